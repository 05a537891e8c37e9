"""Real clients on the native transport: gRPC's C core, blocking and asyncio, the h2 library, and load generators."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.edge.native.server import NativeServer
from extproc.http2.grpc import MessageReader, message_frame
from tests.edge.grpcio.harness import LIMIT_S, PROCESS, Gateway, connected, destination
from tests.edge.grpcio.test_server import asked
from tests.edge.native.harness import PATHS, native, process_fields, request_body, request_headers
from tests.protocol.dialogue import Dialogue

STREAMS = 500
PIECE = b"0123456789abcdef" * 4096


def body_of(replies: list[Any]) -> bytes:
    """Return the body that the replies let through."""
    return b"".join(reply.request_body.response.body_mutation.streamed_response.body for reply in replies)


async def echoed(channel: Any, body: bytes) -> bytes:
    """Send a request with a body, in full duplex, and return what comes back of it."""
    gateway = Gateway(channel)
    await gateway.headers()
    for start in range(0, len(body), len(PIECE)):
        await gateway.body(body[start : start + len(PIECE)])
    await gateway.body(b"", end=True)
    await gateway.half_close()
    replies = []
    while (reply := await gateway.hear()) is not None:
        replies.append(reply)
    assert destination(replies[0]) == "10.0.0.1:8000"
    assert await gateway.status() is grpc.StatusCode.OK
    return body_of(replies[1:])


class TestGrpcAio:
    async def test_many_streams_on_one_connection(self) -> None:
        async with native(Dialogue()) as server, connected(server) as channel:
            assert await asyncio.gather(*(asked(channel) for _ in range(STREAMS))) == ["10.0.0.1:8000"] * STREAMS
            assert server._main is not None
            assert len(server._main.connections) == 1
            assert server.open_streams == 0

    async def test_one_connection_per_request(self) -> None:
        async with native(Dialogue()) as server:
            for _ in range(30):
                async with connected(server) as channel:
                    assert await asked(channel) == "10.0.0.1:8000"

    async def test_bodies_in_pieces(self) -> None:
        async with native(Dialogue()) as server, connected(server) as channel:
            assert await echoed(channel, PIECE * 20) == PIECE * 20

    async def test_a_message_of_4_mb_both_ways(self) -> None:
        body = PIECE * 64
        async with native(Dialogue()) as server, connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers()
            await gateway.body(body, end=True)
            await gateway.half_close()
            replies = []
            while (reply := await gateway.hear()) is not None:
                replies.append(reply)
            assert body_of(replies[1:]) == body


async def in_thread(call: Any) -> Any:
    """Let a blocking client run while this loop serves it."""
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(call)


class TestGrpcBlocking:
    @staticmethod
    def ask(channel: grpc.Channel, body: bytes) -> list[Any]:
        call = channel.stream_stream(
            PROCESS, request_serializer=bytes, response_deserializer=pb.ProcessingResponse.FromString
        )
        return list(call(iter((request_headers(), request_body(body, end=True))), timeout=LIMIT_S))

    async def test_streams_one_after_the_other_and_4_mb(self) -> None:
        def client() -> list[bytes]:
            options = [("grpc.max_receive_message_length", -1)]
            with grpc.insecure_channel(f"localhost:{server.grpc_port}", options=options) as channel:
                return [body_of(self.ask(channel, body)[1:]) for body in (b"{}", PIECE * 64, b"[]")]

        async with native(Dialogue()) as server:
            assert await in_thread(client) == [b"{}", PIECE * 64, b"[]"]

    async def test_health(self) -> None:
        def client() -> int:
            with grpc.insecure_channel(f"localhost:{server.grpc_port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                status: int = stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S).status
                return status

        async with native(Dialogue()) as server:
            assert await in_thread(client) == health_pb2.HealthCheckResponse.NOT_SERVING
            server.health.set_ready(True)
            assert await in_thread(client) == health_pb2.HealthCheckResponse.SERVING


class H2Client:
    """A client of the `h2` library whose streams have a window of a few bytes."""

    def __init__(self, window: int) -> None:
        self.http2: Any = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.http2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.bodies: dict[int, bytearray] = {}
        self.pieces: list[int] = []
        self.trailers: dict[int, dict[bytes, bytes]] = {}

    async def connect(self, server: NativeServer) -> None:
        await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", server.grpc_port))
        self.http2.initiate_connection()

    async def request(self, stream_id: int, body: bytes) -> None:
        """Send a call's whole half, as the windows allow."""
        self.http2.send_headers(stream_id, ((":authority", "localhost"), *process_fields("process")))
        self.bodies[stream_id] = bytearray()
        while body:
            size = min(len(body), self.http2.local_flow_control_window(stream_id), self.http2.max_outbound_frame_size)
            self.http2.send_data(stream_id, body[:size], end_stream=size == len(body))
            body = body[size:]
            if body and not size:
                await self.exchange()
        await self.exchange(read=False)

    async def exchange(self, *, read: bool = True) -> None:
        """Write what is to be written, and read once."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.socket, self.http2.data_to_send())
        if not read:
            return
        data = await loop.sock_recv(self.socket, 65_536)
        assert data, "the server has closed the connection"
        for event in self.http2.receive_data(data):
            match event:
                case h2.events.DataReceived():
                    self.bodies[event.stream_id] += event.data
                    self.pieces.append(len(event.data))
                    with contextlib.suppress(h2.exceptions.StreamClosedError):  # its end came with it
                        self.http2.increment_flow_control_window(event.flow_controlled_length, event.stream_id)
                    self.http2.increment_flow_control_window(event.flow_controlled_length)
                case h2.events.TrailersReceived():
                    self.trailers[event.stream_id] = dict(event.headers)
                case h2.events.StreamReset() | h2.events.ConnectionTerminated():
                    pytest.fail(str(event))
        await loop.sock_sendall(self.socket, self.http2.data_to_send())


@contextlib.asynccontextmanager
async def h2_client(server: NativeServer, window: int) -> AsyncIterator[H2Client]:
    client = H2Client(window)
    try:
        async with asyncio.timeout(3 * LIMIT_S):
            await client.connect(server)
            yield client
    finally:
        client.socket.close()


class TestH2:
    @pytest.mark.parametrize(("window", "size"), [(1, 1000), (7, 3000), (65_535, 200_000)])
    async def test_small_windows(self, window: int, size: int) -> None:
        """Every piece fits the window, and all of it comes in order, however many streams wait at once."""
        body = (PIECE * 4)[:size]
        said = message_frame(request_headers()) + message_frame(request_body(body, end=True))
        async with native(Dialogue()) as server, h2_client(server, window) as client:
            ids = (1, 3, 5)
            for stream_id in ids:
                await client.request(stream_id, said)
            while len(client.trailers) < len(ids):
                await client.exchange()
        assert max(client.pieces) <= window
        for stream_id in ids:
            assert client.trailers[stream_id][b"grpc-status"] == b"0"
            found = MessageReader(1 << 20, "identity").feed(bytes(client.bodies[stream_id]))
            assert body_of([pb.ProcessingResponse.FromString(one) for one in found][1:]) == body


async def finished(*argv: str) -> str:
    """Run a program beside this loop and return what it prints."""
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        async with asyncio.timeout(3 * LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load is not installed (nghttp2-client)")
@pytest.mark.parametrize(("window_bits", "count"), [(1, 20), (16, 400)])
async def test_h2load(tmp_path: Path, window_bits: int, count: int) -> None:
    """A window of n bits has 2^n - 1 bytes."""
    said = tmp_path / "said"
    said.write_bytes(message_frame(request_headers()) + message_frame(request_body(b"{}" * 500, end=True)))
    fields = [f"-H{name}: {value}" for name, value in process_fields("process") if not name.startswith(":")]
    async with native(Dialogue()) as server:
        url = f"http://127.0.0.1:{server.grpc_port}{PATHS['process']}"
        argv = ["h2load", f"-n{count}", "-c4", "-m50", f"-w{window_bits}", f"-d{said}", *fields, url]
        output = await finished(*argv)
        assert re.search(rf"{count} succeeded, 0 failed, 0 errored, 0 timeout", output), output
        assert f"status codes: {count} 2xx" in output
        assert server.open_streams == 0


@pytest.mark.skipif(
    shutil.which("ghz") is None, reason="ghz is not installed (go install github.com/bojand/ghz/cmd/ghz@v0.93.0)"
)
async def test_ghz(tmp_path: Path) -> None:
    files = descriptor_pb2.FileDescriptorSet()
    health_pb2.DESCRIPTOR.CopyToProto(files.file.add())
    described = tmp_path / "health.protoset"
    described.write_bytes(files.SerializeToString())
    async with native(Dialogue()) as server:
        server.health.set_ready(True)
        argv = ["ghz", "--insecure", "--protoset", str(described), "--call", "grpc.health.v1.Health.Check"]
        argv += ["-n", "400", "-c", "20", "--connections", "4", "-d", "{}", "-O", "json"]
        output = await finished(*argv, f"127.0.0.1:{server.grpc_port}")
    assert json.loads(output)["statusCodeDistribution"] == {"OK": 400}
