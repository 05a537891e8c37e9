"""What a request costs behind a real Envoy: the picker against a bare grpc.aio server, in turns, under the same load.

Each round puts one server after the other under every load, the other one idle meanwhile; figures are compared within a
round, and the median of these ratios is what counts, because what else a machine does changes from minute to minute.
h2load sends one body again and again: its prefix is held by one engine from the second request on, as for most of the
bytes of real traffic. One further load, of aiohttp, sends a different conversation with every request.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.core_cost import Conversations
from bench.load import LoadResult, h2load
from bench.stage import Server, cpu_s, raise_stage
from extproc.sim.processes import ChildError, Children

__all__ = ["Load", "Sample", "loads", "measure", "summary", "table"]

_CLIENTS: Final = 4
_RUN_UP: Final = 0.15
"""Share of a load that is sent before anything is measured."""


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of load."""

    name: str
    body_bytes: int
    requests: int
    rate: float | None = None
    """Requests per second; None: closed loop, 32 always under way."""
    varied: bool = False
    """Another prompt with every request."""
    cpu_aim: float | None = None
    """CPU per request, picker / bare."""
    p99_aim: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One server under one load, once."""

    cpu_us: float
    """Of the server's process, per request."""
    rate: float
    p50_ms: float
    p99_ms: float
    max_ms: float


def loads(seconds: float, half_rate: float) -> tuple[Load, ...]:
    """Return the loads of one round, each of about so many seconds; `half_rate` is half of what the bare server can do."""
    return (
        Load("1 kB, 300/s", 1000, int(300 * seconds), 300, cpu_aim=1.5),
        Load("32 kB, 100/s", 32_000, int(100 * seconds), 100, cpu_aim=2.0),
        Load("1 kB, 300/s, all different", 1000, int(300 * seconds), 300, varied=True),
        Load("1 kB, closed loop", 1000, int(1.4 * half_rate * seconds)),
        Load("32 kB, closed loop", 32_000, int(0.7 * half_rate * seconds)),
        Load(f"1 kB, {half_rate:.0f}/s", 1000, int(half_rate * seconds), half_rate, p99_aim=1.5),
    )


