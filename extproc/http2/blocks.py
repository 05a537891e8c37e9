"""One header block out of HEADERS and its CONTINUATION frames (RFC 9113 4.3, 6.2, 6.10), bounded before it is decoded."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from extproc.http2.frames import MAX_WINDOW, ConnectionLevelError, ErrorCode, Flag, StreamLevelError
from extproc.http2.limits import Limits

__all__ = ["BlockAssembly", "RawBlock", "check_dependency", "unpadded"]

_U32: Final = struct.Struct(">I")
_PRIORITY_BYTES: Final = 5


class RawBlock(msgspec.Struct):
    """A header block before decoding."""

    stream_id: int
    ends: bool
    """Whether it ends the request."""
    data: bytes | bytearray
    fault: StreamLevelError | None
    """What is wrong with the frame; raised when the block has been decoded, as every block must be."""
    frames: int = 0


class BlockAssembly:
    """Assembles header blocks; at most one is incomplete."""

    __slots__ = ("_limits", "_open", "open_stream")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: RawBlock | None = None
        self.open_stream = 0
        """The stream whose block is incomplete; 0: none. No other frame may come in between (4.3). No property, because
        it is read with every frame."""

    def begin(self, flags: int, stream_id: int, payload: bytes) -> RawBlock | None:
        """Take HEADERS; return the block if it is complete. Raises ConnectionLevelError."""
        if not stream_id:
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "HEADERS on stream 0")  # 6.2
        if flags & Flag.PADDED:
            payload = unpadded(payload)
        fault = None
        if flags & Flag.PRIORITY:
            if len(payload) < _PRIORITY_BYTES:
                # 6.2: padding that leaves too few bytes is one error, a frame too short for its fields (4.2) another.
                code = ErrorCode.PROTOCOL_ERROR if flags & Flag.PADDED else ErrorCode.FRAME_SIZE_ERROR
                raise ConnectionLevelError(code, "HEADERS without its priority")
            fault = check_dependency(stream_id, payload)
            payload = payload[_PRIORITY_BYTES:]
        block = RawBlock(stream_id, bool(flags & Flag.END_STREAM), payload, fault)
        self._check(block)
        if flags & Flag.END_HEADERS:
            return block
        block.data = bytearray(payload)
        self._open, self.open_stream = block, stream_id
        return None

    def add_continuation(self, flags: int, payload: bytes) -> RawBlock | None:
        """Take CONTINUATION; return the block if it is complete. Raises ConnectionLevelError."""
        block = self._open
        if block is None:
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")  # 6.10
        block.data += payload
        block.frames += 1
        self._check(block)
        if not flags & Flag.END_HEADERS:
            return None
        self._open, self.open_stream = None, 0
        return block

    def _check(self, block: RawBlock) -> None:
        # 10.5.1: not decoded, because the connection ends.
        if len(block.data) > self._limits.header_block_bytes or block.frames > self._limits.continuations:
            raise ConnectionLevelError(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")


def unpadded(payload: bytes) -> bytes:
    """Return a padded payload without its padding. Raises ConnectionLevelError."""
    # 6.1: the padding must be shorter than what is left of the payload, its length field included.
    if not payload or payload[0] >= len(payload):
        raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def check_dependency(stream_id: int, priority: bytes) -> StreamLevelError | None:
    """Return the fault of a stream that depends on itself (RFC 7540 5.3.1); priorities have no other effect (5.3.2)."""
    if _U32.unpack_from(priority)[0] & MAX_WINDOW != stream_id:
        return None
    return StreamLevelError(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
