"""One connection of the native transport: an asyncio Protocol between a socket, `http2` and the calls on it.

No task and no coroutine stands behind a stream: all that one `data_received` causes happens in it, and leaves in one write.
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
"""Mistakes within one stream that are logged of one connection; the metric counts them all."""
_TELLING: Final = frozenset(name.encode() for name in GATEWAY_FIELDS)
_TIMER_AGAIN_S: Final = 1.0
"""Pause of a timer that has failed, at least."""
_ENDS: Final = 16
"""Ends of streams in one write: some 50 bytes each, so that together they fit into one segment of any network."""


class NativeConnection(asyncio.Protocol):
    """One connection from its first byte to its last."""

    def __init__(self, host: ListenerContext, loop: asyncio.AbstractEventLoop) -> None:
        self.host = host
        self.peer = ""
        self.tls = False
        self.http2 = Connection(host.settings.limits, host.clock())
        self.streams: dict[int, GrpcStream | RefusedStream] = {}
        self._loop = loop
        self._transport: Any = None
        self._closing = False
        self._heard = False
        self._asked = False
        self._progress = False
        self._ends: list[GrpcStream] = []
        self._unsent_bytes = 0
        self._logged = 0
        self._blocked = False
        self._lost = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: our SETTINGS leave at once."""
        self._transport = transport
        self._transport.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        self.peer = peer_name(transport.get_extra_info("peername"))
        self.tls = transport.get_extra_info("ssl_object") is not None
        if not self.host.admits(self.peer):
            self._closing = True
            self.http2.fail(ErrorCode.ENHANCE_YOUR_CALM, "too many connections")  # and nothing is read any more
            self._transport.write(self.http2.output())
            self._transport.close()
            return
        self.host.connections[self] = None
        settings = self.host.settings
        self._later("preface", settings.preface_s, self._on_preface_due)
        self._later("keepalive", settings.keepalive_s, self._on_silence)
        if settings.max_age_s:
            # Jitter: connections made together must not come back together.
            share = self.host.rng.uniform(1 - settings.age_jitter, 1 + settings.age_jitter)
            self._later("age", settings.max_age_s * share, self._on_age)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Do everything that these bytes cause."""
        self._heard = True
        http2, streams = self.http2, self.streams
        events = http2.receive(data, self.host.clock())
        for event in events:
            if type(event) is DataReceived:  # nearly all are
                stream = streams.get(event.stream_id)
                if stream is not None:
                    stream.take(event.data)
            else:
                self._on_event(event)
        if events or not http2.mid_frame:
            self._progress = True
        self.flush()

    def pause_writing(self) -> None:
        """Read no more from a peer that does not read."""
        self._blocked = True
        self._count_unsent()
        if not self._closing:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again: the peer has taken what it was sent."""
        self._blocked = False
        self._count_unsent()
        self._heard = True
        if not self._closing:
            self._transport.resume_reading()

    def connection_lost(self, _exc: Exception | None) -> None:
        """Let every call go."""
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()
        self._drop_all()
        self._lost, self._blocked = True, False
        self._count_unsent()
        self.host.connections.pop(self, None)
        self.host.on_gone()

    # -- for the server and the streams --------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether nothing more is said on it, and only the peer has not closed it yet."""
        return self._closing

    def flush(self) -> None:
        """Write what is to be written, and close where nothing more can happen."""
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
        """Count answers that the peer does not take: one that never reads must not fill the memory unseen."""
        size_bytes = 0 if self._lost else self.http2.all_pending_bytes
        if self._blocked:
            # Less than `_WRITE_BUFFER_BYTES` is not counted: uvloop shows all of a write until the turn is over.
            size_bytes += self._transport.get_write_buffer_size()
        self.host.budget.charge(size_bytes - self._unsent_bytes)
        self.host.unsent_bytes += size_bytes - self._unsent_bytes
        self._unsent_bytes = size_bytes

    def _check_unsent(self) -> None:
        """End a connection that makes us keep more than its part, once all of them together are too much."""
        host = self.host
        if host.unsent_bytes <= host.limit_bytes or self.http2.finished:
            return
        if self._unsent_bytes * len(host.connections) >= host.unsent_bytes:
            self._end("answers that are not read", ErrorCode.ENHANCE_YOUR_CALM)
            if self._blocked:
                self._transport.abort()

    def end_soon(self, stream: GrpcStream) -> None:
        """Write a stream's end in the loop's next turn, after everything else of this one.

        Not in this turn: uvloop joins what is written in one, and the end could be cut by a segment's end. The peer has
        to read it whole (`protocol.early_close`).
        """
        if not self._ends:
            self._loop.call_soon(self._write_ends)
        self._ends.append(stream)

    def _write_ends(self) -> None:
        if self._closing:
            return
        ends, self._ends = self._ends[:_ENDS], self._ends[_ENDS:]
        for stream in ends:
            stream.write_end()
        self.flush()
        if self._ends:
            self._loop.call_soon(self._write_ends)
        if "linger" not in self._timers:
            self._later("linger", self.host.settings.linger_s, self._on_linger)

    def forget(self, stream_id: int) -> None:
        """Know a stream no more."""
        self.streams.pop(stream_id, None)

    def refused(self, fault: CallError) -> None:
        """Count and log a call that is ended for what its peer has sent; only the first few are logged."""
        if fault.status is not Status.NOT_FOUND:  # a health check of a service that is not here: an honest question
            self.host.observer.protocol_error(f"grpc {fault.status.name.lower()}")
            self._warn("a call was refused", problem=fault.message)

    def shut_down(self) -> None:
        """Ask the peer to open no more streams here; close after the last one."""
        self.http2.shut_down()
        self._later("last call", self.host.settings.preface_s, self._on_last_call_due)
        self.flush()

    def cut(self) -> None:
        """End what is still open, and close."""
        if not self._closing:
            self._drop_all()
            self.http2.fail(ErrorCode.NO_ERROR, "shutting down")
            self.flush()

    def abort(self) -> None:
        """Close without another word, whatever has not left yet."""
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
            self._complain("http2 stream", event.code, event.reason)
        elif type(event) is ConnectionFailed:
            self._on_failure(event)
        elif type(event) is GoawayReceived and event.code:
            self._warn("a peer gave its connection up", code=event.code)

    def _open(self, event: RequestReceived) -> None:
        stream_id, block = event.stream_id, event.block
        try:
            # What a block says is kept with it, and with nothing else: a stream that kept the fields could be made to
            # hold a hundred times what its peer has sent.
            call, gateway = block.note = block.note or (open_call(block.fields), _gateway(block.fields, self.tls))
        except CallError as fault:
            self.refused(fault)
            self.http2.end_stream(stream_id, trailers(fault.status, fault.message, started=False))
            return
        except NotGrpcError as error:
            self.streams[stream_id] = RefusedStream(self, stream_id, error)
            return
        factory = self.host.routes.get(call.path)
        if factory is None:
            unknown = trailers(Status.UNIMPLEMENTED, f"unknown method {call.path}", started=False)
            self.http2.end_stream(stream_id, unknown)
            return
        reader = MessageReader(self.host.settings.max_message_bytes, call.encoding)
        stream = GrpcStream(self, stream_id, reader, gateway)
        stream.call = factory(stream)
        self.streams[stream_id] = stream
        if call.timeout_s is not None:
            stream.timer = self._loop.call_later(call.timeout_s, stream.on_timeout)

    def _on_reset(self, event: StreamReset) -> None:
        stream = self.streams.get(event.stream_id)
        if event.reason:
            self._complain("http2 stream", event.code, event.reason)
        if stream is not None:
            stream.drop()

    def _on_failure(self, event: ConnectionFailed) -> None:
        self._logged = 0
        self._complain("http2", event.code, event.reason)
        self._drop_all()

    def _complain(self, what: str, code: int, reason: str) -> None:
        self.host.observer.protocol_error(f"{what} {ErrorCode(code).name.lower()}")
        self._warn("a peer broke the rules of HTTP/2", problem=reason)

    def _warn(self, what: str, **details: object) -> None:
        self._logged += 1
        if self._logged <= _LOGGED:
            _log.warning(what, extra={**details, "peer": self.peer})

    def _drop_all(self) -> None:
        for stream in tuple(self.streams.values()):
            stream.drop()

    # -- time ----------------------------------------------------------------------------------------------------

    def _later(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        if (old := self._timers.get(name)) is not None:
            old.cancel()
        self._timers[name] = self._loop.call_later(delay_s, self._on_time, name, delay_s, call)

    def _on_time(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        """Call a timer's owner; a defect in it must not leave the connection without its bounds: the timer is set again."""
        try:
            call()
        except Exception:  # noqa: BLE001 - whatever it is
            self.host.observer.internal_error("timer")
            _log.exception("a timer of a connection has failed and is set again", extra={"timer": name})
            if not self._lost:
                self._later(name, max(delay_s, _TIMER_AGAIN_S), call)

    def _on_preface_due(self) -> None:
        if not self.http2.preface_received:
            self.host.bounds.dropped("silent", self.peer)
            self._end("no HTTP/2 preface in time", ErrorCode.SETTINGS_TIMEOUT)

    def _on_silence(self) -> None:
        """Look whether the peer has said anything, and anything whole, since the last look."""
        settings = self.host.settings
        if self.http2.mid_frame and not self._progress and not self._blocked:
            self._end("a frame that does not end", ErrorCode.ENHANCE_YOUR_CALM)
        elif self._heard:
            self._heard = self._asked = False
            self._later("keepalive", settings.keepalive_s, self._on_silence)
        elif self._asked:
            self._end("no answer to PING", ErrorCode.NO_ERROR)
            self._transport.abort()
        else:
            self._asked = True
            self.http2.ping(_PING)
            self.flush()
            self._later("keepalive", settings.keepalive_timeout_s, self._on_silence)
        self._progress = False

    def _on_age(self) -> None:
        """Ask the peer to come back on another connection; streams that never end by themselves are ended."""
        self.shut_down()
        for stream in tuple(self.streams.values()):
            stream.retire()
        self.flush()

    def _on_linger(self) -> None:
        """Look for peers that never end their half of a call that is over: two looks, and the stream is reset."""
        del self._timers["linger"]
        left = [stream for stream in self.streams.values() if isinstance(stream, GrpcStream) and stream.left]
        for stream in left:
            if stream.lingered:
                stream.finish()
            stream.lingered = True
        if left:
            self._later("linger", self.host.settings.linger_s, self._on_linger)
        self.flush()

    def _on_last_call_due(self) -> None:
        self.http2.refuse_streams()
        self.flush()

    def _end(self, why: str, code: ErrorCode) -> None:
        """Give a connection up that breaks no rule of the RFC, and yet cannot go on."""
        self.host.observer.protocol_error(f"http2 {code.name.lower() if code else 'no_answer'}")
        _log.warning("gave a connection up", extra={"problem": why, "peer": self.peer})
        self._drop_all()
        self.http2.fail(code, why)
        self.flush()

    def _close(self) -> None:
        """Say no more, and read to the peer's end: closing a socket with bytes unread would take back our last words."""
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()  # what is over must not be found wanting again
        self._timers.clear()
        try:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()  # TLS has a word of its own for the end
        except OSError:
            self._transport.abort()  # the peer has gone
        # A peer that does not read what is still in the buffer, or never ends, must not keep us.
        self._later("close", self.host.settings.preface_s, self._transport.abort)


def _gateway(fields: tuple[Field, ...], tls: bool) -> Gateway:
    told = {name.decode("latin-1"): value.decode("latin-1") for name, value in fields if name in _TELLING}
    return gateway_of(told, tls=tls)


def peer_name(address: Any) -> str:
    """Spell an address as gRPC does; IPv4 in IPv6 as IPv4."""
    if not isinstance(address, tuple) or len(address) < 2:
        return "unknown"
    host, port = str(address[0]), address[1]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
