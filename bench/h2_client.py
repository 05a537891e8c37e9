"""The client side of one HTTP/2 connection, as far as a load generator needs it: no checks, little work per frame.

Requests are given as a header block (literals, no table) and pieces of DATA; they begin in order, as soon as the
connection's window has room for the whole of one. A request larger than the server's stream window is refused: none of
the benchmark's is.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, cast

from extproc.errors import ExtprocError
from extproc.http2.frames import (
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    MAX_WINDOW,
    PREFACE,
    ErrorCode,
    Flag,
    FrameType,
    Setting,
    data_header,
    frame,
    settings,
    window_update,
)

__all__ = ["H2Client", "LoadError", "StreamSink"]

_U32: Final = struct.Struct(">I")
_SETTING: Final = struct.Struct(">HI")
_GIVE_BACK: Final = 1 << 28
"""Received bytes after which the connection's window is opened again."""


class LoadError(ExtprocError):
    """The server ended the connection, or said something no load can go on with."""


class StreamSink(Protocol):
    """Who is told what comes back."""

    def headers(self, stream_id: int, block: bytes) -> None:
        """Take a header block, still encoded."""
        ...

    def data(self, stream_id: int, payload: bytes) -> None:
        """Take a piece of a body."""
        ...

    def ended(self, stream_id: int, *, reset: bool) -> None:
        """Know that the server has said all on a stream, or has reset it."""
        ...


def _looked_at(future: asyncio.Future[None]) -> None:
    """Spare asyncio's complaint about an error that nobody waits for."""
    if not future.cancelled():
        future.exception()


def _data_frames(stream_id: int, data: bytes, *, end: bool) -> list[bytes]:
    parts: list[bytes] = []
    for begin in range(0, len(data) or 1, DEFAULT_FRAME_BYTES):
        piece = data[begin : begin + DEFAULT_FRAME_BYTES]
        flags = Flag.END_STREAM if end and begin + DEFAULT_FRAME_BYTES >= len(data) else 0
        parts += (data_header(FrameType.DATA, len(piece), flags, stream_id), piece)
    return parts


class H2Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, sink: StreamSink) -> None:
        self._sink = sink
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self._waiting: deque[tuple[int, bytes, int]] = deque()
        self._window = DEFAULT_WINDOW
        self._stream_window = DEFAULT_WINDOW
        self._received = 0
        self._next_id = 1
        loop = asyncio.get_running_loop()
        self.settled: asyncio.Future[None] = loop.create_future()
        """Done once the server's SETTINGS have come."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Fails when the connection ends."""
        for future in (self.settled, self.lost):
            future.add_done_callback(_looked_at)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say the preface, with windows that never close."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's are of no such class
        said = settings([(Setting.ENABLE_PUSH, 0), (Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW)])
        self._write(PREFACE + said + window_update(0, MAX_WINDOW - DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        """Let those know who wait."""
        self._fail(str(exc or "the server closed the connection"))

    def close(self) -> None:
        """End the connection."""
        if not self.lost.done():
            self.lost.cancel()
        if self._transport is not None:
            self._transport.close()

    def request(self, block: bytes, payload: Sequence[bytes], *, end: bool = True) -> int:
        """Begin a stream; each payload starts a DATA frame of its own; return its identifier."""
        stream_id = self._next_id
        self._next_id += 2
        size = sum(map(len, payload))
        if size > self._stream_window:
            raise LoadError(f"a request of {size} bytes does not fit into the server's window of {self._stream_window}")
        parts = [frame(FrameType.HEADERS, Flag.END_HEADERS, stream_id, block)]
        for place, data in enumerate(payload):
            parts += _data_frames(stream_id, data, end=end and place == len(payload) - 1)
        self._waiting.append((stream_id, b"".join(parts), size))
        self._begin()
        return stream_id

    def send(self, stream_id: int, data: bytes, *, end: bool) -> None:
        """Send one more piece on a stream that has begun; nothing but its end overtakes what waits for the window."""
        frames = b"".join(_data_frames(stream_id, data, end=end))
        if not data:
            self._write(frames)
            return
        self._waiting.append((stream_id, frames, len(data)))
        self._begin()

    def trailers(self, stream_id: int, block: bytes) -> None:
        """End a stream that has begun with trailers, behind what of it still waits for the window."""
        flags = Flag.END_HEADERS | Flag.END_STREAM
        self._waiting.append((stream_id, frame(FrameType.HEADERS, flags, stream_id, block), 0))
        self._begin()

    def reset(self, stream_id: int) -> None:
        """Give up a stream, behind what of it still waits for the window."""
        self._waiting.append((stream_id, frame(FrameType.RST_STREAM, 0, stream_id, _U32.pack(ErrorCode.CANCEL)), 0))
        self._begin()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _begin(self) -> None:
        waiting = self._waiting
        while waiting and waiting[0][2] <= self._window:
            _, data, size = waiting.popleft()
            self._window -= size
            self._write(data)

    def _fail(self, reason: str) -> None:
        for future in (self.settled, self.lost):
            if not future.done():
                future.set_exception(LoadError(reason))

    def data_received(self, data: bytes) -> None:
        """Take frames apart."""
        buffer = self._buffer
        buffer += data
        position, size = 0, len(buffer)
        while size - position >= FRAME_HEADER_BYTES:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(buffer, position)
            begin = position + FRAME_HEADER_BYTES
            position_after = begin + (high << 8 | low)
            if position_after > size:
                break
            self._take(kind, flags, stream_id, bytes(buffer[begin:position_after]))
            position = position_after
        del buffer[:position]

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        sink = self._sink
        if kind == FrameType.DATA:
            self._received += len(payload)
            if self._received > _GIVE_BACK:
                self._write(window_update(0, self._received))
                self._received = 0
            if payload:
                sink.data(stream_id, payload)
            if flags & Flag.END_STREAM:
                sink.ended(stream_id, reset=False)
        elif kind == FrameType.HEADERS:
            if not flags & Flag.END_HEADERS or flags & Flag.PADDED:
                self._fail("a header block in several frames, or padded")
                return
            sink.headers(stream_id, payload)
            if flags & Flag.END_STREAM:
                sink.ended(stream_id, reset=False)
        elif kind == FrameType.RST_STREAM:
            sink.ended(stream_id, reset=_U32.unpack(payload)[0] != 0)
        elif kind == FrameType.WINDOW_UPDATE:
            if stream_id == 0:
                self._window += _U32.unpack(payload)[0]
                self._begin()
        elif kind == FrameType.SETTINGS:
            if not flags & Flag.ACK:
                self._settings(payload)
        elif kind == FrameType.PING:
            if not flags & Flag.ACK:
                self._write(frame(FrameType.PING, Flag.ACK, 0, payload))
        elif kind == FrameType.GOAWAY:
            self._fail(f"the server said GOAWAY: {payload[8:].decode(errors='replace')}")

    def _settings(self, payload: bytes) -> None:
        for key, value in _SETTING.iter_unpack(payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                self._stream_window = value
        self._write(frame(FrameType.SETTINGS, Flag.ACK, 0))
        if not self.settled.done():
            self.settled.set_result(None)
