"""Which event is legal in which state, and what the session does then, as tables.

Request and response are two state machines that do not depend on each other (a response may come before the request has
ended); a third one is that of the stream. An event without a row raises and changes nothing.
Source: the rules of `envoy.extensions.filters.http.ext_proc.v3.ProcessingMode` and recordings of Envoy 1.40.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from extproc.errors import ProtocolError
from extproc.protocol.events import (
    DeadlinePassed,
    Event,
    HalfClosed,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamLost,
    Unknown,
)

__all__ = [
    "REQUEST",
    "RESPONSE",
    "STREAM",
    "Action",
    "IllegalEventError",
    "RequestState",
    "ResponseState",
    "StreamState",
    "action_for",
]


class _Fast(enum.Enum):
    """An enum that hashes by identity: Enum's own hash is a Python call, needed six times per message here."""

    __hash__ = object.__hash__


class StreamState(_Fast):
    """The gRPC stream."""

    OPEN = "open"
    HALF_CLOSED = "half_closed"
    """The peer has ended its half, and still waits for a pending decision."""
    CLOSED_EARLY = "closed_early"
    """We have ended it with the request; a response message that arrives now may be lost to the client."""
    CLOSED = "closed"


class RequestState(_Fast):
    """The request direction."""

    IDLE = "idle"
    COLLECTING = "collecting"
    """Full duplex: the reply to the headers waits for the body."""
    AWAITING_BODY = "awaiting_body"
    """Buffered: the headers are answered, the reply to the body carries the decision."""
    PENDING = "pending"
    """A decision has been requested and is not made yet."""
    PASSING = "passing"
    """Decided; what still arrives is sent back at once."""
    DONE = "done"


class ResponseState(_Fast):
    """The response direction."""

    IDLE = "idle"
    FLOWING = "flowing"
    DONE = "done"


class Action(_Fast):
    """What the session does with a legal event."""

    IGNORE = enum.auto()
    START = enum.auto()
    COLLECT = enum.auto()
    COLLECT_TRAILERS = enum.auto()
    DECIDE_ON_BODY = enum.auto()
    DECIDE_ON_TRAILERS = enum.auto()
    KEEP = enum.auto()
    KEEP_TRAILERS = enum.auto()
    PASS = enum.auto()
    PASS_TRAILERS = enum.auto()
    RESPOND = enum.auto()
    RESPOND_BODY = enum.auto()
    RESPOND_TRAILERS = enum.auto()
    HALF_CLOSE = enum.auto()
    LOSE = enum.auto()
    TIME_OUT = enum.auto()
    LATE = enum.auto()


_Row: TypeAlias = Mapping[type[Event], Action]

# Messages that were under way when we ended the stream are no mistake of the peer.
_OVER: Final[_Row] = dict.fromkeys(
    (
        RequestHeaders,
        RequestBody,
        RequestTrailers,
        ResponseHeaders,
        ResponseBody,
        ResponseTrailers,
        HalfClosed,
        StreamLost,
        DeadlinePassed,
        Unknown,
    ),
    Action.IGNORE,
)

STREAM: Final[Mapping[StreamState, _Row]] = MappingProxyType(
    {
        StreamState.OPEN: {
            HalfClosed: Action.HALF_CLOSE,
            StreamLost: Action.LOSE,
            DeadlinePassed: Action.TIME_OUT,
            Unknown: Action.IGNORE,
        },
        StreamState.HALF_CLOSED: {
            HalfClosed: Action.IGNORE,
            StreamLost: Action.LOSE,
            DeadlinePassed: Action.TIME_OUT,
        },
        StreamState.CLOSED_EARLY: {
            **_OVER,
            **dict.fromkeys((ResponseHeaders, ResponseBody, ResponseTrailers), Action.LATE),
        },
        StreamState.CLOSED: _OVER,
    }
)
"""Events of the stream itself; in `OPEN`, messages are looked up in the tables below."""

REQUEST: Final[Mapping[RequestState, _Row]] = MappingProxyType(
    {
        RequestState.IDLE: {RequestHeaders: Action.START},
        RequestState.COLLECTING: {RequestBody: Action.COLLECT, RequestTrailers: Action.COLLECT_TRAILERS},
        RequestState.AWAITING_BODY: {RequestBody: Action.DECIDE_ON_BODY, RequestTrailers: Action.DECIDE_ON_TRAILERS},
        RequestState.PENDING: {RequestBody: Action.KEEP, RequestTrailers: Action.KEEP_TRAILERS},
        RequestState.PASSING: {RequestBody: Action.PASS, RequestTrailers: Action.PASS_TRAILERS},
        # Envoy 1.35 to 1.37 repeat the end of a body (envoyproxy/envoy#46237).
        RequestState.DONE: {RequestBody: Action.IGNORE, RequestTrailers: Action.PASS_TRAILERS},
    }
)

RESPONSE: Final[Mapping[ResponseState, _Row]] = MappingProxyType(
    {
        # A gateway may be configured to skip the headers and send only the body or the trailers.
        ResponseState.IDLE: {
            ResponseHeaders: Action.RESPOND,
            ResponseBody: Action.RESPOND_BODY,
            ResponseTrailers: Action.RESPOND_TRAILERS,
        },
        ResponseState.FLOWING: {ResponseBody: Action.RESPOND_BODY, ResponseTrailers: Action.RESPOND_TRAILERS},
        ResponseState.DONE: {ResponseBody: Action.IGNORE, ResponseTrailers: Action.RESPOND_TRAILERS},
    }
)


class IllegalEventError(ProtocolError):
    """An event that its state has no row for; `kind` names both and is a bounded set."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"illegal ext_proc message: {kind}")
        self.kind = kind


def action_for(kind: type[Event], stream: StreamState, request: RequestState, response: ResponseState) -> Action:
    """Return what to do with an event of this kind, by the three tables. Raises IllegalEventError."""
    if stream is StreamState.OPEN:
        # No kind is in two of the tables; the most frequent come first.
        if (action := REQUEST[request].get(kind)) is not None:
            return action
        if (action := RESPONSE[response].get(kind)) is not None:
            return action
    if (action := STREAM[stream].get(kind)) is not None:
        return action
    if stream is StreamState.OPEN:
        state = response.value if kind in RESPONSE[ResponseState.IDLE] else request.value
    else:
        state = stream.value
    raise IllegalEventError(f"{kind.__name__} while {state}")
