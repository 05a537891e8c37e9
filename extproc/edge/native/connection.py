"""One connection of the native transport: an asyncio Protocol between a socket, `http2` and the calls on it.

Streams have no task and no coroutine: everything that one `data_received` causes is done in it, and leaves in one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from extproc.edge.native.listener_context import ListenerContext
from extproc.edge.native.stream import GrpcStream, RefusedStream
from extproc.http2.connection import Connection
from extproc.http2.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    GoawayReceived,
    RequestEnded,
    RequestReceived,
    SendingResumed,
    StreamRefused,
    StreamReset,
)
from extproc.http2.frames import ErrorCode
from extproc.http2.grpc import CallError, MessageReader, NotGrpcError, Status, open_call, trailers
from extproc.http2.headers import Field
from extproc.protocol.early_close import GATEWAY_FIELDS, Gateway, gateway_of

__all__ = ["NativeConnection", "peer_name"]

_log = logging.getLogger(__name__)
_WRITE_BUFFER_BYTES: Final = 1024 * 1024
"""Bytes that may wait for the socket before the connection is not read any more."""
_PING: Final = b"extproc\x00"
_LOGGED: Final = 10
"""Errors of streams that are logged per connection; the metric counts all."""
_GATEWAY_FIELDS: Final = frozenset(name.encode() for name in GATEWAY_FIELDS)
_TIMER_RETRY_S: Final = 1.0
"""Shortest delay before a timer that has failed runs again."""
_ENDS_PER_WRITE: Final = 16
"""Ends of streams in one write: some 50 bytes each, so that together they fit into one TCP segment."""


class NativeConnection(asyncio.Protocol):
    """One connection from its first byte to its last."""

    def __init__(self, context: ListenerContext, loop: asyncio.AbstractEventLoop) -> None:
        self.context = context
        self.peer = ""
        self.tls = False
        self.http2 = Connection(context.settings.limits, context.clock())
        self.streams: dict[int, GrpcStream | RefusedStream] = {}
        self._loop = loop
        self._transport: Any = None
        self._closing = False
        self._received = False
        self._ping_sent = False
        self._progress = False
        self._ends: list[GrpcStream] = []
        self._unsent_bytes = 0
        self._logged = 0
        self._blocked = False
        self._lost = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our SETTINGS, or refuse the connection."""
        self._transport = transport
        self._transport.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        self.peer = peer_name(transport.get_extra_info("peername"))
        self.tls = transport.get_extra_info("ssl_object") is not None
        if not self.context.admits(self.peer):
            self._closing = True
            self.http2.fail(ErrorCode.ENHANCE_YOUR_CALM, "too many connections")  # nothing is read after that
            self._transport.write(self.http2.output())
            self._transport.close()
            return
        self.context.connections[self] = None
        settings = self.context.settings
        self._set_timer("preface", settings.preface_s, self._on_preface_due)
        self._set_timer("keepalive", settings.keepalive_s, self._on_keepalive)
        if settings.max_age_s:
            # Jitter, so that connections opened together are not reopened together.
            share = self.context.rng.uniform(1 - settings.age_jitter, 1 + settings.age_jitter)
            self._set_timer("age", settings.max_age_s * share, self._on_age)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, and write the answers."""
        self._received = True
        http2, streams = self.http2, self.streams
        events = http2.receive(data, self.context.clock())
        for event in events:
            if type(event) is DataReceived:  # the most frequent
                stream = streams.get(event.stream_id)
                if stream is not None:
                    stream.take(event.data)
            else:
                self._on_event(event)
        if events or not http2.mid_frame:
            self._progress = True
        self.flush()

    def pause_writing(self) -> None:
        """Stop reading from a peer that does not read its answers."""
        self._blocked = True
        self._count_unsent()
        if not self._closing:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading: the peer has read its answers."""
        self._blocked = False
        self._count_unsent()
        self._received = True
        if not self._closing:
            self._transport.resume_reading()

    def connection_lost(self, _exc: Exception | None) -> None:
        """Release every call."""
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()
        self._drop_all()
        self._lost, self._blocked = True, False
        self._count_unsent()
        self.context.connections.pop(self, None)
        self.context.on_gone()

    # -- for the server and the streams --------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """Whether we have closed our side, and wait for the peer to close its own."""
        return self._closing

    def flush(self) -> None:
        """Write the output, and close where HTTP/2 is finished."""
        if self._closing:
            return
        data = self.http2.output()
        if data:
            self._transport.write(data)
        if self._unsent_bytes or self._blocked or self.http2.all_pending_bytes:
            self._count_unsent()
            self._check_unsent()
        if self.http2.finished and not self._closing:
            self._close()

    def _count_unsent(self) -> None:
        """Count answers that wait for the peer: one that never reads must not use memory uncounted."""
        size_bytes = 0 if self._lost else self.http2.all_pending_bytes
        if self._blocked:
            # Below `_WRITE_BUFFER_BYTES` it is not counted: uvloop counts a whole write until the end of the loop's turn.
            size_bytes += self._transport.get_write_buffer_size()
        self.context.budget.charge(size_bytes - self._unsent_bytes)
        self.context.unsent_bytes += size_bytes - self._unsent_bytes
        self._unsent_bytes = size_bytes

    def _check_unsent(self) -> None:
        """End this connection where the unread answers of all are beyond the limit and it has more than its share."""
        context = self.context
        if context.unsent_bytes <= context.limit_bytes or self.http2.finished:
            return
        if self._unsent_bytes * len(context.connections) >= context.unsent_bytes:
            self._end("answers that are not read", ErrorCode.ENHANCE_YOUR_CALM)
            if self._blocked:
                self._transport.abort()

    def end_soon(self, stream: GrpcStream) -> None:
        """Write a stream's end in the loop's next turn, after everything else of this one.

        Not in this turn: uvloop joins its writes, so a segment could end within it, and the peer has to read it whole
        (`protocol.early_close`).
        """
        if not self._ends:
            self._loop.call_soon(self._write_ends)
        self._ends.append(stream)

    def _write_ends(self) -> None:
        if self._closing:
            return
        ends, self._ends = self._ends[:_ENDS_PER_WRITE], self._ends[_ENDS_PER_WRITE:]
        for stream in ends:
            stream.write_end()
        self.flush()
        if self._ends:
            self._loop.call_soon(self._write_ends)
        if "linger" not in self._timers:
            self._set_timer("linger", self.context.settings.linger_s, self._on_linger)

    def forget(self, stream_id: int) -> None:
        """Remove a stream."""
        self.streams.pop(stream_id, None)

    def refused(self, fault: CallError) -> None:
        """Count a call that is ended because of what its peer sent, and log the first few."""
        if fault.status is not Status.NOT_FOUND:  # a health check of an unknown service is no error of the peer
            self.context.observer.protocol_error(f"grpc {fault.status.name.lower()}")
            self._warn("a call was refused", problem=fault.message)

    def shut_down(self) -> None:
        """Begin a graceful shutdown: the peer opens no more streams, and the connection closes after the last one."""
        self.http2.shut_down()
        self._set_timer("shutdown", self.context.settings.preface_s, self._on_shutdown_due)
        self.flush()

    def terminate(self) -> None:
        """End the open streams, and close."""
        if not self._closing:
            self._drop_all()
            self.http2.fail(ErrorCode.NO_ERROR, "shutting down")
            self.flush()

    def abort(self) -> None:
        """Close at once and drop what was not sent."""
        self._transport.abort()

    # -- events --------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if type(event) is RequestReceived:
            self._open(event)
        elif type(event) is RequestEnded:
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                stream.end()
        elif type(event) is StreamReset:
            self._on_reset(event)
        elif type(event) is SendingResumed:
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                stream.resumed()
        elif type(event) is StreamRefused:
            self._report("http2 stream", event.code, event.reason)
        elif type(event) is ConnectionFailed:
            self._on_failure(event)
        elif type(event) is GoawayReceived and event.code:
            self._warn("a peer ended its connection with an error", code=event.code)

    def _open(self, event: RequestReceived) -> None:
        stream_id, block = event.stream_id, event.block
        try:
            # Kept with the cached block alone: a stream that kept the fields could be made to use a hundred times the
            # memory that its peer has sent.
            call, gateway = block.note = block.note or (open_call(block.fields), _gateway(block.fields, self.tls))
        except CallError as fault:
            self.refused(fault)
            self.http2.end_stream(stream_id, trailers(fault.status, fault.message, started=False))
            return
        except NotGrpcError as error:
            self.streams[stream_id] = RefusedStream(self, stream_id, error)
            return
        factory = self.context.routes.get(call.path)
        if factory is None:
            unknown = trailers(Status.UNIMPLEMENTED, f"unknown method {call.path}", started=False)
            self.http2.end_stream(stream_id, unknown)
            return
        reader = MessageReader(self.context.settings.max_message_bytes, call.encoding)
        stream = GrpcStream(self, stream_id, reader, gateway)
        stream.call = factory(stream)
        self.streams[stream_id] = stream
        if call.timeout_s is not None:
            stream.timer = self._loop.call_later(call.timeout_s, stream.on_timeout)

    def _on_reset(self, event: StreamReset) -> None:
        stream = self.streams.get(event.stream_id)
        if event.reason:
            self._report("http2 stream", event.code, event.reason)
        if stream is not None:
            stream.drop()

    def _on_failure(self, event: ConnectionFailed) -> None:
        self._logged = 0
        self._report("http2", event.code, event.reason)
        self._drop_all()

    def _report(self, what: str, code: int, reason: str) -> None:
        self.context.observer.protocol_error(f"{what} {ErrorCode(code).name.lower()}")
        self._warn("a peer broke the rules of HTTP/2", problem=reason)

    def _warn(self, what: str, **details: object) -> None:
        self._logged += 1
        if self._logged <= _LOGGED:
            _log.warning(what, extra={**details, "peer": self.peer})

    def _drop_all(self) -> None:
        for stream in tuple(self.streams.values()):
            stream.drop()

    # -- time ----------------------------------------------------------------------------------------------------

    def _set_timer(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        if (old := self._timers.get(name)) is not None:
            old.cancel()
        self._timers[name] = self._loop.call_later(delay_s, self._run_timer, name, delay_s, call)

    def _run_timer(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        """Run a timer's callback; where it raises, set the timer again, so that the connection keeps its time limits."""
        try:
            call()
        except Exception:  # noqa: BLE001 - whatever it is
            self.context.observer.internal_error("timer")
            _log.exception("a timer of a connection has failed and is set again", extra={"timer": name})
            if not self._lost:
                self._set_timer(name, max(delay_s, _TIMER_RETRY_S), call)

    def _on_preface_due(self) -> None:
        if not self.http2.preface_received:
            self.context.bounds.dropped("silent", self.peer)
            self._end("no HTTP/2 preface in time", ErrorCode.SETTINGS_TIMEOUT)

    def _on_keepalive(self) -> None:
        """Check whether the peer has sent anything, and any whole frame, since the last check; PING a silent one."""
        settings = self.context.settings
        if self.http2.mid_frame and not self._progress and not self._blocked:
            self._end("a frame that does not end", ErrorCode.ENHANCE_YOUR_CALM)
        elif self._received:
            self._received = self._ping_sent = False
            self._set_timer("keepalive", settings.keepalive_s, self._on_keepalive)
        elif self._ping_sent:
            self._end("no answer to PING", ErrorCode.NO_ERROR)
            self._transport.abort()
        else:
            self._ping_sent = True
            self.http2.ping(_PING)
            self.flush()
            self._set_timer("keepalive", settings.keepalive_timeout_s, self._on_keepalive)
        self._progress = False

    def _on_age(self) -> None:
        """Shut down gracefully, so that the peer reconnects; end the streams that never end by themselves."""
        self.shut_down()
        for stream in tuple(self.streams.values()):
            stream.retire()
        self.flush()

    def _on_linger(self) -> None:
        """Reset streams whose peer has not ended its half: those that this timer finds for the second time."""
        del self._timers["linger"]
        finishing = [stream for stream in self.streams.values() if isinstance(stream, GrpcStream) and stream.finishing]
        for stream in finishing:
            if stream.lingered:
                stream.finish()
            stream.lingered = True
        if finishing:
            self._set_timer("linger", self.context.settings.linger_s, self._on_linger)
        self.flush()

    def _on_shutdown_due(self) -> None:
        self.http2.refuse_streams()
        self.flush()

    def _end(self, why: str, code: ErrorCode) -> None:
        """End a connection that exceeds a limit of ours without breaking a rule of the RFC."""
        self.context.observer.protocol_error(f"http2 {code.name.lower() if code else 'no_answer'}")
        _log.warning("a connection was ended", extra={"problem": why, "peer": self.peer})
        self._drop_all()
        self.http2.fail(code, why)
        self.flush()

    def _close(self) -> None:
        """Close our side, and read until the peer closes: closing a socket with unread bytes would discard our output."""
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()  # a closed connection must not time out
        self._timers.clear()
        try:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()  # TLS ends with close_notify, in both directions
        except OSError:
            self._transport.abort()  # the peer has gone
        # A peer that does not read the rest, or never closes, must not keep the connection.
        self._set_timer("close", self.context.settings.preface_s, self._transport.abort)


def _gateway(fields: tuple[Field, ...], tls: bool) -> Gateway:
    known = {name.decode("latin-1"): value.decode("latin-1") for name, value in fields if name in _GATEWAY_FIELDS}
    return gateway_of(known, tls=tls)


def peer_name(address: Any) -> str:
    """Spell an address as gRPC does; IPv4 in IPv6 as IPv4."""
    if not isinstance(address, tuple) or len(address) < 2:
        return "unknown"
    host, port = str(address[0]), address[1]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
