"""One run from start to end: warm-up, faults, healing, silence; and what is looked at on the way and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from bench.hard_days import report
from bench.hard_days.acts import Acts
from bench.hard_days.clients import WAYS, Load
from bench.hard_days.hostile import Hostile
from bench.hard_days.journal import Lag, Tail
from bench.hard_days.judge import Invariant, Judge, log_problems
from bench.hard_days.schedule import Fault, Times
from bench.hard_days.stage import LEASE_S, Picker, Stage, Usage

__all__ = ["Run", "grown"]

_SETTLED_S: Final = 3.0
"""Engines have written down a request so long after its end."""
_MEMORY_MIB: Final = 48
"""By so much may a picker stay above its memory after the warm-up: the index grows, and allocators keep some of what was used once."""
_DESCRIPTORS: Final = 16
"""By so many more descriptors at the end: connections to engines and Envoys come and go."""
_LEFT: Final = ("extproc_endpoint_in_flight_requests", "extproc_streams_open", "extproc_buffered_bytes")
_LEASE_LATE_S: Final = 10.0
_LAG_EVERY_S: Final = 0.02


def grown(name: str, used: Sequence[Usage], base: Usage, *, descriptors: bool) -> str:
    """Say by what a process has grown since the warm-up, looking at the best of its last five seconds; empty: by nothing."""
    last = [one for one in used if one.at_s > used[-1].at_s - 5.0]
    rss = min(one.rss_bytes for one in last)
    if rss > base.rss_bytes + (_MEMORY_MIB << 20):
        return f"{name} holds {rss >> 20} MiB, {base.rss_bytes >> 20} after the warm-up"
    held = min(one.descriptors for one in last)
    if descriptors and held > base.descriptors + _DESCRIPTORS:
        return f"{name} holds {held} descriptors, {base.descriptors} after the warm-up"
    return ""


class Run:
    """One run."""

    def __init__(
        self, folder: Path, *, seed: int, times: Times, faults: list[Fault], pickers: int, rate: float, transport: str
    ) -> None:
        self._folder = folder
        self._seed = seed
        self._times = times
        self._faults = faults
        self._rate = rate
        self._stage = Stage(folder, pickers=pickers, transport=transport)
        self._judge: Judge
        self._tail = Tail(self._stage.journal)
        self._shown = 0
        self._base: dict[str, Usage] = {}

    async def run(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Do it all; return figures and aims. Raises ExtprocError where something cannot start."""
        stage = self._stage
        async with stage:
            self._judge = judge = Judge(time.monotonic())
            load = Load({way: stage.url(way) for way in WAYS}, self._seed, self._rate, judge.keep)
            hostile = Hostile(stage, judge, self._seed)
            acts = Acts(stage, judge, hostile, self._seed, self._say)
            async with contextlib.AsyncExitStack() as stack:
                for work in (self._look(), self._settle(), self._watch_lag()):
                    stack.push_async_callback(_cancel, asyncio.ensure_future(work))
                watch = asyncio.ensure_future(acts.watch())
                stack.push_async_callback(_cancel, watch)
                loading = asyncio.ensure_future(load.run(judge.start_s + self._times.load_s))
                stack.push_async_callback(_cancel, loading)
                await asyncio.sleep(judge.start_s + self._times.warm_s - time.monotonic())
                self._take_base()
                await acts.run(self._faults, judge.start_s)
                self._say(f"{self._now():7.1f} s  no more faults")
                await loading
                self._say(f"{self._now():7.1f} s  no more requests")
                await asyncio.sleep(_SETTLED_S)
                ledger = await self._ledger()
                self._memory()
                await _cancel(watch)
                await self._end_pickers()
            judge.journal(self._tail.read())
            judge.settle(time.monotonic() + 1)
        self._write_records()
        self._logs(acts.not_started)
        judge.unexplained_gaps()
        judge.no_answers()
        compared = report.compare_all(judge, self._faults, self._times)
        served = report.healed(judge, self._times)
        found = report.figures(judge, compared)
        found["ledger"] = ledger
        found["last_served"] = served
        found["memory"] = self._memory_figures()
        found["hostile"] = dict(hostile.sent)
        return found, report.aims(judge, compared)

    def _now(self) -> float:
        return time.monotonic() - self._judge.start_s

    def _say(self, text: str) -> None:
        print(text, flush=True)

    # While it runs

    async def _look(self) -> None:
        while True:
            self._stage.look()
            await asyncio.sleep(0.5)

    async def _settle(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._judge.journal(self._tail.read())
            self._judge.settle(time.monotonic() - _SETTLED_S)
            fresh = [
                {"invariant": one.invariant.value, "at_s": one.at_s, "what": one.what}
                for one in self._judge.violations[self._shown :]
            ]
            for text in report.episodes(fresh):
                self._say(f"BROKEN {text}")
            self._shown = len(self._judge.violations)

    async def _watch_lag(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LAG_EVERY_S)
            late_s = time.monotonic() - before - _LAG_EVERY_S
            if late_s > 0.05:
                self._judge.lag(Lag(time.monotonic(), late_s))

    def _take_base(self) -> None:
        """Keep what each process uses when nothing has happened yet: the median, under load."""
        used = {f"picker-{picker.number + 1}": _of(picker) for picker in self._stage.pickers}
        used["envoy"] = next(iter(self._stage.envoy_used.values()))
        for name, samples in used.items():
            late = samples[len(samples) // 2 :]
            self._base[name] = Usage(
                late[-1].at_s,
                int(statistics.median(one.rss_bytes for one in late)),
                int(statistics.median(one.descriptors for one in late)),
            )

    # Afterwards

    async def _ledger(self) -> dict[str, Any]:
        """Wait until nothing is held; what is held until its lease is over counts as lost, too."""
        began = time.monotonic()
        held: dict[str, float] = {}
        while time.monotonic() < began + LEASE_S + _LEASE_LATE_S:
            held = await self._held()
            if not any(held.values()):
                break
            await asyncio.sleep(0.25)
        took_s = time.monotonic() - began
        if any(held.values()):
            self._judge.broken(Invariant.LEDGER, began, f"{took_s:.0f} s after the last request there is still {held}")
        elif took_s > _LEASE_LATE_S:
            self._judge.broken(
                Invariant.LEDGER,
                began,
                f"requests were held for {took_s:.0f} s after the last one had ended, until their lease was over",
            )
        return {"zero_after_s": round(took_s, 1), "left": held}

    async def _held(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for picker in self._stage.pickers:
            try:
                page = await self._stage.metrics(picker)
            except (aiohttp.ClientError, TimeoutError, OSError):
                found[f"picker {picker.number + 1} does not answer"] = 1.0
                continue
            for name in _LEFT:
                found[name] = found.get(name, 0.0) + page.get(name, 0.0)
        return found

    def _memory(self) -> None:
        self._stage.look()
        for picker in self._stage.pickers:
            base = self._base[f"picker-{picker.number + 1}"]
            for name, used in picker.used.items():
                last = picker.child is not None and name == picker.child.name
                problem = grown(name, used, base, descriptors=last)
                if problem:
                    self._judge.broken(Invariant.MEMORY, used[-1].at_s, problem)
        used = self._stage.envoy_used[self._stage.envoy.name]
        problem = grown(self._stage.envoy.name, used, self._base["envoy"], descriptors=True)
        if problem:
            self._judge.broken(Invariant.MEMORY, used[-1].at_s, problem)

    def _memory_figures(self) -> dict[str, Any]:
        found = {}
        everything = [item for picker in self._stage.pickers for item in picker.used.items()]
        for name, used in [*everything, *self._stage.envoy_used.items()]:
            found[name] = {
                "first_mib": used[0].rss_bytes >> 20,
                "most_mib": max(one.rss_bytes for one in used) >> 20,
                "last_mib": used[-1].rss_bytes >> 20,
                "most_descriptors": max(one.descriptors for one in used),
                "last_descriptors": used[-1].descriptors,
            }
        for name, base in self._base.items():
            found[f"{name} after the warm-up"] = {"mib": base.rss_bytes >> 20, "descriptors": base.descriptors}
        return found

    async def _end_pickers(self) -> None:
        """Ask every picker to end: it must, by itself and with status 0."""
        for picker in self._stage.pickers:
            if picker.child is None or not picker.running:
                self._judge.broken(
                    Invariant.ALIVE, time.monotonic(), f"picker {picker.number + 1} does not run at the end"
                )
                continue
            child = self._stage.terminate(picker)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.process.wait(), 30)
            if child.process.returncode != 0:
                self._judge.broken(
                    Invariant.ALIVE,
                    time.monotonic(),
                    f"{child.name}, told to end, has status {child.process.returncode} after 30 s",
                )

    def _write_records(self) -> None:
        """Keep what each client got beside what each engine was asked."""
        with (self._folder / "records.jsonl").open("wb") as file:
            for record in self._judge.records:
                file.write(msgspec.json.encode(record) + b"\n")

    def _logs(self, without: set[str]) -> None:
        for path in sorted((self._folder / "logs").glob("*.log")):
            if path.stem in without:
                continue
            text = path.read_text(errors="replace")
            for problem in log_problems(path.stem, text, refused_configs=self._stage.refused_configs):
                self._judge.broken(Invariant.LOGS, time.monotonic(), problem)


def _of(picker: Picker) -> list[Usage]:
    return [one for used in picker.used.values() for one in used]


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