class _Driver:
    """Puts servers under load with bodies it has written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rng = random.Random(5)
        self._paths: dict[int, Path] = {}

    async def sample(self, server: Server, load: Load) -> Sample:
        """Run one load against one server, after a short run-up. Raises ChildError where a request fails."""
        # The picker wakes up as well: its first requests after a pause bring the next scrape of each engine forward.
        await self._run(server, replace(load, requests=max(16, round(load.requests * _RUN_UP))))
        begin = cpu_s(server.child)
        result = await self._run(server, load)
        used_s = cpu_s(server.child) - begin
        if result.failed:
            raise ChildError(
                f"{load.name}: {result.failed} of {load.requests} requests failed at {server.name}\n"
                f"{server.child.tail()}\n{server.envoy.tail()}"
            )
        return Sample(
            used_s / result.requests * 1e6,
            result.rate,
            result.quantile_s(0.50) * 1e3,
            result.quantile_s(0.99) * 1e3,
            result.latencies_s[-1] * 1e3,
        )

    async def _run(self, server: Server, load: Load) -> LoadResult:
        if load.varied:
            assert load.rate is not None
            conversations = Conversations(load.body_bytes, histories=50, rng=self._rng)
            return await _open_loop(server.url, [conversations.next() for _ in range(load.requests)], load.rate)
        # An open loop is only limited by the clients' streams where the server is far behind.
        streams = 8 if load.rate is None else 100
        return await h2load(
            server.url,
            self._body(load.body_bytes),
            requests=load.requests,
            clients=_CLIENTS,
            streams=streams,
            rate=load.rate,
        )

    def _body(self, body_bytes: int) -> Path:
        path = self._paths.get(body_bytes)
        if path is None:
            path = self._paths[body_bytes] = self._folder / f"bench-body-{body_bytes}.json"
            path.write_bytes(Conversations(body_bytes, histories=1, rng=self._rng).next())
        return path


async def _open_loop(url: str, bodies: list[bytes], rate: float) -> LoadResult:
    """Send each body at its time over HTTP/1.1, whatever has become of those before."""
    latencies: list[float] = []
    failed = 0
    begin = time.monotonic()

    async def one(http: aiohttp.ClientSession, place: int) -> None:
        nonlocal failed
        await asyncio.sleep(max(0.0, begin + place / rate - time.monotonic()))
        sent = time.monotonic()
        try:
            async with http.post(url, data=bodies[place], headers={"content-type": "application/json"}) as response:
                await response.read()
                failed += response.status != 200
        except aiohttp.ClientError:
            failed += 1
        latencies.append(time.monotonic() - sent)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(one(http, place) for place in range(len(bodies))))
    return LoadResult(len(bodies), failed, time.monotonic() - begin, tuple(sorted(latencies)))


Samples = dict[str, dict[str, list[Sample]]]
"""By name of the load, then of the server; one per round."""


async def _rounds(
    folder: Path, rounds: int, seconds: float, transport: str
) -> tuple[tuple[Load, ...], Samples, dict[str, Any]]:
    async with Children(folder / "bench-logs") as children:
        bare, picker = await raise_stage(children, folder, transport)
        driver = _Driver(folder)
        warm = Load("warm-up", 1000, int(600 * min(seconds, 1.0)))
        for server in (bare, picker):
            await driver.sample(server, warm)
        capacity = statistics.median([(await driver.sample(bare, warm)).rate for _ in range(3)])
        planned = loads(seconds, round(capacity / 2, -1))
        samples: Samples = {load.name: {"bare": [], "picker": []} for load in planned}
        idle = await _idle((bare, picker), min(seconds, 2.0))
        for number in range(rounds):
            order = (bare, picker) if number % 2 == 0 else (picker, bare)
            for load in planned:
                for server in order:
                    samples[load.name][server.name].append(await driver.sample(server, load))
        resident = {server.name: server.child.rss_bytes() / 1e6 for server in (bare, picker)}
    return planned, samples, {"bare_capacity": capacity, "idle_cores": idle, "resident_mb": resident}


async def _idle(servers: tuple[Server, ...], seconds: float) -> dict[str, float]:
    """Measure what the servers use when nobody asks anything, in cores."""
    begins = [cpu_s(server.child) for server in servers]
    await asyncio.sleep(seconds)
    return {server.name: (cpu_s(server.child) - begin) / seconds for server, begin in zip(servers, begins, strict=True)}


def summary(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Return, for each figure of one load, both medians and the median of the rounds' ratios."""
    found: dict[str, Any] = {}
    for field in ("cpu_us", "rate", "p50_ms", "p99_ms", "max_ms"):
        bare = [getattr(sample, field) for sample in samples["bare"]]
        picker = [getattr(sample, field) for sample in samples["picker"]]
        ratios = [ours / theirs for ours, theirs in zip(picker, bare, strict=True) if theirs]
        found[field] = {
            "bare": statistics.median(bare),
            "picker": statistics.median(picker),
            "ratio": statistics.median(ratios),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return found


def _aims(load: Load, found: dict[str, Any]) -> list[dict[str, Any]]:
    aims = []
    for text, field, aim in (("CPU", "cpu_us", load.cpu_aim), ("p99", "p99_ms", load.p99_aim)):
        if aim is not None:
            ratio = round(found[field]["ratio"], 2)
            aims.append({"name": f"{text}, {load.name}, x bare", "aim": aim, "measured": ratio, "met": ratio <= aim})
    return aims


def measure(folder: Path, *, quick: bool = False, transport: str = "grpcio") -> dict[str, Any]:
    """Run all rounds and return `{"figures": ..., "aims": [...]}`; about 150 s, 25 s when `quick`. Raises ChildError."""
    rounds, seconds = (2, 0.7) if quick else (5, 1.6)
    planned, samples, figures = asyncio.run(_rounds(folder, rounds, seconds, transport))
    figures["rounds"] = rounds
    figures["loads"] = {load.name: summary(samples[load.name]) for load in planned}
    return {"figures": figures, "aims": [aim for load in planned for aim in _aims(load, figures["loads"][load.name])]}


def table(figures: dict[str, Any]) -> list[str]:
    """Lay out the figures, one line per load: bare, picker, and the median of the ratios."""
    lines = [f"{'':27} {'CPU us/request':^21} {'p50 ms':^19} {'p99 ms':^21} {'max ms':^15} {'requests/s':^13}"]
    lines.append(
        f"{'':27} {'bare':>6} {'picker':>6} {'ratio':>6}  {'bare':>5} {'picker':>6} {'ratio':>5}"
        f"  {'bare':>6} {'picker':>6} {'ratio':>5}  {'bare':>6} {'picker':>6}  {'bare':>6} {'picker':>6}"
    )
    for name, found in figures["loads"].items():
        cpu, p50, p99, most, rate = (found[field] for field in ("cpu_us", "p50_ms", "p99_ms", "max_ms", "rate"))
        lines.append(
            f"{name:27} {cpu['bare']:6.0f} {cpu['picker']:6.0f} {cpu['ratio']:6.2f}"
            f"  {p50['bare']:5.1f} {p50['picker']:6.1f} {p50['ratio']:5.2f}"
            f"  {p99['bare']:6.1f} {p99['picker']:6.1f} {p99['ratio']:5.2f}"
            f"  {most['bare']:6.1f} {most['picker']:6.1f}  {rate['bare']:6.0f} {rate['picker']:6.0f}"
        )
    idle, resident = figures["idle_cores"], figures["resident_mb"]
    lines.append(
        f"idle: bare {idle['bare']:.3f} cores, picker {idle['picker']:.3f} (it scrapes 10 endpoints); "
        f"memory: bare {resident['bare']:.0f} MB, picker {resident['picker']:.0f} MB"
    )
    return lines


def main() -> None:
    folder = Path("out")
    folder.mkdir(exist_ok=True)
    measured = measure(folder.resolve())
    print("\n".join(table(measured["figures"])))
    print(json.dumps(measured["aims"], indent=1))


if __name__ == "__main__":
    main()
