"""Does a stream that ends with its request ever damage a response? The experiment behind `server.response_phase`.

Real Envoy, full duplex both ways, and a network between it and the picker that cuts what the picker writes into segments
and holds single ones back for 0.2 to 200 ms (`late_wire`), while engines answer within 0.1 to 50 ms (`late_engine`). Every
byte of every response is compared with what it has to be. Each connection of Envoy's is another peer to the picker, so
that a late close stops early closing there and not in the rest of the run. docs/develop/adr/0006-early-close.md has the outcome.

    python -m bench.late_close --requests 20000 [--mode keep|close|auto] [--cut anywhere|writes] [--tls] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.late_engine import expected, request_body
from extproc.demo.processes import Child, ChildError, Children, envoy_binary, free_ports
from extproc.envoy_config import EnvoyOptions
from extproc.envoy_config.options import profile_named
from extproc.envoy_config.render import bootstrap
from extproc.errors import ExtprocError
from extproc.loop import run

__all__ = ["Plan", "Tally", "main", "measure"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_ENGINES: Final = 4
_TIMEOUT_S: Final = 20.0
"""Far beyond anything the network or an engine does: a response that is not there by then never comes."""
_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    requests: int
    mode: str
    cut: str = "anywhere"
    tls: bool = False
    late: float = 0.02
    seed: int = 1
    connections: int = 64
    first: int = 0
    """Number of the first request: runs of one experiment take different ones."""


@dataclass(slots=True)
class Tally:
    """What came back."""

    good: int = 0
    damaged: int = 0
    """A 200 with other bytes than the engine's."""
    failed: int = 0
    """Another status, a connection that broke, or nothing at all in time."""
    examples: list[str] = field(default_factory=list)

    def note(self, number: int, problem: str) -> None:
        """Keep the first few problems in words."""
        if len(self.examples) < 20:
            self.examples.append(f"request {number}: {problem}")


class _Client(asyncio.Protocol):
    """One connection in a closed loop: a request, its whole response, the next request."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._transport: Any = None
        self._data = bytearray()
        self._number = -1
        self.sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        number = self._load.take()
        self._number = number
        if number < 0:
            self._load.leave(self)
            self._transport.close()
            return
        body = request_body(number)
        self._data.clear()
        self.sent_at = self._load.loop.time()
        self._transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-type: application/json\r\nx-probe: %d\r\n"
            b"content-length: %d\r\n\r\n%b" % (number, len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        self._data += data
        found = response(self._data)
        if found is None:
            return
        status, body = found
        tally, number = self._load.tally, self._number
        if status != 200:
            tally.failed += 1
            tally.note(number, f"status {status}: {bytes(body[:200])!r}")
        elif body == (wanted := expected(number)):
            tally.good += 1
        else:
            tally.damaged += 1
            tally.note(number, f"{len(body)} bytes instead of {len(wanted)}")
        self._next()

    def overdue(self, now: float) -> bool:
        """Tell whether the response takes longer than anything can."""
        return self._number >= 0 and now - self.sent_at > _TIMEOUT_S

    def abort(self) -> None:
        """Give the response up."""
        self._transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._number >= 0:
            self._load.tally.failed += 1
            late = self._load.loop.time() - self.sent_at > _TIMEOUT_S
            why = "no end" if late else "connection closed"
            self._load.tally.note(self._number, f"{why} after {len(self._data)} bytes")
            self._load.leave(self)
            self._load.connect()


def response(data: bytearray) -> tuple[int, bytes] | None:
    """Read one HTTP/1.1 response; None while it is not all there. Raises ValueError where it is none."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(data[:end]).lower()
    status = int(head[9:12])
    place = end + 4
    if b"\r\ntransfer-encoding: chunked" not in head:
        size = int(head.split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0])
        return (status, bytes(data[place : place + size])) if len(data) >= place + size else None
    if not data.endswith(b"0\r\n\r\n"):
        return None
    out: list[bytes] = []
    while (line := data.find(b"\r\n", place)) >= 0:
        size = int(data[place:line], 16)
        place = line + 2 + size + 2
        if not size:
            return status, b"".join(out)
        out.append(bytes(data[line + 2 : line + 2 + size]))
    return None


