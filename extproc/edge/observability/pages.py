"""The two HTTP listeners: metrics and health for machines, admin pages for people.

Two, because they have different readers: Prometheus and the kubelet must reach `/metrics`, `/healthz` and `/readyz` from
outside; `/debug/...` shows addresses, model names and the configuration, and listens on loopback by default. The contents of
the pages are decided in `telemetry`, `decisions` and `config.load`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

from extproc.config.load import public_document
from extproc.edge.observability.decisions import RecentDecisions, endpoint_document
from extproc.edge.process.listen import ConnectionBounds, ListeningSocket, ProtocolListener, listening_socket
from extproc.errors import ConfigError, ConfigProblem
from extproc.router import Router

__all__ = ["AdminServer", "HttpListener", "IdleTimeouts", "MetricsServer"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_DEFAULT_LIMIT: Final = 50


class _OwnErrorsOnly(logging.Filter):
    """Keeps malformed HTTP of peers out of the log: aiohttp logs each with a traceback, so that any peer could fill it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


_log = logging.getLogger(f"{__name__}.server")
_log.addFilter(_OwnErrorsOnly())


@dataclass(frozen=True, slots=True)
class IdleTimeouts:
    """How long a connection may be idle before it is closed."""

    first_request_s: float = 10.0
    """Until the headers of the first request have arrived; the gRPC port has the same limit for its preface."""
    next_request_s: float = 75.0
    """From one request to the headers of the next, by when the answer must have been read, too. Above the default scrape
    interval of Prometheus (60 s), which keeps its connection."""


