"""What a connection tells its owner. The bytes that must be answered (acknowledgements, say) are in the output already."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from extproc.http2.frames import ErrorCode
from extproc.http2.headers import HeaderBlock

__all__ = [
    "ConnectionFailed",
    "DataReceived",
    "Event",
    "PeerLeaving",
    "PingAnswered",
    "RequestEnded",
    "RequestReceived",
    "SendingResumed",
    "StreamRefused",
    "StreamReset",
]


class RequestReceived(NamedTuple):
    """A stream was opened by a well-formed request; RequestEnded follows, at once where it has no body."""

    stream_id: int
    block: HeaderBlock


class DataReceived(NamedTuple):
    """A piece of a request's body; `acknowledge` its size when there is room for more."""

    stream_id: int
    data: bytes


class RequestEnded(NamedTuple):
    """The peer has said all on this stream."""

    stream_id: int


class StreamReset(NamedTuple):
    """A stream that was opened is gone: by the peer, or by us because the peer broke a rule."""

    stream_id: int
    code: int
    """An `ErrorCode`, or whatever number the peer invented."""
    reason: str
    """Empty where the peer reset it."""


class StreamRefused(NamedTuple):
    """The peer broke a rule on a stream that is not open: it never was, or is over. RST_STREAM is in the output."""

    stream_id: int
    code: ErrorCode
    reason: str


class SendingResumed(NamedTuple):
    """Everything that waited for this stream's windows has left."""

    stream_id: int


class PingAnswered(NamedTuple):
    """The peer is alive."""

    payload: bytes


class PeerLeaving(NamedTuple):
    """GOAWAY: the peer will open no more streams; those that are open go on."""

    code: int
    debug: bytes


class ConnectionFailed(NamedTuple):
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
    | PingAnswered
    | PeerLeaving
    | ConnectionFailed
)
