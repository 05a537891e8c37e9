"""The two HTTP listeners: metrics and health for machines, admin pages for people.

Two, because they have different readers: Prometheus and the kubelet must reach `/metrics`, `/healthz` and `/readyz` from
outside; `/debug/...` shows addresses, model names and the configuration, and listens on loopback unless told otherwise.
What a page shows is decided elsewhere (`telemetry`, `decisions`, `config.load`).
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

from extproc.config.load import public_document
from extproc.config.schema import Config
from extproc.edge.decisions import RecentDecisions, endpoint_document
from extproc.edge.listen import ListeningSocket, listening_socket
from extproc.errors import ConfigError, ConfigProblem
from extproc.vocabulary import EndpointSnapshot

__all__ = ["AdminPages", "AdminServer", "HttpListener", "MetricsServer"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_DEFAULT_LIMIT: Final = 50


class HttpListener:
    """One listening port with fixed GET pages.

    `host_key` and `port_key` are the configuration keys to name when the port cannot be had.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, _Handler], *, host_key: str, port_key: str) -> None:
        self._host = host
        self._asked_port = port
        self._host_key = host_key
        self._port_key = port_key
        self._bound: ListeningSocket | None = None
        app = web.Application()
        for path, handler in pages.items():
            app.router.add_get(path, handler)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)

    @property
    def port(self) -> int:
        """The port that is listened on (also where the configuration says 0); only after `start`."""
        addresses: list[Any] = self._runner.addresses
        return int(addresses[0][1])

    async def start(self) -> None:
        """Listen. Raises ConfigError, naming the key to change, where the address cannot be had."""
        await self._runner.setup()
        try:
            self._bound = listening_socket(self._host, self._asked_port)
            await web.SockSite(self._runner, self._bound).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError((self._problem(error),)) from error

    def share(self) -> None:
        """Let a successor listen on the same port; only after `start`."""
        if self._bound is not None:
            self._bound.share()

    async def close(self) -> None:
        """Stop listening and end what is open; a second call does nothing."""
        self.share()
        await self._runner.cleanup()

    def _problem(self, error: OSError) -> ConfigProblem:
        if error.errno == errno.EADDRINUSE:
            message = f"port {self._asked_port} on {self._host} is in use"
            return ConfigProblem(self._port_key, message, "set another port, or 0 for any free one")
        if error.errno == errno.EACCES:
            message = f"no permission to listen on port {self._asked_port}"
            return ConfigProblem(self._port_key, message, "set a port from 1024 on")
        message = f"cannot listen on {self._host}: {error.strerror or error}"
        return ConfigProblem(self._host_key, message, "set an address of this machine, or 0.0.0.0 for all")


class MetricsServer(HttpListener):
    """`/metrics`, `/healthz` (200 while the process can answer) and `/readyz` (200 or 503, with the reason)."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, ready: Callable[[], tuple[bool, str]]
    ) -> None:
        self._registry = registry
        self._ready = ready
        pages = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        super().__init__(host, port, pages, host_key="server.host", port_key="server.metrics_port")

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
    """Families collected earlier, in a registry's clothes."""

    def __init__(self, families: tuple[Metric, ...]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


@dataclass(frozen=True, slots=True)
class AdminPages:
    """Where the admin pages read what they show; called on the event loop."""

    endpoints: Callable[[], Iterable[EndpointSnapshot]]
    decisions: RecentDecisions
    config: Callable[[], Config]
    generation: Callable[[], int] = lambda: 1
    now: Callable[[], float] = time.monotonic
    """The router's clock."""


class AdminServer(HttpListener):
    """`/` (what there is), `/debug/endpoints`, `/debug/decisions` and `/debug/config`, all JSON but the first."""

    def __init__(self, host: str, port: int, pages: AdminPages) -> None:
        self._pages = pages
        routes = {
            "/": self._index,
            "/debug/endpoints": self._endpoints,
            "/debug/decisions": self._decisions,
            "/debug/config": self._config,
        }
        super().__init__(host, port, routes, host_key="admin.host", port_key="admin.port")

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text=_INDEX, content_type="text/html")

    async def _endpoints(self, _: web.Request) -> web.Response:
        now = self._pages.now()
        return _json({"endpoints": [endpoint_document(snapshot, now) for snapshot in self._pages.endpoints()]})

    async def _decisions(self, request: web.Request) -> web.Response:
        query = request.query
        limit_text = query.get("limit", str(_DEFAULT_LIMIT))
        unknown = sorted(set(query) - {"limit", "endpoint", "id"})
        if unknown:
            return _json({"error": f"unknown filter {unknown[0]!r}; there are limit, endpoint and id"}, status=400)
        if not (limit_text.isascii() and limit_text.isdigit() and len(limit_text) < 10):
            return _json({"error": "limit is a whole number"}, status=400)
        recent = self._pages.decisions
        found = recent.find(
            self._pages.now(), limit=int(limit_text), endpoint=query.get("endpoint"), decision_id=query.get("id")
        )
        return _json({"remembered": len(recent), "decisions": found})

    async def _config(self, _: web.Request) -> web.Response:
        return _json({"generation": self._pages.generation(), "config": public_document(self._pages.config())})


def _json(document: object, *, status: int = 200) -> web.Response:
    body = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8")


_INDEX: Final = """\
<!doctype html>
<title>extproc</title>
<h1>extproc</h1>
<ul>
<li><a href="debug/endpoints">/debug/endpoints</a>: what the picker believes of each endpoint
<li><a href="debug/decisions">/debug/decisions</a>: the last decisions with every score, newest first;
filters: ?limit=10, ?endpoint=10.0.0.7:8000, ?id=decision or request id
<li><a href="debug/config">/debug/config</a>: the configuration in force, secrets masked
</ul>
"""
