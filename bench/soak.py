"""A long run: whether the picker's memory grows, whether anything stays open, and what Python's garbage collector costs.

    python -m bench.soak [--requests N] [--transport native|grpcio] [--gc calm|python|A,B,C] [--engines N] [--own-bytes N] [--out FILE]

A closed loop straight against the picker's gRPC port, without Envoy: the client writes HTTP/2 frames by hand, so that most
of the time goes into the picker. Each stream is a whole request, both phases in full duplex; of a hundred, four are cut off by
the client in mid-body and four are no JSON. Ends with 1 where memory grows after the first third, or something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import random
import signal
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hpack import Decoder, Encoder
from prometheus_client.parser import text_string_to_metric_families

from extproc.sim.processes import Child, Children, free_ports

__all__ = ["Client", "Report", "Sample", "main", "slope", "soak"]

MODEL: Final = "llama-3.1-8b"
TENANTS: Final = 50
_SYSTEM_BYTES: Final = 1500
_OWN_BYTES: Final = 700
_FAKE_ENDPOINTS: Final = 10
_REMEMBERED_IDS: Final = 1000
_FULL_DUPLEX: Final = 4
_GROWTH_LIMIT: Final = 1.0
"""MiB per 100,000 requests after the first third: below it is what allocators do."""
_NOISE_MIB: Final = 3.0
"""By how much the memory of a short run goes up and down."""
_LEFT: Final = ("extproc_streams_open", "extproc_buffered_bytes", "extproc_endpoint_in_flight_requests")


# What a stream says


def _message(**parts: Any) -> bytes:
    data: bytes = pb.ProcessingRequest(**parts).SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def _headers(fields: Mapping[str, str]) -> Any:
    found = pb.HttpHeaders()
    for name, value in fields.items():
        found.headers.headers.append(base_pb2.HeaderValue(key=name, raw_value=value.encode()))
    return found


def _body(data: bytes, *, end: bool = True) -> bytes:
    return _message(request_body=pb.HttpBody(body=data, end_of_stream=end))


class Words:
    """What is said on each stream, as gRPC messages; prompts of `TENANTS` tenants, each with a part of its own."""

    def __init__(self, own_bytes: int = _OWN_BYTES) -> None:
        rng = random.Random(1)
        self._own_bytes = own_bytes
        self._noise = rng.randbytes(1 << 20).hex()
        systems = [rng.randbytes(_SYSTEM_BYTES // 2).hex() for _ in range(TENANTS)]
        config = pb.ProtocolConfiguration(request_body_mode=_FULL_DUPLEX, response_body_mode=_FULL_DUPLEX)
        request = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
        usage = {"prompt_tokens": 550, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 300}}
        answer = json.dumps({"choices": [{"text": "x"}], "usage": usage}).encode()
        self._begin = _message(request_headers=_headers(request), protocol_config=config)
        self._answer = _message(
            response_headers=_headers({":status": "200", "content-type": "application/json"})
        ) + _message(response_body=pb.HttpBody(body=answer, end_of_stream=True))
        # One body of each tenant, cut where its own part stands: building a message for each request costs too much.
        own = "~" * own_bytes
        bodies = [_body(json.dumps({"model": MODEL, "prompt": system + own}).encode()) for system in systems]
        self._tenants = [tuple(body.split(own.encode())) for body in bodies]
        self._no_json = self._begin + _body(b"this is no JSON")
        self._half = self._begin + _body(b'{"model": "' + b"x" * 500, end=False)

    def whole(self, number: int) -> bytes:
        """Say a request, and its answer."""
        start = number * 37 % (len(self._noise) - self._own_bytes)
        own = f"{number:12d}" + self._noise[start : start + self._own_bytes - 12]
        before, after = self._tenants[number % TENANTS]
        return b"".join((self._begin, before, own.encode(), after, self._answer))

    def of(self, number: int) -> tuple[bytes, bool]:
        """Return what stream `number` says, and whether it is cut off then."""
        match number % 25:
            case 7:
                return self._no_json, False
            case 13:
                return self._half, True
            case _:
                return self.whole(number), False


# HTTP/2, as far as needed

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MOST: Final = 2**31 - 1
_REFILL: Final = 1 << 24


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return b"".join((len(payload).to_bytes(3, "big"), bytes((kind, flags)), stream.to_bytes(4, "big"), payload))


class Client(asyncio.Protocol):
    """One connection that keeps `streams` streams under way until `next_number` gives None."""

    def __init__(self, words: Words, streams: int, next_number: Callable[[], int | None], authority: str) -> None:
        self._words = words
        self._width = streams
        self._next = next_number
        self._stream = 1
        self._began: dict[int, float] = {}
        self._buffer = b""
        self._credit = 65535
        self._eaten = 0
        self._said = 0
        self._pseudo = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        encoder = Encoder()
        self._blocks = [encoder.encode(self._pseudo), encoder.encode(self._pseudo)]
        """The first one fills the peer's table, all others refer to it."""
        self._decoder = Decoder()
        self.finished = asyncio.get_running_loop().create_future()
        self.latencies_s = array("d")
        self.failed: list[str] = []
        self.reset = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with windows that never close."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = (4).to_bytes(2, "big") + _MOST.to_bytes(4, "big")
        grown = (_MOST - 65535).to_bytes(4, "big")
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, grown))
        self._fill()

    def connection_lost(self, error: Exception | None) -> None:
        """Say that it is over."""
        if not self.finished.done():
            self.failed.append(f"the connection broke with {len(self._began)} streams open: {error}")
            self.finished.set_result(None)

    def _fill(self) -> None:
        out = []
        while len(self._began) < self._width and self._credit > 16384:
            number = self._next()
            if number is None:
                break
            said, cut = self._words.of(number)
            stream, self._stream = self._stream, self._stream + 2
            out.append(_frame(_HEADERS, _END_HEADERS, stream, self._blocks[min(self._said, 1)]))
            out.append(_frame(_DATA, 0 if cut else _END_STREAM, stream, said))
            self._said += 1
            self._credit -= len(said)
            if cut:
                out.append(_frame(_RESET, 0, stream, (8).to_bytes(4, "big")))
                self.reset += 1
            else:
                self._began[stream] = time.perf_counter()
        if out:
            self._transport.write(b"".join(out))
        elif not self._began and not self.finished.done():
            self.finished.set_result(None)
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take frames; every stream that ends makes room for the next."""
        data = self._buffer + data
        at, size = 0, len(data)
        while size - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            if size - at < 9 + length:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, data[at + 9 : at + 9 + length])
            at += 9 + length
        self._buffer = data[at:]
        self._fill()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._eaten += len(payload)
            if self._eaten > _REFILL:
                self._transport.write(_frame(_WINDOW, 0, 0, self._eaten.to_bytes(4, "big")))
                self._eaten = 0
        elif kind == _HEADERS:
            fields: dict[Any, Any] = dict(self._decoder.decode(payload, raw=False))
            if flags & _END_STREAM:
                self.latencies_s.append(time.perf_counter() - self._began.pop(stream))
                if fields.get("grpc-status") != "0":
                    self.failed.append(str(fields))
        elif kind == _RESET:
            if self._began.pop(stream, None) is not None:
                self.failed.append(f"stream {stream} was reset: {payload.hex()}")
        elif kind == _SETTINGS and not flags & _ACK:
            self._transport.write(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW and not stream:
            self._credit += int.from_bytes(payload, "big")
        elif kind == _GOAWAY:
            self.failed.append(f"GOAWAY {payload.hex()}")


# The run


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
        argv = [sys.executable, "-m", "bench.soak", "--picker", collector, str(self._folder), str(config)]
        self.picker = await self._children.start("picker", argv)
        await self.picker.wait_http(f"http://127.0.0.1:{self._ports[2]}/readyz")

    async def connect(self, words: Words, streams: int, next_number: Callable[[], int | None]) -> Client:
        """Open one connection to the picker."""
        host, port = "127.0.0.1", self._ports[0]
        make = functools.partial(Client, words, streams, next_number, f"{host}:{port}")
        _, client = await asyncio.get_running_loop().create_connection(make, host, port)
        return client

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
    own_bytes: int = _OWN_BYTES,
    show: Callable[[Sample], None] = lambda _sample: None,
) -> Report:
    """Run `rounds` times `requests` streams through one fresh picker with `engines` simulated engines that it scrapes."""
    report = Report(requests * rounds, transport, collector)
    words = Words(own_bytes)
    clients: list[Client] = []
    async with Children(folder / "logs") as children, aiohttp.ClientSession() as http:
        stage = _Stage(folder, children, http, engines)
        await stage.start(transport, collector, max_blocks)
        began, cpu_s = time.perf_counter(), stage.picker.cpu_s()
        for number in range(rounds):
            numbers = iter(range(number * requests, (number + 1) * requests))
            fresh = [
                await stage.connect(words, streams, functools.partial(next, numbers, None)) for _ in range(connections)
            ]
            clients += fresh
            await _watch(stage, fresh, clients, report, show)
            report.left = await stage.left()
            report.objects.append(await stage.objects())
        report.duration_s, report.cpu_s = time.perf_counter() - began, stage.picker.cpu_s() - cpu_s
        report.samples.append(await stage.sample(report.requests))
        await stage.picker.stop(20.0)
    _sum_up(report, clients)
    report.pauses = json.loads(stage.pauses_file.read_text()) if stage.pauses_file.exists() else {}
    return report


async def _watch(
    stage: _Stage, running: list[Client], clients: list[Client], report: Report, show: Callable[[Sample], None]
) -> None:
    """Wait for the end of the running clients, and take a sample now and then."""
    ended = asyncio.gather(*(client.finished for client in running))
    step = max(1, report.requests // 60)
    while not ended.done():
        await asyncio.wait([ended], timeout=0.25)
        done = sum(len(client.latencies_s) + client.reset for client in clients)
        if not report.samples or done >= report.samples[-1].requests + step:
            report.samples.append(await stage.sample(done))
            show(report.samples[-1])


def _sum_up(report: Report, clients: list[Client]) -> None:
    report.reset = sum(client.reset for client in clients)
    problems = [problem for client in clients for problem in client.failed]
    report.failed = len(problems)
    for problem in problems[:5]:
        print(f"failed: {problem}", file=sys.stderr)
    latencies = sorted(latency for client in clients for latency in client.latencies_s)
    for name, share in {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}.items():
        report.latency_ms[name] = latencies[min(len(latencies) - 1, int(share * len(latencies)))] * 1e3
    report.growth = slope([sample for sample in report.samples if sample.requests > report.requests / 3])


# The picker, watched


def _picker(collector: str, folder: Path, config: str) -> int:
    """Run the picker, time its garbage collections, and count its objects on SIGUSR1."""
    from extproc import app, cli
    from extproc.pool import ledger, pool

    # Full early, as the prefix index: what may be remembered is no leak.
    patched: Any = pool
    patched.Ledger = functools.partial(ledger.Ledger, remembered_ids=_REMEMBERED_IDS)
    times: dict[int, array[float]] = {generation: array("d") for generation in range(3)}
    began = 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()  # CPU time: how long it would take on a machine of its own
        else:
            times[info["generation"]].append(time.thread_time() - began)

    def count(*_: object) -> None:
        gc.collect()
        fresh = folder / "objects.new"
        fresh.write_text(str(sys.getallocatedblocks()))
        fresh.replace(folder / "objects.json")

    if collector == "python":
        app.calm_collector = lambda: None
    elif collector != "calm":
        calm, thresholds = app.calm_collector, [int(word) for word in collector.split(",")]

        def otherwise() -> None:
            calm()
            gc.set_threshold(*thresholds)

        app.calm_collector = otherwise
    gc.callbacks.append(watch)
    signal.signal(signal.SIGUSR1, count)
    status = cli.main(["serve", "--config", config])
    gc.callbacks.remove(watch)
    found = {
        str(generation): {"count": len(each), "total_ms": sum(each) * 1e3, "max_ms": max(each, default=0.0) * 1e3}
        for generation, each in times.items()
    }
    (folder / "pauses.json").write_text(json.dumps(found))
    return status


def _show(sample: Sample) -> None:
    print(
        f"{sample.requests:>10,} requests  {sample.rss_bytes / 2**20:7.1f} MiB  {sample.index_blocks:>8,} blocks  "
        f"{sample.streams_open:>4} streams open  {sample.in_flight:>4} in flight",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the soak as asked on the command line; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--picker"]:
        return _picker(argv[1], Path(argv[2]), argv[3])
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--transport", choices=("native", "grpcio"), default="native")
    parser.add_argument(
        "--gc",
        default="calm",
        help="calm: `calm_collector`; python: as Python comes; A,B,C: calm with these thresholds",
    )
    parser.add_argument("--max-blocks", type=int, default=200_000, help="bound of the prefix index")
    parser.add_argument(
        "--engines", type=int, default=4, help="simulated engines that are scraped; 0: none, and no limit to caches"
    )
    parser.add_argument(
        "--own-bytes", type=int, default=_OWN_BYTES, help="of each prompt, beside its tenant's; at most 12,000"
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
