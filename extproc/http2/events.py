"""What a connection tells its owner. The bytes that must be answered (acknowledgements, say) are in the output already.

Structs, because a connection makes one with every frame: 0.1 us, a named tuple takes 0.3.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from extproc.http2.frames import ErrorCode
from extproc.http2.headers import HeaderBlock

__all__ = [
    "ConnectionFailed",
    "DataReceived",
    "Event",
    "PeerLeaving",
    "RequestEnded",
    "RequestReceived",
    "SendingResumed",
    "StreamRefused",
    "StreamReset",
]


class RequestReceived(msgspec.Struct, frozen=True):
    """A stream was opened by a well-formed request; RequestEnded follows, at once where it has no body."""

    stream_id: int
    block: HeaderBlock


class DataReceived(msgspec.Struct, frozen=True):
    """A piece of a request's body; `acknowledge` its size when there is room for more."""

    stream_id: int
    data: bytes


class RequestEnded(msgspec.Struct, frozen=True):
    """The peer has said all on this stream."""

    stream_id: int


class StreamReset(msgspec.Struct, frozen=True):
    """A stream that was opened is gone: by the peer, or by us because the peer broke a rule."""

    stream_id: int
    code: int
    """An `ErrorCode`, or whatever number the peer invented."""
    reason: str
    """Empty where the peer reset it."""


class StreamRefused(msgspec.Struct, frozen=True):
    """The peer broke a rule on a stream that is not open: it never was, or is over. RST_STREAM is in the output."""

    stream_id: int
    code: ErrorCode
    reason: str


class SendingResumed(msgspec.Struct, frozen=True):
    """Everything that waited for this stream's windows has left."""

    stream_id: int


class PeerLeaving(msgspec.Struct, frozen=True):
    """GOAWAY: the peer will open no more streams; those that are open go on."""

    code: int
    debug: bytes


class ConnectionFailed(msgspec.Struct, frozen=True):
    """The peer broke a rule of the connection: GOAWAY is in the output, all streams are gone; write it and close."""

    code: ErrorCode
    reason: str


Event: TypeAlias = (
    RequestReceived
    | DataReceived
    | RequestEnded
    | StreamReset
    | StreamRefused
    | SendingResumed
    | PeerLeaving
    | ConnectionFailed
)
