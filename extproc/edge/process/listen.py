"""Listening sockets: the addresses a host name means, sharing a port with another process, and accepting connections.

Connections are accepted here and not by the event loops' own servers, because these report nothing when no descriptor is
left: asyncio lets the peers wait a second at a time, and uvloop (libuv) accepts and closes them. Which connections are kept
is decided by the owner of the listener.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Callable, Collection
from typing import Any, Final

from extproc.edge.process.descriptors import Reserve
from extproc.edge.process.port_claim import SHARES_PORTS, PortClaim

__all__ = [
    "DROP_REASONS",
    "LISTENERS",
    "ConnectionBounds",
    "Listener",
    "ListeningSocket",
    "PortObserver",
    "ProtocolListener",
    "listening_socket",
]

_log = logging.getLogger(__name__)

LISTENERS: Final = ("grpc", "health", "metrics", "admin")
DROP_REASONS: Final = ("full", "crowded", "silent")
"""`full`: a new connection was refused; `crowded`: an idle one was closed for a new one; `silent`: one was idle for too
long."""

BACKLOG: Final = 1024
_ACCEPTS: Final = 16
"""Connections accepted in one iteration of the loop: those closed for new ones are gone only in the next one."""
_RETRY_S: Final = 1.0
"""Pause when there is no descriptor or no memory for a connection, as in asyncio."""
_LOG_EVERY_S: Final = 10.0
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})


class PortObserver:
    """Counts what becomes of connections; these methods do nothing. `listener` is one of `LISTENERS`, `reason` of `DROP_REASONS`."""

    def accept_failed(self, listener: str) -> None:
        """Count a connection that could not be accepted."""

    def connection_dropped(self, listener: str, reason: str) -> None:
        """Count a connection that was closed to keep a port within its bounds."""


class ConnectionBounds:
    """What one port is given: its name, its most connections, what counts and logs drops, and a reserve of descriptors."""

    def __init__(
        self,
        name: str,
        max_connections: int = 1000,
        observer: PortObserver | None = None,
        *,
        reserve: Reserve | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        assert name in LISTENERS, name
        self.name: Final = name
        self.max_connections: Final = max_connections
        self.reserve: Final = reserve or Reserve()
        self._observer = observer or PortObserver()
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def dropped(self, reason: str, peer: Any = "") -> None:
        """Count a connection that was closed to keep the port within its bounds; log one in ten seconds."""
        self._observer.connection_dropped(self.name, reason)
        if reason != "silent" and self._may_log(reason):
            done = "the newest are refused" if reason == "full" else "idle ones are closed"
            extra = {"listener": self.name, "max_connections": self.max_connections, "peer": peer}
            _log.warning(f"too many connections: {done}", extra=extra)

    def failed(self, error: OSError) -> None:
        """Count a connection that could not be accepted; log one in ten seconds."""
        self._observer.accept_failed(self.name)
        if self._may_log("failed"):
            remedy = "; raise the limit (ulimit -n)" if error.errno in _NO_DESCRIPTOR else ""
            _log.error(f"cannot accept a connection{remedy}", extra={"listener": self.name, "problem": str(error)})

    def _may_log(self, what: str) -> bool:
        now = self._clock() if self._clock is not None else asyncio.get_running_loop().time()
        if now - self._logged_at.get(what, -math.inf) < _LOG_EVERY_S:
            return False
        self._logged_at[what] = now
        return True


class Listener:
    """Accepts connections on a bound socket of the running loop, and continues after every error."""

    def __init__(
        self, bound: socket.socket, bounds: ConnectionBounds, take: Callable[[socket.socket, Any], None]
    ) -> None:
        """`take` gets each connection, non-blocking, and its peer's address."""
        self.sockets = (bound,)
        """The listening socket, as in `asyncio.Server`."""
        self._bounds = bounds
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._refill: asyncio.TimerHandle | None = None
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._listen()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        port: int = self.sockets[0].getsockname()[1]
        return port

    @property
    def opening(self) -> Collection[asyncio.Task[None]]:
        """Tasks of accepted sockets that are not connections yet, such as TLS handshakes."""
        return ()

    def finish(self) -> None:
        """Accept what is in the backlog, then close: closing alone would reset the connections in the backlog."""
        if self.sockets[0].fileno() >= 0:
            self._accept(BACKLOG)
            Listener.close(self)

    def close(self) -> None:
        """Accept nothing more. Harmless when repeated."""
        (bound,) = self.sockets
        if bound.fileno() < 0:
            return
        for timer in (self._retry, self._refill):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(bound)
        bound.close()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self.sockets[0], self._accept)

    def _accept(self, most: int = _ACCEPTS) -> None:
        (bound,) = self.sockets
        for _ in range(most):
            try:
                connection, address = bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._bounds.failed(error)
                if error.errno in _NO_DESCRIPTOR and self._bounds.reserve.release():
                    self._refill_later()
                    continue
                # The connection stays in the backlog and the socket readable: trying again at once would use a whole core.
                self._loop.remove_reader(bound)
                self._retry = self._loop.call_later(_RETRY_S, self._listen)
                return
            try:
                connection.setblocking(False)
                # asyncio does so only for sockets that name their protocol, which an accepted one does not.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._take(connection, address)
            except OSError:
                connection.close()  # the peer has gone
            except Exception:  # noqa: BLE001 - an error must cost this connection, not the port
                _log.exception("a connection could not be set up", extra={"listener": self._bounds.name})
                connection.close()

    def _refill_later(self) -> None:
        if self._refill is None:
            self._refill = self._loop.call_later(_RETRY_S, self._on_refill)

    def _on_refill(self) -> None:
        self._refill = None
        self._bounds.reserve.refill()
        if not self._bounds.reserve.full:
            self._refill_later()


