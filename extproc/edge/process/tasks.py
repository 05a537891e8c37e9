"""One supervisor for all background tasks of the process: a task that fails is logged, counted and started again.

Decides when a task runs again (exponential backoff with jitter) and when it counts as one that keeps failing. A task that
returns is over; only an exception is a failure.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

__all__ = ["TASKS", "Restarts", "Tasks"]

TASKS: Final = ("upkeep", "discovery", "scrape", "models", "config", "certificates", "log")
"""All kinds of background tasks: the label values of the metric, from the start."""

FIRST_DELAY_S: Final = 1.0
MOST_DELAY_S: Final = 30.0
"""At this delay a task that keeps failing logs one traceback in half a minute."""
HEALTHY_AFTER_S: Final = 60.0
"""A run of this length ends a series of failures."""
KEEPS_FAILING: Final = 3
"""Failures in a row after which a task is said to keep failing."""

_log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]


class Restarts:
    """The failures of one task: how many in a row, and how long to wait before the next run."""

    __slots__ = ("_in_a_row", "_rng", "_started_at", "_waiting")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._in_a_row = 0
        self._started_at = 0.0
        self._waiting = False

    def started(self, now: float) -> None:
        """Note that a run begins."""
        self._started_at, self._waiting = now, False

    def failed(self, now: float) -> float:
        """Note that the run has failed; return the seconds to wait before the next one."""
        self._in_a_row = 1 if self._was_healthy(now) else self._in_a_row + 1
        self._waiting = True
        most_s = min(FIRST_DELAY_S * 2.0 ** min(self._in_a_row - 1, 16), MOST_DELAY_S)
        return most_s * self._rng.uniform(0.5, 1.0)

    def keeps_failing(self, now: float) -> bool:
        """Tell whether it has failed several times in a row and has not run for a minute since."""
        return self._in_a_row >= KEEPS_FAILING and not self._was_healthy(now)

    def _was_healthy(self, now: float) -> bool:
        return not self._waiting and now - self._started_at >= HEALTHY_AFTER_S


class Tasks:
    """The background tasks of one process.

    Use on one event loop. The caller of `start` may cancel its task; `close` cancels all that are left.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._running: dict[asyncio.Task[None], tuple[str, Restarts]] = {}
        self._failures = dict.fromkeys(TASKS, 0)

    @property
    def failures(self) -> Mapping[str, int]:
        """How often tasks of each kind have failed since the start."""
        return self._failures

    def keep_failing(self) -> Counter[str]:
        """Count, by kind, the tasks that fail again and again; empty: all is well."""
        now = self._clock()
        return Counter(kind for kind, restarts in self._running.values() if restarts.keeps_failing(now))

    def start(self, kind: str, work: Work, *, detail: str = "") -> asyncio.Task[None]:
        """Run `work()` until it returns, and again whenever it raises. Needs a running loop.

        `kind` is one of `TASKS`; `detail` (an endpoint, a file) is for the log alone.
        """
        assert kind in self._failures, kind
        restarts = Restarts(self._rng)
        name = f"{kind} {detail}".rstrip()
        task = asyncio.get_running_loop().create_task(self._supervise(kind, work, detail, restarts), name=name)
        self._running[task] = (kind, restarts)
        task.add_done_callback(self._running.pop)
        return task

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended. A second call does nothing."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _supervise(self, kind: str, work: Work, detail: str, restarts: Restarts) -> None:
        while True:
            restarts.started(self._clock())
            try:
                await work()
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is None or current.cancelling():
                    raise
                # This task was not cancelled; something that it awaited was.
                delay_s = self._failed(kind, detail, restarts)
            except Exception:  # noqa: BLE001 - whatever it is, the task must run again
                delay_s = self._failed(kind, detail, restarts)
            else:
                return
            await self._sleep(delay_s)

    def _failed(self, kind: str, detail: str, restarts: Restarts) -> float:
        self._failures[kind] += 1
        delay_s = restarts.failed(self._clock())
        _log.exception(
            "a background task has failed and is started again: report the traceback",
            extra={"task": kind, "of": detail, "again_in_s": round(delay_s, 1)},
        )
        return delay_s
