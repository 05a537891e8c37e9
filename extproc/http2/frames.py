"""Frames of RFC 9113 sections 4 and 6: numbers, encoding, the two kinds of error, and reading SETTINGS.

Frames are read by one loop in `connection`; each type is judged there.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from extproc.errors import ExtprocError

__all__ = [
    "DEFAULT_FRAME_BYTES",
    "DEFAULT_WINDOW",
    "FRAME_HEADER",
    "FRAME_HEADER_BYTES",
    "MAX_WINDOW",
    "PREFACE",
    "ConnectionLevelError",
    "ErrorCode",
    "Flag",
    "FrameType",
    "PeerSettings",
    "Setting",
    "StreamLevelError",
    "data_header",
    "frame",
    "goaway",
    "read_settings",
    "rst_stream",
    "settings",
    "window_update",
]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The client preface (3.4)."""
FRAME_HEADER: Final = struct.Struct(">HBBBI")
"""Length (24 bits, as 16 and 8), type, flags, reserved bit and stream identifier (4.1)."""
FRAME_HEADER_BYTES: Final = 9
DEFAULT_FRAME_BYTES: Final = 16_384
DEFAULT_WINDOW: Final = 65_535
MAX_WINDOW: Final = 2**31 - 1

_SETTING: Final = struct.Struct(">HI")
_FRAME_BYTES: Final = range(16_384, 16_777_216)
_U32: Final = struct.Struct(">I")
_U32_PAIR: Final = struct.Struct(">II")


class FrameType(enum.IntEnum):
    """Section 6."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag:
    """Flags of section 6; one bit may mean different things in different frames."""

    END_STREAM: Final = 0x1
    ACK: Final = 0x1
    END_HEADERS: Final = 0x4
    PADDED: Final = 0x8
    PRIORITY: Final = 0x20


class Setting(enum.IntEnum):
    """Section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(enum.IntEnum):
    """Section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionLevelError(ExtprocError):
    """The peer broke a rule that ends the connection (5.4.1)."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class StreamLevelError(ExtprocError):
    """The peer broke a rule that ends one stream (5.4.2)."""

    def __init__(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.stream_id = stream_id
        self.code = code
        self.reason = reason


def data_header(kind: int, length: int, flags: int, stream_id: int) -> bytes:
    """Write the nine bytes before a payload of `length` bytes."""
    return FRAME_HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Write one frame."""
    return data_header(kind, len(payload), flags, stream_id) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """Write SETTINGS (6.5)."""
    return frame(FrameType.SETTINGS, 0, 0, b"".join([_SETTING.pack(key, value) for key, value in values]))


class PeerSettings(NamedTuple):
    """Settings of one frame that matter here; None: not in it.

    The others need no effect: we never index, never push, open no streams, and our header lists are short.
    """

    initial_window: int | None
    """Send window of each stream."""
    frame_bytes: int | None
    """Largest payload the peer takes."""


def read_settings(payload: bytes) -> PeerSettings:
    """Read a payload of whole settings; of a repeated setting the last one counts (6.5.2, 6.5.3).

    Raises ConnectionLevelError.
    """
    window: int | None = None
    frame_bytes: int | None = None
    for key, value in _SETTING.iter_unpack(payload):
        if key == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        if key == Setting.INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise ConnectionLevelError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE too large")
            window = value
        elif key == Setting.MAX_FRAME_SIZE:
            if value not in _FRAME_BYTES:
                raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
            frame_bytes = value
    return PeerSettings(window, frame_bytes)


def window_update(stream_id: int, increment: int) -> bytes:
    """Write WINDOW_UPDATE (6.9)."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, _U32.pack(increment))


def rst_stream(stream_id: int, code: int) -> bytes:
    """Write RST_STREAM (6.4)."""
    return frame(FrameType.RST_STREAM, 0, stream_id, _U32.pack(code))


def goaway(last_stream_id: int, code: int, debug: bytes = b"") -> bytes:
    """Write GOAWAY (6.8); `debug` is for the peer's log."""
    return frame(FrameType.GOAWAY, 0, 0, _U32_PAIR.pack(last_stream_id, code) + debug)
