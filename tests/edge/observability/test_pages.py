"""The two HTTP listeners, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import random
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.config.load import load
from extproc.edge.observability.decisions import RecentDecisions
from extproc.edge.observability.pages import AdminServer, HttpListener, IdleTimeouts, MetricsServer
from extproc.edge.observability.telemetry import Telemetry
from extproc.edge.process.listen import ConnectionBounds
from extproc.errors import ConfigError
from extproc.router import Router
from extproc.types import EndpointMetrics
from tests.edge.envoy_wire.decision_samples import A, B, decision


@asynccontextmanager
async def running(server: HttpListener) -> AsyncIterator[HttpListener]:
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def get(server: HttpListener, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{server.port}{path}", headers=headers) as response,
    ):
        return response.status, response.headers["content-type"], await response.text()


def metrics_server(
    ready: tuple[bool, str] = (True, "ready"), port: int = 0, most: int = 100, timeouts: IdleTimeouts | None = None
) -> MetricsServer:
    telemetry = Telemetry()
    telemetry.config_loaded(7)
    bounds = ConnectionBounds("metrics", most, telemetry)
    return MetricsServer("127.0.0.1", port, telemetry.registry, lambda: ready, bounds, timeouts)


class Peer:
    """A connection that is written to by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, path: str) -> int:
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await self.reader.readexactly(int(length.partition(b":")[2]))
        return int(head.split()[1])

    async def over(self) -> bool:
        """Wait until it is closed; True, so that it can be asserted."""
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                await self.reader.read()
        return True


@asynccontextmanager
async def peer(server: HttpListener) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


async def test_metrics_as_text() -> None:
    async with running(metrics_server()) as server:
        status, kind, text = await get(server, "/metrics", {"accept": "text/plain"})
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert "extproc_config_generation 7.0\n" in text
    assert "process_cpu_seconds_total" in text


async def test_metrics_as_openmetrics() -> None:
    async with running(metrics_server()) as server:
        status, kind, text = await get(server, "/metrics", {"accept": "application/openmetrics-text;version=1.0.0"})
    assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
    assert text.endswith("# EOF\n")


async def test_health() -> None:
    async with running(metrics_server()) as server:
        assert (await get(server, "/healthz"))[::2] == (200, "ok\n")
        assert (await get(server, "/readyz"))[::2] == (200, "ready\n")
        assert (await get(server, "/debug/decisions"))[0] == 404


async def test_unready_says_why() -> None:
    async with running(metrics_server((False, "first discovery not done"))) as server:
        assert (await get(server, "/readyz"))[::2] == (503, "first discovery not done\n")
        assert (await get(server, "/healthz"))[0] == 200


async def test_a_port_in_use_names_the_key_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            await metrics_server(port=port).start()
        assert str(caught.value) == (
            f"server.metrics_port: port {port} on 127.0.0.1 is in use; set another port, or 0 for any free one"
        )
        with pytest.raises(ConfigError) as caught:
            await admin_server(port).start()
        assert caught.value.problems[0].path == "admin.port"


async def test_an_address_that_is_not_ours_names_the_host() -> None:
    with pytest.raises(ConfigError) as caught:
        await MetricsServer("192.0.2.1", 0, Telemetry().registry, lambda: (True, "")).start()
    assert caught.value.problems[0].path == "server.host"


async def test_a_privileged_port_names_the_port() -> None:
    problem = metrics_server(port=80)._problem(OSError(errno.EACCES, "Permission denied"))
    assert str(problem) == "server.metrics_port: no permission to listen on port 80; set a port from 1024 on"


async def test_a_full_port_closes_who_has_been_silent_for_longest() -> None:
    async with running(metrics_server(most=3)) as server, AsyncExitStack() as stack:
        first, second, third = [await stack.enter_async_context(peer(server)) for _ in range(3)]
        assert await first.ask("/healthz") == 200
        fourth = await stack.enter_async_context(peer(server))
        assert await second.over()
        # Whoever has asked for something comes last, also a second time on the same connection.
        assert await first.ask("/healthz") == 200
        fifth = await stack.enter_async_context(peer(server))
        assert await third.over()
        assert [await one.ask("/healthz") for one in (first, fourth, fifth)] == [200] * 3
        _, _, page = await get(server, "/metrics")
    assert 'extproc_connections_dropped_total{listener="metrics",reason="crowded"} 3.0' in page


