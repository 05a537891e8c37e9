"""What a run has shown: comparisons with round robin, figures and aims, and the text that a person reads."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from bench.hard_days.clients import PICKER, RETRYING, ROUND_ROBIN, WAYS
from bench.hard_days.judge import Comparison, Invariant, Judge, Span, compare
from bench.hard_days.schedule import Fault, Times

__all__ = ["TILE_S", "aims", "compare_all", "episodes", "figures", "healed", "lines"]

TILE_S: Final = 10.0
"""Length of the stretches that are compared one by one, so that a short black hole does not vanish in a long run."""
_AFTER_S: Final = 1.0
"""A fault is felt for so long after its end."""
_LAST_S: Final = 10.0
_HEALS_S: Final = 30.0
"""An engine that is well again has requests again within this time."""
_SHOWN: Final = 40
_EPISODE_S: Final = 2.0
_MANY: Final = frozenset(one.value for one in (Invariant.WAITS, Invariant.GAPS, Invariant.ANSWERS))
"""Broken by one request after the other while something is wrong."""


def compare_all(judge: Judge, faults: Sequence[Fault], times: Times) -> dict[str, dict[str, Comparison]]:
    """Compare over the whole run, over each kind of fault, and in stretches; note where the picker lost more, and not by chance.

    Returns comparisons by way, for the run (`all`) and for each kind of fault.
    """
    start_s = judge.start_s
    found: dict[str, dict[str, Comparison]] = {"all": {way: compare(judge, way) for way in WAYS[1:]}}
    for kind in sorted({fault.kind.name for fault in faults}):
        spans = [
            Span(start_s + fault.at_s, start_s + fault.end_s + _AFTER_S) for fault in faults if fault.kind.name == kind
        ]
        found[kind] = {way: compare(judge, way, spans) for way in WAYS[1:]}
    for kind, by_way in found.items():
        where = "in the whole run" if kind == "all" else f"while there was {kind}"
        _note(judge, Invariant.ERRORS, by_way[ROUND_ROBIN], where, 0.0)
    _note(judge, Invariant.RETRIES, found["all"][RETRYING], "in the whole run", 0.0)
    for number in range(int(times.load_s / TILE_S)):
        begin_s = start_s + number * TILE_S
        tile = compare(judge, ROUND_ROBIN, [Span(begin_s, begin_s + TILE_S)])
        _note(judge, Invariant.ERRORS, tile, f"in the {TILE_S:.0f} s from here on", number * TILE_S)
    return found


def _note(judge: Judge, invariant: Invariant, found: Comparison, where: str, at_s: float) -> None:
    if found.worse:
        ours, theirs = found.shares()
        judge.broken(
            invariant,
            judge.start_s + at_s,
            f"{where} {ours:.1%} of the picker's requests failed, {theirs:.1%} of the others, of {found.turns} each"
            f" (by chance at most {found.limit:.0f} more)",
        )


def healed(judge: Judge, times: Times) -> dict[str, int]:
    """Look at the last seconds of load, when everything has had its time to heal; return how many requests each engine had."""
    heals_s = times.load_s - times.faults_s
    last_s = min(_LAST_S, heals_s / 3)
    span = Span(judge.start_s + times.load_s - last_s, judge.start_s + times.load_s)
    last = compare(judge, ROUND_ROBIN, [span])
    if last.only_picker:
        judge.broken(
            Invariant.HEALED,
            span.begin_s,
            f"{last.picker} of {last.turns} of the picker's requests failed {heals_s - last_s:.0f} s after the last fault",
        )
    served = Counter(
        record.engine
        for record in judge.records
        if record.way == PICKER and span.begin_s <= record.sent_s <= span.end_s and not record.failed
    )
    if heals_s - last_s >= _HEALS_S:
        everybody = {record.engine for record in judge.records if record.engine}
        for engine in sorted(everybody - set(served)):
            judge.broken(
                Invariant.HEALED,
                span.begin_s,
                f"{engine} has had no request in {last_s:.0f} s, {heals_s - last_s:.0f} s after the last fault",
            )
    return dict(sorted(served.items()))


def figures(judge: Judge, compared: dict[str, dict[str, Comparison]]) -> dict[str, Any]:
    """Put the numbers of a run together."""
    ways: dict[str, Any] = {}
    for way in WAYS:
        records = [record for record in judge.records if record.way == way]
        causes = Counter(record.cause for record in records if record.failed)
        failed = sum(causes.values())
        ways[way] = {
            "requests": len(records),
            "failed": failed,
            "share": round(failed / len(records), 5) if records else 0.0,
            "causes": dict(causes.most_common(20)),
        }
    excused = Counter(filter(None, (judge.excused(record) for record in judge.records)))
    waits = sorted(judge.waits_s)
    return {
        "ways": ways,
        "without_a_picker": {
            "failed": excused["gap"],
            "gaps_s": round(sum(span.end_s - span.begin_s for span in judge.acts.gaps), 1),
            "gaps": len(judge.acts.gaps),
        },
        "without_an_endpoint_failed": excused["empty"],
        "waits_ms": {
            "p50": round(statistics.median(waits) * 1e3, 1) if waits else 0.0,
            "p99": round(waits[int(len(waits) * 0.99)] * 1e3, 1) if waits else 0.0,
            "max": round(waits[-1] * 1e3, 1) if waits else 0.0,
            "too_long_for_all": judge.shared_waits,
        },
        "faults": {
            kind: {
                "turns": by_way[ROUND_ROBIN].turns,
                PICKER: round(by_way[ROUND_ROBIN].shares()[0], 4),
                **{way: round(found.shares()[1], 4) for way, found in by_way.items()},
            }
            for kind, by_way in compared.items()
        },
        "violations": [
            {"invariant": one.invariant.value, "at_s": round(one.at_s, 2), "what": one.what} for one in judge.violations
        ],
    }


def aims(judge: Judge, compared: dict[str, dict[str, Comparison]]) -> list[dict[str, Any]]:
    """State each invariant as an aim: how often it was broken; and both comparisons as what they are, shares of errors."""
    broken = Counter(one.invariant for one in judge.violations)
    found: list[dict[str, Any]] = [
        {"name": one.value, "aim": 0, "measured": broken[one], "met": not broken[one]} for one in Invariant
    ]
    for way, comparison in compared["all"].items():
        ours, theirs = comparison.shares()
        chance = comparison.limit / comparison.turns if comparison.turns else 0.0
        found.append(
            {
                "name": f"share of errors, against {way}",
                "aim": round(theirs + chance, 5),
                "measured": round(ours, 5),
                "met": not comparison.worse,
            }
        )
    return found


def lines(found: dict[str, Any], aims_: Sequence[dict[str, Any]]) -> list[str]:
    """Lay it out for reading."""
    said = ["", f"{'errors':<22}{'turns':>7}" + "".join(f"{way:>27}" for way in WAYS)]
    for kind, row in found["faults"].items():
        said.append(f"{kind:<22}{row['turns']:>7}" + "".join(f"{row[way]:>26.1%} " for way in WAYS))
    said.append("")
    for way, row in found["ways"].items():
        causes = ", ".join(f"{count} x {cause}" for cause, count in row["causes"].items())
        said.append(f"{way}: {row['failed']} of {row['requests']} failed: {causes or 'none'}")
    gap, waits = found["without_a_picker"], found["waits_ms"]
    said.append(
        f"not compared: {gap['failed']} answers that there is no picker, in {gap['gaps']} gaps of {gap['gaps_s']:.1f} s together; "
        f"{found['without_an_endpoint_failed']} that there is no endpoint, as the endpoints file said"
    )
    said.append(
        f"waited beyond the engine: p50 {waits['p50']:.0f} ms, p99 {waits['p99']:.0f} ms, longest {waits['max']:.0f} ms; "
        f"{waits['too_long_for_all']} too long, and round robin's at the same time too (the machine)"
    )
    said.append("")
    said += [
        f"kept   {aim['name']}" if aim["met"] else f"BROKEN {aim['name']} ({aim['measured']:g}, aim {aim['aim']:g})"
        for aim in aims_
    ]
    told = episodes(found["violations"])
    said += [""] if told else []
    said += told[:_SHOWN]
    if len(told) > _SHOWN:
        said.append(f"and {len(told) - _SHOWN} more, in the JSON file")
    return said


def episodes(violations: Sequence[dict[str, Any]]) -> list[str]:
    """Tell violations in order of time; of those of one invariant that follow each other closely, the first and how many."""
    told: list[str] = []
    for name in dict.fromkeys(one["invariant"] for one in violations):
        mine = sorted((one for one in violations if one["invariant"] == name), key=lambda one: one["at_s"])
        begin = 0
        for end in range(1, len(mine) + 1):
            if end < len(mine) and mine[end]["at_s"] - mine[end - 1]["at_s"] < _EPISODE_S and name in _MANY:
                continue
            first, last = mine[begin], mine[end - 1]
            more = f" (and {end - begin - 1} more until {last['at_s']:.1f} s)" if end - begin > 1 else ""
            told.append(f"{first['at_s']:7.1f} s  {name}: {first['what']}{more}")
            begin = end
    return sorted(told, key=lambda text: float(text.split(" s ", 1)[0]))
