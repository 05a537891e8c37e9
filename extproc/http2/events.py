"""Events of a connection. What must be answered (acknowledgements, say) is in the connection's output already.

Structs, because one is made for every frame, and they are made faster than named tuples.
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
    "GoawayReceived",
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
    """A piece of a request's body; `acknowledge` its size to let the peer send more."""

    stream_id: int
    data: bytes


class RequestEnded(msgspec.Struct, frozen=True):
    """The peer has ended its half of the stream."""

    stream_id: int


class StreamReset(msgspec.Struct, frozen=True):
    """An open stream was reset: by the peer, or by us because the peer broke a rule."""

    stream_id: int
    code: int
    """An `ErrorCode`, or another number that the peer sent."""
    reason: str
    """Empty where the peer reset it."""


class StreamRefused(msgspec.Struct, frozen=True):
    """The peer broke a rule on a stream that is not open. RST_STREAM is in the output."""

    stream_id: int
    code: ErrorCode
    reason: str


class SendingResumed(msgspec.Struct, frozen=True):
    """The stream's queued data was sent."""

    stream_id: int


class GoawayReceived(msgspec.Struct, frozen=True):
    """The peer sent GOAWAY: it will open no more streams; those that are open go on."""

    code: int
    debug: bytes


class ConnectionFailed(msgspec.Struct, frozen=True):
    """The peer broke a rule of the connection: all streams are gone, GOAWAY is in the output; write it and close."""

    code: ErrorCode
    reason: str


Event: TypeAlias = (
    RequestReceived
    | DataReceived
    | RequestEnded
    | StreamReset
    | StreamRefused
    | SendingResumed
    | GoawayReceived
    | ConnectionFailed
)
