"""What the connections of the native transport share: times, sizes, services, and who of them is there."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from extproc.edge.native_calls import Call, CallStream
from extproc.http2.limits import Limits
from extproc.protocol.seams import StreamObserver

if TYPE_CHECKING:
    from extproc.edge.native_connection import NativeConnection

__all__ = ["ConnectionSettings", "Host"]


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Times and sizes of every connection."""

    max_message_bytes: int
    max_partial_bytes: int
    """Incomplete messages of all connections together; a stream that goes beyond is refused."""
    keepalive_s: float = 60.0
    """Silence after which the peer is asked whether it lives. A silent stream is legitimate for an hour, a dead peer is not."""
    keepalive_timeout_s: float = 20.0
    """Time it has to say anything at all (gRPC's default)."""
    preface_s: float = 10.0
    """Time for preface and SETTINGS; also for leaving, once a connection is to be closed."""
    max_age_s: float | None = None
    """Age after which the peer is asked to connect anew, give or take a tenth; None: never."""
    limits: Limits = field(default_factory=Limits)


class Host:
    """What all connections of one port share."""

    def __init__(
        self,
        settings: ConnectionSettings,
        routes: Mapping[str, Callable[[CallStream], Call]],
        observer: StreamObserver,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.settings = settings
        self.routes = routes
        """By path: what makes the call."""
        self.observer = observer
        self.clock = clock
        self.rng = rng
        self.connections: set[NativeConnection] = set()
        self.partial_bytes = 0
        self.on_gone: Callable[[], None] = lambda: None
        """Called when a connection has gone."""
