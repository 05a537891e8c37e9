"""Standard gRPC health (`grpc.health.v1`): Check and Watch, under every service name that probes and gateways use.

Whether the picker is alive, ready or on its way down is told to it; it only answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

__all__ = ["EXT_PROC_SERVICE", "HealthService"]

EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_LIVENESS: Final = "liveness"
_READINESS: Final = frozenset({"", "readiness", EXT_PROC_SERVICE, "inference-extension"})
"""Endpoint Picker Protocol; the last is what conformance manifests and charts probe."""

_SERVING: Final[int] = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final[int] = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: Final[int] = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService:
    """Answers for `liveness` (always serving) and the readiness names; starts not ready."""

    def __init__(self) -> None:
        self._ready = False
        self._draining = False
        self._closed = False
        self._changed = asyncio.Event()
        self._watchers: set[Callable[[], None]] = set()

    @property
    def closed(self) -> bool:
        """Whether watches are to end."""
        return self._closed

    @property
    def ready(self) -> bool:
        """Whether the readiness names are SERVING."""
        return self._ready and not self._draining

    def set_ready(self, ready: bool) -> None:
        """Say whether requests can be decided; without effect once draining."""
        self._ready = ready
        self._notify()

    def set_draining(self) -> None:
        """Turn the readiness names to NOT_SERVING for good."""
        self._draining = True
        self._notify()

    def close(self) -> None:
        """End all watches: they never end by themselves, and would keep a stopping server waiting."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        # Whoever waits holds the old event: a new one for the next change, so that no watcher misses one.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for watcher in tuple(self._watchers):
            watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever something may have changed: for a transport that has no coroutines."""
        self._watchers.add(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Call it no more; harmless when repeated."""
        self._watchers.discard(watcher)

    def status(self, service: str) -> int | None:
        """Return the `ServingStatus` of a service name; None: unknown name."""
        if service == _LIVENESS:
            return _SERVING
        if service in _READINESS:
            return _SERVING if self.ready else _NOT_SERVING
        return None

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service for a grpc.aio server; it may stand on several ports."""
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            },
        )

    async def _check(self, data: bytes, context: Any) -> bytes:
        status = self.status(await _service_name(data, context))
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service name")
        return _answer(status)

    async def _watch(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        service = await _service_name(data, context)
        last = None
        while not self._closed:
            changed = self._changed
            status = self.status(service)
            if status is None:
                status = _SERVICE_UNKNOWN
            if status != last:
                last = status
                yield _answer(status)
            await changed.wait()


async def _service_name(data: bytes, context: Any) -> str:
    try:
        request = health_pb2.HealthCheckRequest.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a HealthCheckRequest")
    name: str = request.service
    return name


def _answer(status: int | None) -> bytes:
    data: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return data
