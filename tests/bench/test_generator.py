import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from envoy.service.accesslog.v3 import als_pb2

from bench.bare_server import bare_handlers
from bench.bodies import write_bodies
from bench.core_cost import chat_body
from bench.ext_proc_client import ExtProcCalls, log_entry
from bench.h2_client import H2Client, LoadError
from bench.load import LoadResult, generate
from extproc.demo.processes import ChildError, free_ports
from extproc.edge.envoy_wire.access_log import decode_entries


@asynccontextmanager
async def _bare() -> AsyncIterator[int]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(tuple(bare_handlers(["127.0.0.1:8001"])))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def _run(port: int, *arguments: str) -> tuple[LoadResult, list[str]]:
    said: list[str] = []
    result = await generate(
        ["grpc", "--port", str(port), *arguments],
        begin=lambda: said.append("begin"),
        end=lambda: said.append("end"),
    )
    return result, said


async def test_a_closed_loop_against_a_grpc_server(tmp_path: Path) -> None:
    bodies = write_bodies(tmp_path / "bodies", 20, random.Random(1))
    async with _bare() as port:
        result, said = await _run(port, "--bodies", str(bodies), "--requests", "200", "--run-up", "10")
    assert (result.requests, result.failed, said) == (200, 0, ["begin", "end"])
    assert result.latencies_s == tuple(sorted(result.latencies_s))
    assert result.rate > 0


async def test_bodies_of_its_own_do_not_need_a_file() -> None:
    async with _bare() as port:
        result, _ = await _run(port, "--requests", "150", "--streams", "16")
    assert (result.requests, result.failed) == (150, 0)


async def test_nobody_there_is_said() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ChildError, match=r"the load generator failed: generator: .*refused"):
        await _run(port, "--requests", "1")


async def test_a_server_that_goes_away_is_said() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ChildError, match=r"closed the connection|reset|lost"):
            await _run(port, "--requests", "1")


async def test_a_body_larger_than_the_window_is_refused() -> None:
    async with _bare() as port:
        calls = ExtProcCalls(lambda _sent, _ok: None)
        _, client = await asyncio.get_running_loop().create_connection(lambda: H2Client(calls), "127.0.0.1", port)
        await client.settled
        calls.client = client
        with pytest.raises(LoadError, match="does not fit"):
            calls.begin(chat_body(["a", "b"], 20_000_000), 0.0)
        client.close()


def test_the_log_entry_is_one_the_picker_can_read() -> None:
    logs = als_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[log_entry("0123", 1000)])
    (entry,) = decode_entries(als_pb2.StreamAccessLogsMessage(http_logs=logs).SerializeToString())
    assert (entry.decision_id, entry.interim, entry.status) == ("0123", False, 200)
    assert entry.usage is not None
    assert entry.usage.prompt_tokens == 250
