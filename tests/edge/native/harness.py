"""A connection of the native transport on a transport and a loop that only take notes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.config.schema import TlsConfig
from extproc.edge.native.calls import AccessLogCall, CheckCall, OpenStreams, ProcessCall, WatchCall
from extproc.edge.native.connection import NativeConnection
from extproc.edge.native.listener_context import ConnectionSettings, ListenerContext
from extproc.edge.native.server import NativeServer
from extproc.edge.process.listen import ConnectionBounds
from extproc.edge.services.access_log import AccessLogService
from extproc.edge.services.health import HealthService
from extproc.http2.frames import PREFACE, FrameType, frame
from extproc.http2.grpc import message_frame
from tests.edge.grpcio.harness import LIMIT_S, server_config
from tests.http2.wire import Client, Frame, cut
from tests.protocol.dialogue import Dialogue

PATHS = {
    "process": "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
    "logs": "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs",
    "check": "/grpc.health.v1.Health/Check",
    "watch": "/grpc.health.v1.Health/Watch",
}


@dataclass
class Timer:
    due: float
    call: Callable[..., Any]
    args: tuple[Any, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class VirtualLoop:
    """`call_later` and `call_soon` under a clock that a test moves."""

    now: float = 0.0
    timers: list[Timer] = field(default_factory=list)

    def call_later(self, delay_s: float, call: Callable[..., Any], *args: Any) -> Timer:
        self.timers.append(Timer(self.now + delay_s, call, args))
        return self.timers[-1]

    def call_soon(self, call: Callable[..., Any], *args: Any) -> Timer:
        return self.call_later(0.0, call, *args)

    def advance(self, seconds: float = 0.0) -> None:
        end = self.now + seconds
        while due := sorted((t for t in self.timers if not t.cancelled and t.due <= end), key=lambda t: t.due):
            self.now = max(self.now, due[0].due)
            self.timers.remove(due[0])
            due[0].call(*due[0].args)
        self.now = end


class Socket:
    """An asyncio transport that keeps what is written."""

    def __init__(self, peer: Any = ("10.1.1.1", 5)) -> None:
        self.peer = peer
        self.writes: list[bytes] = []
        self.reading = True
        self.unsent_bytes = 0
        self.tls: object = None
        self.gone = False
        self.state = "open"

    def get_extra_info(self, name: str) -> Any:
        return self.peer if name == "peername" else self.tls

    def set_write_buffer_limits(self, _high: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return not self.tls

    def write_eof(self) -> None:
        if self.gone:
            raise OSError("not connected")
        self.state = "closed"

    def close(self) -> None:
        self.state = "closed with a word of TLS"

    def abort(self) -> None:
        self.state = "aborted"


def process_fields(name: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the header fields of a call of one of our methods, or of another path."""
    start = ((":method", "POST"), (":scheme", "http"), (":path", PATHS.get(name, name)))
    return (*start, ("te", "trailers"), ("content-type", "application/grpc"), *more)


class Stage:
    """One connection with all services, and a client beside it."""

    def __init__(self, dialogue: Dialogue | None = None, peer: Any = ("10.1.1.1", 5), **settings: Any) -> None:
        self.dialogue = d = dialogue or Dialogue()
        self.loop = VirtualLoop()
        self.health = HealthService()
        self.logs = AccessLogService(lambda _entry: None, d.counters)
        loop: Any = self.loop
        self.streams = OpenStreams()
        routes: dict[str, Callable[[Any], Any]] = {
            PATHS["process"]: lambda stream: ProcessCall(d.shared, stream, lambda: self.loop.now, loop, self.streams),
            PATHS["logs"]: lambda stream: AccessLogCall(self.logs, stream),
            PATHS["check"]: lambda stream: CheckCall(self.health, stream),
            PATHS["watch"]: lambda stream: WatchCall(self.health, stream),
        }
        options: dict[str, Any] = {"max_message_bytes": 1 << 20, "max_partial_bytes": 1 << 20, **settings}
        self.context = ListenerContext(
            ConnectionSettings(**options), routes, d.counters, lambda: self.loop.now, random.Random(1), d.budget
        )
        self.connection = NativeConnection(self.context, loop)
        self.client = Client(started=False)
        self.socket = Socket(peer)
        self.connection.connection_made(self.socket)  # type: ignore[arg-type]

    def start(self) -> Stage:
        self.say(PREFACE + frame(FrameType.SETTINGS, 0, 0))
        self.heard()
        return self

    def say(self, *data: bytes) -> None:
        self.connection.data_received(b"".join(data))

    def call(self, name: str, stream_id: int = 1, *more: tuple[str, str]) -> bytes:
        return self.client.headers(stream_id, process_fields(name, *more))

    def heard(self) -> list[Frame]:
        data = b"".join(self.socket.writes)
        self.socket.writes.clear()
        return cut(data)

    def status(self) -> dict[str, str]:
        """Return the fields of the last header block heard."""
        blocks = [self.client.fields(heard.payload) for heard in self.heard() if heard.kind == FrameType.HEADERS]
        return dict(blocks[-1])


def message(data: bytes, stream_id: int = 1, *, end: bool = False) -> bytes:
    return frame(FrameType.DATA, int(end), stream_id, message_frame(data))


def half_close(stream_id: int = 1) -> bytes:
    return frame(FrameType.DATA, 1, stream_id)


