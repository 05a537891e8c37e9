"""A long run: whether the picker's memory grows, whether anything stays open, and what Python's garbage collector costs.

    python -m bench.soak [--requests N] [--transport native|grpcio] [--gc calm|python|A,B,C] [--engines N] [--own-bytes N] [--out FILE]

A closed loop straight against the picker's gRPC port, without Envoy (`soak_load`); the picker is watched from inside
(`soak_picker`). Ends with 1 where memory grows after the first third, or something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.soak_load import MODEL, OWN_BYTES, Load, Words
from extproc.demo.processes import Child, Children, free_ports

__all__ = ["Report", "Sample", "main", "slope", "soak"]

_FAKE_ENDPOINTS: Final = 10
_GROWTH_LIMIT: Final = 1.0
"""MiB per 100,000 requests after the first third: below it is what allocators do."""
_NOISE_MIB: Final = 3.0
"""By how much the memory of a short run goes up and down."""
_LEFT: Final = ("extproc_streams_open", "extproc_buffered_bytes", "extproc_endpoint_in_flight_requests")


@dataclass(frozen=True, slots=True)
class Sample:
    """The picker at one moment."""

    requests: int
    rss_bytes: int
    index_blocks: int
    streams_open: int
    in_flight: int


@dataclass(slots=True)
class Report:
    """What one soak has shown."""

    requests: int
    transport: str
    collector: str
    duration_s: float = 0.0
    cpu_s: float = 0.0
    failed: int = 0
    reset: int = 0
    latency_ms: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    growth: float = 0.0
    """MiB per 100,000 requests, after the first third."""
    left: dict[str, float] = field(default_factory=dict)
    """What was still held when all streams had ended."""
    objects: list[int] = field(default_factory=list)
    """Blocks of memory that Python held at the end of each round, when nothing was open and all garbage was collected."""
    pauses: dict[str, Any] = field(default_factory=dict)
    """The collector's, by generation."""

    @property
    def passed(self) -> bool:
        """Whether nothing grew and nothing is left."""
        grown = self.growth * self.requests / 1e5
        return not self.failed and not any(self.left.values()) and (self.growth < _GROWTH_LIMIT or grown < _NOISE_MIB)


