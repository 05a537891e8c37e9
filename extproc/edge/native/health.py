"""gRPC health on the native transport: the calls of `grpc.health.v1`, whose answers stand in `health`."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from extproc.edge.envoy_wire.health import ServingStatus, encode_status, service_name
from extproc.edge.native.calls import CallStream
from extproc.edge.services.health import HealthService
from extproc.http2.grpc import CallError, Status

__all__ = ["CheckCall", "WatchCall"]


def _service_name(data: bytes) -> str:
    """Return the name asked for. Raises CallError."""
    try:
        return service_name(data)
    except DecodeError as error:
        raise CallError(Status.INVALID_ARGUMENT, "not a HealthCheckRequest") from error


class CheckCall:
    """`grpc.health.v1.Health/Check`: one message, one answer."""

    __slots__ = ("_health", "_name", "_stream")

    paused = False

    def __init__(self, health: HealthService, stream: CallStream) -> None:
        self._health = health
        self._stream = stream
        self._name: str | None = None

    def message(self, data: bytes) -> bool:
        """Take the question. Raises CallError."""
        if self._name is not None:
            raise CallError(Status.INTERNAL, "more than one message in a unary call")
        self._name = _service_name(data)
        return False

    def half_closed(self) -> None:
        """Answer. Raises CallError."""
        if self._name is None:
            raise CallError(Status.INTERNAL, "a unary call without a message")
        status = self._health.status(self._name)
        if status is None:
            raise CallError(Status.NOT_FOUND, "unknown service name")
        self._stream.send(encode_status(status))
        self._stream.finish()

    def resumed(self) -> None:
        """Have nothing that waits."""

    def retire(self) -> None:
        """Go on: the question is under way."""

    def lost(self) -> None:
        """Hold nothing."""


class WatchCall:
    """`grpc.health.v1.Health/Watch`: every change until somebody ends it."""

    __slots__ = ("_health", "_last", "_name", "_stream")

    paused = False

    def __init__(self, health: HealthService, stream: CallStream) -> None:
        self._health = health
        self._stream = stream
        self._name: str | None = None
        self._last: ServingStatus | None = None

    def message(self, data: bytes) -> bool:
        """Take the question and tell the first state. Raises CallError."""
        if self._name is not None:
            raise CallError(Status.INTERNAL, "more than one message in a call with one question")
        self._name = _service_name(data)
        self._health.watch(self._on_change)
        self._tell()
        return False

    def half_closed(self) -> None:
        """Go on: the peer has asked all it wants. Raises CallError where it has asked nothing."""
        if self._name is None:
            raise CallError(Status.INTERNAL, "a call without its question")

    def resumed(self) -> None:
        """Have nothing that waits."""

    def retire(self) -> None:
        """End the watch, so that the peer asks again elsewhere."""
        self._stream.finish()

    def lost(self) -> None:
        """Watch no more."""
        self._health.unwatch(self._on_change)

    def _on_change(self) -> None:
        self._tell()
        self._stream.flush()

    def _tell(self) -> None:
        assert self._name is not None
        if self._health.closed:
            self._stream.finish()
            return
        status = self._health.status(self._name) or ServingStatus.SERVICE_UNKNOWN
        if status is not self._last:
            self._last = status
            self._stream.send(encode_status(status))
