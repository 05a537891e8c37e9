"""A `Decision` in words, in a header and as a record. Prompt text never appears: a decision does not carry it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.types import Candidate, Decision

__all__ = ["COMPACT_BYTES", "as_dict", "brief", "compact", "sentence"]

COMPACT_BYTES: Final = 1000
"""Upper bound of `compact`; gateways refuse responses whose headers grow large (NGINX: 4 KiB for all of them)."""

_COMPACT_CANDIDATES: Final = 5


def sentence(decision: Decision) -> str:
    """Return one sentence that says where the request goes and why."""
    chosen = _chosen(decision)
    parts = [f"{chosen.endpoint_id} {_match_and_load(chosen, decision)} ({decision.note})"]
    runner_up = next(iter(_others(decision)), None)
    if runner_up is None:
        parts.append("no other endpoint was eligible")
    else:
        parts.append(f"next best {runner_up.endpoint_id} {_match_and_load(runner_up, decision)}")
        holder = max(decision.candidates, key=lambda candidate: candidate.matched_bytes)
        if holder.matched_bytes > max(chosen.matched_bytes, runner_up.matched_bytes):
            # The longest match was not chosen: readers want to know why.
            parts.append(f"more is held by {holder.endpoint_id}, which {_match_and_load(holder, decision)}")
    removed = _removed(decision)
    if removed:
        parts.append("filtered out: " + ", ".join(f"{count} by {name}" for name, count in removed.items()))
    return "; ".join(parts) + "."


def compact(decision: Decision) -> str:
    """Render a response header's value: printable ASCII, no newline, at most `COMPACT_BYTES`.

    Form: `strategy note; endpoint total=.. scorer=.. ... ; ...; filtered name=count`, the chosen one first, then the best others.
    """
    shown = [_chosen(decision), *_others(decision)[: _COMPACT_CANDIDATES - 1]]
    pieces = [f"{decision.strategy}: {decision.note}"]
    for candidate in shown:
        scores = " ".join(
            f"{name}={score:.2f}*{weight:g}"
            for (name, weight), score in zip(decision.scorers, candidate.scores, strict=True)
        )
        pieces.append(f"{candidate.endpoint_id} total={candidate.total:.3f} {scores}".rstrip())
    hidden = len(decision.candidates) - len(shown)
    if hidden:
        pieces.append(f"{hidden} more")
    removed = _removed(decision)
    if removed:
        pieces.append("filtered " + " ".join(f"{name}={count}" for name, count in removed.items()))
    text = "; ".join(pieces)
    # Host names and notes are ASCII today; a header must be, whatever they become.
    return "".join([char if " " <= char <= "~" else "?" for char in text[:COMPACT_BYTES]])


def brief(decision: Decision) -> str:
    """Return a response header's value that reveals neither endpoints nor earlier requests.

    No address, no match and no score, and not the strategy's note either, which says whether a prefix was found. The
    rest is found by the id in `/debug/decisions` and in the log.
    """
    pieces = [f"{decision.strategy}: decision {decision.id}", f"one of {len(decision.candidates)}"]
    if removed := _removed(decision):
        pieces.append("filtered " + " ".join(f"{name}={count}" for name, count in removed.items()))
    return "; ".join(pieces)


def as_dict(decision: Decision) -> dict[str, Any]:
    """Return the whole record as JSON-able values, for `/debug/decisions` and the log.

    Candidates are sorted as they are in the pool; scores are rounded to four places, ages to milliseconds.
    """
    names = [name for name, _ in decision.scorers]
    return {
        "id": decision.id,
        "request_id": decision.request_id,
        "decided_at": round(decision.decided_at, 6),
        "endpoint": decision.endpoint.id,
        "endpoint_name": decision.endpoint.name,
        "fallbacks": [endpoint.id for endpoint in decision.fallbacks],
        "strategy": decision.strategy,
        "note": decision.note,
        "reason": sentence(decision),
        "kind": decision.kind.value,
        "model": decision.model,
        "prompt_bytes": decision.prompt_bytes,
        "matched_bytes": decision.matched_bytes,
        "prompt_tokens": decision.prompt_tokens,
        "predicted_cached_tokens": decision.predicted_cached_tokens,
        "weights": dict(decision.scorers),
        "candidates": [_candidate(candidate, names) for candidate in decision.candidates],
        "filtered": [{"endpoint": endpoint_id, "filter": name} for endpoint_id, name in decision.filtered],
        "config_generation": decision.config_generation,
    }


def _candidate(candidate: Candidate, names: list[str]) -> dict[str, Any]:
    age = candidate.signal_age_s
    usage = candidate.kv_cache_usage
    return {
        "endpoint": candidate.endpoint_id,
        "total": round(candidate.total, 4),
        "scores": {name: round(score, 4) for name, score in zip(names, candidate.scores, strict=True)},
        "matched_bytes": candidate.matched_bytes,
        "in_flight": candidate.in_flight,
        "waiting": candidate.waiting,
        "kv_cache_usage": None if usage is None else round(usage, 4),
        "signal_age_s": None if age is None else round(age, 3),
    }


def _chosen(decision: Decision) -> Candidate:
    return next(candidate for candidate in decision.candidates if candidate.endpoint_id == decision.endpoint.id)


def _others(decision: Decision) -> list[Candidate]:
    others = [candidate for candidate in decision.candidates if candidate.endpoint_id != decision.endpoint.id]
    return sorted(others, key=lambda candidate: -candidate.total)


def _removed(decision: Decision) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for _, name in decision.filtered:
        counts[name] = counts.get(name, 0) + 1
    return counts


def _match_and_load(candidate: Candidate, decision: Decision) -> str:
    """Return the reasons for a candidate in words: prompt held, requests in flight and waiting, age of the signals."""
    count = candidate.in_flight
    load = f"has {count:,} request{'' if count == 1 else 's'} in flight"
    if candidate.waiting:
        load += f" and {candidate.waiting:,.0f} waiting"
    if candidate.signal_age_s is None:
        load += ", signals unknown"
    elif candidate.signal_age_s >= 1:
        load += f", signals {candidate.signal_age_s:,.0f} s old"
    if not decision.prompt_bytes:
        return load
    held = min(candidate.matched_bytes, decision.prompt_bytes)
    share = held / decision.prompt_bytes
    prompt = f"{held:,} of {decision.prompt_bytes:,} prompt bytes ({share:.0%})" if held else "nothing of the prompt"
    return f"holds {prompt} and {load}"
