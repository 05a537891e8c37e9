"""The two HTTP listeners, over real sockets."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from extproc.config.load import load
from extproc.edge.decisions import RecentDecisions
from extproc.edge.http import AdminPages, AdminServer, HttpListener, MetricsServer
from extproc.edge.telemetry import Telemetry
from extproc.errors import ConfigError
from extproc.vocabulary import EndpointSnapshot
from tests.edge.decision_samples import A, B, decision


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


def metrics_server(ready: tuple[bool, str] = (True, "ready"), port: int = 0) -> MetricsServer:
    telemetry = Telemetry()
    telemetry.config_loaded(7)
    return MetricsServer("127.0.0.1", port, telemetry.registry, lambda: ready)


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
            await AdminServer("127.0.0.1", port, pages()).start()
        assert caught.value.problems[0].path == "admin.port"


async def test_an_address_that_is_not_ours_names_the_host() -> None:
    with pytest.raises(ConfigError) as caught:
        await MetricsServer("192.0.2.1", 0, Telemetry().registry, lambda: (True, "")).start()
    assert caught.value.problems[0].path == "server.host"


async def test_a_privileged_port_names_the_port() -> None:
    problem = metrics_server(port=80)._problem(OSError(errno.EACCES, "Permission denied"))
    assert str(problem) == "server.metrics_port: no permission to listen on port 80; set a port from 1024 on"


async def test_closing_twice_is_fine() -> None:
    server = metrics_server()
    await server.start()
    await server.close()
    await server.close()


def pages() -> AdminPages:
    recent = RecentDecisions(10)
    recent.add(decision(id="first", request_id="r1"))
    recent.add(decision(id="second", request_id="r2", endpoint=B))
    config = load("pool: {scrape: {headers: {authorization: Bearer s3cret}}}")
    return AdminPages(
        endpoints=lambda: [EndpointSnapshot(A, observed_at=9.0), EndpointSnapshot(B)],
        decisions=recent,
        config=lambda: config,
        generation=lambda: 3,
        now=lambda: 10.0,
    )


async def fetch(path: str) -> tuple[int, Any]:
    async with running(AdminServer("127.0.0.1", 0, pages())) as server:
        status, kind, text = await get(server, path)
    assert kind.startswith("application/json")
    return status, json.loads(text)


async def test_the_index_lists_the_pages() -> None:
    async with running(AdminServer("127.0.0.1", 0, pages())) as server:
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
    assert document["generation"] == 3
    assert document["config"]["pool"]["scrape"]["headers"] == {"authorization": "***"}
    assert document["config"]["server"]["grpc_port"] == 9002
