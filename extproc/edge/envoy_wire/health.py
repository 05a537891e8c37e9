"""The messages of `grpc.health.v1`, read and written without `grpc_health`, which imports grpc."""

from __future__ import annotations

import enum

from extproc.edge.envoy_wire.lean_types import LeanHealthCheckRequest

__all__ = ["ServingStatus", "encode_status", "service_name"]


class ServingStatus(enum.IntEnum):
    """`HealthCheckResponse.ServingStatus`."""

    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3
    """Only in answers to Watch; Check ends with NOT_FOUND."""


def service_name(data: bytes) -> str:
    """Return the service that a `HealthCheckRequest` asks about. Raises DecodeError."""
    name: str = LeanHealthCheckRequest.FromString(data).service
    return name


def encode_status(status: ServingStatus) -> bytes:
    """Write a `HealthCheckResponse`: `status` 1, a varint."""
    return bytes((0x08, status))
