"""The limit of file descriptors, and how the ports share them.

The gRPC port gets half of what is left after the process's own needs, and a reserve that nothing else can use: a full
metrics port, or a leak, must not keep gateways out. What a port does with its share is decided by its server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from dataclasses import dataclass
from typing import Final

__all__ = ["Reserve", "Shares", "raise_limit"]

_log = logging.getLogger(__name__)

_MOST: Final = 65_536
"""Enough for every use; a limit of a million would slow down child processes that close all inherited descriptors."""
_OWN: Final = 64
"""For the process itself: output, files, event loop, name look-ups, listening sockets."""
_RESERVE: Final = 32
_MOST_PROBES: Final = 128
_MOST_METRICS: Final = 128
_MOST_ADMIN: Final = 32


def raise_limit() -> int:
    """Raise the soft limit to the hard one, at most to `_MOST`; return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return _MOST if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class Shares:
    """Connections that each port may have at a time, and descriptors for the rest."""

    grpc: int = 1000
    health: int = _MOST_PROBES
    metrics: int = _MOST_METRICS
    admin: int = _MOST_ADMIN
    reserve: int = 0
    """Descriptors kept for the gRPC and health ports alone."""
    endpoints: int = 1000
    """The rest, for connections to endpoints: scraping keeps one to each, and at times opens a second one."""
    limit: int = 0
    """The process's limit."""

    @classmethod
    def of(cls, limit: int, max_connections: int) -> Shares:
        """Divide a limit; `max_connections` is what the gRPC port may have at most."""
        own, reserve = min(_OWN, limit // 4), min(_RESERVE, limit // 16)
        rest = limit - own - reserve
        grpc = max(1, min(max_connections, rest // 2))
        health = max(1, min(_MOST_PROBES, rest // 8))
        metrics = max(1, min(_MOST_METRICS, rest // 8))
        admin = max(1, min(_MOST_ADMIN, rest // 16))
        return cls(grpc, health, metrics, admin, reserve, max(0, rest - grpc - health - metrics - admin), limit)

    def warn(self, max_connections: int) -> None:
        """Log a warning where the limit is too small for `server.max_connections`."""
        if self.grpc < max_connections:
            _log.warning(
                "few file descriptors: the gRPC port takes fewer connections than server.max_connections; "
                "raise the limit (ulimit -n, LimitNOFILE= of systemd, --ulimit nofile of the container)",
                extra={"descriptors": self.limit, "grpc_connections": self.grpc, "max_connections": max_connections},
            )

    def warn_of_endpoints(self, count: int) -> None:
        """Log a warning where there are more endpoints than descriptors for them."""
        if count > self.endpoints:
            _log.warning(
                "few file descriptors: there are more endpoints than connections to scrape them; "
                "raise the limit (ulimit -n, LimitNOFILE= of systemd, --ulimit nofile of the container)",
                extra={"descriptors": self.limit, "endpoints": count, "for_endpoints": self.endpoints},
            )


class Reserve:
    """Descriptors of /dev/null, to be closed one by one when no others are left."""

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._open: list[int] = []
        self.refill()

    @property
    def full(self) -> bool:
        """Whether all are open."""
        return len(self._open) >= self._size

    def release(self) -> bool:
        """Close one; False: there is none left."""
        if not self._open:
            return False
        os.close(self._open.pop())
        return True

    def refill(self) -> None:
        """Open as many again as the system allows."""
        with contextlib.suppress(OSError):
            while not self.full:
                self._open.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close all for good."""
        self._size = 0
        while self.release():
            pass
