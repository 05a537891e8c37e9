"""One gRPC stream of the native transport: passes DATA to its call as messages, and sends the call's answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.edge.native.calls import Call
from extproc.http2.frames import ErrorCode
from extproc.http2.grpc import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallError,
    MessageReader,
    NotGrpcError,
    Status,
    message_frame,
    refusal,
    trailers,
)
from extproc.protocol.early_close import Gateway

if TYPE_CHECKING:
    from extproc.edge.native.connection import NativeConnection

__all__ = ["GrpcStream", "RefusedStream"]

_BACKPRESSURE_BYTES: Final = 256 * 1024
"""Answers of one stream that may wait for the peer's window before its requests have to wait too."""


class RefusedStream:
    """A request that is no gRPC call: answered in plain HTTP at its end."""

    __slots__ = ("_answer", "_connection", "_id")

    def __init__(self, connection: NativeConnection, stream_id: int, error: NotGrpcError) -> None:
        self._connection = connection
        self._id = stream_id
        self._answer = refusal(error)

    def take(self, data: bytes) -> None:
        """Drop a piece of the body."""
        self._connection.http2.acknowledge(self._id, len(data))

    def end(self) -> None:
        """Answer."""
        http2, (block, body) = self._connection.http2, self._answer
        http2.send_headers(self._id, block)
        http2.send_data(self._id, body)
        http2.end_stream(self._id, b"")
        self.drop()

    def resumed(self) -> None:
        """No-op: nothing waits."""

    def retire(self) -> None:
        """No-op: there is no call."""

    def drop(self) -> None:
        """Forget the stream."""
        self._connection.forget(self._id)


class GrpcStream(msgspec.Struct, eq=False):
    """A stream with a call on it. A struct, because its constructor is faster than one in Python.

    Nothing leaves before `flush`; within a method of the call the connection flushes afterwards.
    """

    _connection: NativeConnection
    id: int
    _reader: MessageReader
    gateway: Gateway = Gateway.OTHER
    """Kind of the peer."""
    call: Call = None  # type: ignore[assignment]  # set right after construction: call and stream refer to each other
    finishing: bool = False
    """Our half has ended, or will with `_last`; the peer's goes on."""
    lingered: bool = False
    """Whether the linger timer has found it once already."""
    timer: asyncio.TimerHandle | None = None
    _last: bytes | None = None
    _started: bool = False
    _over: bool = False
    _peer_ended: bool = False
    _unreturned: int = 0
    _waiting: int = 0
    """Bytes of `_unreturned` that wait in a paused call."""
    _partial: int = 0

    # -- for the call --------------------------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """Address of the peer, as gRPC spells it."""
        return self._connection.peer

    @property
    def backpressured(self) -> bool:
        """Whether too many answers wait for the peer's flow-control window."""
        http2 = self._connection.http2
        return http2.outbound.pending_bytes > _BACKPRESSURE_BYTES and http2.pending_bytes(self.id) > _BACKPRESSURE_BYTES

    def send(self, message: bytes) -> None:
        """Send one message; no-op once the call is finishing."""
        if self.finishing:
            return
        http2 = self._connection.http2
        if not self._started:
            self._started = True
            http2.send_headers(self.id, RESPONSE_HEADERS)
        http2.send_data(self.id, message_frame(message))

    def finish(self, status: Status = Status.OK, message: str = "", *, accept_encoding: bool = False) -> None:
        """End the call with trailers; nothing is sent or passed to the call afterwards."""
        if self._over:
            return
        if self.finishing:
            # Our half has ended already: only a reset ends the peer's.
            self._connection.http2.reset(self.id, ErrorCode.NO_ERROR)
            self.drop()
            return
        if status is Status.OK and self._started:
            block = OK_TRAILERS
        else:
            block = trailers(status, message, started=self._started, accept_encoding=accept_encoding)
        self._connection.http2.end_stream(self.id, block)
        self.drop()

    def finish_with(self, message: bytes) -> None:
        """Send one last message and end the call with OK, in one write of their own after everything else.

        What the peer sends until it has ended its half is still passed to the call.
        """
        if self._over or self.finishing:
            return
        self.finishing = True
        self._last = message
        if self.timer is not None:
            self.timer.cancel()
        if not self._connection.http2.pending_bytes(self.id):
            self._connection.end_soon(self)

    def write_end(self) -> None:
        """Send the last message and the trailers."""
        if self._over or self._last is None:
            return
        message, self._last = self._last, None
        self.finishing = False
        self.send(message)
        self.finishing = True
        self._connection.http2.end_stream(self.id, OK_TRAILERS, linger=True)
        if self._peer_ended:
            self.drop()

    def flush(self) -> None:
        """Write what was sent; for a call that acts outside its own methods."""
        self._connection.flush()

    def release_window(self) -> None:
        """Return flow-control credit for all messages so far: the peer may send as much again."""
        if self._unreturned:
            self._connection.http2.acknowledge(self.id, self._unreturned)
            self._unreturned = self._waiting = 0
        if self._partial:
            self._hold(self._reader.held_bytes)

    # -- for the connection --------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Release the call, once."""
        if self._over:
            return
        self._over = True
        if self.timer is not None:
            self.timer.cancel()
        if self._partial:
            self._connection.context.count_partial(-self._partial)
        self._connection.forget(self.id)
        call = self.call
        # Breaks the reference cycle, so that the garbage collector has nothing to find.
        del self.call
        call.lost()

    def take(self, data: bytes) -> None:
        """Split a piece of the body into messages for the call."""
        self._unreturned += len(data)
        call, reader = self.call, self._reader
        try:
            messages = reader.feed(data)
            paused = not messages and call.paused
            for message in messages:
                paused = call.message(message)
                if self._over:
                    return
            if paused:
                # No credit was returned for what waits in a paused call.
                self._waiting += len(data)
                self._hold(reader.held_bytes + self._waiting)
            elif self._partial or reader.part:
                self._hold(reader.held_bytes)
        except CallError as fault:
            self._refuse(fault)
            return
        if not paused:
            if self._waiting:
                self._waiting = 0
            if self._unreturned >= self._connection.context.return_bytes:
                self.release_window()

    def _refuse(self, fault: CallError) -> None:
        self._connection.refused(fault)
        self.finish(fault.status, fault.message, accept_encoding=fault.accept_encoding)

    def _hold(self, held_bytes: int) -> None:
        """Count incomplete and waiting messages. Raises CallError where they grow beyond the limit of all connections."""
        context = self._connection.context
        context.count_partial(held_bytes - self._partial)
        grew, self._partial = held_bytes > self._partial, held_bytes
        if grew and context.partial_bytes > context.limit_bytes:
            raise CallError(Status.RESOURCE_EXHAUSTED, "too many messages that are incomplete or wait")

    def end(self) -> None:
        """Handle the end of the peer's half."""
        if self.finishing:
            self._peer_ended = True
            if self._last is None:
                self.drop()
            return
        try:
            self._reader.end()
            self.call.half_closed()
        except CallError as fault:
            self._refuse(fault)

    def on_timeout(self) -> None:
        """End a call whose `grpc-timeout` has passed."""
        self.finish(Status.DEADLINE_EXCEEDED, "the call's own deadline has passed")
        self.flush()

    def resumed(self) -> None:
        """Handle that all queued answers have left."""
        if self._last is not None:
            self._connection.end_soon(self)
        self.call.resumed()

    def retire(self) -> None:
        """End the call if nothing else would end it."""
        self.call.retire()
