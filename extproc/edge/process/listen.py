"""Listening sockets: which addresses one host stands for, when another process may listen beside us, how connections are taken.

The last not by the loops' own servers, because these say nothing where no descriptor is left: asyncio leaves the peers
waiting a second at a time, and uvloop (libuv) accepts and closes them. Who is let in is the owner's concern.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from extproc.edge.process.descriptors import Reserve
from extproc.edge.process.port_claim import SHARES_PORTS, PortClaim

__all__ = [
    "DROP_REASONS",
    "LISTENERS",
    "Door",
    "Listener",
    "ListeningSocket",
    "NullPortObserver",
    "PortObserver",
    "ProtocolListener",
    "listening_socket",
]

_log = logging.getLogger(__name__)

LISTENERS: Final = ("grpc", "health", "metrics", "admin")
DROP_REASONS: Final = ("full", "crowded", "silent")
"""`full`: a new connection had no place; `crowded`: one that says nothing made place for a new one; `silent`: one has said
nothing for too long."""

BACKLOG: Final = 1024
_ACCEPTS: Final = 16
"""Connections accepted in one turn of the loop: those that make place for them are closed in the next one."""
_RETRY_S: Final = 1.0
"""Pause when there is no descriptor or no memory for a connection, as asyncio's."""
_TOLD_EVERY_S: Final = 10.0
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})


class PortObserver(Protocol):
    """Who counts what becomes of connections; `listener` is one of `LISTENERS`, `reason` one of `DROP_REASONS`."""

    def accept_failed(self, listener: str) -> None:
        """Count a connection that could not be accepted."""

    def connection_dropped(self, listener: str, reason: str) -> None:
        """Count a connection that was closed to keep a port within its bounds."""


class NullPortObserver:
    """Counts nothing."""

    def accept_failed(self, listener: str) -> None:
        """Count nothing."""

    def connection_dropped(self, listener: str, reason: str) -> None:
        """Count nothing."""


class Door:
    """What one port is given: its name, how many connections it may have, who counts, and a reserve of descriptors."""

    def __init__(
        self,
        name: str,
        most: int = 1000,
        observer: PortObserver | None = None,
        *,
        reserve: Reserve | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        assert name in LISTENERS, name
        self.name: Final = name
        self.most: Final = most
        self.reserve: Final = reserve or Reserve()
        self._observer = observer or NullPortObserver()
        self._clock = clock
        self._told_at: dict[str, float] = {}

    def dropped(self, reason: str, peer: Any = "") -> None:
        """Count a connection that was closed to keep the port within its bounds; log the first in a while."""
        self._observer.connection_dropped(self.name, reason)
        if reason != "silent" and self._may_tell(reason):
            done = "the newest are refused" if reason == "full" else "those that say nothing make place"
            extra = {"listener": self.name, "most": self.most, "peer": peer}
            _log.warning(f"too many connections: {done}", extra=extra)

    def failed(self, error: OSError) -> None:
        """Count a connection that could not be accepted; log the first in a while."""
        self._observer.accept_failed(self.name)
        if self._may_tell("failed"):
            remedy = "; raise the limit (ulimit -n)" if error.errno in _NO_DESCRIPTOR else ""
            _log.error(f"cannot accept a connection{remedy}", extra={"listener": self.name, "problem": str(error)})

    def _may_tell(self, what: str) -> bool:
        now = self._clock() if self._clock is not None else asyncio.get_running_loop().time()
        if now - self._told_at.get(what, -math.inf) < _TOLD_EVERY_S:
            return False
        self._told_at[what] = now
        return True


class Listener:
    """Takes connections from a bound, listening socket of the running loop, and goes on whatever happens."""

    def __init__(self, bound: socket.socket, door: Door, take: Callable[[socket.socket, Any], None]) -> None:
        """`take` gets each connection, non-blocking, and its peer's address."""
        self.sockets = (bound,)
        """The listening socket, as `asyncio.Server` has it."""
        self._door = door
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
        """What makes connections of those that were taken and are not connections yet."""
        return ()

    def finish(self) -> None:
        """Take what waits, then accept nothing more: closing alone would reset whoever the system has put in the queue."""
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
                self._door.failed(error)
                if error.errno in _NO_DESCRIPTOR and self._door.reserve.give():
                    self._refill_later()
                    continue
                # The peer stays in the queue, and the socket readable: asking again at once would take a whole core.
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
            except Exception:  # noqa: BLE001 - a defect must cost this connection, not the port
                _log.exception("a connection could not be taken", extra={"listener": self._door.name})
                connection.close()

    def _refill_later(self) -> None:
        if self._refill is None:
            self._refill = self._loop.call_later(_RETRY_S, self._on_refill)

    def _on_refill(self) -> None:
        self._refill = None
        self._door.reserve.refill()
        if not self._door.reserve.full:
            self._refill_later()


class ProtocolListener(Listener):
    """A listener in plaintext whose connections are protocols of the loop."""

    def __init__(self, bound: socket.socket, door: Door, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make
        self._opening: set[asyncio.Task[None]] = set()
        super().__init__(bound, door, self._on_connection)

    @property
    def opening(self) -> Collection[asyncio.Task[None]]:
        """What makes connections of those that were taken and are not connections yet."""
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
        except Exception:  # noqa: BLE001 - a defect must cost this connection, not the port
            _log.exception("a connection could not be taken", extra={"listener": self._door.name})
            connection.close()


class ListeningSocket(socket.socket):
    """A listening socket whose port nobody else has until it is shared or closed."""

    claim: PortClaim | None = None

    def share(self) -> None:
        """Let a successor listen on the same port from now on; harmless when repeated."""
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
    shared = SHARES_PORTS and bool(port)  # nobody comes to a port that the system has chosen
    if host in {"0.0.0.0", "::"} and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, reuse_port=shared, dualstack_ipv6=True)
        except OSError:
            _log.debug("no IPv6 here; listening on IPv4 alone")
            host = "0.0.0.0"
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, reuse_port=shared)
