"""The ways of replacing a picker that docs/upgrade.md describes, under load: what each of them costs clients.

The load is steady and open: a request is sent when its time has come, whatever has become of those before.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pytest
import yaml

from extproc.demo.processes import Child, Children
from tests.e2e.day import assert_clean, events
from tests.e2e.stack import DEADLINE_S, EXTPROC, Metrics, Ports, Response, Stack, merged, until

pytestmark = pytest.mark.e2e

RATE: Final = 40
"""Requests a second: enough that a gap of a tenth of a second is seen, few enough for a busy machine."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One request of the load."""

    sent_at: float
    status: int
    """0: no answer."""
    kind: str = ""
    """`error.type` of an answer that is not 200."""


class Load:
    """Requests at a steady rate for the length of a block."""

    def __init__(self, stack: Stack, rate: float = RATE) -> None:
        self.answers: list[Answered] = []
        self._stack = stack
        self._rate = rate
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._sending = asyncio.ensure_future(self._send())
        await self.some(10)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._sending is not None
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        await asyncio.gather(*self._tasks)

    @property
    def lost(self) -> list[Answered]:
        """What did not end well, in the order of sending."""
        return sorted((found for found in self.answers if found.status != 200), key=lambda found: found.sent_at)

    async def some(self, count: int) -> None:
        """Wait until so many more have been answered."""
        wanted = len(self.answers) + count
        await until(lambda: len(self.answers) >= wanted, f"{count} more answers")

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        due, number = loop.time(), 0
        while True:
            number += 1
            task = loop.create_task(self._ask(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            due += 1 / self._rate
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def _ask(self, number: int) -> None:
        sent_at = asyncio.get_running_loop().time()
        try:
            answer = await self._stack.chat(f"question {number}", max_tokens=2)
        except OSError as error:
            self.answers.append(Answered(sent_at, 0, repr(error)))
            return
        kind = "" if answer.status == 200 else str(answer.json()["error"]["type"])
        self.answers.append(Answered(sent_at, answer.status, kind))


def upgrading(folder: Path, transport: str, *, drain_delay: str = "4s", **options: Any) -> Stack:
    """Make a stack whose picker goes down as one does that is shipped."""
    server = {"drain_delay": drain_delay, "grace_period": "30s"}
    return Stack("direct", folder, transport=transport, speed=200.0, config={"server": server}, **options)


async def told(child: Child, event: str) -> None:
    """Wait until a picker has logged an event."""
    await until(lambda: events(child, event), event)


async def test_in_place_only_the_requests_of_the_gap_are_lost(tmp_path: Path, transport: str) -> None:
    """The only picker: used while it drains, and again as soon as the next one listens."""
    async with upgrading(tmp_path, transport) as stack, Load(stack) as load:
        loop = asyncio.get_running_loop()
        old = stack.picker
        old.send(signal.SIGTERM)
        await told(old, "closing the gRPC port")
        closed_at = loop.time()
        assert await old.process.wait() == 0
        new = await stack.start_picker()
        ready_at = loop.time()
        await load.some(2 * RATE)
        early = [found for found in load.lost if found.sent_at < closed_at - 0.5]
        late = [found for found in load.lost if found.sent_at > ready_at + 0.5]
        assert not early, "while it drained"
        assert not late, "after the new one was ready"
        assert {found.status for found in load.lost} <= {503}, load.lost
        for child in (old, new):
            assert_clean(child)


async def test_a_new_process_beside_the_draining_one_costs_nothing(tmp_path: Path, transport: str) -> None:
    """The same configuration, the same ports: started at once after SIGTERM, it has taken over before the old one goes."""
    # As long as a busy machine may need to start a process.
    async with upgrading(tmp_path, transport, drain_delay="15s") as stack:
        async with Load(stack) as load:
            old = stack.picker
            old.send(signal.SIGTERM)
            await told(old, "draining")
            # By its log: any of the two may be asked at the port they share.
            new = await stack.start_picker(by_log=True)
            assert not events(old, "closing the gRPC port"), "the new one came too late for this test"
            assert await old.process.wait() == 0
            await load.some(RATE)
        assert not load.lost
        assert (await stack.metrics()).total("extproc_decisions_total") >= RATE, "the new one has taken over"
        for child in (old, new):
            assert_clean(child)


async def test_a_picker_that_does_not_drain_keeps_its_ports(tmp_path: Path, transport: str) -> None:
    async with upgrading(tmp_path, transport, servers=1) as stack:
        second = await stack.children.start("twice", [*EXTPROC, "serve", "--config", str(stack.config_file)])
        assert await asyncio.wait_for(second.process.wait(), DEADLINE_S) == 2
        assert f"port {stack.ports.metrics} on 127.0.0.1 is in use" in second.tail()


@asynccontextmanager
async def second_picker(stack: Stack) -> AsyncIterator[Callable[[], Awaitable[Child]]]:
    """Configure another picker beside the stack's, at ports of its own; yields what starts it, or starts it again."""
    ports = Ports.free()
    file = stack.folder / "second.yaml"
    changes = {
        "server": {"grpc_port": ports.grpc, "health_port": ports.health, "metrics_port": ports.metrics},
        "admin": {"port": ports.admin},
    }
    stack.envoy = {"pickers": (f"127.0.0.1:{stack.ports.grpc}", f"127.0.0.1:{ports.grpc}")}
    numbers = itertools.count(1)

    async def start() -> Child:
        file.write_text(yaml.safe_dump(merged(stack.picker_config(), changes)))
        child = await children.start(f"second-{next(numbers)}", [*EXTPROC, "serve", "--config", str(file)])
        await child.wait_http(f"http://127.0.0.1:{ports.metrics}/readyz", timeout_s=DEADLINE_S)
        return child

    async with Children(stack.folder / "logs") as children:
        yield start


async def test_with_a_second_picker_no_request_is_lost(tmp_path: Path, transport: str) -> None:
    """One after the other is replaced; each waits until Envoy knows that the other serves."""
    stack = upgrading(tmp_path, transport)
    async with second_picker(stack) as start_second:
        other = await start_second()
        async with stack:
            first = stack.picker
            async with Load(stack) as load:
                assert await first.stop(grace_s=DEADLINE_S) == 0
                await load.some(RATE)
                await stack.start_picker()
                await stack.picker_healthy()
                assert await other.stop(grace_s=DEADLINE_S) == 0
                await load.some(RATE)
                newest = await start_second()
                await stack.picker_healthy()
                await load.some(RATE)
            assert not load.lost
            for child in (first, other, stack.picker, newest):
                assert_clean(child)


async def test_a_second_picker_that_is_killed_costs_next_to_nothing(tmp_path: Path) -> None:
    """Requests that it had not answered are asked of the other; its death is no reason to wait for a health check."""
    stack = upgrading(tmp_path, "")
    async with second_picker(stack) as start_second:
        other = await start_second()
        async with stack, Load(stack) as load:
            await other.kill()
            await load.some(4 * RATE)
            assert not load.lost


async def test_every_picker_hears_how_its_requests_ended(tmp_path: Path, transport: str) -> None:
    """Two workers of Envoy and two pickers: each log reaches both, and what the other decided is dropped."""
    stack = upgrading(tmp_path, transport, concurrency=2)
    async with second_picker(stack) as start_second:
        await start_second()
        async with stack:
            other = int(yaml.safe_load((tmp_path / "second.yaml").read_text())["server"]["metrics_port"])

            async def pages() -> list[Metrics]:
                return [await stack.metrics(), await stack.metrics(other)]

            answers = await asyncio.gather(*(stack.chat(f"question {number}") for number in range(60)))
            assert {answer.status for answer in answers} == {200}

            async def all_ended() -> bool:
                return not sum(page.total("extproc_endpoint_in_flight_requests") for page in await pages())

            await until(all_ended, "neither holds a request for open")
            for page in await pages():
                decided = page.total("extproc_decisions_total")
                assert 0 < decided < 60
                assert page.total("extproc_requests_total", outcome="ok") == decided
                assert page.total("extproc_leases_expired_total") == 0
                assert page.total("extproc_access_log_entries_total", kind="foreign") == 60 - decided


@pytest.mark.parametrize("profile", ["direct", "full-duplex", "buffered"])
async def test_a_body_that_met_no_picker_arrives_whole_and_once_at_the_next(tmp_path: Path, profile: str) -> None:
    """Envoy opens the stream again and says on it what it had said: whatever the size and the pace, nothing twice."""

    async def slowly(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]
            await asyncio.sleep(0.02)

    async with Stack(profile, tmp_path, servers=0, recorders=1, ready=False) as stack:
        (upstream,) = stack.upstreams
        await stack.picker.kill()
        starting = asyncio.ensure_future(stack.start_picker())
        bodies: dict[str, bytes] = {}
        asked: dict[str, asyncio.Task[Response]] = {}
        while not starting.done():
            for size in (1, 1_000, 70_000, 300_000, 900_000, 3_000_000):
                body = os.urandom(size // 2).hex().encode() + b"x" * (size % 2)
                for paced in (body, slowly(body)):
                    path = f"/any/{len(asked)}"
                    bodies[path] = body
                    asked[path] = asyncio.ensure_future(stack.request("POST", path, paced))
            await asyncio.sleep(0.3)
        await starting
        answers = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        assert {answer.status for answer in answers.values()} <= {200, 503}
        rescued = [path for path, answer in answers.items() if answer.status == 200]
        # Beyond 64 KiB Envoy does not keep what it would have to say again.
        assert {len(bodies[path]) for path in rescued} >= {1, 1_000}
        for path in answers:
            arrived = [got for got in upstream.received if got.path == path]
            assert [got.body == bodies[path] for got in arrived] == [True] * (path in rescued)