def request_headers(*, end: bool = False) -> bytes:
    part = pb.HttpHeaders(end_of_stream=end)
    part.headers.headers.append(base_pb2.HeaderValue(key=":path", raw_value=b"/v1/completions"))
    config = pb.ProtocolConfiguration(request_body_mode=4)
    data: bytes = pb.ProcessingRequest(request_headers=part, protocol_config=config).SerializeToString()
    return data


def full_duplex() -> bytes:
    """Return the request's headers as a gateway sends them that shows the response too."""
    part = pb.HttpHeaders()
    part.headers.headers.append(base_pb2.HeaderValue(key=":path", raw_value=b"/v1/completions"))
    both = pb.ProtocolConfiguration(request_body_mode=4, response_body_mode=4)
    data: bytes = pb.ProcessingRequest(request_headers=part, protocol_config=both).SerializeToString()
    return data


def request_body(data: bytes, *, end: bool = False) -> bytes:
    out: bytes = pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=end)).SerializeToString()
    return out


@contextlib.asynccontextmanager
async def native(
    dialogue: Dialogue,
    *,
    tls: TlsConfig | None = None,
    bounds: tuple[ConnectionBounds, ConnectionBounds] | None = None,
    **settings: Any,
) -> AsyncIterator[NativeServer]:
    """Serve on loopback; `settings` of connections instead of the defaults."""
    options: dict[str, Any] = {"max_message_bytes": 64 << 20, "max_partial_bytes": 512 << 20, **settings}
    server = NativeServer(
        server_config(tls), dialogue.shared, lambda _entry: None, settings=ConnectionSettings(**options), bounds=bounds
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0, 0)


class Attacker:
    """A peer on a real socket that writes by hand, and reads as far as it is told to."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.client = Client(started=False)
        self.received = bytearray()
        self.frames: list[Frame] = []
        """The whole frames received so far."""
        self.over = False
        self._asked = 0

    async def connect(self, server: NativeServer, *, start: bytes = PREFACE + frame(FrameType.SETTINGS, 0, 0)) -> str:
        """Connect, say the preface, and return the name by which the server knows this peer."""
        await self.connect_to(server.grpc_port, start)
        return f"ipv4:127.0.0.1:{self.socket.getsockname()[1]}"

    async def connect_to(self, port: int, start: bytes = PREFACE + frame(FrameType.SETTINGS, 0, 0)) -> None:
        """Connect to a port of this machine."""
        await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", port))
        await self.say(start)

    async def say(self, *data: bytes) -> None:
        """Write, as far as the server takes it."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self.socket, b"".join(data))

    async def hear(self, done: Callable[[list[Frame]], bool]) -> list[Frame]:
        """Read until the frames so far are enough, or nothing comes any more; return all frames so far."""
        while not self.over and not done(self.frames):
            try:
                found = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 18)
            except OSError:
                found = b""
            self.received += found
            self.over = not found
            self._cut()
        return self.frames

    async def hear_all(self) -> list[Frame]:
        """Read to the end of the connection."""
        return await self.hear(lambda _frames: False)

    def leave(self) -> None:
        """End both directions; what is being said fails."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    async def pong(self) -> list[Frame]:
        """Ask whether the server has heard everything so far; return all frames so far."""
        self._asked += 1
        wanted = Frame(FrameType.PING, 1, 0, b"ask!" + struct.pack(">I", self._asked))
        known = len(self.frames)
        await self.say(frame(FrameType.PING, 0, 0, wanted.payload))
        return await self.hear(lambda frames: wanted in frames[known:])

    def _cut(self) -> None:
        data, end = self.received, 0
        while len(data) - end >= 9 and (size := 9 + int.from_bytes(data[end : end + 3], "big")) <= len(data) - end:
            end += size
        self.frames += cut(bytes(data[:end]))
        del data[:end]

    def call(self, stream_id: int, name: str = "process", *more: tuple[str, str]) -> bytes:
        """Write HEADERS of a call."""
        return self.client.headers(stream_id, process_fields(name, *more))


@contextlib.asynccontextmanager
async def attacking(server: NativeServer, **options: Any) -> AsyncIterator[tuple[Attacker, str]]:
    """Connect an attacker; the whole attack may take `LIMIT_S`."""
    attacker = Attacker()
    try:
        async with asyncio.timeout(3 * LIMIT_S):
            yield attacker, await attacker.connect(server, **options)
    finally:
        attacker.socket.close()


@dataclass
class Cost:
    """What something has cost this process, the attacker's part included."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    """Never a bound: what a limit lets through in this time."""
    peak_bytes: int = 0
    """Most that was held at once above what was held before, in Python's objects."""
    kept_bytes: int = 0
    """What is held at the end of that."""


@contextlib.contextmanager
def measured() -> Iterator[Cost]:
    """Measure CPU time and memory; the measuring itself makes everything two to four times slower."""
    cost = Cost()
    tracemalloc.start()
    before, start, start_wall = tracemalloc.get_traced_memory()[0], time.process_time(), time.monotonic()
    try:
        yield cost
    finally:
        cost.cpu_s = time.process_time() - start
        cost.wall_s = time.monotonic() - start_wall
        cost.kept_bytes, cost.peak_bytes = (held - before for held in tracemalloc.get_traced_memory())
        tracemalloc.stop()
