"""Fetch what `ScrapePlanner` asks for, when it asks for it: every endpoint's metrics page and, rarely, its list of models.

One task per endpoint on its own kept connection, so that a slow or dead endpoint delays no other. The list of models has a
task and a connection of its own, only while it is asked for, so that it does not delay the metrics page either. How a page
is fetched is the concern of `source` and `http_client`.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from extproc.config.schema import ScrapeConfig
from extproc.edge.process.tasks import Tasks
from extproc.edge.scraping.cpu_share import ThreadCpuShare
from extproc.edge.scraping.engines import ENGINES
from extproc.edge.scraping.failures import ScrapeFailedError
from extproc.edge.scraping.http_client import read_buffer
from extproc.edge.scraping.planner import NEAR_S, PageKind, ScrapePlanner, ScrapeSink, Target
from extproc.edge.scraping.source import EndpointPages, tls_context
from extproc.types import Endpoint

__all__ = ["ScrapeSink", "Scraper"]

_TURN_CPU_S: Final = 150e-6
"""CPU time that a scrape takes in the event loop itself, where no `CpuMeter` runs; it varies with how busy the loop is."""
_STOPS_PER_TURN: Final = 100
"""Endpoints whose tasks are ended in one turn of the loop, so that no request waits while a large pool is replaced."""
_BATCH_BELOW: Final = 0.2
"""Share of a core, used by the thread, below which scrapes are batched: a busier thread has warm caches anyway, and a batch
of pages only makes requests wait."""


@dataclass(slots=True, eq=False)
class _Watch:
    """The tasks of one target."""

    task: asyncio.Task[None] | None = None
    due: asyncio.Future[None] | None = None
    """What the task waits for between two scrapes."""
    models_task: asyncio.Task[None] | None = None
    """The last fetch of the list of models, under way or done."""


class Scraper:
    """Keeps one scraping task per endpoint. Use within a running event loop; `close` ends everything."""

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
        """Raise ConfigError where the CA file can not be used. `clock` is the planner's."""
        self._config = config
        self._engine = engine
        self._clock = clock
        self._tasks = tasks or Tasks()
        self._tls = tls_context(config)
        self._planner = ScrapePlanner(config, engine, sink, rng or random.Random())
        self._buffer = read_buffer()
        self._cpu_share = ThreadCpuShare()
        self._watches: dict[Target, _Watch] = {}
        """Of the targets that have been due."""
        self._departing: deque[Target] = deque()
        """Those that were removed, and whose tasks are still to be ended: what they still find is dropped."""
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def stretch(self) -> float:
        """By what factor the CPU budget lengthens all intervals; 1: not at all."""
        return self._planner.stretch

    def selects(self, endpoint_id: str) -> bool:
        """Tell whether an endpoint returns only the families it is asked for."""
        return self._planner.selects(endpoint_id)

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Scrape exactly these; one whose uid changed begins anew."""
        self._departing.extend(self._planner.set_endpoints(endpoints, self._clock()))
        if self._stopping is None:
            self._stop_some()
        self._set_timer()

    def reconfigure(
        self, config: ScrapeConfig, engine: str, tls: ssl.SSLContext | None = None, *, even_if_same: bool = False
    ) -> None:
        """Apply another configuration at once; `tls` is what `tls_context` makes of it, as that reads a file.

        With `even_if_same` connections are made anew even if nothing has changed.
        """
        if config == self._config and engine == self._engine and not even_if_same:
            return
        for target in list(self._watches):
            self._stop(target)
        self._config, self._engine, self._tls = config, engine, tls
        self._planner.reconfigure(config, engine, self._clock())
        self._set_timer()

    def mark_busy(self, endpoint_id: str) -> None:
        """Note that a request was just sent there: an idle endpoint is scraped as a busy one from now on."""
        if self._planner.mark_busy(endpoint_id, self._clock()):
            self._set_timer()

    async def close(self) -> None:
        """Stop all tasks and close all connections; idempotent."""
        self._planner.set_endpoints((), self._clock())
        self._departing.clear()
        self._set_timer()
        for target in list(self._watches):
            self._stop(target)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)

    def _set_timer(self) -> None:
        """Set the timer to when the next target is due. If it fires too early, it is set again."""
        at = self._planner.next_due_at
        if self._timer is not None:
            if self._timer_at <= at < float("inf"):
                return
            self._timer.cancel()
            self._timer = None
        if at < float("inf"):
            delay_s = max(at - self._clock() - NEAR_S / 2, 0.0)
            self._timer, self._timer_at = asyncio.get_running_loop().call_later(delay_s, self._on_timer), at

    def _on_timer(self) -> None:
        """Have the tasks of all that are due go on."""
        self._timer = None
        batch = self._cpu_share.recent() < _BATCH_BELOW
        for target in self._planner.take_due(self._clock(), batch=batch):
            watch = self._watches.get(target)
            if watch is None:
                watch = self._watches[target] = _Watch()
                watch.task = self._tasks.start(
                    "scrape", partial(self._scrape_forever, target, watch), detail=target.endpoint.id
                )
            elif watch.due is not None and not watch.due.done():
                watch.due.set_result(None)
        self._set_timer()

    def _stop_some(self) -> None:
        self._stopping = None
        for _ in range(min(_STOPS_PER_TURN, len(self._departing))):
            self._stop(self._departing.popleft())
        if self._departing:
            self._stopping = asyncio.get_running_loop().call_soon(self._stop_some)

    def _stop(self, target: Target) -> None:
        watch = self._watches.pop(target, None)
        for task in (watch.task, watch.models_task) if watch is not None else ():
            if task is not None:
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    async def _scrape_forever(self, target: Target, watch: _Watch) -> None:
        """Scrape one endpoint, now and whenever it is due."""
        planner = self._planner
        families = ENGINES[self._engine].families
        pages = EndpointPages(self._config, self._tls, target.endpoint, self._buffer, families)
        try:
            while True:
                pages.meter.start()
                kind: PageKind | None = planner.begin(target, self._clock())
                while kind is not None:
                    kind = await self._fetch(target, pages, kind)
                self._start_models(target, watch, pages)
                pages.meter.stop()
                planner.finish(target, pages.meter.take() + _TURN_CPU_S)
                watch.due = asyncio.get_running_loop().create_future()
                self._set_timer()
                await watch.due
        finally:
            await pages.close()

    async def _fetch(self, target: Target, pages: EndpointPages, kind: PageKind) -> PageKind | None:
        """Fetch one metrics page; return another one to fetch, None: the scrape is complete."""
        page = pages.selected if kind is PageKind.SELECTED else pages.metrics
        try:
            text = await page.fetch()
        except ScrapeFailedError as error:
            return self._planner.failed(target, error, self._clock())
        return self._planner.answered(target, text, self._clock())

    def _start_models(self, target: Target, watch: _Watch, pages: EndpointPages) -> None:
        """Begin to fetch the list of models if it is due and the last fetch has ended; else it stays due."""
        idle = watch.models_task is None or watch.models_task.done()
        if idle and self._planner.take_models(target, self._clock()):
            fetch = partial(self._fetch_models, target, pages)
            watch.models_task = self._tasks.start("models", fetch, detail=target.endpoint.id)

    async def _fetch_models(self, target: Target, pages: EndpointPages) -> None:
        """Fetch the list of models of one endpoint once, on a connection that lasts no longer."""
        pages.meter.start()
        try:
            self._planner.models_answered(target, await pages.models.fetch(), self._clock())
        except ScrapeFailedError as error:
            self._planner.models_failed(target, error)
        finally:
            pages.meter.stop()
            await pages.models.close()
