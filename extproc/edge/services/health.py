"""State behind the standard gRPC health service (`grpc.health.v1`): liveness and readiness by service name.

The application sets the state; the transports' adapters answer Check and Watch from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from extproc.edge.envoy_wire.health import ServingStatus

__all__ = ["EXT_PROC_SERVICE", "HealthService"]

EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_LIVENESS: Final = "liveness"
_READINESS: Final = frozenset({"", "readiness", EXT_PROC_SERVICE, "inference-extension"})
"""Endpoint Picker Protocol; the last is what conformance manifests and charts probe."""


class HealthService:
    """State of `liveness` (always SERVING) and of the readiness names, which start NOT_SERVING."""

    def __init__(self) -> None:
        self._ready = False
        self._draining = False
        self._closed = False
        self._watchers: set[Callable[[], None]] = set()

    @property
    def closed(self) -> bool:
        """Whether watches must end."""
        return self._closed

    @property
    def ready(self) -> bool:
        """Whether the readiness names are SERVING."""
        return self._ready and not self._draining

    def set_ready(self, ready: bool) -> None:
        """Set whether requests can be decided; without effect once draining."""
        self._ready = ready
        self._notify()

    def set_draining(self) -> None:
        """Turn the readiness names to NOT_SERVING for good."""
        self._draining = True
        self._notify()

    def close(self) -> None:
        """End all watches: clients never end them, and an open call would delay the server's stop."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        for watcher in tuple(self._watchers):
            watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever the state may have changed, until `unwatch`."""
        self._watchers.add(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Stop calling `watcher`; no-op when repeated."""
        self._watchers.discard(watcher)

    def status(self, service: str) -> ServingStatus | None:
        """Return the status of a service name; None: unknown name."""
        if service == _LIVENESS:
            return ServingStatus.SERVING
        if service in _READINESS:
            return ServingStatus.SERVING if self.ready else ServingStatus.NOT_SERVING
        return None
