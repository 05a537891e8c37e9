"""The calls of the native transport: one object per gRPC stream, driven by its connection.

A call is told of messages, of the end of the peer's half and of its loss; it answers through its `CallStream`. What
is said stands in `protocol`, `access_log` and `health`, which both transports share.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol

from extproc.edge.envoy_wire.codec import decode, echoed, encode, response_piece
from extproc.edge.services.access_log import AccessLogService
from extproc.errors import ProtocolError, RequestError
from extproc.http2.grpc import Status
from extproc.protocol.early_close import Gateway
from extproc.protocol.events import DeadlinePassed, HalfClosed, StreamLost
from extproc.protocol.interfaces import PendingDecision
from extproc.protocol.replies import Finish, FinishWith, Reply
from extproc.protocol.session import Session
from extproc.protocol.settings import ResponsePhase
from extproc.protocol.shared import SessionShared
from extproc.protocol.tables import IllegalEventError
from extproc.types import Decision

__all__ = ["AccessLogCall", "Call", "CallStream", "OpenStreams", "ProcessCall"]

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_HALF_CLOSED: Final = HalfClosed()
_LOST: Final = StreamLost()
_DEADLINE: Final = DeadlinePassed()


class CallStream(Protocol):
    """What a connection offers to a call. Nothing leaves before `flush`; within a call's methods that is done for it."""

    @property
    def peer(self) -> str:
        """Address of the peer, for logs."""
        ...

    @property
    def gateway(self) -> Gateway:
        """Who the peer is."""
        ...

    @property
    def backpressured(self) -> bool:
        """Whether the peer takes no answers at present."""
        ...

    def send(self, message: bytes) -> None:
        """Send one message."""
        ...

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call; nothing can be sent afterwards, and nothing comes any more."""
        ...

    def leave(self, message: bytes) -> None:
        """Send one last message and end the call with OK, both in one write of their own that comes a little later.

        What the peer says until it has ended its half as well is still told.
        """
        ...

    def flush(self) -> None:
        """Write what has been sent; for a call that acts by itself."""
        ...

    def room(self) -> None:
        """Return to the peer what it may send: all messages so far are done with."""
        ...


class Call(Protocol):
    """What a connection tells a call. After `finish`, or `lost`, it is told nothing more."""

    @property
    def paused(self) -> bool:
        """Whether the peer should be slowed down: what was told has not been dealt with."""
        ...

    def message(self, data: bytes) -> bool:
        """Take one message; return `paused`."""
        ...

    def half_closed(self) -> None:
        """Take the end of the peer's half."""
        ...

    def resumed(self) -> None:
        """Go on: the peer takes answers again."""
        ...

    def retire(self) -> None:
        """End by itself, if nothing else would: the connection is to be closed after its last call."""
        ...

    def lost(self) -> None:
        """Let go of everything: the stream is gone. Called once, also after `finish`."""
        ...


class OpenStreams:
    """How many ext_proc streams of a server are open; `on_end` is called with the end of each while it drains."""

    __slots__ = ("count", "draining", "on_end")

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        self.draining = False
        self.on_end = on_end


class ProcessCall:
    """One ext_proc stream: the session behind it, and what waits while the session is paused or the peer is slow."""

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
        stream: CallStream,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        streams: OpenStreams,
    ) -> None:
        self._shared = shared
        self._streams = streams
        self._stream = stream
        self._clock = clock
        self._loop = loop
        keeps = shared.settings.response_phase is ResponsePhase.KEEP  # who the peer is plays no part then
        self._session = Session(shared, stream.peer, Gateway.UNKNOWN if keeps else stream.gateway)
        self._pending: PendingDecision | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._backlog: deque[bytes | None] | None = None
        """Messages not yet taken; None among them is the end of the peer's half. Bounded by the stream's window."""
        self._done = False
        streams.count += 1
        shared.observer.stream_opened()

    @property
    def paused(self) -> bool:
        """Whether messages wait here."""
        session = self._session
        return bool(self._backlog) or (session.pending is not None and session.paused) or self._stream.backpressured

    def message(self, data: bytes) -> bool:
        """Take one `ProcessingRequest`; return `paused`."""
        session, stream = self._session, self._stream
        if (self._backlog or session.pending is not None or stream.backpressured) and self.paused:
            self._wait(data)
            return True
        piece = response_piece(data)
        if piece is not None and session.pass_on(piece, self._clock()):
            # What comes and goes with every token takes the short way.
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
        # Not delayed by a pause: it may mean that the client has gone. Only by messages that come first.
        if self._backlog:
            self._wait(None)
        else:
            self._take(None)

    def resumed(self) -> None:
        """Go on with what has waited."""
        backlog = self._backlog
        while (
            backlog
            and not self._done
            and (backlog[0] is None or not (self._session.paused or self._stream.backpressured))
        ):
            self._take(backlog.popleft())
        if not self._done and not self.paused:
            self._stream.room()

    def retire(self) -> None:
        """Go on: the request ends by itself."""

    def lost(self) -> None:
        """Release what the request holds."""
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the other streams go on
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
            # Taken out, so that a large body is not kept as replies, as messages and as frames at once.
            reply = replies.pop()
            if type(reply) is Finish:  # `isinstance` is slow at saying no
                self._finish(Status.OK, "")
                return
            if type(reply) is FinishWith:
                self._stream.leave(encode(reply.last))
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
        # Later: the core may answer one stream within a call of another.
        self._loop.call_soon(self._resume, result)

    def _resume(self, result: Decision | RequestError) -> None:
        if self._done:
            # Too late: the session releases what the answer holds.
            self._session.resume(result, self._clock())
            return
        self._run(self._session.resume, result, self._clock())
        self._go_on()

    def _on_deadline(self, deadline: float) -> None:
        self._timer = None
        self._run(self._session.receive, _DEADLINE, max(self._clock(), deadline))
        self._go_on()

    def _go_on(self) -> None:
        if not self._done:
            self.resumed()
        self._stream.flush()


class AccessLogCall:
    """One access log stream: entries until Envoy, or the service, ends it."""

    __slots__ = ("_service", "_stream")

    paused = False

    def __init__(self, service: AccessLogService, stream: CallStream) -> None:
        self._service = service
        self._stream = stream
        service.join(self._close, stream.peer)

    def message(self, data: bytes) -> bool:
        """Pass the entries of one message on."""
        self._service.take(data)
        return False

    def half_closed(self) -> None:
        """Answer: an empty StreamAccessLogsResponse."""
        self._stream.send(b"")
        self._stream.finish()

    def resumed(self) -> None:
        """Have nothing that waits."""

    def retire(self) -> None:
        """End the stream, so that Envoy opens another; entries that are under way are still taken."""
        self._stream.leave(b"")

    def lost(self) -> None:
        """Leave."""
        self._service.leave(self._close)

    def _close(self) -> None:
        self.half_closed()
        self._stream.flush()
