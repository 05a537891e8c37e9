"""What the tests of bad days and operations share: streamed answers, the log's events, gRPC clients of the picker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.demo.processes import Child
from tests.e2e.stack import MODEL, Stack

EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
READINESS: Final = ("", "readiness", EXT_PROC, "inference-extension")
SERVING: Final = "SERVING"
NOT_SERVING: Final = "NOT_SERVING"


@dataclass
class Streamed:
    """One streamed answer, as far as it has come."""

    status: int = 0
    data: bytes = b""
    error: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first token, or when there will be none."""

    @property
    def whole(self) -> bool:
        """Whether it ran to its end."""
        return self.data.rstrip().endswith(b"data: [DONE]") and not self.error

    @property
    def tokens(self) -> int:
        """How many token events came."""
        return self.data.count(b'"content":') + self.data.count(b'"text":')


async def stream(stack: Stack, answer: Streamed, prompt: str, *, max_tokens: int, **fields: Any) -> Streamed:
    """Ask for a streamed completion and gather it in `answer`, whatever becomes of it."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": True, **fields}
    try:
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as response:
            answer.status = response.status
            async for piece in response.content.iter_any():
                answer.data += piece
                answer.begun.set()
    except Exception as error:  # noqa: BLE001 - what a client sees is what is tested
        answer.error = repr(error)
    answer.begun.set()
    return answer


class Streams:
    """Several streamed answers under way."""

    def __init__(self, stack: Stack, count: int, *, max_tokens: int) -> None:
        self.answers = [Streamed() for _ in range(count)]
        self._tasks = [
            asyncio.ensure_future(stream(stack, answer, f"story number {number}", max_tokens=max_tokens))
            for number, answer in enumerate(self.answers)
        ]

    async def begun(self) -> None:
        """Wait until each has its first token."""
        await asyncio.gather(*(answer.begun.wait() for answer in self.answers))
        assert all(answer.status == 200 for answer in self.answers), self.answers

    @property
    def running(self) -> int:
        """How many have not ended."""
        return sum(not task.done() for task in self._tasks)

    async def done(self) -> list[Streamed]:
        """Wait for the end of all."""
        return await asyncio.gather(*self._tasks)


def events(child: Child, event: str = "") -> list[dict[str, Any]]:
    """Return the structured lines a picker has written, all or those of one event."""
    # What is being written may be seen as far as a page of the file goes.
    whole, _, _ = child.log.read_text().rpartition("\n")
    lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
    return [line for line in lines if not event or line["event"] == event]


def assert_clean(child: Child) -> None:
    """Hold a picker's output to be structured lines without a traceback."""
    text = child.log.read_text()
    assert "Traceback" not in text, text[-3000:]
    loose = [line for line in text.splitlines() if line and not line.startswith("{")]
    assert not loose, loose[:10]


# gRPC


@asynccontextmanager
async def channel(port: int) -> AsyncIterator[Any]:
    """Speak gRPC to a port of this machine, on a connection of our own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as opened:
        yield opened


async def health(port: int, service: str = "") -> str:
    """Ask for gRPC health; the name of the status, or of the gRPC error."""
    async with channel(port) as opened:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await health_pb2_grpc.HealthStub(opened).Check(request, timeout=60)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def log_message(decision_id: str | None, *, status: int = 200, upstream: str = "") -> als_pb2.StreamAccessLogsMessage:
    """Make an access log message of one final entry, as Envoy would send it; None: no decision in its metadata."""
    message = als_pb2.StreamAccessLogsMessage()
    entry: Any = message.http_logs.log_entry.add()
    common = entry.common_properties
    common.access_log_type = accesslog_pb2.AccessLogType.DownstreamEnd
    entry.response.response_code.value = status
    entry.response.response_code_details = "via_upstream"
    if decision_id is not None:
        common.metadata.filter_metadata["extproc"].fields["decision"].string_value = decision_id
    if upstream:
        host, _, port = upstream.rpartition(":")
        common.upstream_remote_address.socket_address.address = host
        common.upstream_remote_address.socket_address.port_value = int(port)
    return message


@asynccontextmanager
async def access_log(port: int) -> AsyncIterator[Any]:
    """Open an access log stream as an Envoy worker does; yields an object with `write(bytes)`."""
    async with channel(port) as opened:
        call = opened.stream_unary("/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs")()
        try:
            yield call
        finally:
            await call.done_writing()
            await call
