"""The calls of the native transport: one object per gRPC stream, which turns its messages into answers.

What is answered is decided in `protocol` and `edge.services`, which both transports share.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, ParamSpec

from google.protobuf.message import DecodeError

from extproc.edge.envoy_wire.codec import decode, echoed, encode, response_piece
from extproc.edge.envoy_wire.health import ServingStatus, encode_status, service_name
from extproc.edge.services.access_log import AccessLogService
from extproc.edge.services.health import HealthService
from extproc.errors import ProtocolError, RequestError
from extproc.http2.grpc import CallError, Status
from extproc.protocol.early_close import Gateway
from extproc.protocol.events import DeadlinePassed, HalfClosed, StreamLost
from extproc.protocol.interfaces import PendingDecision
from extproc.protocol.replies import Finish, FinishWith, Reply
from extproc.protocol.session import Session
from extproc.protocol.settings import ResponsePhase
from extproc.protocol.shared import SessionShared
from extproc.protocol.tables import IllegalEventError
from extproc.types import Decision

if TYPE_CHECKING:
    from extproc.edge.native.stream import GrpcStream

__all__ = ["AccessLogCall", "Call", "CheckCall", "OpenStreams", "ProcessCall", "WatchCall"]

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_HALF_CLOSED: Final = HalfClosed()
_LOST: Final = StreamLost()
_DEADLINE: Final = DeadlinePassed()


class Call:
    """A gRPC call, driven by its `GrpcStream`; after `finish` or `lost` no method but `lost` is called any more.

    What a method sends leaves when it returns; a call that acts at another time calls `GrpcStream.flush`.
    """

    __slots__ = ()

    @property
    def paused(self) -> bool:
        """Whether the peer is to be slowed down, because messages wait in the call."""
        return False

    def message(self, data: bytes) -> bool:
        """Take one message; return `paused`. Raises CallError."""
        raise NotImplementedError

    def half_closed(self) -> None:
        """Take the end of the peer's half. Raises CallError."""
        raise NotImplementedError

    def resumed(self) -> None:
        """Go on: the peer takes answers again. No-op in a call in which nothing waits."""

    def retire(self) -> None:
        """End the call if nothing else would end it: the connection closes after its last call."""

    def lost(self) -> None:
        """Release everything: the stream is gone. Called once, also after `finish`."""


class OpenStreams:
    """Number of open ext_proc streams of a server; while it drains, `on_end` is called when one ends."""

    __slots__ = ("count", "draining", "on_end")

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        self.draining = False
        self.on_end = on_end


