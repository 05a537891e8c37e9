"""One ext_proc stream on grpc.aio: read, call the session, write.

The session decides everything; this module waits. One coroutine per stream reads and writes in turn, so that a peer that
does not read our replies is not read from either, and its own flow control bounds the memory. Only while a decision is
pending are there several things to wait for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import grpc

from extproc.edge.envoy_wire.codec import decode, encode
from extproc.errors import ProtocolError, RequestError
from extproc.protocol.events import DeadlinePassed, Event, HalfClosed, StreamLost
from extproc.protocol.interfaces import PendingDecision
from extproc.protocol.replies import BodyReply, DecisionReply, Finish, FinishWith, Reply
from extproc.protocol.request_buffer import BodyBudget
from extproc.protocol.session import Session
from extproc.protocol.shared import SessionShared
from extproc.protocol.tables import IllegalEventError
from extproc.types import Decision

__all__ = ["serve_stream"]

_log = logging.getLogger(__name__)
_HALF_CLOSED: Final = HalfClosed()
_LOST: Final = StreamLost()
_DEADLINE: Final = DeadlinePassed()
_TRANSPORT_ERRORS: Final = (grpc.RpcError, grpc.aio.BaseError)
"""What read and write raise when the stream has ended."""


def _event(data: Any) -> Event:
    return _HALF_CLOSED if data is grpc.aio.EOF else decode(data)


async def serve_stream(shared: SessionShared, context: Any, clock: Callable[[], float]) -> None:
    """Serve one stream to its end, and release its request however it ends.

    Returning ends the stream with OK; it is aborted with INVALID_ARGUMENT for a protocol error of the peer, and with
    INTERNAL for an error of ours.
    """
    observer = shared.observer
    observer.stream_opened()
    session = Session(shared, context.peer())
    try:
        await _serve(session, context, clock, shared.budget)
    except _TRANSPORT_ERRORS:
        pass
    except ProtocolError as error:
        kind = error.kind if isinstance(error, IllegalEventError) else "malformed"
        observer.protocol_error(kind)
        _log.warning("the gateway broke the ext_proc protocol", extra={"problem": str(error), "peer": context.peer()})
        session.receive(_LOST, clock())
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except Exception:  # noqa: BLE001 - a stream's failure stays its own
        observer.internal_error("stream")
        _log.exception("an ext_proc stream failed")
        session.receive(_LOST, clock())
        await context.abort(grpc.StatusCode.INTERNAL, "the endpoint picker failed; its log says why")
    finally:
        session.receive(_LOST, clock())
        observer.stream_ended(session.outcome)


async def _serve(session: Session, context: Any, clock: Callable[[], float], budget: BodyBudget) -> None:
    read, receive = context.read, session.receive
    while True:
        # The replies get no name: it would keep a body in memory, uncounted, until the next message arrives.
        if await _send(receive(_event(await read()), clock()), context, budget):
            return
        if session.pending is not None and await _Wait(session, session.pending, context, clock, budget).run():
            return


async def _send(replies: list[Reply], context: Any, budget: BodyBudget) -> bool:
    """Write replies in order; return True where they end the stream.

    A body is charged to the budget until the peer has read all of it: one that never reads must not use memory uncounted.
    """
    held_bytes = 0
    for reply in replies:
        if isinstance(reply, BodyReply | DecisionReply) and reply.data is not None:
            held_bytes += len(reply.data)
    budget.charge(held_bytes)
    try:
        for reply in replies:
            if isinstance(reply, Finish):
                return True
            if isinstance(reply, FinishWith):  # pragma: no cover - never sent to `Gateway.UNKNOWN`
                await context.write(encode(reply.last))
                return True
            await context.write(encode(reply))
    finally:
        budget.refund(held_bytes)
    return False


class _Wait:
    """The wait for one pending decision: its answer, its deadline, and what the peer sends meanwhile."""

    def __init__(
        self, session: Session, pending: PendingDecision, context: Any, clock: Callable[[], float], budget: BodyBudget
    ) -> None:
        self._session = session
        self._budget = budget
        self._context = context
        self._clock = clock
        self._answer: asyncio.Future[Decision | RequestError] = asyncio.get_running_loop().create_future()
        self._reading: asyncio.Future[Any] | None = None
        self._half_closed = False
        pending.listen(self._on_answer)

    def _on_answer(self, result: Decision | RequestError) -> None:
        if self._answer.done():
            # The stream has ended, or the deadline has passed: the session releases the decision.
            self._session.resume(result, self._clock())
        else:
            self._answer.set_result(result)

    async def run(self) -> bool:
        """Wait until the decision was sent; return True where the stream ends with it."""
        try:
            while self._session.pending is not None:
                if await _send(await self._step(), self._context, self._budget):
                    return True
            return await self._finish_read()
        finally:
            await self._stop()

    async def _step(self) -> list[Reply]:
        session = self._session
        if self._reading is None and not self._half_closed and not session.paused:
            self._reading = asyncio.ensure_future(self._context.read())
        waiting = [self._answer] if self._reading is None else [self._answer, self._reading]
        assert session.deadline is not None
        timeout_s = max(0.0, session.deadline - self._clock())
        done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._answer in done:
            return session.resume(self._answer.result(), self._clock())
        if self._reading in done:
            return self._take_read()
        return session.receive(_DEADLINE, max(self._clock(), session.deadline))

    def _take_read(self) -> list[Reply]:
        assert self._reading is not None
        data = self._reading.result()
        self._reading = None
        self._half_closed = data is grpc.aio.EOF
        return self._session.receive(_event(data), self._clock())

    async def _finish_read(self) -> bool:
        """Handle the message that is being read: a read of grpc.aio cannot be undone."""
        if self._reading is None:
            return False
        await self._reading
        return await _send(self._take_read(), self._context, self._budget)

    async def _stop(self) -> None:
        """Cancel what is still running, however the wait ended."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if not self._answer.done():
            self._answer.cancel()
        elif self._session.pending is not None:
            # Answered and cancelled in the same turn of the loop.
            self._session.receive(_LOST, self._clock())
            self._session.resume(self._answer.result(), self._clock())
