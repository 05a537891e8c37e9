"""What the connections of one port of the native transport share: settings, routes, memory accounting, the list of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from extproc.edge.native.calls import Call
from extproc.edge.process.listen import ConnectionBounds
from extproc.http2.limits import Limits
from extproc.protocol.interfaces import Observer
from extproc.protocol.request_buffer import BodyBudget

if TYPE_CHECKING:
    from extproc.edge.native.connection import NativeConnection
    from extproc.edge.native.stream import GrpcStream

__all__ = ["ConnectionSettings", "ListenerContext"]


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Times and sizes of every connection."""

    max_message_bytes: int
    max_partial_bytes: int | None = None
    """Bytes of messages of all connections that are incomplete or wait for a decision: a stream that exceeds it is
    refused. Also bytes of unread answers: the connection that exceeds it is ended. None: the budget of all bodies."""
    keepalive_s: float = 60.0
    """Silence after which a PING is sent: a stream may be silent for an hour, a dead peer must be found sooner."""
    keepalive_timeout_s: float = 20.0
    """Time the peer has to send anything after that PING (gRPC's default)."""
    preface_s: float = 10.0
    """Time for preface and SETTINGS; also for the peer's close, after ours."""
    max_age_s: float = 0.0
    """Age after which a connection is shut down gracefully; 0: never."""
    age_jitter: float = 0.1
    """Fraction of that age by which it varies between connections, up and down."""
    linger_s: float = 10.0
    """Time a peer has to end its half of a call after our half has ended; Envoy resets it within a round trip."""
    max_connections: int = 1000
    """Connections of one port at a time, TLS handshakes included; beyond it the oldest one that has not completed its
    preface is closed, and where there is none the newest is refused."""
    idle_yields: bool = False
    """Whether a connection without a stream is closed for a new one too."""
    limits: Limits = field(default_factory=Limits)


class ListenerContext:
    """What all connections of one port share."""

    def __init__(
        self,
        settings: ConnectionSettings,
        routes: Mapping[str, Callable[[GrpcStream], Call]],
        observer: Observer,
        clock: Callable[[], float],
        rng: random.Random,
        budget: BodyBudget,
        bounds: ConnectionBounds | None = None,
    ) -> None:
        self.settings = settings
        self.routes = routes
        """Factories of calls, by path."""
        self.observer = observer
        self.clock = clock
        self.rng = rng
        self.budget = budget
        """Charged with incomplete messages and unread answers."""
        self.bounds = bounds or ConnectionBounds("grpc", settings.max_connections, clock=clock)
        self.connections: dict[NativeConnection, None] = {}
        """Oldest first."""
        self.return_bytes = settings.limits.stream_window // 4
        """Bytes a stream takes before it returns flow-control credit."""
        self.partial_bytes = 0
        """Bytes of incomplete messages, and of messages that wait while their streams are paused."""
        self.unsent_bytes = 0
        """Bytes of answers that peers have not read."""
        self.on_gone: Callable[[], None] = lambda: None
        """Called when a connection was closed."""

    def admits(self, peer: str, handshakes: int = 0, drop_handshake: Callable[[], bool] = lambda: False) -> bool:
        """Return whether one more connection or handshake is admitted, closing another one for it if need be; count refusals.

        `drop_handshake` ends the oldest handshake and returns True, or False where there is none.
        """
        if len(self.connections) + handshakes < self.settings.max_connections:
            return True
        if drop_handshake() or self._drop_silent():
            self.bounds.dropped("crowded", peer)
            return True
        self.observer.protocol_error("too many connections")
        self.bounds.dropped("full", peer)
        return False

    def _drop_silent(self) -> bool:
        """Close the oldest connection that serves no stream and may be closed; False: there is none."""
        found = None
        for connection in self.connections:
            if connection.closing or not connection.http2.preface_received:
                found = connection
                break
            if found is None and self.settings.idle_yields and not connection.streams:
                found = connection
        if found is None:
            return False
        del self.connections[found]
        found.abort()
        return True

    @property
    def limit_bytes(self) -> int:
        """Limit of `partial_bytes`, and of `unsent_bytes`."""
        limit = self.settings.max_partial_bytes
        return self.budget.limit_bytes if limit is None else limit

    def count_partial(self, change_bytes: int) -> None:
        """Add to `partial_bytes`, and charge the budget."""
        self.partial_bytes += change_bytes
        self.budget.charge(change_bytes)
