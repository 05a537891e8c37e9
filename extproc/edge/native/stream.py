"""One gRPC stream of the native transport: DATA becomes messages for its call, and the call's answers become frames."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import msgspec

from extproc.edge.native.calls import Call
from extproc.edge.native.listener_context import ListenerContext
from extproc.http2.connection import Connection
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

__all__ = ["GrpcStream", "RefusedStream", "StreamOwner"]

_CHOKED_BYTES: Final = 256 * 1024
"""Answers of one stream that may wait for the peer's window before its requests wait too."""


class StreamOwner(Protocol):
    """What a stream needs of its connection."""

    host: ListenerContext
    http2: Connection
    peer: str

    def forget(self, stream_id: int) -> None:
        """Know the stream no more."""
        ...

    def flush(self) -> None:
        """Write what is to be written."""
        ...

    def end_soon(self, stream: GrpcStream) -> None:
        """Let a stream write its end after everything else that is to be written now."""
        ...

    def refused(self, fault: CallError) -> None:
        """Count and log a call that is ended for what its peer has sent."""
        ...


class RefusedStream:
    """A request that is no gRPC call: answered in plain HTTP when it has said all, whatever that is."""

    __slots__ = ("_answer", "_id", "_owner")

    def __init__(self, owner: StreamOwner, stream_id: int, error: NotGrpcError) -> None:
        self._owner = owner
        self._id = stream_id
        self._answer = refusal(error)

    def take(self, data: bytes) -> None:
        """Drop a piece of the body."""
        self._owner.http2.acknowledge(self._id, len(data))

    def end(self) -> None:
        """Answer."""
        http2, (block, body) = self._owner.http2, self._answer
        http2.send_headers(self._id, block)
        http2.send_data(self._id, body)
        http2.end_stream(self._id, b"")
        self.drop()

    def resumed(self) -> None:
        """Have nothing that waits."""

    def retire(self) -> None:
        """Have no call."""

    def drop(self) -> None:
        """Hold nothing."""
        self._owner.forget(self._id)


class GrpcStream(msgspec.Struct, eq=False):
    """A stream with a call on it; implements `CallStream`. A struct, because a constructor in Python takes 1 us."""

    _owner: StreamOwner
    id: int
    _reader: MessageReader
    gateway: Gateway = Gateway.OTHER
    """Who the peer is."""
    call: Call = None  # type: ignore[assignment]  # set at once; it is made with the stream
    left: bool = False
    """Our half is over, or about to be; the peer's goes on."""
    lingered: bool = False
    """Whether a look for peers that never end theirs has met it before."""
    timer: asyncio.TimerHandle | None = None
    _last: bytes | None = None
    _started: bool = False
    _over: bool = False
    _peer_ended: bool = False
    _unreturned: int = 0
    _waiting: int = 0
    """How much of `_unreturned` waits in a paused call."""
    _partial: int = 0

    # -- for the call --------------------------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """Return the address of the peer."""
        return self._owner.peer

    @property
    def backpressured(self) -> bool:
        """Whether the peer takes no answers at present."""
        http2 = self._owner.http2
        return http2.outbound.pending_bytes > _CHOKED_BYTES and http2.pending_bytes(self.id) > _CHOKED_BYTES

    def send(self, message: bytes) -> None:
        """Send one message, unless the call has been left."""
        if self.left:
            return
        http2 = self._owner.http2
        if not self._started:
            self._started = True
            http2.send_headers(self.id, RESPONSE_HEADERS)
        http2.send_data(self.id, message_frame(message))

    def finish(self, status: Status = Status.OK, message: str = "", *, accept_encoding: bool = False) -> None:
        """End the call."""
        if self._over:
            return
        if self.left:
            # Too late to say anything else; whatever the peer says now is of no interest.
            self._owner.http2.reset(self.id, ErrorCode.NO_ERROR)
            self.drop()
            return
        if status is Status.OK and self._started:
            block = OK_TRAILERS
        else:
            block = trailers(status, message, started=self._started, accept_encoding=accept_encoding)
        self._owner.http2.end_stream(self.id, block)
        self.drop()

    def leave(self, message: bytes) -> None:
        """End the call behind one last message: nothing of it leaves before all that was sent so far."""
        if self._over or self.left:
            return
        self.left = True
        self._last = message
        if self.timer is not None:
            self.timer.cancel()
        if not self._owner.http2.pending_bytes(self.id):
            self._owner.end_soon(self)

    def write_end(self) -> None:
        """Send the last message and the end."""
        if self._over or self._last is None:
            return
        message, self._last = self._last, None
        self.left = False
        self.send(message)
        self.left = True
        self._owner.http2.end_stream(self.id, OK_TRAILERS, linger=True)
        if self._peer_ended:
            self.drop()

    def flush(self) -> None:
        """Write what has been sent."""
        self._owner.flush()

    def room(self) -> None:
        """Return to the peer what it may send."""
        if self._unreturned:
            self._owner.http2.acknowledge(self.id, self._unreturned)
            self._unreturned = self._waiting = 0
        if self._partial:
            self._hold(self._reader.held_bytes)

    # -- for the connection --------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Let the call go, once."""
        if self._over:
            return
        self._over = True
        if self.timer is not None:
            self.timer.cancel()
        if self._partial:
            self._owner.host.count_partial(-self._partial)
        self._owner.forget(self.id)
        call = self.call
        # The two know each other: apart they go with their last user, and the collector finds nothing to do.
        del self.call
        call.lost()

    def take(self, data: bytes) -> None:
        """Take a piece of the body."""
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
                # What waits in a paused call was never returned to the peer.
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
            if self._unreturned >= self._owner.host.return_bytes:
                self.room()

    def _refuse(self, fault: CallError) -> None:
        self._owner.refused(fault)
        self.finish(fault.status, fault.message, accept_encoding=fault.accept_encoding)

    def _hold(self, held_bytes: int) -> None:
        """Count what is held here. Raises CallError where it grows and all together is too much."""
        host = self._owner.host
        host.count_partial(held_bytes - self._partial)
        grew, self._partial = held_bytes > self._partial, held_bytes
        if grew and host.partial_bytes > host.limit_bytes:
            raise CallError(Status.RESOURCE_EXHAUSTED, "too many messages that are incomplete or wait")

    def end(self) -> None:
        """Take the end of the request."""
        if self.left:
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
        """End a call whose own deadline has passed."""
        self.finish(Status.DEADLINE_EXCEEDED, "the call's own deadline has passed")
        self.flush()

    def resumed(self) -> None:
        """Go on: the peer takes answers again."""
        if self._last is not None:
            self._owner.end_soon(self)
        self.call.resumed()

    def retire(self) -> None:
        """Let the call end, if nothing else would end it."""
        self.call.retire()
