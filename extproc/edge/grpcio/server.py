"""The gRPC port on grpc.aio: ext_proc, Envoy's access log and health; and the plaintext health port beside it.

This module binds, serves, drains and stops. What happens on a stream is in `stream` and `services`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import grpc

from extproc.config.schema import ServerConfig
from extproc.edge.grpcio.services import access_log_handler, health_handler
from extproc.edge.grpcio.stream import serve_stream
from extproc.edge.grpcio.tls import ServerTls
from extproc.edge.process.listen import ConnectionBounds
from extproc.edge.process.port_claim import SHARES_PORTS, PortClaim
from extproc.edge.services.access_log import AccessLogService, LogSink
from extproc.edge.services.health import EXT_PROC_SERVICE, HealthService
from extproc.errors import ConfigError, ConfigProblem
from extproc.protocol.shared import SessionShared

__all__ = ["GrpcioServer"]

_log = logging.getLogger(__name__)
_UNLIMITED: Final = 2**31 - 1
_HANDSHAKE_S: Final = 10
"""Time for TLS and the peer's SETTINGS, as on the native transport; gRPC's default is two minutes."""
_IDLE_S: Final = 300
_PROBE_IDLE_S: Final = 30
"""Time without a stream after which a connection is shut down, so that unused ones do not fill a port."""


def _options(
    port: int, max_message_bytes: int, bounds: ConnectionBounds, idle_s: int, max_age_s: float = 0.0
) -> list[tuple[str, int]]:
    # gRPC itself varies the age by a tenth, and lets open streams finish without a limit.
    age = [("grpc.max_connection_age_ms", max(1, int(max_age_s * 1000)))] if max_age_s else []
    return [
        *age,
        # Beyond it the newest are closed; neither these nor accepts that fail can be counted.
        ("grpc.max_allowed_incoming_connections", bounds.max_connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_S * 1000),
        ("grpc.max_connection_idle_ms", idle_s * 1000),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _UNLIMITED),
        # A burst of streams while the loop is busy is no attack; by default gRPC cancels some beyond 1,000.
        ("grpc.server.max_pending_requests", _UNLIMITED),
        ("grpc.server.max_pending_requests_hard_limit", _UNLIMITED),
        # For a successor, which binds the port too while we drain; the claim keeps others away. Not for a port that the
        # system has chosen.
        ("grpc.so_reuseport", int(SHARES_PORTS and bool(port))),
        # More than Envoy's limit of 60 KiB for request headers, of which metadata may repeat a part.
        ("grpc.max_metadata_size", 128 * 1024),
        # Gateways may keep idle connections alive by pings, however often.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


class GrpcioServer:
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
        bounds: tuple[ConnectionBounds, ConnectionBounds] | None = None,
    ) -> None:
        """`bounds` are those of the gRPC port and of the health port; of them only the bound counts here."""
        self._bounds = bounds or (
            ConnectionBounds("grpc", config.max_connections),
            ConnectionBounds("health", config.max_connections),
        )
        self._config = config
        self._shared = shared
        self._clock = clock
        self._streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tls: ServerTls | None = None
        self._server: grpc.aio.Server | None = None
        self._health_server: grpc.aio.Server | None = None
        self._claims: list[PortClaim] = []
        self.health = HealthService()
        self.access_log = AccessLogService(log_sink, shared.observer)
        self.grpc_port = 0
        """Bound port, once started."""
        self.health_port = 0
        """Bound plaintext health port, once started."""

    @property
    def open_streams(self) -> int:
        """How many ext_proc streams are open."""
        return self._streams

    def read_certificates_again(self) -> str:
        """Read the certificate files again; return the result for the log."""
        return self._tls.read_again() if self._tls is not None else "none"

    async def follow_certificates(self) -> None:
        """Return at once: gRPC itself asks for changed files at every handshake, on a thread of its own."""

    async def start(self) -> None:
        """Bind both ports and serve. Raises ConfigError where a port or a TLS file cannot be used."""
        config = self._config
        self._tls = ServerTls(config.tls)
        main, probes = self._bounds
        server = grpc.aio.server(
            options=_options(config.grpc_port, config.max_message_bytes, main, _IDLE_S, config.max_connection_age)
        )
        logs = access_log_handler(self.access_log, config.max_connection_age)
        server.add_generic_rpc_handlers((self._ext_proc_handler(), logs, health_handler(self.health)))
        self.grpc_port = self._bind(server, config.grpc_port, "server.grpc_port", self._tls.credentials)
        health_server = grpc.aio.server(
            options=_options(config.health_port, config.max_message_bytes, probes, _PROBE_IDLE_S)
        )
        health_server.add_generic_rpc_handlers((health_handler(self.health),))
        try:
            self.health_port = self._bind(health_server, config.health_port, "server.health_port", None)
        except ConfigError:
            await server.stop(None)
            raise
        await server.start()
        await health_server.start()
        self._server, self._health_server = server, health_server
        _log.info(
            "serving ext_proc",
            extra={"grpc_port": self.grpc_port, "health_port": self.health_port, "tls": config.tls.mode},
        )

    def _bind(self, server: grpc.aio.Server, port: int, key: str, credentials: grpc.ServerCredentials | None) -> int:
        """Bind a port, claimed until we drain, and return its number. Raises ConfigError naming the key."""
        host = self._config.host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self._claims.append(PortClaim(host, port))
            if credentials is None:
                bound: int = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, credentials)
        except (OSError, RuntimeError) as error:
            self._release_claims()
            problem = ConfigProblem(key, f"cannot listen on {address}: in use, or not permitted", "choose a free port")
            raise ConfigError((problem,)) from error
        return bound

    def _release_claims(self) -> None:
        for claim in self._claims:
            claim.release()

    async def stop(self, drain_delay_s: float | None = None, grace_s: float | None = None) -> None:
        """Drain and stop; the defaults are the configuration's.

        At once health is NOT_SERVING and a successor may bind the ports as well. After `drain_delay_s` the port closes
        and connections get GOAWAY; open ext_proc streams may finish within `grace_s`. Access log streams and health
        watches, which clients never end, are ended after the last ext_proc stream. No-op when repeated or never started.
        """
        server, health_server = self._server, self._health_server
        self.health.set_draining()
        self._release_claims()
        if server is None or health_server is None:
            return
        self._server = self._health_server = None
        await asyncio.sleep(self._config.drain_delay if drain_delay_s is None else drain_delay_s)
        grace_s = float(self._config.grace_period if grace_s is None else grace_s)
        _log.info("closing the gRPC port", extra={"open_streams": self._streams, "grace_s": grace_s})
        stopping = asyncio.ensure_future(server.stop(grace_s))
        idle = asyncio.ensure_future(self._idle.wait())
        try:
            await asyncio.wait((stopping, idle), return_when=asyncio.FIRST_COMPLETED)
            # Not by a second `stop`: grpc.aio 1.85 crashes when two of them overlap.
            self.access_log.close()
            self.health.close()
            await stopping
        finally:
            idle.cancel()
            await health_server.stop(None)

    def _ext_proc_handler(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_stream_rpc_method_handler(self._process)
        return grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": method})

    async def _process(self, _requests: Any, context: Any) -> None:
        self._streams += 1
        self._idle.clear()
        try:
            await serve_stream(self._shared, context, self._clock)
        finally:
            self._streams -= 1
            if not self._streams:
                self._idle.set()
