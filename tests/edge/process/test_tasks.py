"""The supervisor of background tasks, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable

import pytest

from extproc.edge.process.tasks import HEALTHY_AFTER_S, KEEPS_FAILING, MOST_DELAY_S, TASKS, Tasks


class Bench:
    """Tasks whose pauses take no time but move the clock; `runs` tells each run of `work` what to do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.tasks = Tasks(clock=lambda: self.now, sleep=self._sleep, rng=random.Random(1))
        self.runs: list[Callable[[], object]] = []
        self.done = 0

    async def _sleep(self, delay_s: float) -> None:
        self.pauses.append(delay_s)
        self.now += delay_s
        await asyncio.sleep(0)

    async def work(self) -> None:
        self.done += 1
        if self.done <= len(self.runs):
            self.runs[self.done - 1]()
            return
        await asyncio.Event().wait()

    def fail(self, after_s: float = 0.0) -> None:
        self.now += after_s
        raise ZeroDivisionError

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.tasks.close()


async def test_what_fails_is_logged_counted_and_started_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.runs = [bench.fail]
    bench.tasks.start("scrape", bench.work, detail="10.0.0.1:8000")
    await bench.until(lambda: bench.done == 2)
    (record,) = caplog.records
    assert (record.levelno, vars(record)["task"], vars(record)["of"]) == (logging.ERROR, "scrape", "10.0.0.1:8000")
    assert "ZeroDivisionError" in caplog.text
    assert bench.tasks.failures == {**dict.fromkeys(TASKS, 0), "scrape": 1}
    assert 0.5 <= bench.pauses[0] <= 1.0


async def test_what_returns_is_over(bench: Bench) -> None:
    bench.runs = [lambda: None]
    task = bench.tasks.start("discovery", bench.work)
    await task
    assert bench.done == 1
    assert not any(bench.tasks.failures.values())


async def test_pauses_grow_to_a_bound_and_begin_anew_after_a_run_that_went_well(bench: Bench) -> None:
    bench.runs = [*[bench.fail] * 12, lambda: bench.fail(HEALTHY_AFTER_S), bench.fail]
    bench.tasks.start("upkeep", bench.work)
    await bench.until(lambda: bench.done == 15)
    assert all(most_s / 2 <= pause <= most_s for most_s, pause in zip((1, 2, 4, 8, 16), bench.pauses, strict=False))
    assert all(MOST_DELAY_S / 2 <= pause <= MOST_DELAY_S for pause in bench.pauses[5:12])
    assert bench.pauses[12] <= 1.0
    assert bench.pauses[13] <= 2.0
    assert len(set(bench.pauses)) == len(bench.pauses), "jitter"


async def test_what_keeps_failing_is_named_until_it_has_run_for_a_while(bench: Bench) -> None:
    bench.runs = [bench.fail] * KEEPS_FAILING
    bench.tasks.start("scrape", bench.work)
    bench.tasks.start("scrape", asyncio.Event().wait)  # type: ignore[arg-type]
    await bench.until(lambda: bench.done == KEEPS_FAILING)
    assert bench.tasks.keep_failing() == {"scrape": 1}
    await bench.until(lambda: bench.done == KEEPS_FAILING + 1)
    assert bench.tasks.keep_failing() == {"scrape": 1}, "it runs, but for how long?"
    bench.now += HEALTHY_AFTER_S
    assert not bench.tasks.keep_failing()


async def test_a_few_failures_are_no_series(bench: Bench) -> None:
    bench.runs = [bench.fail] * (KEEPS_FAILING - 1)
    bench.tasks.start("scrape", bench.work)
    await bench.until(lambda: bench.done == KEEPS_FAILING)
    assert not bench.tasks.keep_failing()


async def test_a_pause_is_no_run_that_goes_well(bench: Bench) -> None:
    """A clock that jumps while a task waits for its turn does not make it well."""
    bench.runs = [bench.fail] * 20
    bench.tasks.start("scrape", bench.work)
    await bench.until(lambda: bench.done == KEEPS_FAILING)
    task = next(iter(bench.tasks._running))
    assert not task.done()
    bench.now += 10 * HEALTHY_AFTER_S
    assert bench.tasks.keep_failing() == {"scrape": 1}


async def test_who_started_a_task_may_cancel_it(bench: Bench) -> None:
    task = bench.tasks.start("config", bench.work)
    await bench.until(lambda: bench.done)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert not any(bench.tasks.failures.values())


async def test_a_cancelled_future_that_a_task_waits_for_is_a_failure_of_it(bench: Bench) -> None:
    """Nobody has asked the task to end: without this it would be gone without a word."""
    waited: list[asyncio.Future[None]] = []

    async def work() -> None:
        waited.append(asyncio.get_running_loop().create_future())
        await waited[-1]

    bench.tasks.start("models", work)
    await bench.until(lambda: waited)
    waited[0].cancel()
    await bench.until(lambda: len(waited) == 2)
    assert bench.tasks.failures["models"] == 1


async def test_close_ends_all_and_may_be_repeated(bench: Bench) -> None:
    tasks = [bench.tasks.start(kind, bench.work) for kind in TASKS]
    await bench.tasks.close()
    await bench.tasks.close()
    assert all(task.cancelled() for task in tasks)
    assert not bench.tasks._running


async def test_an_unknown_kind_is_a_mistake_of_the_caller(bench: Bench) -> None:
    with pytest.raises(AssertionError):
        bench.tasks.start("other", bench.work)