class ProcessCall(Call):
    """One ext_proc stream: its session, and the messages that wait while the session is paused or the peer reads slowly."""

    __slots__ = (
        "_backlog",
        "_clock",
        "_done",
        "_loop",
        "_pending",
        "_session",
        "_shared",
        "_stream",
        "_streams",
        "_timer",
    )

    def __init__(
        self,
        shared: SessionShared,
        stream: GrpcStream,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        streams: OpenStreams,
    ) -> None:
        self._shared = shared
        self._streams = streams
        self._stream = stream
        self._clock = clock
        self._loop = loop
        keeps = shared.settings.response_phase is ResponsePhase.KEEP  # the peer does not matter then
        self._session = Session(shared, stream.peer, Gateway.UNKNOWN if keeps else stream.gateway)
        self._pending: PendingDecision | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._backlog: deque[bytes | None] | None = None
        """Messages that wait; None is the end of the peer's half. Bounded by the stream's flow-control window."""
        self._done = False
        streams.count += 1
        shared.observer.stream_opened()

    @property
    def paused(self) -> bool:
        """Whether messages wait here, or would have to."""
        session = self._session
        return bool(self._backlog) or (session.pending is not None and session.paused) or self._stream.backpressured

    def message(self, data: bytes) -> bool:
        """Take one `ProcessingRequest`; return `paused`."""
        session, stream = self._session, self._stream
        if (self._backlog or session.pending is not None or stream.backpressured) and self.paused:
            self._wait(data)
            return True
        piece = response_piece(data)
        if piece is not None and session.pass_on(piece):
            # A token of a response goes back without an event.
            stream.send(echoed(piece))
            return stream.backpressured
        self._take(data)
        return (session.pending is not None and session.paused) or stream.backpressured

    def _wait(self, data: bytes | None) -> None:
        if self._backlog is None:
            self._backlog = deque()
        self._backlog.append(data)

    def half_closed(self) -> None:
        """Take the end of the peer's half."""
        # Delayed by messages that wait, not by a pause: it may mean that the client has gone.
        if self._backlog:
            self._wait(None)
        else:
            self._take(None)

    def resumed(self) -> None:
        """Take the messages that have waited."""
        backlog = self._backlog
        while (
            backlog
            and not self._done
            and (backlog[0] is None or not (self._session.paused or self._stream.backpressured))
        ):
            self._take(backlog.popleft())
        if not self._done and not self.paused:
            self._stream.release_window()

    def lost(self) -> None:
        """End the session, which releases the request."""
        self._done = True
        self._backlog = None
        self._streams.count -= 1
        if self._streams.draining:
            self._streams.on_end()
        if self._timer is not None:
            self._stop_timer()
        self._session.receive(_LOST, self._clock())
        self._shared.observer.stream_ended(self._session.outcome)

    def _take(self, data: bytes | None) -> None:
        try:
            self._answer(self._session.receive(_HALF_CLOSED if data is None else decode(data), self._clock()))
        except Exception as error:  # noqa: BLE001 - a stream's failure stays its own
            self._fail(error)

    def _run(self, step: Callable[_P, list[Reply]], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Do one step of the session and send its replies; a stream's failure stays its own."""
        try:
            self._answer(step(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _answer(self, replies: list[Reply]) -> None:
        replies.reverse()
        while replies:
            # Popped, so that a large body is not kept as replies, as messages and as frames at once.
            reply = replies.pop()
            if type(reply) is Finish:  # faster than `isinstance` where it is another type
                self._finish(Status.OK, "")
                return
            if type(reply) is FinishWith:
                self._stream.finish_with(encode(reply.last))
            else:
                self._stream.send(encode(reply))
        if self._session.pending is not self._pending:
            self._await(self._session.pending)

    def _fail(self, error: Exception) -> None:
        """End the call for an error within it; called where it is handled."""
        observer = self._shared.observer
        if isinstance(error, ProtocolError):
            kind = error.kind if isinstance(error, IllegalEventError) else "malformed"
            observer.protocol_error(kind)
            extra = {"problem": str(error), "peer": self._stream.peer}
            _log.warning("the gateway broke the ext_proc protocol", extra=extra)
            self._finish(Status.INVALID_ARGUMENT, str(error))
        else:
            observer.internal_error("stream")
            _log.exception("an ext_proc stream failed")
            self._finish(Status.INTERNAL, "the endpoint picker failed; its log says why")

    def _finish(self, status: Status, message: str) -> None:
        self._done = True
        self._stream.finish(status, message)

    # -- a pending decision --------------------------------------------------------------------------------------

    def _await(self, pending: PendingDecision | None) -> None:
        self._pending = pending
        self._stop_timer()
        deadline = self._session.deadline
        if pending is not None and deadline is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._on_deadline, deadline)
            pending.listen(self._on_answer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_answer(self, result: Decision | RequestError) -> None:
        # In the next turn of the loop: the answer may come within a call of another stream.
        self._loop.call_soon(self._resume, result)

    def _resume(self, result: Decision | RequestError) -> None:
        if self._done:
            # The stream has ended: the session releases the decision.
            self._session.resume(result, self._clock())
            return
        self._run(self._session.resume, result, self._clock())
        self._continue()

    def _on_deadline(self, deadline: float) -> None:
        self._timer = None
        self._run(self._session.receive, _DEADLINE, max(self._clock(), deadline))
        self._continue()

    def _continue(self) -> None:
        if not self._done:
            self.resumed()
        self._stream.flush()


class AccessLogCall(Call):
    """One access log stream: entries until Envoy, or the service, ends it."""

    __slots__ = ("_service", "_stream")

    def __init__(self, service: AccessLogService, stream: GrpcStream) -> None:
        self._service = service
        self._stream = stream
        service.join(self._close, stream.peer)

    def message(self, data: bytes) -> bool:
        """Pass on the entries of one message."""
        self._service.take(data)
        return False

    def half_closed(self) -> None:
        """Answer: an empty StreamAccessLogsResponse."""
        self._stream.send(b"")
        self._stream.finish()

    def retire(self) -> None:
        """End the stream, so that Envoy opens another; entries that are under way are still read."""
        self._stream.finish_with(b"")

    def lost(self) -> None:
        """Count the stream as ended."""
        self._service.leave(self._close)

    def _close(self) -> None:
        self.half_closed()
        self._stream.flush()


def _service_name(data: bytes) -> str:
    """Return the service asked about. Raises CallError."""
    try:
        return service_name(data)
    except DecodeError as error:
        raise CallError(Status.INVALID_ARGUMENT, "not a HealthCheckRequest") from error


class CheckCall(Call):
    """`grpc.health.v1.Health/Check`: one request, one answer."""

    __slots__ = ("_health", "_name", "_stream")

    def __init__(self, health: HealthService, stream: GrpcStream) -> None:
        self._health = health
        self._stream = stream
        self._name: str | None = None

    def message(self, data: bytes) -> bool:
        """Take the request. Raises CallError."""
        if self._name is not None:
            raise CallError(Status.INTERNAL, "more than one message in a unary call")
        self._name = _service_name(data)
        return False

    def half_closed(self) -> None:
        """Answer. Raises CallError."""
        if self._name is None:
            raise CallError(Status.INTERNAL, "a unary call without a message")
        status = self._health.status(self._name)
        if status is None:
            raise CallError(Status.NOT_FOUND, "unknown service name")
        self._stream.send(encode_status(status))
        self._stream.finish()


class WatchCall(Call):
    """`grpc.health.v1.Health/Watch`: every change of one status until either side ends the call."""

    __slots__ = ("_health", "_last", "_name", "_stream")

    def __init__(self, health: HealthService, stream: GrpcStream) -> None:
        self._health = health
        self._stream = stream
        self._name: str | None = None
        self._last: ServingStatus | None = None

    def message(self, data: bytes) -> bool:
        """Take the request, and answer with the present status. Raises CallError."""
        if self._name is not None:
            raise CallError(Status.INTERNAL, "more than one message in a server-streaming call")
        self._name = _service_name(data)
        self._health.watch(self._on_change)
        self._send_status()
        return False

    def half_closed(self) -> None:
        """Keep watching. Raises CallError where there was no request."""
        if self._name is None:
            raise CallError(Status.INTERNAL, "a server-streaming call without a message")

    def retire(self) -> None:
        """End the watch, so that the peer watches on another connection."""
        self._stream.finish()

    def lost(self) -> None:
        """Stop watching."""
        self._health.unwatch(self._on_change)

    def _on_change(self) -> None:
        self._send_status()
        self._stream.flush()

    def _send_status(self) -> None:
        assert self._name is not None
        if self._health.closed:
            self._stream.finish()
            return
        status = self._health.status(self._name) or ServingStatus.SERVICE_UNKNOWN
        if status is not self._last:
            self._last = status
            self._stream.send(encode_status(status))
