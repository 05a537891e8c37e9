"""The gRPC port and the plaintext health port on our own HTTP/2 transport: bind, serve, drain and stop.

What happens on a connection is in `connection`, what a call answers in `calls`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

from extproc.config.schema import ServerConfig
from extproc.edge.native.calls import AccessLogCall, Call, CheckCall, OpenStreams, ProcessCall, WatchCall
from extproc.edge.native.connection import NativeConnection, peer_name
from extproc.edge.native.listener_context import ConnectionSettings, ListenerContext
from extproc.edge.native.stream import GrpcStream
from extproc.edge.native.tls import ServerTls, TlsListener
from extproc.edge.process.listen import ConnectionBounds, Listener, ListeningSocket, ProtocolListener, listening_socket
from extproc.edge.services.access_log import AccessLogService, LogSink
from extproc.edge.services.health import EXT_PROC_SERVICE, HealthService
from extproc.errors import ConfigError, ConfigProblem
from extproc.protocol.shared import SessionShared

__all__ = ["NativeServer"]

_log = logging.getLogger(__name__)
_CLOSE_S: Final = 1.0
"""Time for connections to read their GOAWAY: those without open streams, and all of them at the end."""
_POLL_S: Final = 0.01


class NativeServer:
    """Serves ext_proc streams until stopped.

    Starts NOT_SERVING; `health.set_ready(True)` makes gateways that check it send requests.
    """

    def __init__(
        self,
        config: ServerConfig,
        shared: SessionShared,
        log_sink: LogSink,
        *,
        clock: Callable[[], float] = time.monotonic,
        settings: ConnectionSettings | None = None,
        rng: random.Random | None = None,
        bounds: tuple[ConnectionBounds, ConnectionBounds] | None = None,
    ) -> None:
        """`bounds` are those of the gRPC port and of the health port."""
        self._config = config
        self._bounds = bounds or (
            ConnectionBounds("grpc", config.max_connections),
            ConnectionBounds("health", config.max_connections),
        )
        self._settings = settings or ConnectionSettings(
            config.max_message_bytes,
            max_connections=self._bounds[0].max_connections,
            max_age_s=config.max_connection_age,
            age_jitter=config.max_connection_age_jitter,
        )
        self._rng = rng or random.Random()
        self._changed = asyncio.Event()
        self._streams = OpenStreams(self._changed.set)
        self._servers: tuple[Listener, Listener] | None = None
        self._bound: list[ListeningSocket] = []
        self._tls: ServerTls | None = None
        self._main: ListenerContext | None = None
        self._probes: ListenerContext | None = None
        self.shared = shared
        self.clock = clock
        self.health = HealthService()
        self.access_log = AccessLogService(log_sink, shared.observer)
        self.grpc_port = 0
        """Bound port, once started."""
        self.health_port = 0
        """Bound plaintext health port, once started."""

    @property
    def open_streams(self) -> int:
        """How many ext_proc streams are open."""
        return self._streams.count

    def read_certificates_again(self) -> str:
        """Read the certificate files again; return the result for the log."""
        return self._tls.read_again() if self._tls is not None else "none"

    async def follow_certificates(self) -> None:
        """Read certificate files that change, for as long as it runs; returns at once where there are none."""
        if self._tls is not None:
            await self._tls.follow_files()

    async def start(self) -> None:
        """Bind both ports and serve. Raises ConfigError where a port or a TLS file cannot be used."""
        config = self._config
        self._tls = ServerTls(config.tls)
        loop = asyncio.get_running_loop()
        probes: dict[str, Callable[[GrpcStream], Call]] = {
            "/grpc.health.v1.Health/Check": lambda stream: CheckCall(self.health, stream),
            "/grpc.health.v1.Health/Watch": lambda stream: WatchCall(self.health, stream),
        }
        services: dict[str, Callable[[GrpcStream], Call]] = {
            f"/{EXT_PROC_SERVICE}/Process": lambda stream: ProcessCall(
                self.shared, stream, self.clock, loop, self._streams
            ),
            "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs": lambda stream: AccessLogCall(
                self.access_log, stream
            ),
            **probes,
        }
        main, other = self._bounds
        self._main = self._context(services, self._settings, main)
        few = min(other.max_connections, self._settings.max_connections)
        self._probes = self._context(probes, replace(self._settings, max_connections=few, idle_yields=True), other)
        bound = _bind(config.host, config.grpc_port, "server.grpc_port")
        server = _listen(self._main, bound, self._tls.context)
        try:
            health_bound = _bind(config.host, config.health_port, "server.health_port")
        except ConfigError:
            server.close()
            bound.share()
            raise
        health_server = _listen(self._probes, health_bound, None)
        self._bound = [bound, health_bound]
        self._servers = (server, health_server)
        self.grpc_port, self.health_port = server.port, health_server.port
        _log.info(
            "serving ext_proc",
            extra={"grpc_port": self.grpc_port, "health_port": self.health_port, "tls": config.tls.mode},
        )

    def _context(
        self, routes: dict[str, Callable[[GrpcStream], Call]], settings: ConnectionSettings, bounds: ConnectionBounds
    ) -> ListenerContext:
        context = ListenerContext(
            settings, routes, self.shared.observer, self.clock, self._rng, self.shared.budget, bounds
        )
        context.on_gone = self._changed.set
        return context

    async def stop(self, drain_delay_s: float | None = None, grace_s: float | None = None) -> None:
        """Drain and stop; the defaults are the configuration's.

        At once health is NOT_SERVING and a successor may bind the ports as well. After `drain_delay_s` the port closes
        and connections get GOAWAY; open ext_proc streams, and those that peers open before they read it, may finish
        within `grace_s`. Access log streams and health watches, which clients never end, are ended after the last
        ext_proc stream. No-op when repeated or never started.
        """
        self.health.set_draining()
        if self._servers is None or self._main is None or self._probes is None:
            return
        (server, health_server), self._servers = self._servers, None
        for bound in self._bound:
            bound.share()
        try:
            await asyncio.sleep(self._config.drain_delay if drain_delay_s is None else drain_delay_s)
            grace_s = float(self._config.grace_period if grace_s is None else grace_s)
            _log.info("closing the gRPC port", extra={"open_streams": self._streams.count, "grace_s": grace_s})
            server.finish()
            if server.opening and grace_s:
                await asyncio.wait(server.opening, timeout=min(grace_s, _CLOSE_S))
            for connection in tuple(self._main.connections):
                connection.shut_down()
            self._streams.draining = True
            await self._last_streams(self._main.connections, grace_s)
            self.access_log.close()
            self.health.close()
            # Connections whose peers have answered the PING of the shutdown close by themselves; the others here.
            for connection in tuple(self._main.connections):
                if not connection.streams:
                    connection.http2.refuse_streams()
                    connection.flush()
        finally:
            server.close()
            health_server.close()
            for context in (self._main, self._probes):
                for connection in tuple(context.connections):
                    connection.terminate()
            connections = self._main.connections, self._probes.connections
            await self._until(lambda: not any(connections), _CLOSE_S)
            for connection in (*self._main.connections, *self._probes.connections):
                connection.abort()

    async def _last_streams(self, connections: Collection[NativeConnection], limit_s: float) -> None:
        """Wait until no stream is open and no peer will open one, at most `limit_s`."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while (left_s := started_at + limit_s - loop.time()) > 0:
            await self._until(lambda: not self._streams.count, left_s)
            read = all(connection.http2.refuses_streams for connection in connections)
            if read or loop.time() - started_at > _CLOSE_S:
                return
            # Streams that a peer opened before it read our GOAWAY may still arrive.
            await asyncio.sleep(_POLL_S)

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait for a condition that changes with streams and connections, at most `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return


def _bind(address: str, port: int, key: str) -> ListeningSocket:
    """Bind a port. Raises ConfigError naming the key."""
    try:
        return listening_socket(address, port)
    except OSError as error:
        shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        problem = ConfigProblem(key, f"cannot listen on {shown}: in use, or not permitted", "choose a free port")
        raise ConfigError((problem,)) from error


def _listen(context: ListenerContext, bound: socket.socket, tls: ssl.SSLContext | None) -> Listener:
    """Serve on a bound socket; `tls` None: plaintext."""
    loop = asyncio.get_running_loop()
    if tls is None:
        return ProtocolListener(bound, context.bounds, lambda: NativeConnection(context, loop))

    def failed(how: str, peer: Any, problem: str) -> None:
        context.observer.protocol_error(f"tls handshake {how}")
        if how == "timeout":
            context.bounds.dropped("silent", peer)
        _log.warning("a TLS handshake failed", extra={"problem": problem, "peer": peer_name(peer)})

    def admits(address: Any, handshakes: int, drop_handshake: Callable[[], bool]) -> bool:
        return context.admits(peer_name(address), handshakes, drop_handshake)

    return TlsListener(
        bound,
        tls,
        lambda: NativeConnection(context, loop),
        context.settings.preface_s,  # the handshake has as long as the preface
        failed,
        context.bounds,
        admits,
    )
