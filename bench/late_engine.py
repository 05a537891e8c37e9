"""Engines whose every answer is known in advance: by the number of the request, to the byte, and to the time.

One process, several ports, HTTP/1.1. The number stands in the header `x-probe`; the answer begins after 0.1 to 50 ms and
is either one piece or several with pauses between, so that a gap, a repetition or a stranger's bytes all show. The
checksum of the request's body stands in every piece: a damaged request shows too. Prints its ports.

    python -m bench.late_engine --engines 4
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from bench.late_wire import at, log_uniform
from extproc.loop import run

__all__ = ["Plan", "expected", "main", "plan", "request_body"]

_ANSWER_S: Final = (0.1e-3, 50e-3)
_PLANS: Final = 4096
"""Different shapes of an answer; the number stands in its bytes anyway."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of one answer."""

    first_s: float
    """From the end of the request to the first byte."""
    pauses_s: tuple[float, ...]
    """Before each further piece; none: the answer is one piece with a content-length."""
    fills: tuple[bytes, ...]
    """What each piece is filled up with."""


@lru_cache(maxsize=_PLANS)
def _plan(shape: int) -> Plan:
    rng = random.Random(shape)
    pieces = 1 if rng.random() < 0.4 else rng.randint(2, 6)
    pauses = tuple(0.0 if rng.random() < 0.5 else log_uniform(rng.random(), 1e-4, 5e-3) for _ in range(pieces - 1))
    fills = tuple(b"%x" % rng.getrandbits(4 * rng.randint(16, 800)) for _ in range(pieces))
    return Plan(log_uniform(rng.random(), *_ANSWER_S), pauses, fills)


def plan(number: int) -> Plan:
    """Return the shape of the answer to request `number`."""
    return _plan(number * 2_654_435_761 % 2**32 % _PLANS)


def pieces(number: int, checksum: int) -> list[bytes]:
    """Return the pieces of the answer to a request whose body has this CRC-32."""
    return [b"data: %d/%d %08x %b\n\n" % (number, i, checksum, fill) for i, fill in enumerate(plan(number).fills)]


def request_body(number: int) -> bytes:
    """Return the body of request `number`, some 50 bytes to 6 kB."""
    fill = b"%x" % (number * 0x9E3779B97F4A7C15 % 2**64)
    return b'{"model":"m","prompt":"%b"}' % (fill * (1 + number * 7 % 400))


def expected(number: int) -> bytes:
    """Return the body that the client must get, to the byte."""
    return b"".join(pieces(number, zlib.crc32(request_body(number))))


class _Engine(asyncio.Protocol):
    """One connection: requests one after the other, as Envoy sends them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._data = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._data[:end].lower()
        if b"transfer-encoding: chunked" in head:
            # In full duplex Envoy knows no length. Data may hold the mark, so a whole parse is due where it is at the end.
            if not self._data.endswith(b"0\r\n\r\n"):
                return
            body = _dechunked(self._data[end + 4 :])
            if body is None:
                return
        else:
            place = head.find(b"content-length:")
            size = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            body = self._data[end + 4 :]
            if len(body) < size:
                return
        self._data = b""
        place = head.find(b"\r\nx-probe:")
        number = int(head[place + 10 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
        self._answer(number, pieces(number, zlib.crc32(body)))

    def _answer(self, number: int, parts: list[bytes]) -> None:
        shape = plan(number)
        when = self._loop.time() + shape.first_s
        if len(parts) == 1:
            head = b"HTTP/1.1 200 OK\r\nserver: late\r\ncontent-length: %d\r\n\r\n" % len(parts[0])
            at(self._loop, when, lambda: self._transport.write(head + parts[0]))
            return
        writes = [b"HTTP/1.1 200 OK\r\nserver: late\r\ntransfer-encoding: chunked\r\n\r\n" + _chunk(parts[0])]
        writes += [_chunk(part) for part in parts[1:]]
        writes[-1] += b"0\r\n\r\n"
        self._write(writes, list(shape.pauses_s), when)

    def _write(self, writes: list[bytes], pauses_s: list[float], when: float) -> None:
        def step() -> None:
            self._transport.write(writes.pop(0))
            if writes:
                self._write(writes, pauses_s, self._loop.time() + pauses_s.pop(0))

        at(self._loop, when, step)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _dechunked(data: bytes) -> bytes | None:
    """Return a chunked body; None where it is not all there."""
    out: list[bytes] = []
    place = 0
    while True:
        end = data.find(b"\r\n", place)
        if end < 0:
            return None
        size = int(data[place:end], 16)
        place = end + 2 + size + 2
        if place > len(data):
            return None
        if not size:
            return b"".join(out)
        out.append(data[end + 2 : end + 2 + size])


async def _serve(engines: int) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    servers = [await loop.create_server(lambda: _Engine(loop), "127.0.0.1", 0) for _ in range(engines)]
    print("ports", *(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.late_engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=4, metavar="N")
    args = parser.parse_args()
    run(_serve(args.engines))


if __name__ == "__main__":
    main()
