"""What a request costs behind a real Envoy: the pickers against a bare grpc.aio server, in turns, under the same load.

h2load sends one body again and again: its prefix is held by one engine from the second request on, as for most of the
bytes of real traffic. `bench.generator` sends growing conversations, no two bodies alike.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.bodies import write_bodies, write_one
from bench.compare import Sample, aim, order_of, summary, table
from bench.envoy_stage import PLAIN
from bench.load import LoadResult, generate, h2load
from bench.stage import Contender, Stage, cpu_s
from extproc.demo.processes import ChildError

__all__ = ["Driver", "Load", "added", "lines", "loads", "measure"]

_RUN_UP: Final = 0.15
"""Share of a load that is sent before anything is measured."""
_FULL_RATE: Final = 1000
"""Requests per second of the aim for p99."""
_SLOWER_RATES: Final = (1000, 850, 700, 550, 450, 350, 250, 150)
_CARRIED_P50_MS: Final = 25.0
"""Above it a queue is growing: the rate is not carried."""


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of load."""

    name: str
    requests: int
    body_bytes: int | None = 1000
    """None: growing conversations, all different."""
    rate: float | None = None
    """Requests per second; None: closed loop, 32 always under way."""
    stream: bool = False
    cpu_aims: Mapping[str, float] | None = None
    """By server: CPU per request, times bare."""
    p99_aims: Mapping[str, float] | None = None


class Driver:
    """Puts servers under load with bodies it has written once."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._stage = stage
        self._folder = folder
        self._rng = random.Random(5)
        self._paths: dict[tuple[int | None, bool], Path] = {}

    async def sample(self, contender: Contender | None, load: Load, listener: str = "") -> Sample:
        """Run one load against one server, after a short run-up; None: against Envoy alone.

        Raises ChildError where a request fails.
        """
        stage = self._stage
        listener = listener or (PLAIN if contender is None else f"{contender.name}-{contender.profile}")
        clock = _Clock(stage, contender)
        run_up = max(16, round(load.requests * _RUN_UP))
        if load.body_bytes is None:
            arguments = ["http", "--port", str(stage.port(listener)), "--bodies", str(self._body(load))]
            arguments += ["--requests", str(load.requests), "--rate", str(load.rate), "--run-up", str(run_up)]
            messages_before = 0
            result = await generate(arguments, begin=clock.start, end=clock.stop)
            messages = 0
        else:
            # The picker wakes up as well: its first requests after a pause bring the next scrape of each engine forward.
            await self._h2load(listener, replace(load, requests=run_up))
            messages_before, _ = (0, 0) if contender is None else await stage.messages(listener)
            clock.start()
            result = await self._h2load(listener, load)
            clock.stop()
            messages, _ = (0, 0) if contender is None else await stage.messages(listener)
        if result.failed:
            child = stage.envoy if contender is None else contender.child
            raise ChildError(
                f"{load.name}: {result.failed} of {load.requests} requests failed at {listener}\n"
                f"{child.tail()}\n{stage.envoy.tail()}"
            )
        return Sample.of(result, clock.server_s, clock.envoy_s, messages - messages_before)

    async def _h2load(self, listener: str, load: Load) -> LoadResult:
        # An open loop is only limited by the clients' streams where the server is far behind.
        streams = 8 if load.rate is None else 100
        url = self._stage.url(listener)
        return await h2load(url, self._body(load), requests=load.requests, streams=streams, rate=load.rate)

    def _body(self, load: Load) -> Path:
        key = (load.body_bytes, load.stream)
        path = self._paths.get(key)
        if path is None:
            path = self._folder / f"bench-body-{load.body_bytes or 'growing'}{'-stream' if load.stream else ''}.json"
            if load.body_bytes is None:
                write_bodies(path, 20_000, self._rng)
            else:
                write_one(path, load.body_bytes, self._rng, stream=load.stream)
            self._paths[key] = path
        return path


class _Clock:
    """The CPU time of a server and of Envoy between two moments."""

    def __init__(self, stage: Stage, contender: Contender | None) -> None:
        self._stage = stage
        self._contender = contender
        self.server_s = 0.0
        self.envoy_s = 0.0

    def start(self) -> None:
        self.envoy_s = -cpu_s(self._stage.envoy)
        self.server_s = -self._contender.cpu_s() if self._contender else 0.0

    def stop(self) -> None:
        self.server_s += self._contender.cpu_s() if self._contender else 0.0
        self.envoy_s += cpu_s(self._stage.envoy)


def loads(seconds: float, half_rate: float) -> tuple[Load, ...]:
    """Return the loads of one round, each of about so many seconds; `half_rate` is half of what the bare server can do."""
    return (
        Load("1 kB chats, 300/s", int(300 * seconds), 1000, 300, cpu_aims={"grpcio": 1.5, "native": 0.4}),
        Load("32 kB chats, 100/s", int(100 * seconds), 32_000, 100, cpu_aims={"grpcio": 2.0, "native": 0.5}),
        Load("growing chats of 0.7 to 3 kB, all different, 300/s", int(300 * seconds), None, 300),
        Load("1 kB chats, closed loop", int(1.4 * half_rate * seconds)),
        Load(
            f"1 kB chats, {half_rate:.0f}/s (half of what bare can do)",
            int(half_rate * seconds),
            1000,
            half_rate,
            p99_aims={"grpcio": 1.5, "native": 1.5},
        ),
    )


async def measure(stage: Stage, folder: Path, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Run all rounds; return `{"figures": ..., "aims": [...]}`. Raises ChildError."""
    driver = Driver(stage, folder)
    servers = [one for one in stage.contenders.values() if one.name != "native-close"]
    bare = servers[0]
    warm = Load("warm-up", int(600 * min(seconds, 1.0)))
    for server in servers:
        await driver.sample(server, warm)
    capacity = statistics.median([(await driver.sample(bare, warm)).rate for _ in range(3)])
    planned = loads(seconds, round(capacity / 2, -1))
    idle = await _idle(servers, min(2 * seconds, 3.0))
    samples: dict[str, dict[str, list[Sample]]] = {load.name: {one.name: [] for one in servers} for load in planned}
    for number in range(rounds):
        for load in planned:
            for server in order_of(servers, number):
                samples[load.name][server.name].append(await driver.sample(server, load))
    rate = await _carried(driver, [one for one in servers if one.name in {"bare", "native"}], capacity)
    latency = await _latency(driver, servers, rate, rounds=rounds, seconds=2 * seconds)
    found = {load.name: summary(samples[load.name]) for load in planned}
    figures = {
        "rounds": rounds,
        "bare_capacity": capacity,
        "idle_cores": idle,
        "resident_mb": {one.name: one.rss_bytes() / 1e6 for one in servers},
        "loads": found,
        "latency": latency,
    }
    aims = [one for load in planned for one in _aims(load, found[load.name])]
    if "native" in latency["added"]:
        name = f"p99 added to Envoy's at {rate}/s, native, x what bare adds"
        aims.append(aim(name, 0.5, latency["added"]["native"]["ratio"]))
    return {"figures": figures, "aims": aims}


