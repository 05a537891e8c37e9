"""SETTINGS of the peer, read and judged (6.5.2).

Those we have no use for are not even kept: we never index, never push, open no streams, and our header lists are short.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from extproc.http2.frames import MAX_WINDOW, ConnectionLevelError, ErrorCode, Setting

__all__ = ["PeerSettings", "read_settings"]

_SETTING: Final = struct.Struct(">HI")
_FRAME_BYTES: Final = range(16_384, 16_777_216)


class PeerSettings(NamedTuple):
    """What one frame changes; None: nothing was said."""

    initial_window: int | None
    """Bytes that each of our answers may have under way."""
    frame_bytes: int | None
    """Largest payload the peer takes."""


def read_settings(payload: bytes) -> PeerSettings:
    """Read a payload of whole settings; of a setting that stands there twice the last one counts (6.5.3).

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
