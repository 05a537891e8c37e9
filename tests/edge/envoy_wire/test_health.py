from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from extproc.edge.envoy_wire.health import ServingStatus, encode_status, service_name


@pytest.mark.parametrize("name", ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"])
def test_the_service_asked_about(name: str) -> None:
    assert service_name(health_pb2.HealthCheckRequest(service=name).SerializeToString()) == name


def test_bytes_that_are_no_request() -> None:
    with pytest.raises(DecodeError):
        service_name(b"\xff")


@pytest.mark.parametrize("status", ServingStatus)
def test_answers_are_what_the_generated_types_write(status: ServingStatus) -> None:
    expected = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.ServingStatus.Value(status.name))
    assert encode_status(status) == expected.SerializeToString()
