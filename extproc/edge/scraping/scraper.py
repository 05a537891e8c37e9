"""Fetch every endpoint's metrics page (and, rarely, its list of models) and hand what they say to a sink.

Of the page only what is needed, where the endpoint can select (`edge.scraping.selection`); where that fails the whole page comes
in the same turn, so that nothing but the whole page decides whether a scrape has failed.

One task per endpoint on its own kept connection, so that a slow or dead endpoint delays nobody; one that is due takes
others along, which saves half of what they cost. The list of models has a task and a connection of its own, only while
it is asked for, so that it does not delay the metrics page either. When to ask is `edge.scraping.scrape_interval`'s arithmetic, what a
page says is `edge.scraping.signals`', what it means is the sink's; how it is fetched, `http_client`'s. Redirects are not followed:
a scrape goes where the configuration says.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from extproc.config.schema import ScrapeConfig
from extproc.edge.process.tasks import Tasks
from extproc.edge.scraping import scrape_interval as cadence
from extproc.edge.scraping.core_share import Wakefulness
from extproc.edge.scraping.engines import ENGINES
from extproc.edge.scraping.failures import ScrapeFailedError, ScrapeFailure
from extproc.edge.scraping.http_client import read_buffer
from extproc.edge.scraping.selection import Selection, Told
from extproc.edge.scraping.signals import has_load, read_metrics, read_models, told
from extproc.edge.scraping.source import EndpointPages, Page, tls_context
from extproc.types import Endpoint, EndpointMetrics

__all__ = ["ScrapeSink", "Scraper"]

_BUSY_HOLD_S: Final = 1.0
"""How long a poke makes an endpoint busy: the engine's gauges lag behind by up to a step."""
_TURN_CPU_S: Final = 150e-6
"""What a scrape costs in the event loop itself, where no meter of ours runs (40 to 250 us measured, most where it sleeps)."""
_NEAR_S: Final = 0.002
"""So near, the time has come. uvloop's timers count milliseconds, from when the loop last looked at its clock: one that is
asked for half of that comes up to as much too early, and rarely too late for signals that must not get too old."""

_COMPANY: Final = 16
"""How many are asked at once, at most: a request may come behind their pages, 150 to 300 us each."""
_AT_ONCE: Final = 100
"""Tasks begun or ended in one turn of the loop, some 30 us each; of a pool of 1,000 that is replaced, 2,000 come at once."""
_AWAKE: Final = 0.2
"""From this share of a core on our thread has warm caches anyway, and pages all at once only make requests wait."""
_NEVER: Final = float("inf")

_log = logging.getLogger(__name__)


class ScrapeSink(Protocol):
    """Who is told what the scraper finds; called in the event loop, must not block."""

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> object:
        """Take in one page. True means: the engine has restarted (its models are then asked for anew)."""

    def observe_failure(self, endpoint_id: str, reason: ScrapeFailure, now: float) -> None:
        """Note a scrape that failed."""

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:
        """Take in the models and adapters an endpoint lists, name -> parent (None: a base model)."""


@dataclass(slots=True, eq=False)
class _Target:
    """One endpoint and where its scraping stands."""

    endpoint: Endpoint
    alarm: asyncio.Future[None] | None = None
    """What it waits for while it rests."""
    task: asyncio.Task[None] | None = None
    selection: Selection = field(default_factory=lambda: Selection(allowed=False))
    """Whether it is asked for its whole page."""
    scrape_s: float = cadence.FIRST_SCRAPE_S
    """Smoothed duration of its scrapes."""
    cpu_s: float | None = None
    """Smoothed CPU time that one of its scrapes takes of us."""
    failures: int = 0
    loaded: bool = False
    """The last page showed requests running or waiting."""
    busy_at: float | None = None
    demanded_cores: float = 0.0
    """Its part of the whole picker's demand, unstretched."""
    ended_at: float = 0.0
    """When its last scrape ended: the signals are as old as that."""
    due_at: float = 0.0
    due_if_busy_at: float = 0.0
    joins_at: float = _NEVER
    """From when on it may go along with another that is due."""
    models_due_at: float = float("-inf")
    models_task: asyncio.Task[None] | None = None
    """The last look at its models, under way or done."""