def slope(samples: list[Sample]) -> float:
    """Return the growth of memory in MiB per 100,000 requests, by least squares; 0 for fewer than three samples."""
    if len(samples) < 3:
        return 0.0
    xs = [sample.requests / 1e5 for sample in samples]
    ys = [sample.rss_bytes / 2**20 for sample in samples]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((value - x) ** 2 for value in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else 0.0


def _config(ports: list[int], transport: str, engines: list[str], max_blocks: int) -> str:
    """Write the picker's configuration; without engines its endpoints are names of nothing, with endless caches."""
    pool: dict[str, Any] = {"endpoints": engines}
    prefix = {"max_blocks": max_blocks}
    if not engines:
        pool = {
            "endpoints": [f"10.0.0.{number + 1}:8000" for number in range(_FAKE_ENDPOINTS)],
            "scrape": {"enabled": False},
        }
        prefix["capacity_tokens"] = 10**9
    grpc_port, health_port, metrics_port, admin_port = ports
    return yaml.safe_dump(
        {
            "server": {
                "transport": transport,
                "host": "127.0.0.1",
                "grpc_port": grpc_port,
                "health_port": health_port,
                "metrics_port": metrics_port,
                "drain_delay": 0,
                "grace_period": 1,
            },
            "admin": {"port": admin_port},
            "pool": pool,
            # Small, so that it is full early: what it is allowed to hold is no leak.
            "prefix": prefix,
            "log": {"decisions": {"sample": 0.01}},
        }
    )


class _Stage:
    """A picker under watch, its engines, and what they are called."""

    def __init__(self, folder: Path, children: Children, http: aiohttp.ClientSession, engines: int) -> None:
        self._folder = folder
        self._children = children
        self._http = http
        self._ports = free_ports(4 + engines)
        self.grpc_port = self._ports[0]
        self.objects_file = folder / "objects.json"
        self.pauses_file = folder / "pauses.json"
        self.picker: Child

    async def start(self, transport: str, collector: str, max_blocks: int) -> None:
        """Start the engines, then the picker, and wait for it."""
        for port in self._ports[4:]:
            argv = [sys.executable, "-m", "extproc", "model-server", "--port", str(port), "--model", MODEL]
            child = await self._children.start(f"engine-{port}", argv)
            await child.wait_http(f"http://127.0.0.1:{port}/health")
        config = self._folder / "extproc.yaml"
        ids = [f"127.0.0.1:{port}" for port in self._ports[4:]]
        config.write_text(_config(self._ports[:4], transport, ids, max_blocks))
        argv = [sys.executable, "-m", "bench.soak_picker", collector, str(self._folder), str(config)]
        self.picker = await self._children.start("picker", argv)
        await self.picker.wait_http(f"http://127.0.0.1:{self._ports[2]}/readyz")

    async def page(self) -> dict[str, float]:
        """Read the metrics, added up by name."""
        found: dict[str, float] = {}
        async with self._http.get(f"http://127.0.0.1:{self._ports[2]}/metrics") as answer:
            for family in text_string_to_metric_families(await answer.text()):
                for sample in family.samples:
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    async def sample(self, requests: int) -> Sample:
        """Look at the picker."""
        page = await self.page()
        return Sample(
            requests,
            self.picker.rss_bytes(),
            int(page.get("extproc_prefix_index_blocks", 0)),
            int(page.get("extproc_streams_open", 0)),
            int(page.get("extproc_endpoint_in_flight_requests", 0)),
        )

    async def left(self) -> dict[str, float]:
        """Wait, for at most ten seconds, until nothing is held; return what is."""
        for _ in range(100):
            page = await self.page()
            held = {name: page.get(name, 0.0) for name in _LEFT}
            if not any(held.values()):
                break
            await asyncio.sleep(0.1)
        return held

    async def objects(self) -> int:
        """Let the picker collect its garbage and count its objects: those that may have cycles, and all memory blocks."""
        self.objects_file.unlink(missing_ok=True)
        self.picker.send(signal.SIGUSR1)
        while not self.objects_file.exists():
            await asyncio.sleep(0.05)
            assert self.picker.running, self.picker.tail()
        return int(self.objects_file.read_text())


async def soak(
    folder: Path,
    *,
    requests: int,
    rounds: int = 1,
    transport: str = "native",
    collector: str = "calm",
    connections: int = 4,
    streams: int = 16,
    engines: int = 4,
    max_blocks: int = 200_000,
    own_bytes: int = OWN_BYTES,
    show: Callable[[Sample], None] = lambda _sample: None,
) -> Report:
    """Run `rounds` times `requests` streams through one fresh picker with `engines` simulated engines that it scrapes."""
    report = Report(requests * rounds, transport, collector)
    words = Words(own_bytes)
    loads: list[Load] = []
    async with Children(folder / "logs") as children, aiohttp.ClientSession() as http:
        stage = _Stage(folder, children, http, engines)
        await stage.start(transport, collector, max_blocks)
        began, cpu_s = time.perf_counter(), stage.picker.cpu_s()
        for number in range(rounds):
            numbers = iter(range(number * requests, (number + 1) * requests))
            fresh = [Load(words, streams, functools.partial(next, numbers, None)) for _ in range(connections)]
            loads += fresh
            ended = asyncio.gather(*(load.run(stage.grpc_port) for load in fresh))
            await _watch(stage, ended, loads, report, show)
            report.left = await stage.left()
            report.objects.append(await stage.objects())
        report.duration_s, report.cpu_s = time.perf_counter() - began, stage.picker.cpu_s() - cpu_s
        report.samples.append(await stage.sample(report.requests))
        await stage.picker.stop(20.0)
    _sum_up(report, loads)
    report.pauses = json.loads(stage.pauses_file.read_text()) if stage.pauses_file.exists() else {}
    return report


async def _watch(
    stage: _Stage, ended: asyncio.Future[Any], loads: list[Load], report: Report, show: Callable[[Sample], None]
) -> None:
    """Wait for the end of the running loads, and take a sample now and then."""
    step = max(1, report.requests // 60)
    while not ended.done():
        await asyncio.wait([ended], timeout=0.25)
        done = sum(len(load.latencies_s) + load.reset for load in loads)
        if not report.samples or done >= report.samples[-1].requests + step:
            report.samples.append(await stage.sample(done))
            show(report.samples[-1])
    await ended


def _sum_up(report: Report, loads: list[Load]) -> None:
    report.reset = sum(load.reset for load in loads)
    problems = [problem for load in loads for problem in load.failed]
    report.failed = len(problems)
    for problem in problems[:5]:
        print(f"failed: {problem}", file=sys.stderr)
    latencies = sorted(latency for load in loads for latency in load.latencies_s)
    for name, share in {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}.items():
        report.latency_ms[name] = latencies[min(len(latencies) - 1, int(share * len(latencies)))] * 1e3
    report.growth = slope([sample for sample in report.samples if sample.requests > report.requests / 3])


def _show(sample: Sample) -> None:
    print(
        f"{sample.requests:>10,} requests  {sample.rss_bytes / 2**20:7.1f} MiB  {sample.index_blocks:>8,} blocks  "
        f"{sample.streams_open:>4} streams open  {sample.in_flight:>4} in flight",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the soak as asked on the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--transport", choices=("native", "grpcio"), default="native")
    parser.add_argument(
        "--gc",
        default="calm",
        help="calm: `tune_gc`; python: as Python comes; A,B,C: calm with these thresholds",
    )
    parser.add_argument("--max-blocks", type=int, default=200_000, help="bound of the prefix index")
    parser.add_argument(
        "--engines", type=int, default=4, help="simulated engines that are scraped; 0: none, and no limit to caches"
    )
    parser.add_argument(
        "--own-bytes", type=int, default=OWN_BYTES, help="of each prompt, beside its tenant's; at most 12,000"
    )
    parser.add_argument("--streams", type=int, default=16, help="at a time, on each of four connections")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(
            soak(
                Path(folder),
                requests=args.requests,
                transport=args.transport,
                collector=args.gc,
                max_blocks=args.max_blocks,
                streams=args.streams,
                engines=args.engines,
                own_bytes=args.own_bytes,
                show=_show,
            )
        )
    if args.out:
        args.out.write_text(json.dumps(asdict(report), indent=1))
    print(
        f"{report.requests:,} streams in {report.duration_s:.0f} s ({report.requests / report.duration_s:,.0f}/s), "
        f"{report.cpu_s / report.requests * 1e6:.0f} us of CPU each; {report.failed} failed, {report.reset} cut off by us"
    )
    print("latency (ms): " + ", ".join(f"{name} {value:.1f}" for name, value in report.latency_ms.items()))
    print(f"growth after the first third: {report.growth:+.2f} MiB per 100,000; left: {report.left}")
    print(f"garbage collector ({args.gc}): {report.pauses}")
    print("passed" if report.passed else "FAILED")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
