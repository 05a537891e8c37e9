"""One connection of the native transport: an asyncio Protocol between a socket, `http2` and the calls on it.

No task and no coroutine stands behind a stream: all that one `data_received` causes happens in it, and leaves in one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from extproc.edge.native_host import Host
from extproc.edge.native_stream import CalledStream, RefusedStream
from extproc.http2.connection import Connection
from extproc.http2.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    PeerLeaving,
    RequestEnded,
    RequestReceived,
    SendingResumed,
    StreamReset,
)
from extproc.http2.frames import ErrorCode
from extproc.http2.grpc import CallError, MessageReader, NotGrpcError, Status, open_call, trailers

__all__ = ["NativeConnection"]

_log = logging.getLogger(__name__)
_WRITE_BUFFER_BYTES: Final = 1024 * 1024
"""Bytes that may wait for the socket before the connection is not read any more."""
_PING: Final = b"extproc\x00"


class NativeConnection(asyncio.Protocol):
    """One connection from its first byte to its last."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self.host = host
        self.peer = ""
        self.http2 = Connection(host.settings.limits, host.clock())
        self.streams: dict[int, CalledStream | RefusedStream] = {}
        self._loop = loop
        self._transport: Any = None
        self._closing = False
        self._heard = False
        self._asked = False
        self._progress = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: our SETTINGS leave at once."""
        self._transport = transport
        self._transport.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        self.peer = _peer(transport.get_extra_info("peername"))
        self.host.connections.add(self)
        settings = self.host.settings
        self._later("preface", settings.preface_s, self._on_preface_due)
        self._later("keepalive", settings.keepalive_s, self._on_silence)
        if settings.max_age_s is not None:
            # Jitter: connections made together must not come back together.
            self._later("age", settings.max_age_s * self.host.rng.uniform(0.9, 1.1), self.shut_down)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Do everything that these bytes cause."""
        self._heard = True
        events = self.http2.receive(data, self.host.clock())
        for event in events:
            self._on_event(event)
        if events or not self.http2.mid_frame:
            self._progress = True
        self.flush()

    def pause_writing(self) -> None:
        """Read no more from a peer that does not read."""
        if not self._closing:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again: the peer has taken what it was sent."""
        self._heard = True
        if not self._closing:
            self._transport.resume_reading()

    def connection_lost(self, _exc: Exception | None) -> None:
        """Let every call go."""
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()
        self._drop_all()
        self.host.connections.discard(self)
        self.host.on_gone()

    # -- for the server and the streams --------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what is to be written, and close where nothing more can happen."""
        if self._closing:
            return
        data = self.http2.output()
        if data:
            self._transport.write(data)
        if self.http2.finished:
            self._close()

    def forget(self, stream_id: int) -> None:
        """Know a stream no more."""
        self.streams.pop(stream_id, None)

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

    # -- events --------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if type(event) is DataReceived:
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                stream.take(event.data)
        elif type(event) is RequestReceived:
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
        elif type(event) is ConnectionFailed:
            self._on_failure(event)
        elif type(event) is PeerLeaving and event.code:
            _log.warning("a peer gave its connection up", extra={"code": event.code, "peer": self.peer})

    def _open(self, event: RequestReceived) -> None:
        stream_id = event.stream_id
        try:
            call = open_call(event.block.fields)
        except CallError as fault:
            self.http2.end_stream(stream_id, trailers(fault.status, fault.message, started=False))
            return
        except NotGrpcError as error:
            self.streams[stream_id] = RefusedStream(self, stream_id, error)
            return
        factory = self.host.routes.get(call.path)
        if factory is None:
            block = trailers(Status.UNIMPLEMENTED, f"unknown method {call.path}", started=False)
            self.http2.end_stream(stream_id, block)
            return
        stream = CalledStream(self, stream_id, MessageReader(self.host.settings.max_message_bytes, call.encoding))
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
        self._complain("http2", event.code, event.reason)
        self._drop_all()

    def _complain(self, what: str, code: int, reason: str) -> None:
        self.host.observer.protocol_error(f"{what} {ErrorCode(code).name.lower()}")
        _log.warning("a peer broke the rules of HTTP/2", extra={"problem": reason, "peer": self.peer})

    def _drop_all(self) -> None:
        for stream in tuple(self.streams.values()):
            stream.drop()

    # -- time ----------------------------------------------------------------------------------------------------

    def _later(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        if (old := self._timers.get(name)) is not None:
            old.cancel()
        self._timers[name] = self._loop.call_later(delay_s, call)

    def _on_preface_due(self) -> None:
        if not self.http2.settled:
            self._give_up("no HTTP/2 preface in time")

    def _on_silence(self) -> None:
        """Look whether the peer has said anything, and anything whole, since the last look."""
        settings = self.host.settings
        if self.http2.mid_frame and not self._progress:
            self._give_up("a frame that does not end")
        elif self._heard:
            self._heard = self._asked = False
            self._later("keepalive", settings.keepalive_s, self._on_silence)
        elif self._asked:
            self._give_up("no answer to PING")
        else:
            self._asked = True
            self.http2.ping(_PING)
            self.flush()
            self._later("keepalive", settings.keepalive_timeout_s, self._on_silence)
        self._progress = False

    def _on_last_call_due(self) -> None:
        self.http2.refuse_streams()
        self.flush()

    def _give_up(self, why: str) -> None:
        _log.warning("gave a connection up", extra={"problem": why, "peer": self.peer})
        self._transport.abort()

    def _close(self) -> None:
        self._closing = True
        self._transport.close()
        # A peer that does not read what is still in the buffer must not keep us.
        self._later("close", self.host.settings.preface_s, self._transport.abort)


def _peer(address: Any) -> str:
    """Spell an address as gRPC does; IPv4 in IPv6 as IPv4."""
    if not isinstance(address, tuple) or len(address) < 2:
        return "unknown"
    host, port = str(address[0]), address[1]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
