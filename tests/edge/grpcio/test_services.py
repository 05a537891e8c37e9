from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.edge.grpcio.harness import LIMIT_S, connected, running, until
from tests.protocol.dialogue import Dialogue

Status = health_pb2.HealthCheckResponse
READINESS = ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension"]


async def check(channel: Any, service: str) -> int:
    call = channel.unary_unary("/grpc.health.v1.Health/Check", response_deserializer=Status.FromString)
    answer = await call(health_pb2.HealthCheckRequest(service=service).SerializeToString())
    status: int = answer.status
    return status


async def test_readiness_is_told_and_liveness_is_not() -> None:
    async with running(Dialogue()) as server:
        health = grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}")
        async with connected(server) as channel, health:
            for ready, expected in ((False, Status.NOT_SERVING), (True, Status.SERVING)):
                server.health.set_ready(ready)
                for port in (channel, health):
                    assert [await check(port, name) for name in READINESS] == [expected] * 4
                    assert await check(port, "liveness") == Status.SERVING
            server.health.set_draining()
            server.health.set_ready(True)
            assert await check(health, "readiness") == Status.NOT_SERVING
            assert await check(health, "liveness") == Status.SERVING


async def test_unknown_names_and_bad_messages() -> None:
    async with running(Dialogue()) as server, connected(server) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await check(channel, "nobody")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff")
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watch_tells_every_change_once() -> None:
    async with running(Dialogue()) as server, connected(server) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", response_deserializer=Status.FromString)
        request = health_pb2.HealthCheckRequest(service="readiness").SerializeToString()
        call, unknown = watch(request), watch(health_pb2.HealthCheckRequest(service="nobody").SerializeToString())
        assert (await call.read()).status == Status.NOT_SERVING
        assert (await unknown.read()).status == Status.SERVICE_UNKNOWN
        server.health.set_ready(True)
        assert (await call.read()).status == Status.SERVING
        server.health.set_ready(True)
        server.health.set_ready(False)
        assert (await call.read()).status == Status.NOT_SERVING
        await asyncio.wait_for(server.stop(0, LIMIT_S), LIMIT_S / 2)
        await until(lambda: server.open_streams == 0)