async def test_who_says_nothing_is_closed_and_who_does_not_end_a_head_too() -> None:
    async with (
        running(metrics_server(timeouts=IdleTimeouts(first_request_s=0.05))) as server,
        AsyncExitStack() as stack,
    ):
        silent, slow = [await stack.enter_async_context(peer(server)) for _ in range(2)]
        slow.writer.write(b"GET /healthz HTTP/1.1\r\nHost:")
        assert await silent.over()
        assert await slow.over()
        _, _, page = await get(server, "/metrics")
    assert 'extproc_connections_dropped_total{listener="metrics",reason="silent"} 2.0' in page


async def test_a_kept_connection_is_closed_when_nothing_more_is_asked() -> None:
    async with running(metrics_server(timeouts=IdleTimeouts(next_request_s=0.1))) as server, peer(server) as kept:
        assert await kept.ask("/healthz") == 200
        assert await kept.over()
        assert not server.connections


async def test_an_answer_that_is_not_taken_is_not_kept_for_ever() -> None:
    timeouts = IdleTimeouts(first_request_s=30.0, next_request_s=0.3)
    async with running(metrics_server(timeouts=timeouts)) as server, AsyncExitStack() as stack:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        stack.callback(writer.transport.abort)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
        async with asyncio.timeout(30):
            while not server.connections:
                await asyncio.sleep(0.001)
            while server.connections:
                await asyncio.sleep(0.01)


async def test_what_is_no_http_is_answered_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with running(metrics_server()) as server:
        for said in (
            b"\x16\x03\x01\x02\x00\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.1\r\nx" * 9000,
        ):
            async with peer(server) as one:
                one.writer.write(said)
                assert b" 400 " in await one.reader.readline()
    assert caplog.records == []


async def test_a_page_that_fails_is_told_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    server = metrics_server()

    async def broken(_: web.Request) -> web.StreamResponse:
        raise ZeroDivisionError

    server._runner.app.router.add_get("/broken", broken)
    async with running(server):
        assert (await get(server, "/broken"))[0] == 500
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


async def test_closing_before_the_start_is_fine() -> None:
    await metrics_server().close()


async def test_closing_twice_is_fine() -> None:
    server = metrics_server()
    await server.start()
    await server.close()
    await server.close()


def admin_server(port: int = 0) -> AdminServer:
    recent = RecentDecisions(10)
    recent.decided(decision(id="first", request_id="r1"), 0, {})
    recent.decided(decision(id="second", request_id="r2", endpoint=B), 0, {})
    config = load("pool: {scrape: {headers: {authorization: Bearer s3cret}}}")
    router = Router(config, rng=random.Random(0))
    router.set_endpoints([A, B], now=8.0)
    router.observe(A.id, EndpointMetrics(), now=9.0)
    return AdminServer("127.0.0.1", port, router, recent, lambda: 10.0)


async def fetch(path: str) -> tuple[int, Any]:
    async with running(admin_server()) as server:
        status, kind, text = await get(server, path)
    assert kind.startswith("application/json")
    return status, json.loads(text)


async def test_the_index_lists_the_pages() -> None:
    async with running(admin_server()) as server:
        status, kind, text = await get(server, "/")
        assert (status, kind.split(";")[0]) == (200, "text/html")
        for path in ("debug/endpoints", "debug/decisions", "debug/config"):
            assert f'href="{path}"' in text
            assert (await get(server, f"/{path}"))[0] == 200


async def test_endpoints() -> None:
    _, document = await fetch("/debug/endpoints")
    assert [found["endpoint"] for found in document["endpoints"]] == [A.id, B.id]
    assert [found["signal_age_s"] for found in document["endpoints"]] == [1.0, None]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("", ["second", "first"]),
        ("?limit=1", ["second"]),
        ("?limit=0", []),
        ("?endpoint=10.0.0.1:8000", ["first"]),
        ("?endpoint=gpu-2", ["second"]),
        ("?id=first", ["first"]),
        ("?id=r2", ["second"]),
        ("?id=nobody", []),
    ],
)
async def test_decisions(query: str, ids: list[str]) -> None:
    status, document = await fetch(f"/debug/decisions{query}")
    assert status == 200
    assert document["remembered"] == 2
    assert [found["id"] for found in document["decisions"]] == ids


@pytest.mark.parametrize("query", ["limit=x", "limit=-1", "limit=", "limit=99999999999", "limit=%C2%B2", "endpont=a"])
async def test_bad_filters(query: str) -> None:
    status, document = await fetch(f"/debug/decisions?{query}")
    assert status == 400
    assert "limit" in document["error"]


async def test_the_configuration_without_its_secrets() -> None:
    _, document = await fetch("/debug/config")
    assert document["generation"] == 1
    assert document["config"]["pool"]["scrape"]["headers"] == {"authorization": "***"}
    assert document["config"]["server"]["grpc_port"] == 9002