class _Load:
    """All connections of the client, and the numbers that are left."""

    def __init__(self, port: int, plan: Plan) -> None:
        self.loop = asyncio.get_running_loop()
        self.tally = Tally()
        self._port = port
        self._left = iter(range(plan.first, plan.first + plan.requests))
        self._clients: set[_Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()

    def take(self) -> int:
        """Return the next number; -1: there is none."""
        return next(self._left, -1)

    def connect(self) -> None:
        """Open one more connection."""
        task = self.loop.create_task(self._connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        client = _Client(self)
        self._clients.add(client)
        try:
            await self.loop.create_connection(lambda: client, "127.0.0.1", self._port)
        except OSError:
            self.leave(client)

    def leave(self, client: _Client) -> None:
        """Count a connection out."""
        self._clients.discard(client)
        self.loop.call_soon(self._look)

    def _look(self) -> None:
        if not self._clients and not self._tasks:
            self._done.set()

    async def run(self, connections: int) -> None:
        """Send everything."""
        for _ in range(connections):
            self.connect()
        while not self._done.is_set():
            try:
                async with asyncio.timeout(1.0):
                    await self._done.wait()
            except TimeoutError:
                now = self.loop.time()
                for client in [client for client in self._clients if client.overdue(now)]:
                    client.abort()
                self._look()


async def _words(child: Child, first: str) -> list[str]:
    """Wait for the line of a child's output that begins with a word, and return the others. Raises ChildError."""
    for _ in range(200):
        # Whole lines only: what a child prints arrives word by word.
        whole, _, _ = child.log.read_text(errors="replace").rpartition("\n")
        for line in whole.splitlines():
            if line.startswith(first):
                return line.split()[1:]
        if not child.running:
            break
        await asyncio.sleep(0.05)
    raise ChildError(f"{child.name} did not say its {first}:\n{child.tail()}")


def _picker_config(plan: Plan, engines: list[str], grpc: int, health: int, metrics: int) -> str:
    server: dict[str, Any] = {
        "transport": "native",
        "host": "127.0.0.1",
        "grpc_port": grpc,
        "health_port": health,
        "metrics_port": metrics,
        "response_phase": plan.mode,
        # Every stream that can be is ended early: the sample would only be work without a question.
        "response_sample": 0,
        "drain_delay": 0,
        "grace_period": 1,
        "tls": {"mode": "self-signed" if plan.tls else "plaintext"},
    }
    return json.dumps(
        {
            "apiVersion": "extproc/v1alpha1",
            "kind": "ExtprocConfig",
            "server": server,
            "admin": {"port": 0},
            "pool": {"endpoints": engines, "scrape": {"enabled": False}},
            "routing": {"strategy": "round-robin"},
            # Nobody tells of the ends here.
            "in_flight": {"lease": 2},
            "log": {"decisions": {"enabled": False}},
        }
    )


def _envoy_config(plan: Plan, options: EnvoyOptions) -> str:
    profile = dataclasses.replace(profile_named("full-duplex"), picker_tls=plan.tls)
    document = bootstrap(profile, options)
    picker = next(found for found in document["static_resources"]["clusters"] if found["name"] == "picker")
    http = picker["typed_extension_protocol_options"][_OPTIONS]
    # Several connections, each of them for a while: a held-back segment stops one of them only.
    http["explicit_http_config"]["http2_protocol_options"]["max_concurrent_streams"] = 8
    http["common_http_protocol_options"] = {"max_requests_per_connection": 1000}
    return json.dumps(document)


async def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run one plan and return its figures; the processes' output lies in `folder`. Raises ChildError."""
    env = {"PYTHONPATH": str(_ROOT)}
    async with Children(folder) as children:
        python = sys.executable
        argv = [python, "-m", "bench.late_engine", "--engines", str(_ENGINES)]
        engine = await children.start("engines", argv, env=env)
        addresses = [f"127.0.0.1:{port}" for port in await _words(engine, "ports")]
        grpc, health, metrics, listen, admin = free_ports(5)
        config = folder / "picker.json"
        config.write_text(_picker_config(plan, addresses, grpc, health, metrics))
        picker = await children.start("picker", [python, "-m", "extproc", "serve", "--config", str(config)], env=env)
        await picker.wait_http(f"http://127.0.0.1:{metrics}/readyz")
        argv = [python, "-m", "bench.late_wire", "--picker-port", str(grpc), "--cut", plan.cut]
        argv += ["--late", str(plan.late), "--seed", str(plan.seed)]
        wire = await children.start("wire", argv, env=env)
        (port,) = await _words(wire, "port")
        options = EnvoyOptions(tuple(addresses), (f"127.0.0.1:{port}",), listen_port=listen, admin_port=admin)
        path = folder / "envoy.json"
        path.write_text(_envoy_config(plan, options))
        argv = [str(envoy_binary()), "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id"]
        envoy = await children.start("envoy", [*argv, "--log-level", "error"])
        await _healthy(envoy, admin)
        begin = time.monotonic()
        load = _Load(listen, plan)
        await load.run(plan.connections)
        duration_s = time.monotonic() - begin
        counted = await _counted(metrics, plan.requests)
        await wire.stop()
        segments = await _words(wire, "segments")
        cpu_s = {child.name: round(child.cpu_s(), 1) for child in (picker, envoy, engine)}
    tally = load.tally
    return {
        **dataclasses.asdict(plan),
        "good": tally.good,
        "damaged": tally.damaged,
        "failed": tally.failed,
        "ended_early": counted["closed_early"],
        "kept": counted["completed"],
        "late_closes": counted["late"],
        "segments": int(segments[0]),
        "segments_late": int(segments[2]),
        "duration_s": round(duration_s, 1),
        "cpu_s": cpu_s,
        "examples": tally.examples,
    }


async def _healthy(envoy: Child, admin: int) -> None:
    """Wait until Envoy holds the picker for healthy. Raises ChildError."""
    await envoy.wait_http(f"http://127.0.0.1:{admin}/ready")
    async with aiohttp.ClientSession() as http:
        for _ in range(200):
            async with http.get(f"http://127.0.0.1:{admin}/stats?filter=picker.membership_healthy") as found:
                if "membership_healthy: 1" in await found.text():
                    return
            await asyncio.sleep(0.05)
    raise ChildError(f"Envoy does not find the picker:\n{envoy.tail()}")


async def _counted(metrics: int, requests: int) -> Counter[str]:
    """Return how the picker's streams ended, and how many got a late response; the last ends may take a moment."""
    for _ in range(100):
        counted = await _counted_now(metrics)
        if counted.total() - counted["late"] >= requests:
            break
        await asyncio.sleep(0.05)
    return counted


async def _counted_now(metrics: int) -> Counter[str]:
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{metrics}/metrics") as found:
        page = await found.text()
    counted: Counter[str] = Counter()
    for how, value in re.findall(r'^extproc_streams_ended_total\{how="(\w+)"\} ([\d.e+]+)$', page, re.MULTILINE):
        counted[how] += int(float(value))
    for value in re.findall(r"^extproc_late_responses_total\{.*\} ([\d.e+]+)$", page, re.MULTILINE):
        counted["late"] += int(float(value))
    return counted


def _line(found: dict[str, Any]) -> str:
    return (
        f"{found['mode']:>5} {found['cut']:>8} {'tls' if found['tls'] else 'plaintext':>9}: {found['requests']} requests, "
        f"{found['ended_early']} streams ended early, {found['late_closes']} late closes, "
        f"{found['damaged']} damaged, {found['failed']} failed; {found['segments_late']} of {found['segments']} segments late; "
        f"{found['requests'] / found['duration_s']:.0f} requests/s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.late_close", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, metavar="N", help="of each mode (default: %(default)s)")
    parser.add_argument("--mode", action="append", choices=("keep", "close", "auto"), help="default: keep and close")
    parser.add_argument("--cut", default="anywhere", choices=("anywhere", "writes"), help="default: %(default)s")
    parser.add_argument("--tls", action="store_true", help="TLS between Envoy and the picker")
    parser.add_argument("--late", type=float, default=0.02, help="share of segments held back (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first request")
    parser.add_argument("--connections", type=int, default=64, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("out/late_close.jsonl"), help="default: %(default)s")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for mode in args.mode or ("keep", "close"):
            plan = Plan(args.requests, mode, args.cut, args.tls, args.late, args.seed, args.connections, args.first)
            found: dict[str, Any] = {}

            async def one(plan: Plan = plan, found: dict[str, Any] = found) -> None:
                found.update(await measure(plan, args.out.parent / f"late-close-{plan.mode}-{plan.seed}"))

            run(one())
            print(_line(found), *found["examples"][:5], sep="\n  ", flush=True)
            with args.out.open("a") as out:
                out.write(json.dumps(found) + "\n")
    except ExtprocError as error:
        print(f"late_close: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
