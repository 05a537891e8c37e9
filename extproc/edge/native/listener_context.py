"""What the connections of the native transport share: times, sizes, services, and who of them is there."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from extproc.edge.native.calls import Call, CallStream
from extproc.edge.process.listen import ConnectionBounds
from extproc.http2.limits import Limits
from extproc.protocol.interfaces import Observer
from extproc.protocol.request_buffer import BodyBudget

if TYPE_CHECKING:
    from extproc.edge.native.connection import NativeConnection

__all__ = ["ConnectionSettings", "ListenerContext"]


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Times and sizes of every connection."""

    max_message_bytes: int
    max_partial_bytes: int | None = None
    """None: as many as the budget of all bodies has, as it is at the time. Messages of all connections together that are incomplete or wait for a decision: a stream that goes beyond is refused.
    Also answers that wait for peers that do not read them: the connection that goes beyond is ended."""
    keepalive_s: float = 60.0
    """Silence after which the peer is asked whether it lives. A silent stream is legitimate for an hour, a dead peer is not."""
    keepalive_timeout_s: float = 20.0
    """Time it has to say anything at all (gRPC's default)."""
    preface_s: float = 10.0
    """Time for preface and SETTINGS; also for leaving, once a connection is to be closed."""
    max_age_s: float = 0.0
    """Age after which the peer is asked to connect anew; 0: never."""
    age_jitter: float = 0.1
    """Share by which that age differs from connection to connection, up and down."""
    linger_s: float = 10.0
    """Time a peer has to end its half of a call that we have left; Envoy resets it within a round trip."""
    max_connections: int = 1000
    """Connections of one port at a time, TLS handshakes among them; then those make place that have said nothing, and where
    there is none the newest is refused."""
    idle_yields: bool = False
    """Whether connections without a stream make place too."""
    limits: Limits = field(default_factory=Limits)


class ListenerContext:
    """What all connections of one port share."""

    def __init__(
        self,
        settings: ConnectionSettings,
        routes: Mapping[str, Callable[[CallStream], Call]],
        observer: Observer,
        clock: Callable[[], float],
        rng: random.Random,
        budget: BodyBudget,
        bounds: ConnectionBounds | None = None,
    ) -> None:
        self.settings = settings
        self.routes = routes
        """By path: what makes the call."""
        self.observer = observer
        self.clock = clock
        self.rng = rng
        self.budget = budget
        """Counts what peers that do not read, or do not end their messages, make us keep."""
        self.bounds = bounds or ConnectionBounds("grpc", settings.max_connections, clock=clock)
        self.connections: dict[NativeConnection, None] = {}
        """The oldest first."""
        self.return_bytes = settings.limits.stream_window // 4
        """What a stream takes before it tells HTTP/2, which tells the peer of no less than twice as much."""
        self.partial_bytes = 0
        """Incomplete messages, and messages that wait while their streams are paused."""
        self.unsent_bytes = 0
        """Answers that peers do not take."""
        self.on_gone: Callable[[], None] = lambda: None
        """Called when a connection has gone."""

    def admits(self, peer: str, handshakes: int = 0, drop_handshake: Callable[[], bool] = lambda: False) -> bool:
        """Tell whether there is room for one more connection or handshake, or make it; if there is none, count it.

        `drop_handshake` ends the oldest one and returns True, or there is none.
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
        """Close the oldest connection that is of no use to anybody; False: there is none."""
        found = None
        for connection in self.connections:
            if connection.over or not connection.http2.preface_received:
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
        """How much may be incomplete, and how much unread, at present."""
        limit = self.settings.max_partial_bytes
        return self.budget.limit_bytes if limit is None else limit

    def count_partial(self, change_bytes: int) -> None:
        """Count incomplete and waiting messages that came or went, here and among all that is held."""
        self.partial_bytes += change_bytes
        self.budget.charge(change_bytes)
