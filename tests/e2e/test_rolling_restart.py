"""Engines that restart one after the other: they drain (503), are away, start (503), and no client notices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.day import assert_clean
from tests.e2e.stack import Stack, until

pytestmark = pytest.mark.e2e

CLIENTS = 6


class Clients:
    """Ask without a pause, streams and JSON in turns, until told to stop; keeps what was not answered as it should be."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.answered = 0
        self.errors: list[str] = []
        self.enough = False
        self.may_ask = asyncio.Event()
        self.may_ask.set()

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(self._ask(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            self.enough = True
            self.may_ask.set()
            await asyncio.gather(*tasks)

    async def _ask(self, number: int) -> None:
        stream = number % 2 == 1
        while not self.enough:
            await self.may_ask.wait()
            try:
                answer = await self.stack.chat(f"question {self.answered} of {number}", stream=stream)
                assert answer.status == 200, f"{answer.status} {answer.body!r}"
                assert len(answer.events()) >= 4 if stream else answer.json()["choices"]
            except (AssertionError, OSError, ValueError) as error:
                self.errors.append(repr(error))
            self.answered += 1

    async def served(self, more: int) -> None:
        """Wait until so many more have been answered."""
        wanted = self.answered + more
        await until(lambda: self.answered >= wanted, f"{more} more answers")


async def restart(stack: Stack, index: int, clients: Clients) -> None:
    """Restart one engine as its operator would: it drains, is away, starts and is back."""
    await stack.fault(index, kind="error", status=503)
    await clients.served(40)
    # What is on its way to a process that ends in this moment is lost with it: an engine that drains ends when it is idle.
    clients.may_ask.clear()
    await stack.settled()
    await stack.fault(index, kind="restart", seconds=0.5)
    clients.may_ask.set()
    await clients.served(20)

    async def starting() -> bool:
        with contextlib.suppress(OSError):
            await stack.fault(index, kind="error", status=503)
            return True
        return False

    await until(starting, "the process is there again")
    await clients.served(40)
    await stack.fault(index, kind="none")
    await clients.served(20)


@pytest.mark.parametrize(
    ("profile", "fallbacks"), [("direct", 0), ("direct", 1), ("full-duplex", 0), ("buffered", 0), ("headers-only", 0)]
)
async def test_a_rolling_restart_is_no_clients_problem(
    tmp_path: Path, transport: str, profile: str, fallbacks: int
) -> None:
    config = {"routing": {"strategy": "round-robin", "fallbacks": fallbacks}}
    async with Stack(profile, tmp_path, transport=transport, servers=3, config=config) as stack:
        clients = Clients(stack)
        async with clients.asking():
            for index in range(3):
                await restart(stack, index, clients)
        assert clients.errors == []
        decisions = await stack.settled()
        assert {found["outcome"] for found in decisions} == {"ok"}
        page = await stack.metrics()
        assert page.total("extproc_requests_total") == page.total("extproc_requests_total", outcome="ok")
        assert page.by("extproc_rerouted_requests_total", "endpoint").keys() == set(stack.server_ids)
        assert_clean(stack.picker)


async def test_an_engine_that_answers_503_is_busy_and_keeps_its_health_score(tmp_path: Path, transport: str) -> None:
    """It can be reached: were it taken for one that cannot, a full engine would be demoted for being full."""
    config = {"routing": {"strategy": "round-robin", "fallbacks": 0}}
    async with Stack("direct", tmp_path, transport=transport, servers=3, config=config) as stack:
        await stack.fault(0, kind="error", status=503)
        for number in range(12):
            assert (await stack.chat(f"question {number}")).status == 200
        decisions = await stack.settled()
        met = [found for found in decisions if found["endpoint"] == stack.server_ids[0]]
        assert met
        for found in met:
            assert found["outcome"] == "ok"
            assert found["served_by"] in stack.server_ids[1:]
            assert found["tried"] == {stack.server_ids[0]: "busy"}
        assert {found["health_score"] for found in await stack.endpoints()} == {1.0}
        page = await stack.metrics()
        assert page.total("extproc_requests_total", outcome="ok") == 12
        assert page.total("extproc_requests_total") == 12
        assert page.by("extproc_rerouted_requests_total", "endpoint") == {stack.server_ids[0]: len(met)}
        assert_clean(stack.picker)


async def test_when_all_are_busy_attempts_do_not_multiply(tmp_path: Path, transport: str) -> None:
    async with Stack("direct", tmp_path, transport=transport, servers=4) as stack:
        for index in range(4):
            await stack.fault(index, kind="error", status=503)
        answers = await asyncio.gather(*(stack.chat(f"question {number}") for number in range(60)))
        assert {answer.status for answer in answers} == {503}
        await stack.settled()
        assert await stack.envoy_stat("cluster.engines.upstream_rq_503") <= 2 * 60
        assert {found["health_score"] for found in await stack.endpoints()} == {1.0}
        assert (await stack.metrics()).total("extproc_requests_total", outcome="busy") == 60
        assert_clean(stack.picker)