class Scraper:
    """Keeps one scraping task per endpoint, and beside it now and then one that looks at its models.

    Use within a running event loop; `close` ends everything.
    """

    def __init__(
        self,
        config: ScrapeConfig,
        engine: str,
        sink: ScrapeSink,
        clock: Callable[[], float] = time.monotonic,
        *,
        rng: random.Random | None = None,
        tasks: Tasks | None = None,
    ) -> None:
        """Raise ConfigError where the CA file can not be used. `clock` only feeds the sink and the intervals."""
        self._config = config
        self._engine = engine
        self._sink = sink
        self._clock = clock
        self._rng = rng or random.Random()
        self._tasks = tasks or Tasks()
        self._tls = tls_context(config)
        self._buffer = read_buffer()
        self._targets: dict[str, _Target] = {}
        self._resting: list[tuple[float, int, _Target]] = []
        """A heap of who may go along, by `joins_at`; one that has gone, or whose time has changed, is passed over."""
        self._planned = itertools.count()
        self._awake = Wakefulness(clock)
        self._demanded_cores = 0.0
        self._leaving: set[asyncio.Task[None]] = set()
        self._starting: deque[tuple[_Target, int]] = deque()
        """Endpoints whose task is to be begun, each with how many began together."""
        self._departing: deque[_Target] = deque()
        """Those that have left, and whose tasks are to be ended: what these still find is dropped."""
        self._more: asyncio.Handle | None = None

    @property
    def stretch(self) -> float:
        """By what factor the budget stretches all intervals; 1: not at all."""
        return cadence.stretch(self._demanded_cores, self._config.budget)

    def selects(self, endpoint_id: str) -> bool:
        """Tell whether an endpoint gives only the families it is asked for."""
        target = self._targets.get(endpoint_id)
        return target is not None and target.selection.selected

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Start and stop tasks, so that exactly these are scraped; one whose uid changed begins anew.

        At once where it is about up to 100 endpoints, else in as many turns of the loop as that takes.
        """
        wanted = {endpoint.id: endpoint for endpoint in endpoints}
        for name, target in list(self._targets.items()):
            if name not in wanted or wanted[name].uid != target.endpoint.uid:
                self._departing.append(target)
                del self._targets[name]
            else:
                target.endpoint = wanted[name]
        for name, endpoint in wanted.items():
            if name not in self._targets:
                self._targets[name] = _Target(endpoint)
        self._start_all()

    def reconfigure(
        self, config: ScrapeConfig, engine: str, tls: ssl.SSLContext | None = None, *, even_if_same: bool = False
    ) -> None:
        """Apply another configuration at once; `tls` is what `tls_context` makes of it, as that reads a file.

        With `even_if_same` connections are made anew even if nothing has changed.
        """
        if config == self._config and engine == self._engine and not even_if_same:
            return
        for target in self._targets.values():
            self._stop(target)
            target.models_due_at = float("-inf")
            target.failures = 0
        self._config, self._engine, self._tls = config, engine, tls
        self._start_all()

    def mark_busy(self, endpoint_id: str) -> None:
        """Say that a request was just sent there: an idle endpoint is scraped as a busy one from now on. O(1)."""
        target = self._targets.get(endpoint_id)
        if target is not None:
            target.busy_at = self._clock()
            if target.due_if_busy_at < target.due_at:
                target.due_at = target.due_if_busy_at
                target.joins_at = _NEVER
                _ring(target.alarm)

    async def close(self) -> None:
        """Stop all tasks and close all connections; idempotent."""
        for target in (*self._targets.values(), *self._departing):
            self._stop(target)
        self._targets.clear()
        self._departing.clear()
        self._starting.clear()
        self._resting.clear()
        while self._leaving:
            await asyncio.gather(*self._leaving, return_exceptions=True)

    def _start_all(self) -> None:
        """Start the tasks that do not run; none where scraping is switched off. Stop those of endpoints that have left."""
        starting = [target for target in self._targets.values() if target.task is None] if self._config.enabled else []
        self._starting = deque([(target, len(starting)) for target in starting])
        if self._more is None:
            self._start_some()

    def _start_some(self) -> None:
        self._more = None
        for _ in range(_AT_ONCE):
            if self._starting:
                target, together = self._starting.popleft()
                if self._has(target):
                    first_delay_s = cadence.first_delay_s(together, self._config.budget, self._rng)
                    watch = partial(self._watch, target, first_delay_s)
                    target.task = self._tasks.start("scrape", watch, detail=target.endpoint.id)
            elif self._departing:
                self._stop(self._departing.popleft())
            else:
                return
        if self._starting or self._departing:
            self._more = asyncio.get_running_loop().call_soon(self._start_some)

    def _has(self, target: _Target) -> bool:
        return self._targets.get(target.endpoint.id) is target

    def _stop(self, target: _Target) -> None:
        self._ask_for(target, 0.0)
        target.joins_at = _NEVER
        for task in (target.task, target.models_task):
            if task is not None:
                task.cancel()
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
        target.task = target.models_task = None

    async def _watch(self, target: _Target, first_delay: float) -> None:
        """Scrape one endpoint for ever."""
        families = ENGINES[self._engine].families
        pages = EndpointPages(self._config, self._tls, target.endpoint, self._buffer, families)
        target.selection = Selection(allowed=self._config.select)
        target.due_at = target.due_if_busy_at = self._clock() + first_delay
        try:
            while True:
                await self._rest(target)
                pages.meter.start()
                # From here on until the next interval is known a poke only leaves its time.
                target.due_if_busy_at = target.due_at
                target.joins_at = _NEVER
                started_at = target.ended_at = self._clock()
                await self._turn(target, pages)
                self._plan(target, started_at)
                pages.meter.stop()
                target.cpu_s = cadence.smooth(target.cpu_s, pages.meter.take() + _TURN_CPU_S)
        finally:
            await pages.close()

    async def _rest(self, target: _Target) -> None:
        """Wait until the target is due, which a poke may bring forward."""
        loop = asyncio.get_running_loop()
        while (left_s := target.due_at - self._clock()) > _NEAR_S:
            alarm = target.alarm = loop.create_future()
            timer = loop.call_later(left_s - _NEAR_S / 2, self._set_off, target)
            try:
                await alarm
            finally:
                timer.cancel()

    def _set_off(self, target: _Target) -> None:
        """Wake one that is due, and those that may go along: together they cost half of what they do one by one.

        A loop that has just woken finds its caches cold; who comes second finds them warm (docs/develop/cost.md). One that is
        awake most of the time has no use for that.
        """
        _ring(target.alarm)
        target.joins_at = _NEVER
        now, resting = self._clock(), self._resting
        room = _COMPANY - 1 if self._awake.share() < _AWAKE else 0
        while resting and resting[0][0] <= now:
            joins_at, _, mate = resting[0]
            if mate.joins_at == joins_at:
                if not room:
                    break
                mate.due_at, mate.joins_at = now, _NEVER
                _ring(mate.alarm)
                room -= 1
            heapq.heappop(resting)

    def _plan(self, target: _Target, started_at: float) -> None:
        """Decide when the target is due again, and when it would be if it turned busy."""
        scrape_s = target.scrape_s
        marked = target.busy_at is not None and target.busy_at >= started_at - _BUSY_HOLD_S
        busy = target.loaded or marked
        config, failures = self._config, target.failures

        def due(*, as_busy: bool) -> tuple[float, float]:
            interval_s = cadence.base_interval_s(config, busy=as_busy, scrape_s=scrape_s, failures=failures)
            if as_busy is busy:
                self._ask_for(target, cadence.demand_cores(interval_s, target.cpu_s or cadence.FIRST_CPU_S))
            joins = cadence.joins_from(self._demanded_cores, config.budget)
            joins_s, rest_s = cadence.rest_s(
                config, interval_s=interval_s, scrape_s=scrape_s, stretched=self.stretch, joins=joins, rng=self._rng
            )
            return target.ended_at + joins_s, target.ended_at + rest_s

        may_join_at, target.due_at = due(as_busy=busy)
        # Neither company nor a request makes a failing endpoint answer: its backoff stays.
        if not failures and target.due_at - self._clock() > _NEAR_S:
            target.joins_at = may_join_at
            heapq.heappush(self._resting, (target.joins_at, next(self._planned), target))
        target.due_if_busy_at = target.due_at if busy or failures else min(due(as_busy=True)[1], target.due_at)

    def _ask_for(self, target: _Target, cores: float) -> None:
        # Never below zero by rounding.
        self._demanded_cores = max(self._demanded_cores + cores - target.demanded_cores, 0.0)
        target.demanded_cores = cores

    async def _turn(self, target: _Target, pages: EndpointPages) -> None:
        """Scrape one endpoint once; have its models looked at, if it is time and it can be reached at all."""
        try:
            restarted = await self._scrape(target, pages)
        except ScrapeFailedError as error:
            target.failures += 1
            target.selection.begin_anew()
            if target.failures == 1:
                _log.warning("scrape fails", extra=_told(target, error))
            target.ended_at = self._clock()
            if not self._has(target):
                return
            self._sink.observe_failure(target.endpoint.id, error.reason, target.ended_at)
            if error.reason.unreachable:
                return
        else:
            if target.failures:
                _log.info("scrape recovered", extra={"endpoint": target.endpoint.id, "failures": target.failures})
            target.failures = 0
            if restarted:
                target.selection.begin_anew()
                target.models_due_at = float("-inf")
        self._start_models(target, pages)

    async def _scrape(self, target: _Target, pages: EndpointPages) -> bool:
        """Fetch and read one page and tell the sink; True: the engine has restarted."""
        started_at = self._clock()
        metrics = None
        if target.selection.selects:
            metrics = await self._selected(target, pages, started_at)
        if metrics is None:
            metrics, page_bytes = await self._read(target, pages.metrics, started_at)
            if why := target.selection.compare(Told(told(metrics), page_bytes)):
                _log.info(
                    "no selected metrics page from this engine: whole pages for now",
                    extra={"endpoint": target.endpoint.id, "detail": why},
                )
        target.scrape_s = cadence.smooth_scrape(target.scrape_s, metrics.scrape_s)
        target.loaded = bool(metrics.waiting or metrics.running)
        return self._has(target) and self._sink.observe(target.endpoint.id, metrics, target.ended_at) is True

    async def _selected(self, target: _Target, pages: EndpointPages, started_at: float) -> EndpointMetrics | None:
        """Fetch and read the selected page; None: the whole one is needed."""
        try:
            metrics, page_bytes = await self._read(target, pages.selected, started_at)
        except ScrapeFailedError as error:
            target.selection.lost(str(error))
            return None
        return metrics if target.selection.accepts(Told(told(metrics), page_bytes)) else None

    async def _read(self, target: _Target, source: Page, started_at: float) -> tuple[EndpointMetrics, int]:
        """Fetch one page, and give what it says and its length; ScrapeFailedError where it has no signal."""
        page = await source.fetch()
        now = target.ended_at = self._clock()
        metrics = read_metrics(page, self._engine, scrape_s=now - started_at)
        if not has_load(metrics):
            raise ScrapeFailedError(ScrapeFailure.PARSE, f"no signal of engine {self._engine} in {len(page)} bytes")
        return metrics, len(page)

    def _start_models(self, target: _Target, pages: EndpointPages) -> None:
        """Begin a look at the models, if it is time and the last one has ended."""
        if not self._config.models_path or self._clock() < target.models_due_at:
            return
        if target.models_task is not None and not target.models_task.done():
            # It stays due: after a restart what is under way may tell of the engine before.
            return
        # An endpoint that has no such list is asked again as rarely as one that has.
        target.models_due_at = self._clock() + self._config.models_interval
        turn = partial(self._models_turn, target, pages)
        target.models_task = self._tasks.start("models", turn, detail=target.endpoint.id)

    async def _models_turn(self, target: _Target, pages: EndpointPages) -> None:
        """Look at the models of one endpoint once, on a connection that lasts no longer."""
        pages.meter.start()
        try:
            await self._look_at_models(target, pages)
        except ScrapeFailedError as error:
            _log.debug("models unknown", extra=_told(target, error))
        finally:
            pages.meter.stop()
            await pages.models.close()

    async def _look_at_models(self, target: _Target, pages: EndpointPages) -> None:
        """Fetch the list of models and tell the sink."""
        models = read_models(await pages.models.fetch())
        if models is None:
            raise ScrapeFailedError(ScrapeFailure.PARSE, "no list of models")
        if self._has(target):
            self._sink.observe_models(target.endpoint.id, models, self._clock())


def _ring(alarm: asyncio.Future[None] | None) -> None:
    if alarm is not None and not alarm.done():
        alarm.set_result(None)


def _told(target: _Target, error: ScrapeFailedError) -> dict[str, str]:
    return {"endpoint": target.endpoint.id, "reason": error.reason.value, "detail": str(error)}
