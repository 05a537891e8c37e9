"""Under full load, a closed loop of 64 clients: clients that break off, a killed picker, a killed Envoy. Nothing stays behind.

Each test ends with an empty ledger, no open stream, and as many file descriptors as before the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import aiohttp
import pytest
import pytest_asyncio

from extproc.demo.processes import Child
from tests.e2e.day import assert_clean
from tests.e2e.stack import MODEL, Stack, on_both, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

CLIENTS = 64
PROMPT = "what everybody asks, at some length " * 40


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=on_both("direct", "full-duplex"))
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    # Whose end Envoy can no longer report is released by the lease.
    config = {"in_flight": {"lease": "2s"}, "log": {"decisions": {"sample": 0.0}}}
    folder = tmp_path_factory.mktemp("load")
    async with running(request.param, folder, servers=3, speed=50.0, config=config) as stack:
        yield stack


class Load:
    """Clients that ask again as soon as they have an answer; `break_off`: the share of requests they do not wait for."""

    def __init__(self, stack: Stack, *, break_off: float = 0.0) -> None:
        self._stack = stack
        self._break_off = break_off
        self._rng = random.Random(CLIENTS)
        self._stop = False
        self.ends: Counter[str] = Counter()
        """Statuses, `broken off`, and names of errors."""
        self._clients: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> Self:
        self._clients = [asyncio.ensure_future(self._client(number)) for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._clients)

    async def more(self, end: str, count: int) -> None:
        """Wait for `count` more requests that end so."""
        wanted = self.ends[end] + count
        await until(lambda: self.ends[end] >= wanted, f"{count} more {end} (so far {dict(self.ends)})", timeout=90)

    async def _client(self, number: int) -> None:
        asked = 0
        while not self._stop:
            asked += 1
            body = {"model": MODEL, "prompt": f"{PROMPT}{number} {asked}", "max_tokens": 8, "stream": asked % 2 == 0}
            if self._rng.random() < self._break_off:
                await self._broken_off(body)
                continue
            try:
                answer = await self._stack.post("/v1/completions", body)
                self.ends[str(answer.status)] += 1
                pause_s = 0.0 if answer.status == 200 else 0.05
            except aiohttp.ClientError as error:
                self.ends[type(error).__name__] += 1
                pause_s = 0.05
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _broken_off(self, body: dict[str, object]) -> None:
        asking = asyncio.ensure_future(self._stack.post("/v1/completions", body))
        await asyncio.wait([asking], timeout=self._rng.random() * 0.05)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
            await asking
        self.ends["broken off"] += 1


def descriptors(child: Child) -> int:
    return len(list(Path(f"/proc/{child.process.pid}/fd").iterdir()))


async def at_rest(stack: Stack) -> int:
    """Wait until nothing is held or open; return the picker's file descriptors."""
    await stack.settled()

    async def none_open() -> bool:
        page = await stack.metrics()
        return not any(
            page.total(name)
            for name in (
                "extproc_streams_open",
                "extproc_endpoint_in_flight_requests",
                "extproc_endpoint_in_flight_tokens",
                "extproc_buffered_bytes",
            )
        )

    await until(none_open, "no stream is open, and the ledger is empty", timeout=60)
    page = await stack.metrics()
    assert page.total("extproc_internal_errors_total") == 0
    assert page.total("extproc_protocol_errors_total") == 0
    assert_clean(stack.picker)
    return descriptors(stack.picker)


async def settles_to(stack: Stack, wanted: int) -> None:
    """Wait until the picker has no more descriptors open than that; connections of scrapes come and go."""
    await until(lambda: descriptors(stack.picker) <= wanted + 4, f"{wanted} file descriptors as before", timeout=60)


async def test_half_of_the_clients_break_off(stack: Stack) -> None:
    async with Load(stack) as load:
        await load.more("200", CLIENTS)
    before = await at_rest(stack)
    async with Load(stack, break_off=0.5) as load:
        await load.more("broken off", 5 * CLIENTS)
        await load.more("200", CLIENTS)
    assert load.ends.keys() == {"200", "broken off"}, load.ends
    await at_rest(stack)
    await settles_to(stack, before)

    async def idle() -> bool:
        return all(found["running"] == 0 and found["waiting"] == 0 for found in await stack.endpoints())

    await until(idle, "the engines have dropped what nobody waits for")


async def test_the_picker_is_killed(stack: Stack) -> None:
    async with Load(stack) as load:
        await load.more("200", 2 * CLIENTS)
        before = descriptors(stack.picker)
        await stack.picker.kill()
        await load.more("503", CLIENTS)
        await stack.start_picker()
        await load.more("200", 2 * CLIENTS)
    if stack.profile == "direct":
        assert load.ends.keys() == {"200", "503"}, "without a response phase no running answer is cut"
    await at_rest(stack)
    await settles_to(stack, before)
    for cluster in ("picker", "engines"):

        async def none_active(name: str = cluster) -> bool:
            active = await stack.envoy_stat(f"cluster.{name}.upstream_rq_active")
            return active <= (1 if name == "picker" and stack.profile == "direct" else 0)  # the access log's own stream

        await until(none_active, f"Envoy holds no request to {cluster}")


async def test_envoy_is_killed(stack: Stack) -> None:
    async with Load(stack) as load:
        await load.more("200", 2 * CLIENTS)
        before = descriptors(stack.picker)
        await stack.proxy.kill()
        await until(lambda: len(load.ends) > 1, "the clients have noticed")
        await stack.start_envoy()
        await load.more("200", 2 * CLIENTS)
    assert "503" not in load.ends, "a new Envoy takes requests as soon as it is ready"
    await at_rest(stack)
    await settles_to(stack, before)
