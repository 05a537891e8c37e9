"""A fake picker, fake engines, a real Envoy and two clients: what the tests against a real Envoy are made of.

The picker speaks ext_proc through `grpc.aio` and the `xds-protos` messages: nothing of extproc's own server is in it, so
these tests prove the configurations, not our picker.
"""

import asyncio
import contextlib
import io
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from google.protobuf import json_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.envoy_config import EnvoyOptions, render
from tests.envoy_config.h2_client import Answer, h2_request

DESTINATION = "x-gateway-destination-endpoint"
DEADLINE_S = 60.0


def envoy_binary() -> Path:
    """Find the Envoy of EXTPROC_ENVOY or of `make test`; skip the test without one."""
    root = Path(__file__).parents[2]
    path = Path(os.environ.get("EXTPROC_ENVOY") or root / ".envoy/envoy/_bin/envoy")
    if not os.access(path, os.X_OK):
        pytest.skip(f"no Envoy at {path}: `make test` installs one, or set EXTPROC_ENVOY to a binary")
    return path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll a callable (sync or async) until it is true; fail after DEADLINE_S."""
    end = asyncio.get_running_loop().time() + DEADLINE_S
    while asyncio.get_running_loop().time() < end:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {DEADLINE_S} s: {what}")


# ------------------------------------------------------------------------------------------------------------ picker


class FakePicker(pb_grpc.ExternalProcessorServicer, als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    """Answers like a careful picker: holds the headers until the request has ended where the mode allows it."""

    def __init__(self) -> None:
        self.destination: str | None = None
        self.send_header = True
        self.send_metadata = True
        self.explain: str | None = None
        self.immediate: tuple[int, bytes] | None = None
        self.allow_retry = True
        """Mark requests whose end was seen without trailers: `extproc: {retry: true}`."""
        self.always_allow_retry = False
        self.messages: list[Any] = []
        self.entries: list[dict[str, Any]] = []

    async def Process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        held: list[Any] = []
        mode = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
        async for message in requests:
            self.messages.append(message)
            if message.HasField("protocol_config"):
                mode = message.protocol_config.request_body_mode
            kind = message.WhichOneof("request")
            if self.immediate is not None:
                yield _immediate(*self.immediate)
                return
            duplex = mode == processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
            if kind == "request_headers":
                if not duplex or message.request_headers.end_of_stream:
                    yield self._headers(retry=message.request_headers.end_of_stream)
                else:
                    held = []
            elif kind == "request_body":
                if not duplex:
                    yield pb.ProcessingResponse(request_body=pb.BodyResponse())
                    continue
                held.append(message.request_body)
                if message.request_body.end_of_stream:
                    yield self._headers(retry=True)
                    for chunk in held:
                        yield _streamed(chunk.body, chunk.end_of_stream, "request_body")
            elif kind == "request_trailers":
                if duplex:
                    yield self._headers(retry=False)
                    for chunk in held:
                        yield _streamed(chunk.body, False, "request_body")
                yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
            elif kind == "response_headers":
                yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
            elif kind == "response_body":
                yield _streamed(message.response_body.body, message.response_body.end_of_stream, "response_body")
            elif kind == "response_trailers":
                yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def _headers(self, *, retry: bool) -> Any:
        response = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        # Envoy clears the route cache (and so sees `retry`) only in a response that changes a header.
        marker = response.request_headers.response.header_mutation.set_headers.add()
        marker.header.key, marker.header.raw_value = "x-picker", b"fake"
        if self.destination is not None and self.send_header:
            option = response.request_headers.response.header_mutation.set_headers.add()
            option.header.key, option.header.raw_value = DESTINATION, self.destination.encode()
            option.append_action = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        metadata: dict[str, dict[str, Any]] = {"extproc": {"decision": "d-1"}}
        if self.destination is not None and self.send_metadata:
            metadata["envoy.lb"] = {DESTINATION: self.destination}
        if self.explain is not None:
            metadata["extproc"]["explain"] = self.explain
        if (self.allow_retry and retry) or self.always_allow_retry:
            metadata["extproc"]["retry"] = True
        json_format.ParseDict(metadata, response.dynamic_metadata)
        return response

    async def StreamAccessLogs(self, requests: AsyncIterator[Any], context: Any) -> Any:
        async for message in requests:
            self.entries += [json_format.MessageToDict(entry) for entry in message.http_logs.log_entry]
        return als_pb2.StreamAccessLogsResponse()

    def kinds(self) -> list[str]:
        return [message.WhichOneof("request") for message in self.messages]

    def request_headers(self) -> dict[str, str]:
        for message in self.messages:
            if message.WhichOneof("request") == "request_headers":
                return {h.key: h.raw_value.decode() for h in message.request_headers.headers.headers}
        raise AssertionError("no request headers seen")

    async def entry(self) -> dict[str, Any]:
        """Wait for the first access log entry of an ended request."""
        await until(lambda: self.entries, "an access log entry")
        return self.entries[0]


def _immediate(status: int, body: bytes) -> Any:
    response = pb.ProcessingResponse()
    response.immediate_response.status.code = status
    response.immediate_response.body = body
    option = response.immediate_response.headers.set_headers.add()
    option.header.key, option.header.raw_value = "content-type", b"application/json"
    return response


def _streamed(body: bytes, end: bool, direction: str) -> Any:
    streamed = pb.StreamedBodyResponse(body=body, end_of_stream=end)
    mutation = pb.BodyMutation(streamed_response=streamed)
    return pb.ProcessingResponse(**{direction: pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))})


# ----------------------------------------------------------------------------------------------------------- engines


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class FakeEngine:
    """A model server that records what it was sent and answers what the path asks for."""

    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: the second half of an answer to /wait is sent."""
    refuses_with: int = 0
    """Answer every request with this status; 0: serve it."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.path, {k.lower(): v for k, v in request.headers.items()}, body))
        if self.refuses_with:
            return web.json_response({"error": "not now"}, status=self.refuses_with)
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
        if request.path == "/json":
            return web.json_response({"choices": [], "usage": usage})
        if request.path == "/big":
            return web.json_response({"data": "x" * 3_000_000, "usage": usage})
        if request.path == "/quoted-usage":
            return web.json_response({"text": 'a, "usage": {"prompt_tokens": 99}', "other": '"usage": {}'})
        if request.path == "/late":
            await self.go_on.wait()
            return web.Response()
        if request.path == "/wait":
            waiting = web.StreamResponse()
            await waiting.prepare(request)
            await waiting.write(b"first ")
            await self.go_on.wait()
            await waiting.write(b"last")
            return waiting
        if request.path in {"/sse", "/sse-without-usage"}:
            response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": f"t{i}"}}]} for i in range(3)]
            events.append({"choices": [], "usage": usage if request.path == "/sse" else None})
            for event in events:
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        return web.Response(text=f"{self.address} {len(body)}")


@contextlib.asynccontextmanager
async def running_engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    app = web.Application(client_max_size=256 * 1024 * 1024)
    app.router.add_route("*", "/{tail:.*}", engine.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.port = runner.addresses[0][1]
    try:
        yield engine
    finally:
        await runner.cleanup()


# --------------------------------------------------------------------------------------------------------- the stage


@dataclass
class Stage:
    """One Envoy with a picker and live engines, and a dead address that is among Envoy's endpoints."""

    picker: FakePicker
    engines: list[FakeEngine]
    dead: str
    port: int
    admin_port: int
    picker_port: int
    server: Any
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str = "/echo", body: bytes = b"{}", headers: dict[str, str] | None = None) -> Answer:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=io.BytesIO(body), headers=headers) as r,
        ):
            return Answer(r.status, {k.lower(): v for k, v in r.headers.items()}, await r.read())

    async def post_h2(
        self, body: bytes, *, trailers: bool, headers: Sequence[tuple[str, str]] = (), path: str = "/echo"
    ) -> Answer:
        return await asyncio.wait_for(h2_request(self.port, path, body, headers, trailers=trailers), DEADLINE_S)

    async def restart_picker(self) -> None:
        self.server, _ = await start_picker(self.picker, self.picker_port, None)

    def bodies(self) -> list[bytes]:
        return [seen.body for engine in self.engines for seen in engine.seen]

    async def stat(self, name: str) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.admin_port}/stats?format=json&filter=^{name}$") as r,
        ):
            stats = (await r.json(content_type=None))["stats"]
        return int(stats[0]["value"]) if stats else 0


