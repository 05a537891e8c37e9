"""One ext_proc stream as a synchronous state machine: events in, replies out.

It decides when a decision is requested, in which order replies are sent, what is buffered and for how long, and reports
exactly once how a request ended. Which events are legal is defined in `tables`; parsing, routing and encoding are done
elsewhere.
Sources: Envoy's `external_processor.proto` and `processing_mode.proto`; the Endpoint Picker Protocol
(gateway-api-inference-extension docs/proposals/004).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from extproc.errors import DecisionTimeoutError, InternalError, RequestError
from extproc.protocol.early_close import Gateway
from extproc.protocol.events import (
    BodyMode,
    DeadlinePassed,
    Direction,
    Event,
    HalfClosed,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamLost,
)
from extproc.protocol.interfaces import PendingDecision, StreamEnd
from extproc.protocol.outcome import stream_end
from extproc.protocol.replies import (
    BodyReply,
    DecisionReply,
    Finish,
    FinishWith,
    HeadersReply,
    Reply,
    TrailersReply,
    echo,
    echo_all,
    refusal,
)
from extproc.protocol.request_buffer import RequestBuffer, spliced
from extproc.protocol.response import ResponseMachine
from extproc.protocol.settings import CONTROL_HEADERS, DESTINATION
from extproc.protocol.shared import SessionShared
from extproc.protocol.tables import Action, RequestState, ResponseState, StreamState, action_for
from extproc.types import Decision

__all__ = ["Session"]

_log = logging.getLogger(__name__)

_BUFFERED: Final = (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
_PASS: Final = BodyReply(Direction.REQUEST)
_TRAILERS: Final = TrailersReply(Direction.REQUEST)
_FINISH: Final = Finish()
_LAST: Final = FinishWith(BodyReply(Direction.REQUEST, b"", True))
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e]+")
_HEADER_TEXT_CHARS: Final = 4096
"""Envoy refuses header edits beyond 80 KB with a 500, and most clients beyond 8 KB a line."""


class Session:
    """The state of one stream.

    The transport calls `receive` with every event in order and sends the replies in order. While `pending` is set, it
    listens to it, passes the answer to `resume`, sends `DeadlinePassed` at `deadline`, and stops reading while `paused`.
    After `Finish`, `FinishWith` or `StreamLost` the session is closed and returns no more replies; events that arrive
    after `FinishWith` must still be passed to `receive`.
    """

    __slots__ = (
        "_buffer",
        "_config",
        "_decision_id",
        "_end",
        "_explanation",
        "_gateway",
        "_mode",
        "_peer",
        "_refused",
        "_request",
        "_response",
        "_settings",
        "_shared",
        "_stage",
        "_stream",
        "deadline",
        "pending",
    )

    def __init__(self, shared: SessionShared, peer: str = "", gateway: Gateway = Gateway.UNKNOWN) -> None:
        settings = shared.settings
        self._shared = shared
        self._settings = settings
        self._peer = peer
        self._gateway = gateway
        self._stream = StreamState.OPEN
        self._request = RequestState.IDLE
        self._buffer = RequestBuffer(shared.budget, shared.observer, settings)
        self._response = ResponseMachine(shared, settings.default_body_mode, settings.piece_bytes)
        self._config: ProtocolConfig | None = None
        self._mode = settings.default_body_mode
        self._stage: type[RequestHeaders | RequestBody | RequestTrailers] = RequestHeaders
        self._decision_id = self._explanation = ""
        self._refused = False
        self._end: StreamEnd | None = None
        self.pending: PendingDecision | None = None
        """The decision that has not been made yet; None: there is none."""
        self.deadline: float | None = None
        """When `DeadlinePassed` is due, on the clock of `now`; None while no decision is pending."""

    @property
    def closed(self) -> bool:
        """Whether we have ended the stream, or it is lost."""
        return self._stream in (StreamState.CLOSED, StreamState.CLOSED_EARLY)

    @property
    def paused(self) -> bool:
        """Whether to stop reading: the body of a request whose decision is pending exceeds what may be buffered."""
        return self.pending is not None and (self._buffer.too_large or self._shared.budget.exceeded)

    @property
    def outcome(self) -> str:
        """How the stream ended, as a metric label: a `StreamEnd` value, `refused` or `undecided`."""
        if self._end is not None:
            return self._end.value
        return "refused" if self._refused else "undecided"

    def receive(self, event: Event, now: float) -> list[Reply]:
        """Take one event and return the replies it causes, in the order they must be sent.

        Raises IllegalEventError (a ProtocolError) where the event is not legal in the current state, which stays as it
        is. Costs O(event), and the decision where this event completes the request.
        """
        action = action_for(type(event), self._stream, self._request, self._response.state)
        return self._HANDLERS[action](self, event, now)

    def pass_on(self, data: bytes) -> bool:
        """Take a piece of the response body, but the last, that is to be sent back unchanged; False: `receive` it instead."""
        return self._stream is StreamState.OPEN and self._response.pass_on(data, self._decision_id)

    def resume(self, result: Decision | RequestError, now: float) -> list[Reply]:
        """Take the answer of a pending decision and return the replies it causes.

        A decision that comes too late (the stream has ended, the deadline has passed) is reported as aborted at once.
        """
        if self.pending is None:
            if not isinstance(result, RequestError):
                self._shared.notify("ended", self._shared.handler.ended, result.id, StreamEnd.ABORTED, self._peer, now)
            return []
        self.pending = self.deadline = None
        if isinstance(result, RequestError):
            return self._refuse(result, now)
        replies = self._release(result, now)
        return replies + self._close(now) if self._stream is StreamState.HALF_CLOSED else replies

    # -- request: before the decision ----------------------------------------------------------------------------

    def _start(self, event: RequestHeaders, now: float) -> list[Reply]:
        if event.protocol_config is not None:
            self._config = event.protocol_config
            self._mode = event.protocol_config.request_body_mode
            self._response.mode = event.protocol_config.response_body_mode
        buffer = self._buffer
        buffer.headers = event.headers
        self._shared.observer.arrived(event.headers)
        buffer.note_subset(event.metadata)
        if event.end_of_stream:
            buffer.ended = True
            return self._decide(RequestHeaders, now, complete=True)
        if "upgrade" not in event.headers:
            if self._mode is BodyMode.FULL_DUPLEX:
                buffer.keep(b"", event.wire_bytes)
                self._request = RequestState.COLLECTING
                return []
            if self._mode in _BUFFERED:
                self._request = RequestState.AWAITING_BODY
                # Trailers leave no later place for the removal of headers.
                return [HeadersReply(Direction.REQUEST, remove_headers=_control_headers_in(event.headers))]
            if self._mode is not BodyMode.NONE:
                self._shared.warn_streamed()
        return self._decide(RequestHeaders, now, complete=False)

    def _collect(self, event: RequestBody, now: float) -> list[Reply]:
        buffer, ended = self._buffer, event.end_of_stream
        buffer.note_subset(event.metadata)
        buffer.keep(event.data, last=ended)
        buffer.ended = ended
        if not ended and not buffer.too_large:
            if not self._shared.budget.exceeded:
                return []
            self._shared.observer.body_cut("budget")
        return self._decide(RequestHeaders, now, complete=ended)

    def _collect_trailers(self, event: RequestTrailers, now: float) -> list[Reply]:
        self._buffer.note_subset(event.metadata)
        self._buffer.trailers = True
        return self._decide(RequestHeaders, now, complete=True)

    def _decide_on_body(self, event: RequestBody, now: float) -> list[Reply]:
        self._buffer.note_subset(event.metadata)
        self._buffer.keep(event.data)
        self._buffer.ended = event.end_of_stream
        # BUFFERED: the body is whole even without end_of_stream, which then comes with the trailers.
        return self._decide(RequestBody, now, complete=event.end_of_stream or self._mode is BodyMode.BUFFERED)

    def _decide_on_trailers(self, event: RequestTrailers, now: float) -> list[Reply]:
        # An empty body with trailers: too late for header edits, in time for the metadata.
        self._buffer.note_subset(event.metadata)
        self._buffer.trailers = True
        return self._decide(RequestTrailers, now, complete=True)

    def _decide(
        self, stage: type[RequestHeaders | RequestBody | RequestTrailers], now: float, *, complete: bool
    ) -> list[Reply]:
        """Request a decision; `stage` is the kind of message whose reply will carry it."""
        self._stage = stage
        if self._response.state is not ResponseState.IDLE:
            return self._release_unrouted()
        result = self._shared.decide(self._buffer.route_request(complete=complete), now)
        if isinstance(result, RequestError):
            return self._refuse(result, now)
        if isinstance(result, PendingDecision):
            self.pending = result
            self.deadline = now + self._settings.deadline_s
            self._request = RequestState.PENDING
            return []
        return self._release(result, now)

    def _keep(self, event: RequestBody, _now: float) -> list[Reply]:
        self._buffer.ended = self._buffer.ended or event.end_of_stream
        if self._mode is BodyMode.FULL_DUPLEX:
            self._buffer.keep(event.data)
        else:
            self._buffer.owed_bodies += 1
        return []

    def _keep_trailers(self, _event: RequestTrailers, _now: float) -> list[Reply]:
        self._buffer.trailers = True
        return []

    # -- request: the decision, and after ------------------------------------------------------------------------

    def _release(self, decision: Decision, now: float) -> list[Reply]:
        """Send the decision and everything that is buffered."""
        self._decision_id = decision.id
        if decision.explain:
            explanation = self._shared.notify("explanation", self._shared.handler.explanation, decision)
            self._explanation = header_text(explanation or "")
        edited: list[bytes] | None = None
        if decision.body_splice is not None:
            try:
                edited = spliced(self._buffer.chunks(), *decision.body_splice)
            except ValueError:
                _log.exception("the decision edits bytes that were not read", extra={"decision": decision.id})
                self._shared.observer.internal_error("splice")
                return self._refuse(InternalError("The endpoint picker failed to edit the request."), now)
        return self._send(decision, edited, now)

    def _release_unrouted(self) -> list[Reply]:
        """Pass on a request that already has a response from elsewhere: an answer of ours would only cut that one short."""
        return self._send(None, None, 0.0)

    def _send(self, decision: Decision | None, edited: list[bytes] | None, now: float) -> list[Reply]:
        """Reply to everything received so far, in the order the gateway requires; `edited` replaces the buffered body."""
        buffer, stage = self._buffer, self._stage
        headers = buffer.headers
        ended = buffer.retriable
        last = self._end_with_request(now) if ended and buffer.body is not None else []
        removed = _control_headers_in(headers)
        if decision is None and DESTINATION in headers:
            removed = (DESTINATION, *removed)  # a client must not choose its destination
        # Retried only where the request has ended without trailers: Envoy 1.40 doubles the body of a retried request that
        # ends in trailers (envoyproxy/envoy#45470).
        retriable = decision is not None and ended
        data = b"".join(edited) if edited is not None and stage is RequestBody else None
        replies: list[Reply] = [DecisionReply(stage, decision, removed, retriable, self._explanation, data)]
        if stage is RequestHeaders and self._mode is BodyMode.FULL_DUPLEX and buffer.body is not None:
            chunks = buffer.chunks() if edited is None else edited
            replies += echo_all(Direction.REQUEST, chunks, ended and not last, self._settings.piece_bytes)
        replies += [_PASS] * buffer.owed_bodies
        if buffer.trailers and stage is not RequestTrailers:
            replies.append(_TRAILERS)
        buffer.drop()
        # In mode BUFFERED nothing follows the body, in mode NONE there is none.
        whole = self._mode is BodyMode.NONE or (self._mode is BodyMode.BUFFERED and stage is not RequestHeaders)
        over = buffer.ended or buffer.trailers or whole
        self._request = RequestState.DONE if over else RequestState.PASSING
        return replies + last

    def _pass(self, event: RequestBody, now: float) -> list[Reply]:
        end = event.end_of_stream
        if end:
            self._request = RequestState.DONE
        if self._mode is not BodyMode.FULL_DUPLEX:
            return [_PASS]
        last = self._end_with_request(now) if end else []
        return echo(Direction.REQUEST, event.data, end and not last, self._settings.piece_bytes) + last

    def _end_with_request(self, now: float) -> list[Reply]:
        """End the stream with the request body, where that is safe and configured; return the last reply, else nothing.

        Not after the response has begun, which would be cut, nor with an explanation, which the response's headers carry.
        """
        free = self._response.state is ResponseState.IDLE and self._decision_id and not self._explanation
        if not free or not self._shared.early_close.wanted(self._settings, self._config, self._gateway, self._peer):
            return []
        self._stream = StreamState.CLOSED_EARLY
        self._report_end(StreamEnd.CLOSED_EARLY, now)
        return [_LAST]

    def _late(self, event: Event, _now: float) -> list[Reply]:
        self._stream = StreamState.CLOSED  # counted once per response, not per message
        self._shared.early_close.late(self._peer, self._decision_id, type(event).__name__)
        return []

    def _pass_trailers(self, _event: RequestTrailers, _now: float) -> list[Reply]:
        self._request = RequestState.DONE
        if self._buffer.trailers:
            return []
        self._buffer.trailers = True
        return [_TRAILERS]

    def _refuse(self, error: RequestError, now: float) -> list[Reply]:
        """Answer the client ourselves and end the stream, as the gateway does after such an answer."""
        if self._response.state is not ResponseState.IDLE:
            return self._release_unrouted()
        self._shared.observer.refused(error, self._buffer.headers)
        self._refused = True
        return [refusal(error), *self._close(now)]

    # -- response ------------------------------------------------------------------------------------------------

    def _respond(self, event: ResponseHeaders, now: float) -> list[Reply]:
        self._note_response_mode(event.protocol_config)
        replies = self._response.headers(event, self._decision_id, self._explanation, now)
        self._end_if_response_is_done(now)
        return replies

    def _respond_body(self, event: ResponseBody, now: float) -> list[Reply]:
        self._note_response_mode(event.protocol_config)
        replies = self._response.body(event, self._decision_id)
        self._end_if_response_is_done(now)
        return replies

    def _respond_trailers(self, event: ResponseTrailers, now: float) -> list[Reply]:
        replies = self._response.trailers(event)
        self._end_if_response_is_done(now)
        return replies

    def _note_response_mode(self, config: ProtocolConfig | None) -> None:
        if config is not None:  # on the first message: the stream begins with the response
            self._config = config
            self._response.mode = config.response_body_mode

    def _end_if_response_is_done(self, now: float) -> None:
        if self._response.state is ResponseState.DONE:
            self._report_end(StreamEnd.COMPLETED, now)

    # -- the end -------------------------------------------------------------------------------------------------

    def _half_close(self, _event: HalfClosed, now: float) -> list[Reply]:
        if self.pending is not None and self._config is None:
            # A peer that sends everything at once and waits for the end (NGINX Gateway Fabric). Envoy closes its half
            # before it has our answer only when the client has disconnected.
            self._stream = StreamState.HALF_CLOSED
            return []
        return self._close(now)

    def _time_out(self, _event: DeadlinePassed, now: float) -> list[Reply]:
        if self.pending is None or self.deadline is None or now < self.deadline:
            return []
        self._shared.observer.deadline_passed()
        self._withdraw(self.pending, now)
        return self._refuse(
            DecisionTimeoutError("The endpoint picker did not choose an endpoint in time; try again."), now
        )

    def _lose(self, _event: StreamLost, now: float) -> list[Reply]:
        self._close(now)
        return []

    def _close(self, now: float) -> list[Reply]:
        """End the stream and release everything it holds."""
        self._stream = StreamState.CLOSED
        if self.pending is not None:
            self._withdraw(self.pending, now)
        if self._decision_id and self._end is None:
            machine = self._response
            how = stream_end(self._request, machine.state, machine.mode, self._config is not None, self._by_log)
            self._report_end(how, now)
        self._buffer.drop()
        return [_FINISH]

    def _withdraw(self, pending: PendingDecision, now: float) -> None:
        self.pending = self.deadline = None
        self._shared.notify("withdraw", self._shared.handler.withdraw, pending, now)

    def _by_log(self) -> bool:
        return bool(self._shared.notify("access_log_connected", self._shared.handler.access_log_connected, self._peer))

    def _report_end(self, how: StreamEnd, now: float) -> None:
        """Report how the request ended, once."""
        if self._decision_id and self._end is None:
            self._end = how
            self._shared.notify("ended", self._shared.handler.ended, self._decision_id, how, self._peer, now)

    def _ignore(self, _event: Event, _now: float) -> list[Reply]:
        return []

    _HANDLERS: ClassVar[Mapping[Action, Callable[[Session, Any, float], list[Reply]]]] = {
        Action.IGNORE: _ignore,
        Action.START: _start,
        Action.COLLECT: _collect,
        Action.COLLECT_TRAILERS: _collect_trailers,
        Action.DECIDE_ON_BODY: _decide_on_body,
        Action.DECIDE_ON_TRAILERS: _decide_on_trailers,
        Action.KEEP: _keep,
        Action.KEEP_TRAILERS: _keep_trailers,
        Action.PASS: _pass,
        Action.PASS_TRAILERS: _pass_trailers,
        Action.RESPOND: _respond,
        Action.RESPOND_BODY: _respond_body,
        Action.RESPOND_TRAILERS: _respond_trailers,
        Action.HALF_CLOSE: _half_close,
        Action.LOSE: _lose,
        Action.TIME_OUT: _time_out,
        Action.LATE: _late,
    }


def header_text(text: str) -> str:
    """Return `text` as one line of printable ASCII, cut to 4096 characters: Envoy answers a line break with a 500."""
    return _UNPRINTABLE.sub(" ", text[:_HEADER_TEXT_CHARS])


def _control_headers_in(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of a request's headers that are meant for a picker, sorted."""
    if headers.keys().isdisjoint(CONTROL_HEADERS):
        return ()
    return tuple(sorted(headers.keys() & CONTROL_HEADERS))
