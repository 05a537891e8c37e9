"""Access log and health service on grpc.aio: handlers around the state in `edge.services`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from extproc.edge.envoy_wire.health import ServingStatus, encode_status, service_name
from extproc.edge.services.access_log import AccessLogService
from extproc.edge.services.health import HealthService

__all__ = ["access_log_handler", "health_handler"]


def access_log_handler(service: AccessLogService, max_stream_s: float = 0.0) -> grpc.GenericRpcHandler:
    """Return `envoy.service.accesslog.v3.AccessLogService`; messages stay bytes, so that `service` counts bad ones.

    `max_stream_s`: a stream is ended after this time, because Envoy never ends it and would so keep a connection that
    has reached its maximum age; 0: never.
    """

    async def stream_access_logs(_requests: Any, context: Any) -> bytes:
        closing = asyncio.Event()
        if service.closed:
            closing.set()
        service.join(closing.set, context.peer())
        timer = asyncio.get_running_loop().call_later(max_stream_s, closing.set) if max_stream_s else None
        closed = asyncio.ensure_future(closing.wait())
        try:
            while (data := await _read_unless(closed, context)) is not grpc.aio.EOF:
                service.take(data)
        finally:
            closed.cancel()
            if timer is not None:
                timer.cancel()
            service.leave(closing.set)
        return b""  # an empty StreamAccessLogsResponse

    return grpc.method_handlers_generic_handler(
        "envoy.service.accesslog.v3.AccessLogService",
        {"StreamAccessLogs": grpc.stream_unary_rpc_method_handler(stream_access_logs)},
    )


async def _read_unless(closed: asyncio.Future[Any], context: Any) -> Any:
    """Return the next message; EOF at the end of the stream, or once `closed` is done."""
    reading = asyncio.ensure_future(context.read())
    try:
        await asyncio.wait((reading, closed), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else grpc.aio.EOF
    finally:
        reading.cancel()


def health_handler(health: HealthService) -> grpc.GenericRpcHandler:
    """Return `grpc.health.v1.Health`."""

    async def check(data: bytes, context: Any) -> bytes:
        status = health.status(await _service_name(data, context))
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service name")
        assert status is not None  # `abort` raises
        return encode_status(status)

    async def watch(data: bytes, context: Any) -> AsyncIterator[bytes]:
        service = await _service_name(data, context)
        changed = asyncio.Event()
        health.watch(changed.set)
        last = None
        try:
            while not health.closed:
                changed.clear()
                status = health.status(service) or ServingStatus.SERVICE_UNKNOWN
                if status is not last:
                    last = status
                    yield encode_status(status)
                await changed.wait()
        finally:
            health.unwatch(changed.set)

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health",
        {"Check": grpc.unary_unary_rpc_method_handler(check), "Watch": grpc.unary_stream_rpc_method_handler(watch)},
    )


async def _service_name(data: bytes, context: Any) -> str:
    try:
        return service_name(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a HealthCheckRequest")
        raise
