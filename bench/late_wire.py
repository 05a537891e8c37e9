"""A bad network between the picker and Envoy: TCP segments, some of which come late, and with them all that follows.

Accepts Envoy's connections and makes one to the picker for each, from an address of its own (127.0.0.0/8), so that the
picker takes each for another peer. What the picker writes is cut into segments; a share of them is held back, which in
TCP holds back whatever was sent behind them. What Envoy writes goes through untouched. Prints its port.

    python -m bench.late_wire --picker-port 9002 --cut anywhere --late 0.02 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from extproc.loop import run

__all__ = ["Late", "at", "cut", "log_uniform", "main"]

_SEGMENT_BYTES: Final = 1448
"""What a segment carries on Ethernet: 1500 less the headers of IPv4 and TCP with timestamps."""
_LATE_S: Final = (0.2e-3, 200e-3)


@dataclass(slots=True)
class Late:
    """What the network does, and how often it has done it."""

    share: float
    """Of the segments that are held back."""
    anywhere: bool
    """Cut at random places, else only where a write of the picker was read or a segment is full."""
    rng: random.Random
    segments: int = 0
    held_back: int = 0
    addresses: Any = field(default_factory=lambda: itertools.count(2))

    def delay_s(self) -> float:
        """Draw one segment's delay."""
        self.segments += 1
        if self.rng.random() >= self.share:
            return 0.0
        self.held_back += 1
        return log_uniform(self.rng.random(), *_LATE_S)

    def source(self) -> str:
        """Return the next address in 127.0.0.0/8."""
        number = next(self.addresses) % 0xFFFFFD + 2
        return f"127.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def log_uniform(share: float, low: float, high: float) -> float:
    """Map 0..1 to low..high, so that every factor is equally likely."""
    return float(low * (high / low) ** share)


def cut(data: bytes, late: Late) -> list[bytes]:
    """Cut what was read into segments."""
    pieces, start = [], 0
    while start < len(data):
        size = late.rng.randint(1, _SEGMENT_BYTES) if late.anywhere else _SEGMENT_BYTES
        pieces.append(data[start : start + size])
        start += size
    return pieces


def at(loop: asyncio.AbstractEventLoop, when: float, call: Callable[[], None]) -> None:
    """Call at a time to some 50 us: timers of the loop know milliseconds, so the rest is waited for turn by turn."""
    left = when - loop.time()
    if left > 2e-3:
        loop.call_later(left - 1.5e-3, at, loop, when, call)
    elif left > 0:
        loop.call_soon(at, loop, when, call)
    else:
        call()


class _FromPicker(asyncio.Protocol):
    """One connection to the picker: what comes is cut, and sent on in order and in time."""

    def __init__(self, late: Late, envoy: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._late = late
        self._envoy = envoy
        self._loop = loop
        self._queue: deque[tuple[float, bytes]] = deque()
        self._last = 0.0
        self._over = False

    def data_received(self, data: bytes) -> None:
        for piece in cut(data, self._late):
            delay_s = self._late.delay_s()
            if delay_s:
                self._last = max(self._last, self._loop.time() + delay_s)
            elif not self._queue:
                self._envoy.write(piece)
                continue
            waiting = bool(self._queue)
            self._queue.append((self._last, piece))
            if not waiting:
                at(self._loop, self._last, self._release)

    def _release(self) -> None:
        now = self._loop.time()
        while self._queue and self._queue[0][0] <= now:
            self._envoy.write(self._queue.popleft()[1])
        if self._queue:
            at(self._loop, self._queue[0][0], self._release)
        elif self._over:  # what was held back comes before the end
            self._envoy.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._over = True
        if not self._queue:
            self._envoy.close()


class _FromEnvoy(asyncio.Protocol):
    """One connection of Envoy's."""

    def __init__(self, late: Late, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self._late = late
        self._port = port
        self._loop = loop
        self._early: list[bytes] = []
        self._envoy: Any = None
        self._picker: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._envoy = transport
        task = self._loop.create_task(self._connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        try:
            self._picker, _ = await self._loop.create_connection(
                lambda: _FromPicker(self._late, self._envoy, self._loop),
                "127.0.0.1",
                self._port,
                local_addr=(self._late.source(), 0),
            )
        except OSError as error:
            print(f"the picker cannot be reached: {error}", file=sys.stderr, flush=True)
            self._envoy.abort()
            return
        for data in self._early:
            self._picker.write(data)
        if self._closed:
            self._picker.close()

    def data_received(self, data: bytes) -> None:
        if self._picker is None:
            self._early.append(data)
        else:
            self._picker.write(data)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._closed = True
        if self._picker is not None:
            self._picker.close()


async def _serve_one(picker_port: int, late: Late) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _FromEnvoy(late, picker_port, loop), "127.0.0.1", 0)


async def _serve(picker_port: int, late: Late) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await _serve_one(picker_port, late)
    print(f"port {server.sockets[0].getsockname()[1]}", flush=True)
    await stop.wait()
    print(f"segments {late.segments} late {late.held_back}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.late_wire", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picker-port", type=int, required=True, metavar="PORT")
    parser.add_argument("--cut", default="anywhere", choices=("anywhere", "writes"))
    parser.add_argument("--late", type=float, default=0.02, help="share of the segments (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    run(_serve(args.picker_port, Late(args.late, args.cut == "anywhere", random.Random(args.seed))))


if __name__ == "__main__":
    main()