class HttpListener:
    """One listening port with fixed GET pages.

    `host_key` and `port_key` are the configuration keys named in the error when the port cannot be bound. A port with as
    many connections as its bounds allow closes the one whose last request is oldest.
    """

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, _Handler],
        bounds: ConnectionBounds,
        *,
        host_key: str,
        port_key: str,
        timeouts: IdleTimeouts | None = None,
    ) -> None:
        self.bounds: Final = bounds
        self.timeouts: Final = timeouts or IdleTimeouts()
        self.connections: dict[asyncio.Protocol, _HttpConnection] = {}
        """By aiohttp's own protocol, in the order of their last requests."""
        self._listener: ProtocolListener | None = None
        self._host = host
        self._asked_port = port
        self._host_key = host_key
        self._port_key = port_key
        self._bound: ListeningSocket | None = None
        app = web.Application(middlewares=[self._note_request])
        for path, handler in pages.items():
            app.router.add_get(path, handler)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, keepalive_timeout=self.timeouts.next_request_s, logger=_log
        )

    @property
    def port(self) -> int:
        """The port that is listened on (also where the configuration says 0); only after `start`."""
        assert self._listener is not None, "not started"
        return self._listener.port

    async def start(self) -> None:
        """Listen. Raises ConfigError, naming the key to change, where the address cannot be bound."""
        try:
            self._bound = listening_socket(self._host, self._asked_port)
        except OSError as error:
            raise ConfigError((self._problem(error),)) from error
        await self._runner.setup()
        self._listener = ProtocolListener(self._bound, self.bounds, self._make)

    def share(self) -> None:
        """Let a successor listen on the same port; only after `start`."""
        if self._bound is not None:
            self._bound.share()

    async def close(self) -> None:
        """Stop listening and end what is open; a second call does nothing."""
        self.share()
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _make(self) -> asyncio.Protocol:
        if self._runner.server is None:
            raise ConnectionAbortedError("the server is closed")
        return _HttpConnection(self, self._runner.server())

    @web.middleware
    async def _note_request(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        connection = self.connections.get(request.protocol)
        if connection is not None:
            connection.on_request()
        return await handler(request)

    def _problem(self, error: OSError) -> ConfigProblem:
        if error.errno == errno.EADDRINUSE:
            message = f"port {self._asked_port} on {self._host} is in use"
            return ConfigProblem(self._port_key, message, "set another port, or 0 for any free one")
        if error.errno == errno.EACCES:
            message = f"no permission to listen on port {self._asked_port}"
            return ConfigProblem(self._port_key, message, "set a port from 1024 on")
        message = f"cannot listen on {self._host}: {error.strerror or error}"
        return ConfigProblem(self._host_key, message, "set an address of this machine, or 0.0.0.0 for all")


class _HttpConnection(asyncio.Protocol):
    """One connection: aiohttp's protocol with idle timeouts; aiohttp has none before the first request."""

    def __init__(self, listener: HttpListener, inner: asyncio.Protocol) -> None:
        self._listener = listener
        self._inner = inner
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start; where the port is full, close the connection whose last request is oldest."""
        self._transport = transport
        connections, bounds = self._listener.connections, self._listener.bounds
        if len(connections) >= bounds.max_connections:
            oldest = next(iter(connections))
            connections.pop(oldest).abort()
            bounds.dropped("crowded", transport.get_extra_info("peername"))
        connections[self._inner] = self
        self._allow(self._listener.timeouts.first_request_s)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._listener.connections.pop(self._inner, None)
        if self._timer is not None:
            self._timer.cancel()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on."""
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self._inner.resume_writing()

    def on_request(self) -> None:
        """Note a request: the time for its answer and for the next request starts."""
        connections = self._listener.connections
        if connections.pop(self._inner, None) is not None:
            connections[self._inner] = self
            self._allow(self._listener.timeouts.next_request_s)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def _allow(self, time_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(time_s, self._on_silence)

    def _on_silence(self) -> None:
        self._listener.bounds.dropped("silent")
        self.abort()


class MetricsServer(HttpListener):
    """`/metrics`, `/healthz` (200 while the process can answer) and `/readyz` (200 or 503, with the reason)."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        ready: Callable[[], tuple[bool, str]],
        bounds: ConnectionBounds | None = None,
        timeouts: IdleTimeouts | None = None,
    ) -> None:
        self._registry = registry
        self._ready = ready
        pages = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        keys = {"host_key": "server.host", "port_key": "server.metrics_port"}
        super().__init__(host, port, pages, bounds or ConnectionBounds("metrics"), **keys, timeouts=timeouts)

    async def _metrics(self, request: web.Request) -> web.Response:
        """Serve the page in the format that the reader asks for.

        Values are collected here, on the event loop, because they belong to it; turning a thousand endpoints' series
        into text takes a tenth of a second, which is a thread's work.
        """
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        page = _Collected(tuple(self._registry.collect()))
        body = await asyncio.to_thread(encode, page)
        return web.Response(body=body, headers={"content-type": content_type, "cache-control": "no-store"})

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        ready, reason = self._ready()
        return web.Response(text=f"{reason}\n", status=200 if ready else 503)


class _Collected(CollectorRegistry):
    """A registry that returns families collected earlier."""

    def __init__(self, families: tuple[Metric, ...]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


class AdminServer(HttpListener):
    """`/` (what there is), `/debug/endpoints`, `/debug/decisions` and `/debug/config`, all JSON but the first."""

    def __init__(
        self,
        host: str,
        port: int,
        router: Router,
        decisions: RecentDecisions,
        clock: Callable[[], float],
        bounds: ConnectionBounds | None = None,
    ) -> None:
        """Make the server; `clock` is the router's."""
        self._router = router
        self._recent = decisions
        self._clock = clock
        routes = {
            "/": self._index,
            "/debug/endpoints": self._endpoints,
            "/debug/decisions": self._decisions,
            "/debug/config": self._config,
        }
        super().__init__(
            host, port, routes, bounds or ConnectionBounds("admin"), host_key="admin.host", port_key="admin.port"
        )

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text=_INDEX, content_type="text/html")

    async def _endpoints(self, _: web.Request) -> web.Response:
        now = self._clock()
        return _json({"endpoints": [endpoint_document(snapshot, now) for snapshot in self._router.snapshots(now)]})

    async def _decisions(self, request: web.Request) -> web.Response:
        query = request.query
        limit_text = query.get("limit", str(_DEFAULT_LIMIT))
        unknown = sorted(set(query) - {"limit", "endpoint", "id"})
        if unknown:
            return _json({"error": f"unknown filter {unknown[0]!r}; use limit, endpoint or id"}, status=400)
        if not (limit_text.isascii() and limit_text.isdigit() and len(limit_text) < 10):
            return _json({"error": "limit must be a whole number"}, status=400)
        found = self._recent.find(
            self._clock(), limit=int(limit_text), endpoint=query.get("endpoint"), decision_id=query.get("id")
        )
        return _json({"remembered": len(self._recent), "decisions": found})

    async def _config(self, _: web.Request) -> web.Response:
        return _json({"generation": self._router.generation, "config": public_document(self._router.config)})


def _json(document: object, *, status: int = 200) -> web.Response:
    body = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8")


_INDEX: Final = """\
<!doctype html>
<title>extproc</title>
<h1>extproc</h1>
<ul>
<li><a href="debug/endpoints">/debug/endpoints</a>: the state of each endpoint as the picker sees it
<li><a href="debug/decisions">/debug/decisions</a>: the last decisions with every score, newest first;
filters: ?limit=10, ?endpoint=10.0.0.7:8000, ?id=decision or request id
<li><a href="debug/config">/debug/config</a>: the configuration in force, secrets masked
</ul>
"""
