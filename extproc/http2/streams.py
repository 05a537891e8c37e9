"""State of the open streams, and how the last closed ones ended."""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

import msgspec

from extproc.http2.frames import ErrorCode, StreamLevelError

__all__ = ["ClosedStreams", "Closing", "Stream"]

_REMEMBERED: Final = 1024
"""Closed streams that are remembered, for frames that arrive late; older ones count as `Closing.UNKNOWN`."""


class Stream(msgspec.Struct, eq=False):
    """An open stream (5.1: open or half-closed; our own half ends with `ending` sent, which closes the stream).

    A struct, because its constructor is faster than one in Python.
    """

    id: int
    send_window: int
    """Negative after the peer has reduced its initial window (6.9.2)."""
    receive_window: int
    content_remaining: int | None
    """Bytes of `content-length` still to come; None: no such field."""
    opened: float = 0.0
    remote_open: bool = True
    answered: bool = False
    """Whether we have sent a header block."""
    returnable: int = 0
    """Bytes acknowledged, and not yet returned by WINDOW_UPDATE."""
    pending: bytes | bytearray = b""
    """Data that waits for a window."""
    lingers: bool = False
    """After our end it stays open until the peer has ended its half too."""
    ending: bytes | None = None
    """The header block that follows `pending` and ends the stream."""

    def take(self, size_bytes: int, data_bytes: int) -> None:
        """Count DATA: `size_bytes` with padding, `data_bytes` without. Raises StreamLevelError."""
        if not self.remote_open:
            raise StreamLevelError(self.id, ErrorCode.STREAM_CLOSED, "DATA after the end of the request")  # 5.1
        self.receive_window -= size_bytes
        if self.receive_window < 0:
            raise StreamLevelError(self.id, ErrorCode.FLOW_CONTROL_ERROR, "stream window exceeded")  # 6.9.1
        if self.content_remaining is not None:
            self.content_remaining -= data_bytes
            if self.content_remaining < 0:
                raise StreamLevelError(self.id, ErrorCode.PROTOCOL_ERROR, "more than content-length")  # 8.1.1

    def end_remote(self) -> None:
        """Close the peer's half. Raises StreamLevelError."""
        if self.content_remaining:
            raise StreamLevelError(self.id, ErrorCode.PROTOCOL_ERROR, "less than content-length")  # 8.1.1
        self.remote_open = False


class Closing(enum.Enum):
    """How a stream was closed."""

    ENDED = "ended"
    """Both halves ended, or the peer reset it."""
    RESET = "reset"
    """We reset it: what the peer had under way is ignored (5.4.2)."""
    UNKNOWN = "unknown"
    """Too long ago, or never opened: a higher number was opened first (5.1.1)."""


class ClosedStreams:
    """How the last closed streams ended; bounded."""

    __slots__ = ("_how", "_order")

    def __init__(self) -> None:
        self._how: dict[int, Closing] = {}
        self._order: deque[int] = deque()

    def add(self, stream_id: int, how: Closing) -> None:
        """Remember how a stream ended."""
        if stream_id not in self._how:
            self._order.append(stream_id)
        self._how[stream_id] = how
        if len(self._order) > _REMEMBERED:
            del self._how[self._order.popleft()]

    def how(self, stream_id: int) -> Closing:
        """Return how a stream ended that is neither open nor idle."""
        return self._how.get(stream_id, Closing.UNKNOWN)