async def start_picker(picker: FakePicker, port: int, certificate: tuple[Path, Path] | None) -> tuple[Any, int]:
    """Serve ext_proc, access logs and health on a loopback port (0: any); returns the server and its port."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    pb_grpc.add_ExternalProcessorServicer_to_server(picker, server)
    als_pb2_grpc.add_AccessLogServiceServicer_to_server(picker, server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    serving = health_pb2.HealthCheckResponse.SERVING
    await servicer.set("envoy.service.ext_proc.v3.ExternalProcessor", serving)
    if certificate is None:
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        chain, key = (path.read_bytes() for path in certificate)
        bound = server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([(key, chain)]))
    await server.start()
    return server, bound


@contextlib.asynccontextmanager
async def running(
    profile: str,
    *,
    engines: int = 2,
    edit: Callable[[str], str] | None = None,
    certificate: tuple[Path, Path] | None = None,
    wait_for_picker: bool = True,
    **options: Any,
) -> AsyncIterator[Stage]:
    """Run a profile with everything it needs; `edit(yaml) -> yaml` changes the text first (for experiments)."""
    binary = envoy_binary()
    async with contextlib.AsyncExitStack() as stack:
        live = [await stack.enter_async_context(running_engine()) for _ in range(engines)]
        dead = f"127.0.0.1:{free_port()}"
        picker = FakePicker()
        server, picker_port = await start_picker(picker, 0, certificate)
        port, admin_port = free_port(), free_port()
        chosen = EnvoyOptions(
            endpoints=(dead, *(engine.address for engine in live)),
            pickers=(f"127.0.0.1:{picker_port}",),
            listen_port=port,
            admin_port=admin_port,
            **options,
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        text = render(profile, chosen)
        (folder / "envoy.yaml").write_text(edit(text) if edit else text)
        log = folder / "envoy.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                binary, "-c", folder / "envoy.yaml", "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning",
                stdout=out, stderr=out,
            )  # fmt: skip
        stage = Stage(picker, live, dead, port, admin_port, picker_port, server, log)
        try:
            await until(lambda: _ready(stage, process, healthy=wait_for_picker), "Envoy is ready")
            yield stage
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await stage.server.stop(0)


async def _ready(stage: Stage, process: asyncio.subprocess.Process, *, healthy: bool) -> bool:
    assert process.returncode is None, stage.log.read_text()
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{stage.admin_port}/ready") as r:
            live = r.status == 200
    except aiohttp.ClientError:
        return False
    return live and (not healthy or await stage.stat("cluster.picker.membership_healthy") == 1)
