"""A small HTTP/1.1 client (RFC 9112): one kept connection to one origin, one GET at a time, the whole body as bytes.

An asyncio protocol between socket and llhttp (`httptools`): no session, no stream and no task switch per piece of the
body, which is what a general client spends most on. Nothing else is needed here: no redirects, cookies, proxies or
compression. When to ask, and what an answer says, is decided elsewhere (`edge.scraping.planner`).
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httptools

from extproc.edge.scraping.failures import ScrapeFailedError, ScrapeFailure

__all__ = ["CpuMeter", "KeptConnection", "Origin", "get_request", "read_buffer"]

_READ_BYTES: Final = 256 * 1024
"""A whole page of a vLLM in one read, and what asyncio reads at most in one go."""
_HEAD_BYTES: Final = 64 * 1024
"""Longest head of an answer (llhttp itself has no limit), and how much chunk framing may add to a body."""
_CONNECT_CPU_S: Final = 0.0003
_HANDSHAKE_CPU_S: Final = 0.002
"""CPU time of a new connection, and what TLS adds; estimates, because it is spread over turns of the event loop in which
others work too."""
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_PATH_KEEPS: Final = "/?%:@!$&'()*+,;=-._~[]"
_FRAMING: Final = (b"content-length", b"transfer-encoding", b"content-encoding")


class _StaleError(Exception):
    """The server had closed a kept connection before it saw the request."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A server: an address or host name (IPv6 without brackets), its port, and whether to use TLS."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""
    server_name: str = ""
    """Name to verify and to send as SNI; empty: `host`."""


class CpuMeter:
    """Adds up the CPU time of the calling thread between `start` and `stop`, in seconds."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        """Begin a stretch of work."""
        self._began = time.thread_time()

    def stop(self) -> None:
        """End the stretch that `start` began."""
        self.seconds += time.thread_time() - self._began

    def take(self) -> float:
        """Return what has added up since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken


def read_buffer() -> memoryview:
    """Make a buffer that all connections of one event loop may share: what is read is used before the next read."""
    return memoryview(bytearray(_READ_BYTES))


def get_request(origin: Origin, path: str, headers: Mapping[str, str]) -> bytes:
    """Write a GET request. Headers of the caller replace the default ones. ValueError: a header that can not be sent."""
    host = f"[{origin.host.partition('%')[0]}]" if ":" in origin.host else origin.host
    default_port = 443 if origin.tls is not None else 80
    fields = {
        "host": host if origin.port == default_port else f"{host}:{origin.port}",
        # Uncompressed: more bytes on a local network cost less than gzip in the engine that also streams its tokens.
        "accept-encoding": "identity",
        **{name.lower(): value for name, value in headers.items()},
    }
    for name, value in fields.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"header {name!r} can not be sent")
    target = quote(path.partition("#")[0], safe=_PATH_KEEPS)
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode()


class KeptConnection:
    """Sends requests to one origin, on one connection that is kept for `idle_s` seconds after an answer.

    One `get` at a time, all in one event loop. `meter` runs when `get` is called and when it returns or raises; in
    between it runs while this connection works, and is stopped while it waits.
    """

    def __init__(self, origin: Origin, buffer: memoryview, meter: CpuMeter, *, idle_s: float) -> None:
        self._origin = origin
        self._buffer = buffer
        self._meter = meter
        self._idle_s = idle_s
        self._protocol: HttpProtocol | None = None

    async def get(self, request: bytes, *, timeout_s: float, max_bytes: int) -> bytes:
        """Send a request and return the body of the 200 that answers it; ScrapeFailedError says why there is none.

        A kept connection that turns out to be closed is replaced at once: the server never saw the request, and a GET
        may be sent twice.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self._protocol is not None and self._protocol.usable:
            try:
                return await self._ask(self._protocol, request, max_bytes, deadline)
            except _StaleError:
                pass
        self._meter.stop()
        try:
            async with asyncio.timeout_at(deadline):
                protocol = self._protocol = await self._connect()
        except TimeoutError as error:
            raise ScrapeFailedError(ScrapeFailure.TIMEOUT, "no connection in time") from error
        except ssl.SSLError as error:
            raise ScrapeFailedError(ScrapeFailure.TLS, str(error)) from error
        except (OSError, ValueError) as error:
            # ValueError: a host name that can not be looked up.
            raise ScrapeFailedError(ScrapeFailure.CONNECT, str(error) or type(error).__name__) from error
        finally:
            self._meter.start()
            self._meter.seconds += _CONNECT_CPU_S + (_HANDSHAKE_CPU_S if self._origin.tls is not None else 0.0)
        return await self._ask(protocol, request, max_bytes, deadline)

    async def close(self) -> None:
        """Close the connection; idempotent. Nothing is open afterwards."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.drop()
            await protocol.closed.wait()

    async def _connect(self) -> HttpProtocol:
        loop = asyncio.get_running_loop()
        origin = self._origin
        _, protocol = await loop.create_connection(
            lambda: HttpProtocol(loop, self._buffer, self._meter, self._idle_s),
            origin.host,
            origin.port,
            ssl=origin.tls,
            server_hostname=(origin.server_name or origin.host) if origin.tls is not None else None,
        )
        return protocol

    async def _ask(self, protocol: HttpProtocol, request: bytes, max_bytes: int, deadline: float) -> bytes:
        answer = protocol.send(request, max_bytes, deadline)
        self._meter.stop()
        try:
            return await answer
        finally:
            self._meter.start()
            if answer.cancelled():
                # The caller was cancelled: what may still come must not be taken for the next answer.
                protocol.drop()


