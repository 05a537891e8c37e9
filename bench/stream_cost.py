"""What a streamed answer costs: 100 tokens, in the profile `direct` and in full duplex both ways.

In `direct` no token passes the server: Envoy's own count of ext_proc messages proves it. In full duplex the bare server
echoes every token; the picker does, too, with `response_phase: keep`, and has ended its stream by then with `close`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.compare import Sample, aim, order_of, summary, table
from bench.engine import TOKENS
from bench.proxy_cost import Driver, Load
from bench.stage import Contender, Stage
from extproc.envoy_config import PROFILES

__all__ = ["lines", "measure", "targets"]

RATES: Final = {"direct": 100, "full duplex both ways": 30}
"""Streams per second; in full duplex the bare server has 200 messages for each, and carries no more."""
_DIRECT_MESSAGES: Final = 4
"""Headers, body in one or two pieces, trailers: none for a token."""
_AIMS: Final = {
    "direct": {"native": 0.35},
    "full duplex both ways": {"native": 0.25, "native-close": 0.04},
}


def targets(stage: Stage) -> dict[str, list[tuple[Contender, str]]]:
    """Return, by kind of profile, who takes part, and at which listener; the first is bare."""
    found: dict[str, list[tuple[Contender, str]]] = {kind: [] for kind in _AIMS}
    for one in stage.contenders.values():
        if one.stranger:
            kind = "full duplex both ways" if PROFILES[one.profile].full_response else "direct"
            found[kind].append((one, f"{one.name}-{one.profile}"))
        else:
            if one.name != "native-close":
                found["direct"].append((one, f"{one.name}-direct"))
            found["full duplex both ways"].append((one, f"{one.name}-full-duplex"))
    return found


async def measure(stage: Stage, folder: Path, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Run all rounds; return `{"figures": ..., "aims": [...]}`. Raises ChildError."""
    driver = Driver(stage, folder)
    loads = {
        kind: Load(f"{TOKENS}-token streams, {rate}/s", int(rate * seconds), rate=rate, stream=True)
        for kind, rate in RATES.items()
    }
    kinds = targets(stage)
    samples: dict[str, dict[str, list[Sample]]] = {
        kind: {one.name: [] for one, _ in members} for kind, members in kinds.items()
    }
    for number in range(rounds):
        for kind, members in kinds.items():
            for one, listener in order_of(members, number):
                samples[kind][one.name].append(await driver.sample(one, loads[kind], listener))
    found = {kind: summary(own) for kind, own in samples.items()}
    return {"figures": {"rounds": rounds, "rates": RATES, "tokens": TOKENS, "profiles": found}, "aims": _aims(found)}


def _aims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    aims = []
    for kind, wanted in _AIMS.items():
        for name, at_most in wanted.items():
            if name in found[kind]:
                phase = "" if kind == "direct" else ", response_phase " + ("close" if "close" in name else "keep")
                text = f"CPU, {TOKENS}-token streams, {kind}{phase}, native, x bare"
                aims.append(aim(text, at_most, found[kind][name]["cpu_us"]["ratio"]))
    for name in ("grpcio", "native"):
        if name in found["direct"]:
            most = found["direct"][name]["messages"]["most"]
            aims.append(
                aim(f"messages to the picker per {TOKENS}-token stream, direct, {name}", _DIRECT_MESSAGES, most)
            )
    return aims


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Lay out one table per kind of profile."""
    said = []
    for kind, found in figures["profiles"].items():
        said.append(
            f"{figures['tokens']}-token streams, {figures['rates'][kind]}/s, {kind} ({figures['rounds']} rounds)"
        )
        said += [*table(found, messages=True), ""]
    return said[:-1]
