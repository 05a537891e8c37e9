"""A load generator in a process of its own, where h2load can't do it: bodies that differ, or gRPC against a server itself.

    python -m bench.generator http --port 10000 --bodies FILE --requests 500 --rate 300
    python -m bench.generator grpc --port 9002 --bodies FILE --requests 5000 [--streams 32]

`grpc` speaks ext_proc as an Envoy with the profile `direct` does, and reports the end of each request on an access log
stream; without `--bodies` every body is new (`bodies.LongPrompts`). Says `ready` after the run-up, waits for a line on
its standard input, so that the caller can look at the clock, and then prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.bodies import LongPrompts
from bench.ext_proc_client import ExtProcCalls
from bench.h2_client import H2Client, LoadError
from extproc.http2.headers import HeaderReader, encode_fields
from extproc.http2.limits import Limits
from extproc.loop import run as run_loop

__all__ = ["HttpPosts", "Run", "main"]

_TICK_S: Final = 0.001
_CONNECTIONS: Final = 4
_SILENCE_S: Final = 30.0


class Run:
    """Counts answers of requests that are answered in any order, and remembers when each began."""

    def __init__(self, requests: int) -> None:
        """Expect so many answers."""
        self.requests = requests
        self.sent = 0
        self.failed = 0
        self.latencies: list[float] = []
        self.over = asyncio.Event()

    def take(self, sent: float, ok: bool) -> None:
        """Count the answer to what was sent at `sent`."""
        self.failed += not ok
        self.latencies.append(time.perf_counter() - sent)
        if len(self.latencies) == self.requests:
            self.over.set()


class HttpPosts:
    """POSTs over one HTTP/2 connection; the sink of their answers."""

    def __init__(self) -> None:
        self.client: H2Client
        self.run: Run
        self._reader = HeaderReader(Limits())
        self._sent: dict[int, float] = {}
        self._failed: set[int] = set()

    def post(self, body: bytes) -> None:
        """Send one request."""
        block = encode_fields(
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/v1/chat/completions"),
            (b":authority", b"bench"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        )
        sent = time.perf_counter()
        self._sent[self.client.request(block, (body,))] = sent

    def headers(self, stream_id: int, block: bytes) -> None:
        """Look at the status."""
        fields = dict(self._reader.read(block).fields)
        if fields.get(b":status", b"200") != b"200":
            self._failed.add(stream_id)

    def data(self, stream_id: int, payload: bytes) -> None:
        """Drop the body."""

    def ended(self, stream_id: int, *, reset: bool) -> None:
        """Tell the run."""
        sent = self._sent.pop(stream_id, None)
        if sent is not None:
            self.run.take(sent, not reset and stream_id not in self._failed)


async def _connect(port: int, sink: Any) -> H2Client:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: H2Client(sink), "127.0.0.1", port)
    await client.settled
    sink.client = client
    return client


async def _within(run: Run, clients: list[H2Client]) -> None:
    """Wait until a run is over. Raises LoadError where a connection ends first, or nothing comes any more."""
    over: asyncio.Future[Any] = asyncio.ensure_future(run.over.wait())
    answered = -1
    try:
        while not over.done():
            if len(run.latencies) == answered:
                raise LoadError(f"{answered} of {run.requests} answers, and none for {_SILENCE_S:.0f} s")
            answered = len(run.latencies)
            waiting = [over, *(client.lost for client in clients)]
            done, _ = await asyncio.wait(waiting, timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
    finally:
        over.cancel()


class _Http:
    """Open loop over HTTP: each body at its time, whatever has become of those before."""

    def __init__(self, bodies: Iterator[bytes], rate: float) -> None:
        self._bodies = bodies
        self._rate = rate
        self._posts: list[HttpPosts] = []
        self.clients: list[H2Client] = []

    async def connect(self, port: int) -> None:
        for _ in range(_CONNECTIONS):
            timed = HttpPosts()
            self._posts.append(timed)
            self.clients.append(await _connect(port, timed))

    async def run(self, run: Run) -> None:
        for one in self._posts:
            one.run = run
        turn = itertools.cycle(self._posts)
        begin = time.perf_counter()
        while run.sent < run.requests:
            due = min(run.requests, int((time.perf_counter() - begin) * self._rate) + 1)
            for _ in range(due - run.sent):
                next(turn).post(next(self._bodies))
                run.sent += 1
            await asyncio.sleep(_TICK_S)
        await _within(run, self.clients)


class _Grpc:
    """Closed loop of ext_proc streams over one connection, as an Envoy worker has one."""

    def __init__(self, bodies: Iterator[bytes], streams: int) -> None:
        self._bodies = bodies
        self._streams = streams
        self._calls = ExtProcCalls(self._on_end)
        self._run: Run
        self.clients: list[H2Client] = []

    async def connect(self, port: int) -> None:
        self.clients.append(await _connect(port, self._calls))
        self._calls.open_log()

    async def run(self, run: Run) -> None:
        self._run = run
        for _ in range(min(self._streams, run.requests)):
            self._next()
        await _within(run, self.clients)

    def _next(self) -> None:
        self._run.sent += 1
        self._calls.begin(next(self._bodies), time.perf_counter())

    def _on_end(self, sent: float, ok: bool) -> None:
        run = self._run
        run.take(sent, ok)
        if run.sent < run.requests:
            self._next()


async def _drive(args: argparse.Namespace) -> dict[str, Any]:
    bodies: Iterator[bytes]
    if args.bodies is None:
        prompts = LongPrompts(random.Random(args.seed))
        bodies = iter(prompts.next, None)
    else:
        bodies = itertools.cycle(args.bodies.read_bytes().split(b"\n"))
    load = _Http(bodies, args.rate) if args.kind == "http" else _Grpc(bodies, args.streams)
    await load.connect(args.port)
    if args.run_up:
        await load.run(Run(args.run_up))
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    run = Run(args.requests)
    begin = time.perf_counter()
    await load.run(run)
    took_s = time.perf_counter() - begin
    for client in load.clients:
        client.close()
    return {"requests": len(run.latencies), "failed": run.failed, "duration_s": took_s, "latencies_s": run.latencies}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("http", "grpc"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bodies", type=Path, help="one body per line; they are sent in turn")
    parser.add_argument("--seed", type=int, default=1, help="of the bodies where there is no file")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--run-up", type=int, default=0, help="requests before anything is measured")
    parser.add_argument("--rate", type=float, default=300.0, help="http: requests per second")
    parser.add_argument("--streams", type=int, default=32, help="grpc: how many are always under way")
    args = parser.parse_args()
    try:
        figures = run_loop(_drive(args))
    except (LoadError, OSError) as error:
        print(f"generator: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
