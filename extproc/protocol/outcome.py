"""How a request ended, by an access log entry or by what its stream has shown.

Pure functions over plain values. An endpoint is blamed only for what it did: not for what the gateway did by itself
(another filter's answer, a circuit breaker), nor for the reset that a client caused by disconnecting.
Sources: Envoy's `data/accesslog/v3/accesslog.proto` (ResponseFlags) and the response code details it writes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Final, assert_never

import msgspec

from extproc.protocol.events import BodyMode
from extproc.protocol.interfaces import StreamEnd
from extproc.protocol.tables import RequestState, ResponseState
from extproc.types import Outcome, Usage

__all__ = [
    "LogEntry",
    "LogFlag",
    "is_local_reply",
    "log_outcome",
    "response_outcome",
    "served_elsewhere",
    "stream_end",
    "stream_outcome",
]

_SWITCHING_PROTOCOLS: Final = 101
_VIA_UPSTREAM: Final = "via_upstream"
"""Response code details of every answer that came from the endpoint."""


class LogFlag(enum.Enum):
    """The response flags that concern the endpoint or the client; the value is Envoy's field name."""

    NO_HEALTHY_UPSTREAM = "no_healthy_upstream"
    UPSTREAM_REQUEST_TIMEOUT = "upstream_request_timeout"
    LOCAL_RESET = "local_reset"
    UPSTREAM_REMOTE_RESET = "upstream_remote_reset"
    UPSTREAM_CONNECTION_FAILURE = "upstream_connection_failure"
    UPSTREAM_CONNECTION_TERMINATION = "upstream_connection_termination"
    UPSTREAM_OVERFLOW = "upstream_overflow"
    UPSTREAM_RETRY_LIMIT_EXCEEDED = "upstream_retry_limit_exceeded"
    UPSTREAM_MAX_STREAM_DURATION_REACHED = "upstream_max_stream_duration_reached"
    UPSTREAM_PROTOCOL_ERROR = "upstream_protocol_error"
    STREAM_IDLE_TIMEOUT = "stream_idle_timeout"
    DURATION_TIMEOUT = "duration_timeout"
    DNS_RESOLUTION_FAILURE = "dns_resolution_failure"
    DOWNSTREAM_CONNECTION_TERMINATION = "downstream_connection_termination"
    DOWNSTREAM_REMOTE_RESET = "downstream_remote_reset"
    DOWNSTREAM_PROTOCOL_ERROR = "downstream_protocol_error"


class LogEntry(msgspec.Struct, frozen=True):
    """What the gateway's access log says of one request; a struct for the reason given in `events`."""

    decision_id: str
    """From the metadata we set; empty: not one of our decisions."""
    interim: bool = False
    """The request is still under way: the entry only renews its lease."""
    attempt: bool = False
    """One attempt of a request has ended, to which all other fields refer. It names no decision, only the request."""
    status: int = 0
    """HTTP status the client got; 0: none."""
    details: str = ""
    """Response code details, for example `via_upstream`."""
    flags: frozenset[LogFlag] = frozenset()
    upstream: str = ""
    """Address the last attempt went to, `ip:port`; empty: none was made."""
    served: str = ""
    """The endpoint that answered in the gateway's own words (`...-served`); empty where it does not say."""
    attempts: int = 0
    """How often the gateway sent the request on; 0 where it does not say."""
    usage: Usage | None = None
    request_id: str = ""
    """`x-request-id`, where the entry names no decision. It may be forged: correlate by it only what harms nobody."""


_OK: Final = Outcome.OK
"""A module-level name: before Python 3.12 an enum member is slow to look up."""

_BY_FLAG: Final = (
    # A refused connection is the endpoint's fault even where the client has disconnected meanwhile.
    (
        frozenset({LogFlag.UPSTREAM_CONNECTION_FAILURE, LogFlag.NO_HEALTHY_UPSTREAM, LogFlag.DNS_RESOLUTION_FAILURE}),
        Outcome.CONNECT_FAILURE,
    ),
    (frozenset({LogFlag.UPSTREAM_OVERFLOW}), Outcome.BUSY),
    (
        frozenset(
            {
                LogFlag.UPSTREAM_REQUEST_TIMEOUT,
                LogFlag.UPSTREAM_MAX_STREAM_DURATION_REACHED,
                LogFlag.STREAM_IDLE_TIMEOUT,
                LogFlag.DURATION_TIMEOUT,
            }
        ),
        Outcome.TIMEOUT,
    ),
    # Before the resets: Envoy resets the endpoint's stream itself when the client has gone.
    (
        frozenset(
            {
                LogFlag.DOWNSTREAM_CONNECTION_TERMINATION,
                LogFlag.DOWNSTREAM_REMOTE_RESET,
                LogFlag.DOWNSTREAM_PROTOCOL_ERROR,
            }
        ),
        Outcome.CLIENT_GONE,
    ),
    (
        frozenset(
            {
                LogFlag.UPSTREAM_CONNECTION_TERMINATION,
                LogFlag.UPSTREAM_REMOTE_RESET,
                LogFlag.UPSTREAM_PROTOCOL_ERROR,
                LogFlag.LOCAL_RESET,
            }
        ),
        Outcome.RESET,
    ),
)


