"""What a session needs of the rest of the program, and what others see of requests and streams.

The session is given a `RequestHandler`, which chooses endpoints and is called with what becomes of a request. An
`Observer` is called with everything that can be counted, logged or traced.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from extproc.errors import RequestError
from extproc.types import Decision, Finished

__all__ = ["Observer", "Observers", "PendingDecision", "RequestHandler", "RouteRequest", "StreamEnd"]


class RouteRequest(msgspec.Struct, frozen=True):
    """Everything known of a request when its decision is due; a struct for the reason given in `events`."""

    method: str
    """Empty where the gateway sends no pseudo-headers (NGINX Gateway Fabric)."""
    path: str
    """With the query; empty like `method`."""
    headers: Mapping[str, str]
    """Names in lower case; repeated headers joined by `, `."""
    body: bytes
    """What has been buffered of it, at most `max_inspect_bytes`."""
    complete: bool
    """False: more of the body follows, or the gateway does not send it to us."""
    subset: frozenset[str] | None
    """Addresses the gateway allows (`ip:port` or bare `ip`); None: no hint; empty: none is allowed."""
    upgrade: bool
    """The client asks for another protocol (a websocket, for example): no body follows before the decision."""
    explain: bool
    """The client asked for an explanation, and the settings allow it."""


class PendingDecision:
    """A decision that is made later: the handler returns it from `decide` and calls `answer` once."""

    __slots__ = ("_listener",)

    def __init__(self) -> None:
        self._listener: Callable[[Decision | RequestError], None] | None = None

    def listen(self, listener: Callable[[Decision | RequestError], None]) -> None:
        """Set the callback that passes the answer to `Session.resume`; called by the transport of the stream."""
        self._listener = listener

    def answer(self, result: Decision | RequestError) -> None:
        """Deliver the decision, or the error that takes its place; calls the listener in place.

        Raises RuntimeError where there is no listener: the answer, and the slot it occupies, would be lost silently.
        """
        if self._listener is None:
            raise RuntimeError("a pending decision was answered before its stream listened")
        self._listener(result)


class StreamEnd(enum.Enum):
    """How much of a request its stream had shown when it ended; the value is a metric label."""

    COMPLETED = "completed"
    """The response has ended (or its headers have passed, where the gateway sends no more and has no access log)."""
    ABORTED = "aborted"
    """The stream ended before everything that the gateway is configured to send."""
    DETACHED = "detached"
    """The request is complete and the gateway sends no more: the access log or a lease ends the request."""
    CLOSED_EARLY = "closed_early"
    """We ended the stream with the request: the access log or an estimate ends the request."""


class RequestHandler(Protocol):
    """What a session calls. Each call is synchronous and must not block."""

    def decide(self, request: RouteRequest, now: float) -> Decision | PendingDecision:
        """Choose an endpoint. Raises RequestError where the client gets an answer from us."""
        ...

    def explanation(self, decision: Decision) -> str:
        """Return why this endpoint was chosen; called where `decision.explain` is set."""
        ...

    def withdraw(self, pending: PendingDecision, now: float) -> None:
        """Cancel a pending decision: its answer is not needed any more."""
        ...

    def access_log_connected(self, peer: str) -> bool:
        """Return whether this peer's access log is connected, which reports the end of a request without its stream."""
        ...

    def response_started(
        self, decision_id: str, status: int, headers: Mapping[str, str], now: float, served: str | None
    ) -> bool:
        """Process the response's headers; return True to be called with its body too (`response_body`).

        `status` is 0 where there is none. `outcome.is_local_reply(headers)` recognises a local reply of the gateway.
        `served`: the endpoint that answered, where the gateway says.
        """
        ...

    def response_body(self, decision_id: str, data: bytes) -> None:
        """Process a piece of the response body."""
        ...

    def ended(self, decision_id: str, how: StreamEnd, peer: str, now: float) -> None:
        """Process the end of what the stream shows of a request; called exactly once per decision.

        After `DETACHED` or `CLOSED_EARLY` the request goes on: the access log of this peer reports its end, if there is one.
        """
        ...


class Observer:
    """Is called with what happens to requests and streams; does nothing, so that a subclass defines only what it needs.

    Of one request, in this order: `arrived`, then `decided` or `refused` (neither, where the client leaves or the response
    begins before), after `decided` perhaps `response_started`, and exactly one `ended`. Everything after `decided` carries
    the decision or its id. Calls must be quick and must not raise; text arguments are bounded sets, fit for metric labels.
    """

    # A request

    def arrived(self, headers: Mapping[str, str]) -> None:
        """Take the headers of a request that has arrived; its body may follow."""

    def decided(self, decision: Decision, duration_s: float, headers: Mapping[str, str]) -> None:
        """Take a decision and how long parsing and routing took; `headers` are the request's."""

    def refused(self, error: RequestError, headers: Mapping[str, str]) -> None:
        """Take an answer of our own to a request with these headers."""

    def response_started(self, decision_id: str, status: int) -> None:
        """Take the status of a response whose headers pass the picker; 0: unknown."""

    def ended(self, finished: Finished) -> None:
        """Take the end of a request that was decided: outcome, duration and usage, as far as they are known."""

    # The wire

    def stream_opened(self) -> None:
        """Count an ext_proc stream that began."""

    def stream_ended(self, how: str) -> None:
        """Count an ext_proc stream that ended: a `StreamEnd` value, `refused` or `undecided`."""

    def protocol_error(self, kind: str) -> None:
        """Count an illegal message; `kind` names it and the state in which it arrived."""

    def deadline_passed(self) -> None:
        """Count a decision that was not made in time."""

    def late_response(self, kind: str) -> None:
        """Count a stream that was ended with its request and got a response message all the same."""

    def body_cut(self, why: str) -> None:
        """Count a decision on a part of the body: `inspect_limit`, `budget` or `elements`."""

    def internal_error(self, where: str) -> None:
        """Count a defect of ours that was caught; `where` names the call."""

    def access_log_streams(self, count: int) -> None:
        """Take the number of access log streams that are connected."""

    def access_log_entry(self, kind: str) -> None:
        """Count an access log entry: `final`, `interim`, `attempt`, `late`, `foreign`, `uncorrelated` or `malformed`."""


class Observers(Observer):
    """Passes each event on to those of its observers that define the method, in their order."""

    def __init__(self, *observers: Observer) -> None:
        # Bound once, so that an event with one reader costs one call and not two.
        for name in [name for name in vars(Observer) if not name.startswith("_")]:
            calls = [getattr(one, name) for one in observers if getattr(type(one), name) is not getattr(Observer, name)]
            if calls:
                setattr(self, name, calls[0] if len(calls) == 1 else _each(calls))


def _each(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call_each(*args: object) -> None:
        for call in calls:
            call(*args)

    return call_each
