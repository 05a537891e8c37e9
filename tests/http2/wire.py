"""A client that writes frames by hand, and reads what a connection answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hpack import Decoder, Encoder

from extproc.http2.connection import Connection
from extproc.http2.events import ConnectionFailed, Event
from extproc.http2.frames import FRAME_HEADER, PREFACE, ErrorCode, FrameType, frame
from extproc.http2.limits import Limits

REQUEST = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.B/C"),
    (":authority", "x"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
CALM = ErrorCode.ENHANCE_YOUR_CALM


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


def cut(data: bytes) -> list[Frame]:
    """Cut bytes into frames; they must be whole."""
    found, position = [], 0
    while position < len(data):
        high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(data, position)
        end = position + 9 + (high << 8 | low)
        assert end <= len(data)
        found.append(Frame(kind, flags, stream_id, data[position + 9 : end]))
        position = end
    return found


class Client:
    """Drives one connection past its preface."""

    def __init__(self, limits: Limits | None = None, *, started: bool = True) -> None:
        self.now = 0.0
        self.connection = Connection(limits or Limits(), self.now)
        self.encoder = Encoder()
        self.decoder = Decoder()
        if started:
            assert self.say(PREFACE + frame(FrameType.SETTINGS, 0, 0)) == []
            self.heard()

    def say(self, *data: bytes) -> list[Event]:
        return self.connection.receive(b"".join(data), self.now)

    def heard(self) -> list[Frame]:
        return cut(self.connection.output())

    def block(self, fields: Iterable[tuple[str, str]] = REQUEST) -> bytes:
        data: bytes = self.encoder.encode(list(fields))
        return data

    def headers(self, stream_id: int = 1, fields: Iterable[tuple[str, str]] = REQUEST, *, flags: int = 4) -> bytes:
        return frame(FrameType.HEADERS, flags, stream_id, self.block(fields))

    def fields(self, data: bytes) -> list[tuple[str, str]]:
        return [(str(name), str(value)) for name, value in self.decoder.decode(data)]

    def fails(self, *data: bytes) -> tuple[ErrorCode, str]:
        """Say something that must end the connection: GOAWAY with the code that the event names."""
        events = self.say(*data)
        failed = events[-1]
        assert isinstance(failed, ConnectionFailed), events
        last = self.heard()[-1]
        assert last.kind == FrameType.GOAWAY
        assert int.from_bytes(last.payload[4:8], "big") == failed.code
        assert self.say(b"more") == []
        assert self.connection.finished
        return failed.code, failed.reason

    def resets(self, *data: bytes, stream_id: int = 1) -> ErrorCode:
        """Say something that must end one stream and nothing else; return the code of its RST_STREAM."""
        events = self.say(*data)
        assert not any(isinstance(event, ConnectionFailed) for event in events), events
        resets = [heard for heard in self.heard() if heard.kind == FrameType.RST_STREAM]
        assert [heard.stream_id for heard in resets] == [stream_id]
        return ErrorCode(int.from_bytes(resets[0].payload, "big"))


def u32(value: int) -> bytes:
    return value.to_bytes(4, "big")


def kinds(events: Iterable[Any]) -> list[str]:
    return [type(event).__name__ for event in events]
