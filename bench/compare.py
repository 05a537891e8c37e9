"""How servers are compared: in rounds, one after the other under each load, and as ratios within a round.

What else a machine does changes from minute to minute; what it does within a round hits all. Each round goes through the
servers in another order, and what counts is the median of the rounds' ratios to the first server of the list.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TypeVar

from bench.load import LoadResult

__all__ = ["FIELDS", "Sample", "aim", "order_of", "summary", "table"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """One server under one load, once."""

    cpu_us: float
    """Of the server's process, per request; its scraping is in it."""
    rate: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    envoy_us: float = 0.0
    """Of Envoy's process, per request."""
    messages: float = 0.0
    """ext_proc messages to the server per request; 0: not counted."""

    @classmethod
    def of(cls, result: LoadResult, cpu_s: float, envoy_s: float = 0.0, messages: int = 0) -> Sample:
        """Sum up one run: seconds of CPU, and messages, of all its requests."""
        n = result.requests
        return cls(
            cpu_s / n * 1e6,
            result.rate,
            result.quantile_s(0.50) * 1e3,
            result.quantile_s(0.99) * 1e3,
            result.latencies_s[-1] * 1e3,
            envoy_s / n * 1e6,
            messages / n,
        )


FIELDS: Final = tuple(field.name for field in fields(Sample))


def order_of(names: Sequence[T], number: int) -> list[T]:
    """Return the order of round `number`: rotated by one each, and every second one backwards."""
    turn = number // 2 % len(names)
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if number % 2 else order


def summary(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Return, per server and field, the median and the median of its rounds' ratios to the first server."""
    first = next(iter(samples))
    found: dict[str, Any] = {}
    for name, own in samples.items():
        found[name] = {}
        for field in FIELDS:
            values = [getattr(sample, field) for sample in own]
            bases = [getattr(sample, field) for sample in samples[first]]
            ratios = [value / base for value, base in zip(values, bases, strict=True) if base]
            found[name][field] = {
                "median": statistics.median(values),
                "most": max(values),
                "ratio": statistics.median(ratios) if ratios else None,
                "ratios": [round(ratio, 4) for ratio in ratios],
            }
        found[name]["samples"] = [asdict(sample) for sample in own]
    return found


def table(found: Mapping[str, Any], *, messages: bool = False) -> list[str]:
    """Lay out a summary: one line per server; ratios are to the first line, with the least and the most of the rounds."""
    first = next(iter(found))
    head = f"  {'':14} {'CPU us':>7} {'x ' + first[:6]:>7} {'(rounds)':^13} {'p50 ms':>7} {'p99 ms':>7} {'x':>5} {'max ms':>7} {'req/s':>6} {'Envoy us':>9}"
    lines = [head + (f" {'messages':>9}" if messages else "")]
    for name, one in found.items():
        cpu, p99 = one["cpu_us"], one["p99_ms"]
        ratio = spread = ""
        if name != first and cpu["ratio"]:
            ratio, spread = f"{cpu['ratio']:.3f}", f"{min(cpu['ratios']):.2f}-{max(cpu['ratios']):.2f}"
        slower = "" if name == first or p99["ratio"] is None else f"{p99['ratio']:.2f}"
        line = (
            f"  {name:14} {cpu['median']:7.0f} {ratio:>7} {spread:^13} {one['p50_ms']['median']:7.1f}"
            f" {p99['median']:7.1f} {slower:>5} {one['max_ms']['most']:7.1f} {one['rate']['median']:6.0f}"
            f" {one['envoy_us']['median']:9.0f}"
        )
        counted = one["messages"]["median"]
        lines.append(line + (f" {counted:9.1f}" if messages and counted else ""))
    return lines


def aim(name: str, at_most: float, measured: float) -> dict[str, Any]:
    """Put an aim beside what was measured, rounded as it is shown."""
    digits = 3 if at_most < 1 else 2
    shown = round(measured, digits)
    return {"name": name, "aim": at_most, "measured": shown, "met": shown <= at_most}
