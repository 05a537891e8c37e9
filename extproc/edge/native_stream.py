"""One gRPC stream of the native transport: DATA becomes messages for its call, and the call's answers become frames."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from extproc.edge.native_calls import Call
from extproc.edge.native_host import Host
from extproc.http2.connection import Connection
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

__all__ = ["CalledStream", "RefusedStream", "StreamOwner"]

_CHOKED_BYTES: Final = 256 * 1024
"""Answers of one stream that may wait for the peer's window before its requests wait too."""


class StreamOwner(Protocol):
    """What a stream needs of its connection."""

    host: Host
    http2: Connection
    peer: str

    def forget(self, stream_id: int) -> None:
        """Know the stream no more."""
        ...

    def flush(self) -> None:
        """Write what is to be written."""
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

    def drop(self) -> None:
        """Hold nothing."""
        self._owner.forget(self._id)


class CalledStream:
    """A stream with a call on it; implements `CallStream`."""

    __slots__ = ("_over", "_owner", "_partial", "_reader", "_started", "_unreturned", "call", "id", "timer")

    def __init__(self, owner: StreamOwner, stream_id: int, reader: MessageReader) -> None:
        self._owner = owner
        self._reader = reader
        self._started = False
        self._over = False
        self._unreturned = 0
        self._partial = 0
        self.id = stream_id
        self.timer: asyncio.TimerHandle | None = None
        self.call: Call

    # -- for the call --------------------------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """Return the address of the peer."""
        return self._owner.peer

    @property
    def choked(self) -> bool:
        """Whether the peer takes no answers at present."""
        return self._owner.http2.pending_bytes(self.id) > _CHOKED_BYTES

    def send(self, message: bytes) -> None:
        """Send one message."""
        http2 = self._owner.http2
        if not self._started:
            self._started = True
            http2.send_headers(self.id, RESPONSE_HEADERS)
        http2.send_data(self.id, message_frame(message))

    def finish(self, status: Status = Status.OK, message: str = "", *, accept_encoding: bool = False) -> None:
        """End the call."""
        if self._over:
            return
        if status is Status.OK and self._started:
            block = OK_TRAILERS
        else:
            block = trailers(status, message, started=self._started, accept_encoding=accept_encoding)
        self._owner.http2.end_stream(self.id, block)
        self.drop()

    def flush(self) -> None:
        """Write what has been sent."""
        self._owner.flush()

    def room(self) -> None:
        """Return to the peer what it may send."""
        if self._unreturned:
            self._owner.http2.acknowledge(self.id, self._unreturned)
            self._unreturned = 0

    # -- for the connection --------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Let the call go, once."""
        if self._over:
            return
        self._over = True
        if self.timer is not None:
            self.timer.cancel()
        self._owner.host.partial_bytes -= self._partial
        self._owner.forget(self.id)
        self.call.lost()

    def take(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._unreturned += len(data)
        call = self.call
        try:
            for message in self._reader.feed(data):
                call.message(message)
                if self._over:
                    return
            self._count_partial()
        except CallError as fault:
            self.finish(fault.status, fault.message, accept_encoding=fault.accept_encoding)
            return
        if not call.paused:
            self.room()

    def _count_partial(self) -> None:
        host = self._owner.host
        partial = self._reader.held_bytes
        host.partial_bytes += partial - self._partial
        grew, self._partial = partial > self._partial, partial
        if grew and host.partial_bytes > host.settings.max_partial_bytes:
            raise CallError(Status.RESOURCE_EXHAUSTED, "too many incomplete messages")

    def end(self) -> None:
        """Take the end of the request."""
        try:
            self._reader.end()
            self.call.half_closed()
        except CallError as fault:
            self.finish(fault.status, fault.message)

    def on_timeout(self) -> None:
        """End a call whose own deadline has passed."""
        self.finish(Status.DEADLINE_EXCEEDED, "the call's own deadline has passed")
        self.flush()

    def resumed(self) -> None:
        """Go on: the peer takes answers again."""
        self.call.resumed()