class HttpProtocol(asyncio.BufferedProtocol):
    """One connection from its first byte to its last.

    `send` begins an exchange; its future ends with the body, ScrapeFailedError or `_StaleError`, at the deadline at the
    latest.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, buffer: memoryview, meter: CpuMeter, idle_s: float) -> None:
        self.closed = asyncio.Event()
        self._loop = loop
        self._buffer = buffer
        self._meter = meter
        self._idle_s = idle_s
        self._timer: asyncio.TimerHandle | None = None
        """Ends the exchange at its deadline, or the connection when it has been idle."""
        self._transport: Any = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[bytes] | None = None  # no exchange is under way
        self._answers = 0
        self._max_bytes = 0
        self._dropped = False
        self._begin()

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return not self._dropped and not self._transport.is_closing()

    def send(self, request: bytes, max_bytes: int, deadline: float) -> asyncio.Future[bytes]:
        """Send a request; `deadline` is a time of the event loop."""
        self._begin()
        self._max_bytes = max_bytes
        self._answer = answer = self._loop.create_future()
        if self.usable:
            self._set_timer(deadline, self._on_timeout)
            self._transport.write(request)
        else:
            # Between the connection and its first request.
            self._fail(ScrapeFailure.CONNECT, "closed before the request was sent")
        return answer

    def drop(self) -> None:
        """Close at once, whatever is under way."""
        self._dropped = True
        self._transport.abort()

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Name the buffer to read to; the CPU time from here on is this connection's."""
        self._meter.start()
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes that were read."""
        self._received += nbytes
        if self._answer is None:
            # No request is under way: some servers send 408 before they close an idle connection.
            self.drop()
        else:
            self._read(nbytes)
        self._meter.stop()

    def eof_received(self) -> None:
        """End an answer that has no length (RFC 9112 section 6.3); asyncio then closes."""
        if self._answer is not None and self._status == 200 and not self._sized:
            self._finish(keep=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange that is under way, if any."""
        self._dropped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._answer is not None and self._answers and not self._received:
            answer, self._answer = self._answer, None
            if not answer.done():
                answer.set_exception(_StaleError())
        elif isinstance(exc, ssl.SSLError):
            self._fail(ScrapeFailure.TLS, str(exc))
        else:
            self._fail(ScrapeFailure.CONNECT, str(exc or "closed before the answer was complete"))
        # The parser refers to methods of this object: a cycle.
        self._parser = None
        self.closed.set()

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Note an answer without a request, in the same bytes as the last one."""
        if self._answer is None:
            self._dropped = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep how the body is framed and encoded."""
        name = name.lower()
        if name not in _FRAMING:
            return
        if name == b"content-encoding":
            self._encoding = value.strip().lower()
        elif name == b"content-length" or value.lower().endswith(b"chunked"):
            self._sized = True

    def on_headers_complete(self) -> None:
        """Note the status."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Keep a piece, unless there is too much already."""
        self._body_bytes += len(body)
        if self._body_bytes <= self._max_bytes:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """End the exchange, unless this was an informational answer (1xx)."""
        if self._status < 200:
            self._status, self._sized = 0, False
        elif self._answer is not None:
            self._finish(keep=self._parser.should_keep_alive())

    # -- one answer ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._pieces: list[bytes] = []
        self._received = 0
        self._body_bytes = 0
        self._status = 0  # the head is not complete
        self._sized = False
        self._encoding = b""

    def _read(self, nbytes: int) -> None:
        """Feed the parser; fail as soon as the answer cannot become a page."""
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ScrapeFailure.CONNECT, f"the answer is not HTTP: {error}")
            self.drop()
        if self._answer is None:
            if self._dropped:
                self._transport.abort()
        elif self._status >= 200 and (why := self._refusal()) is not None:
            self._fail(*why)
        elif self._received > self._body_bytes + _HEAD_BYTES:
            self._fail(ScrapeFailure.TOO_LARGE, f"more than {_HEAD_BYTES} bytes around the body")

    def _refusal(self) -> tuple[ScrapeFailure, str] | None:
        """Return why the answer is refused, as far as it is known; None: it is not."""
        if self._status != 200:
            return ScrapeFailure.STATUS, f"status {self._status}"
        if self._encoding not in {b"", b"identity"}:
            return (
                ScrapeFailure.PARSE,
                f"content-encoding {self._encoding.decode('latin-1')}, where identity was asked for",
            )
        if self._body_bytes > self._max_bytes:
            return ScrapeFailure.TOO_LARGE, f"more than {self._max_bytes} bytes"
        return None

    def _finish(self, *, keep: bool) -> None:
        """End the exchange with a complete answer."""
        answer, self._answer = self._answer, None
        assert answer is not None
        self._answers += 1
        if not keep:
            self.drop()
        self._set_timer(self._loop.time() + self._idle_s, self.drop)
        if answer.done():
            return
        if (why := self._refusal()) is not None:
            answer.set_exception(ScrapeFailedError(*why))
        else:
            answer.set_result(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces))

    def _fail(self, reason: ScrapeFailure, detail: str) -> None:
        """End the exchange that is under way, if any, and the connection with it."""
        answer, self._answer = self._answer, None
        if answer is not None:
            self.drop()
            if not answer.done():
                answer.set_exception(ScrapeFailedError(reason, detail))

    def _set_timer(self, at: float, then: Callable[[], None]) -> None:
        """Have one timer: the last that was set."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, then)

    def _on_timeout(self) -> None:
        self._fail(ScrapeFailure.TIMEOUT, "no answer in time")