class ProtocolListener(Listener):
    """A plaintext listener whose connections are asyncio protocols."""

    def __init__(self, bound: socket.socket, bounds: ConnectionBounds, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make
        self._opening: set[asyncio.Task[None]] = set()
        super().__init__(bound, bounds, self._on_connection)

    @property
    def opening(self) -> Collection[asyncio.Task[None]]:
        """Tasks of accepted sockets that are not connections yet, such as TLS handshakes."""
        return tuple(self._opening)

    def _on_connection(self, connection: socket.socket, _address: Any) -> None:
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError:
            connection.close()  # the peer has gone
        except Exception:  # noqa: BLE001 - an error must cost this connection, not the port
            _log.exception("a connection could not be set up", extra={"listener": self._bounds.name})
            connection.close()


class ListeningSocket(socket.socket):
    """A listening socket whose port is ours alone until it is shared or closed."""

    claim: PortClaim | None = None

    def share(self) -> None:
        """Let a successor listen on the same port from now on. A second call does nothing."""
        if self.claim is not None:
            self.claim.release()

    def close(self) -> None:
        """Listen no more."""
        self.share()
        super().close()


def listening_socket(host: str, port: int) -> ListeningSocket:
    """Return a socket that listens on `host`; `0.0.0.0` and `::` are all addresses of both families, as with gRPC.

    Another picker can have the port beside it from `share` on. Raises OSError where the address cannot be had.
    """
    claim = PortClaim(host, port)
    try:
        made = ListeningSocket(fileno=_listening(host, port).detach())
    except BaseException:
        claim.release()
        raise
    made.claim = claim
    return made


def _listening(host: str, port: int) -> socket.socket:
    shared = SHARES_PORTS and bool(port)  # no successor looks for a port that the system has chosen
    if host in {"0.0.0.0", "::"} and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, reuse_port=shared, dualstack_ipv6=True)
        except OSError:
            _log.debug("no IPv6 here; listening on IPv4 alone")
            host = "0.0.0.0"
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, reuse_port=shared)
