"""The sending half of a connection: frames to write, data that waits for flow-control windows, and its order."""

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
"""Idle-frame tokens that a DATA frame of ours earns: a peer may answer each with two WINDOW_UPDATEs and a PING."""
_SIZE_UPDATE = b"\x20"
"""HPACK dynamic table size update to zero (RFC 7541 section 6.3), sent once: we never index, so the peer's table size does not matter."""


class Outbound:
    """Collects frames; DATA only as far as the windows of its stream and of the connection allow (5.2)."""

    __slots__ = (
        "_first",
        "_idle_tokens",
        "_waiting",
        "frame_bytes",
        "initial_window",
        "out",
        "pending_bytes",
        "window",
    )

    def __init__(self, idle_tokens: TokenBucket) -> None:
        self._idle_tokens = idle_tokens
        self._first = True
        self._waiting: OrderedDict[int, Stream] = OrderedDict()
        """Streams that wait for the connection's window alone; taken from the front, which is slow with a plain dict."""
        self.out: list[bytes | memoryview] = []
        """Bytes to write, in order."""
        self.pending_bytes = 0
        """Bytes that wait for windows, of all streams."""
        self.window = DEFAULT_WINDOW
        """The connection's send window (6.9.1)."""
        self.initial_window = DEFAULT_WINDOW
        """Send window of a new stream (6.9.2)."""
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
        """Send, or queue until the windows open; in order either way. What is queued is copied once."""
        size = len(data)
        if not stream.pending:
            if size <= stream.send_window and size <= self.window:
                stream.send_window -= size
                self.window -= size
                if size > self.frame_bytes:
                    self._write(stream.id, data)
                else:
                    self._idle_tokens.tokens += _FRAME_EARNS
                    self.out += (FRAME_HEADER.pack(size >> 8, size & 0xFF, 0, 0, stream.id), data)
                return
            stream.pending = bytearray()  # created late: few streams ever wait
        stream.pending += data
        self.pending_bytes += size
        self.flush(stream)

    def _write(self, stream_id: int, data: bytes) -> None:
        size, most = len(data), self.frame_bytes
        if size <= most:
            self._idle_tokens.tokens += _FRAME_EARNS
            self.out += (FRAME_HEADER.pack(size >> 8, size & 0xFF, 0, 0, stream_id), data)
            return
        view = memoryview(data)  # slices without a copy; `output` joins once
        for start in range(0, size, most):
            piece = view[start : start + most]
            self._idle_tokens.tokens += _FRAME_EARNS
            self.out += (data_header(0, len(piece), 0, stream_id), piece)

    def flush(self, stream: Stream) -> bool:
        """Send as much of the queued data as the windows allow; return True where none is left."""
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
            # A stream whose own window is closed waits for that window, not for the connection's.
            self._waiting.pop(stream.id, None)
        return not pending

    def forget(self, stream: Stream) -> None:
        """Drop the queued data of a stream that has ended."""
        if stream.pending:
            self._waiting.pop(stream.id, None)
            self.pending_bytes -= len(stream.pending)
            stream.pending = b""

    def increment_window(self, increment: int) -> list[Stream]:
        """Increase the connection's window (6.9.1); return the streams whose queue became empty.

        The stream that has waited longest goes first. Raises ConnectionLevelError.
        """
        self.window += increment
        if self.window > MAX_WINDOW:
            raise ConnectionLevelError(ErrorCode.FLOW_CONTROL_ERROR, "connection window too large")
        drained = []
        while self._waiting and self.window > 0:
            # Afterwards it does not wait any more, or the window is closed: the cost does not grow with those that wait.
            stream = next(iter(self._waiting.values()))
            if self.flush(stream):
                drained.append(stream)
        return drained

    def increment_stream_window(self, stream: Stream, increment: int) -> bool:
        """Increase a stream's window (6.9.1); return True where its queue became empty.

        Raises StreamLevelError.
        """
        stream.send_window += increment
        if stream.send_window > MAX_WINDOW:
            raise StreamLevelError(stream.id, ErrorCode.FLOW_CONTROL_ERROR, "stream window too large")
        return bool(stream.pending) and self.flush(stream)
