"""The sending half of a connection: what leaves now, what waits for a window, and in which order it goes on."""

from __future__ import annotations

from collections import OrderedDict

from extproc.http2.frames import (
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    FRAME_HEADER,
    MAX_WINDOW,
    ConnectionLevelError,
    ErrorCode,
    Flag,
    FrameType,
    StreamLevelError,
    data_header,
)
from extproc.http2.limits import TokenBucket
from extproc.http2.streams import Stream

__all__ = ["Outbound"]

_FRAME_EARNS = 3
"""Frames that a DATA frame of ours may cause without being a nuisance: two WINDOW_UPDATEs and a PING."""
_SIZE_UPDATE = b"\x20"
"""HPACK size update to zero (RFC 7541 section 6.3), once: we never index, so whatever size the peer allows is large enough."""


class Outbound:
    """Collects frames; DATA only as far as the windows of the stream and the connection allow (5.2)."""

    __slots__ = (
        "_allowance",
        "_first",
        "_waiting",
        "frame_bytes",
        "initial_window",
        "out",
        "pending_bytes",
        "window",
    )

    def __init__(self, allowance: TokenBucket) -> None:
        self._allowance = allowance
        self._first = True
        self._waiting: OrderedDict[int, Stream] = OrderedDict()
        """What the connection's window alone holds back; taken from the front, which a plain dict is slow at."""
        self.out: list[bytes | memoryview] = []
        """What is to be written, in order."""
        self.pending_bytes = 0
        """What waits for windows, of all streams."""
        self.window = DEFAULT_WINDOW
        """The connection's (6.9.1)."""
        self.initial_window = DEFAULT_WINDOW
        """A new stream's (6.9.2)."""
        self.frame_bytes = DEFAULT_FRAME_BYTES
        """Largest payload the peer takes (4.2)."""

    def headers(self, stream_id: int, block: bytes, flags: int) -> None:
        """Write a header block, in CONTINUATION frames where it is too long for one frame (4.3)."""
        if self._first:
            self._first = False
            block = _SIZE_UPDATE + block
        kind: int = FrameType.HEADERS
        while len(block) > self.frame_bytes:
            piece, block = block[: self.frame_bytes], block[self.frame_bytes :]
            self.out += (data_header(kind, len(piece), flags, stream_id), piece)
            kind, flags = FrameType.CONTINUATION, 0
        self.out += (data_header(kind, len(block), flags | Flag.END_HEADERS, stream_id), block)

    def data(self, stream: Stream, data: bytes) -> None:
        """Send, or keep for when the windows open; in order either way. Costs one copy of what is kept."""
        size = len(data)
        if not stream.pending:
            if size <= stream.send_window and size <= self.window:
                stream.send_window -= size
                self.window -= size
                if size > self.frame_bytes:
                    self._write(stream.id, data)
                else:
                    self._allowance.left += _FRAME_EARNS
                    self.out += (FRAME_HEADER.pack(size >> 8, size & 0xFF, 0, 0, stream.id), data)
                return
            stream.pending = bytearray()  # not before: hardly a stream ever waits
        stream.pending += data
        self.pending_bytes += size
        self.flush(stream)

    def _write(self, stream_id: int, data: bytes) -> None:
        size, most = len(data), self.frame_bytes
        if size <= most:
            self._allowance.left += _FRAME_EARNS
            self.out += (FRAME_HEADER.pack(size >> 8, size & 0xFF, 0, 0, stream_id), data)
            return
        view = memoryview(data)  # cut without a copy: all is joined once, when it leaves
        for start in range(0, size, most):
            piece = view[start : start + most]
            self._allowance.left += _FRAME_EARNS
            self.out += (data_header(0, len(piece), 0, stream_id), piece)

    def flush(self, stream: Stream) -> bool:
        """Send what the windows allow of what waits; return True where nothing waits any more."""
        pending = stream.pending
        size = min(len(pending), stream.send_window, self.window)
        if size > 0:
            stream.send_window -= size
            self.window -= size
            self._write(stream.id, bytes(pending[:size]))
            assert isinstance(pending, bytearray)
            del pending[:size]
            self.pending_bytes -= size
        if pending and stream.send_window > 0:
            self._waiting[stream.id] = stream
        else:
            # A stream whose own window is closed waits for that; looking at it again for the connection's would be in vain.
            self._waiting.pop(stream.id, None)
        return not pending

    def forget(self, stream: Stream) -> None:
        """Drop what waits of a stream that is gone."""
        if stream.pending:
            self._waiting.pop(stream.id, None)
            self.pending_bytes -= len(stream.pending)
            stream.pending = b""

    def widen(self, increment: int) -> list[Stream]:
        """Open the connection's window (6.9.1); return the streams of which nothing waits any more.

        Raises ConnectionLevelError. Who has waited longest goes first.
        """
        self.window += increment
        if self.window > MAX_WINDOW:
            raise ConnectionLevelError(ErrorCode.FLOW_CONTROL_ERROR, "connection window too large")
        drained = []
        while self._waiting and self.window > 0:
            # Afterwards it waits no more, or the window is closed: a small step costs as little with many that wait.
            stream = next(iter(self._waiting.values()))
            if self.flush(stream):
                drained.append(stream)
        return drained

    def widen_stream(self, stream: Stream, increment: int) -> bool:
        """Open a stream's window (6.9.1); return True where something waited and nothing does any more.

        Raises StreamLevelError.
        """
        stream.send_window += increment
        if stream.send_window > MAX_WINDOW:
            raise StreamLevelError(stream.id, ErrorCode.FLOW_CONTROL_ERROR, "stream window too large")
        return bool(stream.pending) and self.flush(stream)
