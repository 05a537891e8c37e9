"""Connections that grow old under a real Envoy: it comes back on new ones, and no request notices."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.day import assert_clean
from tests.e2e.stack import Stack, until

pytestmark = pytest.mark.e2e


async def test_no_request_notices_that_connections_grow_old(tmp_path: Path, transport: str) -> None:
    config = {"server": {"max_connection_age": 0.5}, "in_flight": {"lease": 3}}
    async with Stack("direct", tmp_path, transport=transport, config=config) as stack:
        statuses: list[int] = []
        enough = asyncio.Event()

        async def client(name: int) -> None:
            while not enough.is_set():
                statuses.append((await stack.chat(f"client {name} says hello")).status)

        clients = [asyncio.ensure_future(client(name)) for name in range(4)]
        before = await stack.envoy_stat("cluster.picker.upstream_cx_total")

        async def several_came() -> bool:
            return await stack.envoy_stat("cluster.picker.upstream_cx_total") >= before + 4

        await until(several_came, "Envoy has come back on four new connections")
        enough.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}

        # The old ones are gone: nothing on them lasts for ever, the access log's stream neither.
        async def few() -> bool:
            return await stack.envoy_stat("cluster.picker.upstream_cx_active") <= 3

        await until(few, "the old connections are closed")
        await stack.settled()
        page = await stack.metrics()
        assert page.total("extproc_requests_total", outcome="ok") >= 0.9 * len(statuses)
        assert_clean(stack.picker)