def _aims(load: Load, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    aims = []
    for text, field, wanted in (("CPU", "cpu_us", load.cpu_aims), ("p99", "p99_ms", load.p99_aims)):
        for name, at_most in (wanted or {}).items():
            if name in found:
                aims.append(aim(f"{text}, {load.name}, {name}, x bare", at_most, found[name][field]["ratio"]))
    return aims


async def _idle(servers: Sequence[Contender], seconds: float) -> dict[str, float]:
    """Measure what the servers use when nobody asks anything, in cores."""
    begins = [server.cpu_s() for server in servers]
    await asyncio.sleep(seconds)
    return {server.name: (server.cpu_s() - begin) / seconds for server, begin in zip(servers, begins, strict=True)}


async def _carried(driver: Driver, servers: Sequence[Contender], capacity: float) -> int:
    """Return the highest rate, at most 1,000/s, that each of these carries without a growing queue."""
    for rate in _SLOWER_RATES[:-1]:
        if rate > capacity:
            continue
        load = Load("trial", rate, rate=rate)
        for server in servers:
            sample = await driver.sample(server, load)
            if sample.rate < 0.97 * rate or sample.p50_ms > _CARRIED_P50_MS:
                break
        else:
            return rate
    return _SLOWER_RATES[-1]


async def _latency(
    driver: Driver, servers: Sequence[Contender], rate: int, *, rounds: int, seconds: float
) -> dict[str, Any]:
    load = Load(f"1 kB chats, {rate}/s", int(rate * seconds), rate=rate)
    rows: list[Contender | None] = [None, *servers]
    samples: dict[str, list[Sample]] = {**{one.name: [] for one in servers}, PLAIN: []}
    for number in range(rounds):
        for one in order_of(rows, number):
            samples[PLAIN if one is None else one.name].append(await driver.sample(one, load))
    return {"rate": rate, "wanted_rate": _FULL_RATE, "servers": summary(samples), "added": added(samples)}


def added(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Return what each server adds to the p99 of Envoy without a filter, in ms, and that as a multiple of what bare adds.

    Rounds in which bare seems to add nothing tell nothing, and are left out of the ratio.
    """
    plain = [sample.p99_ms for sample in samples[PLAIN]]
    over = {
        name: [sample.p99_ms - base for sample, base in zip(own, plain, strict=True)]
        for name, own in samples.items()
        if name != PLAIN
    }
    found = {}
    for name, values in over.items():
        ratios = [value / base for value, base in zip(values, over["bare"], strict=True) if base > 0]
        found[name] = {
            "p99_ms": statistics.median(values),
            "ratio": statistics.median(ratios) if ratios else float("inf"),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return found


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Lay out everything: a table per load, then latency, then what is used when nobody asks."""
    said = []
    for name, found in figures["loads"].items():
        said += [f"{name} ({figures['rounds']} rounds)", *table(found, messages=True), ""]
    latency = figures["latency"]
    rate, wanted = latency["rate"], latency["wanted_rate"]
    short = "" if rate == wanted else f"; this machine does not carry {wanted}/s with load, Envoy and server together"
    said += [f"latency: 1 kB chats, {rate}/s, the highest rate bare and native both carry{short}"]
    said += table(latency["servers"])
    for name, one in latency["added"].items():
        ratio = "" if name == "bare" else f", {one['ratio']:.2f} times what bare adds"
        said.append(f"  {name} adds {one['p99_ms']:.1f} ms to the p99 of Envoy without a filter{ratio}")
    used = ", ".join(f"{name} {cores:.3f}" for name, cores in figures["idle_cores"].items())
    held = ", ".join(f"{name} {mb:.0f}" for name, mb in figures["resident_mb"].items())
    return [
        *said,
        "",
        f"idle, in cores (pickers scrape 10 engines): {used}",
        f"resident memory after all that, in MB: {held}",
    ]