def log_outcome(entry: LogEntry) -> Outcome | None:
    """Return how the request ended; None for an interim entry."""
    if entry.interim:
        return None
    if entry.status == _SWITCHING_PROTOCOLS:
        # An upgraded connection has no end but that one side closes it, which Envoy flags as a termination.
        return Outcome.OK
    if entry.flags:
        for flags, outcome in _BY_FLAG:
            if not flags.isdisjoint(entry.flags):
                return outcome
    from_endpoint = entry.details == _VIA_UPSTREAM if entry.details else bool(entry.upstream)
    return _status_outcome(entry.status, from_endpoint=from_endpoint)


def served_elsewhere(entry: LogEntry, destination: str) -> bool:
    """Return whether another endpoint than `destination` (`ip:port`) answered: after a retry, or because the gateway ignored it."""
    served = entry.served or entry.upstream
    return bool(served) and served != destination


def _status_outcome(status: int, *, from_endpoint: bool) -> Outcome:
    if status == 0:
        return Outcome.ABORTED
    if status < 400:
        return _OK
    if status == 429 or (status == 503 and from_endpoint):
        return Outcome.BUSY
    if status < 500:
        return Outcome.CLIENT_ERROR
    return Outcome.SERVER_ERROR if from_endpoint else Outcome.ABORTED


def is_local_reply(headers: Mapping[str, str]) -> bool:
    """Return whether response headers are those of the gateway's own answer.

    Envoy adds `x-envoy-upstream-service-time` to what came from an endpoint, unless told not to; the engines' HTTP
    servers (uvicorn and others) name themselves in `server`, and a filter sees that before Envoy overwrites it.
    """
    return "x-envoy-upstream-service-time" not in headers and "server" not in headers


def response_outcome(status: int, *, local: bool) -> Outcome:
    """Return what a response's status means, provided that the response also ends.

    `status` 0: unknown. Envoy's own 503 stands for a connection refused or reset before the headers, its own 504 for a
    timeout.
    """
    if local and status == 503:
        return Outcome.CONNECT_FAILURE
    if local and status == 504:
        return Outcome.TIMEOUT
    return _status_outcome(status, from_endpoint=not local)


def stream_outcome(how: StreamEnd, status: int, *, local: bool) -> Outcome | None:
    """Return how a request ended as far as its stream shows; None: the access log or the lease ends it.

    An answer of the gateway's own, or an error status, is final even where the stream broke off after it.
    """
    match how:
        case StreamEnd.DETACHED | StreamEnd.CLOSED_EARLY:
            return None
        case StreamEnd.COMPLETED:
            # Without response headers (a gateway that sends only the end) nothing but a regular end is known.
            return response_outcome(status, local=local) if status else Outcome.OK
        case StreamEnd.ABORTED:
            return response_outcome(status, local=local) if status >= 400 else Outcome.ABORTED
        case _:
            assert_never(how)


def stream_end(
    request: RequestState,
    response: ResponseState,
    response_mode: BodyMode,
    configured: bool,
    by_log: Callable[[], bool],
) -> StreamEnd:
    """Return how a decided request's stream ended.

    `configured`: the gateway has sent its body modes, so `response_mode` is not our default. `by_log` says whether the
    access log is connected; called only where that makes a difference.
    """
    if request is not RequestState.DONE:
        # Decided and under way, but not all of it has arrived: an upload cut short, an early answer, an upgraded connection.
        by_log_alone = configured and response_mode is BodyMode.NONE and response is ResponseState.IDLE
        return StreamEnd.DETACHED if by_log_alone and by_log() else StreamEnd.ABORTED
    if response is ResponseState.DONE:
        # The response ended before the decision: it came from elsewhere, and nothing was sent to our endpoint.
        return StreamEnd.ABORTED
    if response is ResponseState.FLOWING:
        if response_mode is not BodyMode.NONE:
            return StreamEnd.ABORTED
        # Envoy closes the stream once the response's headers are answered and does not send the end of the body; a
        # status is better than a lease that occupies the slot for minutes.
        return StreamEnd.DETACHED if by_log() else StreamEnd.COMPLETED
    if configured and response_mode is not BodyMode.NONE and not by_log():
        return StreamEnd.ABORTED
    return StreamEnd.DETACHED
