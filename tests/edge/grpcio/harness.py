"""A real server on loopback, and a client that speaks as gateways do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.config.schema import ServerConfig, TlsConfig
from extproc.edge.grpcio.server import GrpcioServer
from extproc.edge.native.server import NativeServer
from extproc.protocol.outcome import LogEntry
from tests.protocol.dialogue import Dialogue

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ACCESS_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
LIMIT_S = 60.0
"""A test that waits longer hangs."""


def server_config(tls: TlsConfig | None = None, grpc_port: int = 0) -> ServerConfig:
    return ServerConfig(host="127.0.0.1", grpc_port=grpc_port, health_port=0, tls=tls or TlsConfig())


@asynccontextmanager
async def running(
    dialogue: Dialogue,
    *,
    tls: TlsConfig | None = None,
    sink: Callable[[LogEntry], None] = lambda _entry: None,
    **options: Any,
) -> AsyncIterator[GrpcioServer]:
    server = GrpcioServer(server_config(tls), dialogue.shared, sink, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0, 0)


@asynccontextmanager
async def connected(
    server: GrpcioServer | NativeServer, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[Any]:
    target = f"localhost:{server.grpc_port}"
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    async with asyncio.timeout(LIMIT_S), channel:
        yield channel


class Gateway:
    """One ext_proc stream as a gateway sees it."""

    def __init__(self, channel: Any) -> None:
        self.call = channel.stream_stream(
            PROCESS,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()

    async def say(self, **parts: Any) -> None:
        await self.call.write(pb.ProcessingRequest(**parts))

    async def headers(self, *, end: bool = False, mode: int | None = 4, path: str = "/v1/completions") -> None:
        part = pb.HttpHeaders(end_of_stream=end)
        part.headers.headers.append(base_pb2.HeaderValue(key=":path", raw_value=path.encode()))
        config = None if mode is None else pb.ProtocolConfiguration(request_body_mode=mode)
        await self.say(request_headers=part, protocol_config=config)

    async def body(self, data: bytes, *, end: bool = False) -> None:
        await self.say(request_body=pb.HttpBody(body=data, end_of_stream=end))

    async def hear(self) -> Any:
        """Return the next reply; None at the end of the stream."""
        reply = await self.call.read()
        return None if reply is grpc.aio.EOF else reply

    async def half_close(self) -> None:
        await self.call.done_writing()

    async def status(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await self.call.code()
        return code


def destination(reply: Any) -> str:
    """Return the destination of a headers' reply, which must name it as header and as metadata alike."""
    (option,) = reply.request_headers.response.header_mutation.set_headers
    assert option.header.key == "x-gateway-destination-endpoint"
    named = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"]
    assert named.string_value == option.header.raw_value.decode()
    value: str = named.string_value
    return value


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)
