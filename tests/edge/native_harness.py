"""A connection of the native transport on a transport and a loop that only take notes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.edge.access_log import AccessLogService
from extproc.edge.health import HealthService
from extproc.edge.native_calls import AccessLogCall, CheckCall, ProcessCall, WatchCall
from extproc.edge.native_connection import NativeConnection
from extproc.edge.native_host import ConnectionSettings, Host
from extproc.http2.frames import PREFACE, FrameType, frame
from extproc.http2.grpc import message_frame
from extproc.protocol.settings import SessionSettings
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
        self.state = "open"

    def get_extra_info(self, _name: str) -> Any:
        return self.peer

    def set_write_buffer_limits(self, _high: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.state = "closed"

    def abort(self) -> None:
        self.state = "aborted"


class Stage:
    """One connection with all services, and a client beside it."""

    def __init__(self, dialogue: Dialogue | None = None, peer: Any = ("10.1.1.1", 5), **settings: Any) -> None:
        self.dialogue = d = dialogue or Dialogue()
        self.loop = VirtualLoop()
        self.health = HealthService()
        self.logs = AccessLogService(lambda _entry: None, SessionSettings, d.counters)
        loop: Any = self.loop
        routes: dict[str, Callable[[Any], Any]] = {
            PATHS["process"]: lambda stream: ProcessCall(d.shared, stream, lambda: self.loop.now, loop),
            PATHS["logs"]: lambda stream: AccessLogCall(self.logs, stream),
            PATHS["check"]: lambda stream: CheckCall(self.health, stream),
            PATHS["watch"]: lambda stream: WatchCall(self.health, stream),
        }
        options: dict[str, Any] = {"max_message_bytes": 1 << 20, "max_partial_bytes": 1 << 20, **settings}
        self.host = Host(ConnectionSettings(**options), routes, d.counters, lambda: self.loop.now, random.Random(1))
        self.connection = NativeConnection(self.host, loop)
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
        fields = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", PATHS.get(name, name)),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *more,
        )
        return self.client.headers(stream_id, fields)

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


def request_body(data: bytes, *, end: bool = False) -> bytes:
    out: bytes = pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=end)).SerializeToString()
    return out
