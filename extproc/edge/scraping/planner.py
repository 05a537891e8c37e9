"""When each endpoint is scraped, what it is asked for, and what follows from an answer or a failure. Does no I/O.

`ScrapePlanner` takes the time and what has happened and says what to do; `scraper` waits and fetches. Of a metrics page
only what is needed is asked for where the endpoint can select (`selection`); where that fails the whole page comes in the
same scrape, so that nothing but the whole page decides whether a scrape has failed. The arithmetic of intervals is in
`scrape_interval`, what a page says is read by `signals`, and what it means is the sink's decision.

Endpoints are scraped in batches: a page costs more CPU time right after the process has slept than in a row with others.
So when one endpoint is due, others whose interval is nearly over are scraped with it.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from extproc.config.schema import ScrapeConfig
from extproc.edge.scraping import scrape_interval
from extproc.edge.scraping.failures import ScrapeFailedError, ScrapeFailure
from extproc.edge.scraping.selection import PageSummary, Selection
from extproc.edge.scraping.signals import has_load, read_metrics, read_models, signal_names
from extproc.types import Endpoint, EndpointMetrics

__all__ = ["BATCH", "NEAR_S", "PageKind", "ScrapePlanner", "ScrapeSink", "Target"]

BATCH: Final = 16
"""Endpoints that are scraped together at most: a request may have to wait until all of their pages are read."""
NEAR_S: Final = 0.002
"""Deadlines so close count as due: uvloop's timers count milliseconds from when the loop last looked at its clock."""
_BUSY_HOLD_S: Final = 1.0
"""How long a dispatched request makes an endpoint busy: the engine's gauges lag behind by up to a step."""
_NEVER: Final = float("inf")

_log = logging.getLogger(__name__)


class ScrapeSink(Protocol):
    """Receives what is found; called in the event loop, must not block."""

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> object:
        """Take one page. True means: the engine has restarted (its models are then asked for again)."""

    def observe_failure(self, endpoint_id: str, reason: ScrapeFailure, now: float) -> None:
        """Take a scrape that failed."""

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:
        """Take the models and adapters an endpoint lists, name -> parent (None: a base model)."""


class PageKind(enum.Enum):
    """Which metrics page to fetch."""

    WHOLE = "whole"
    SELECTED = "selected"


@dataclass(slots=True, eq=False)
class Target:
    """One endpoint and the state of its scrapes, for the planner alone to change. Times are those of its clock, in seconds."""

    endpoint: Endpoint
    selection: Selection
    removed: bool = False
    """No longer an endpoint: what is still found of it is dropped."""
    asked: PageKind = PageKind.WHOLE
    reachable: bool = False
    """The last scrape got an answer, be it an error."""
    scrape_s: float = scrape_interval.FIRST_SCRAPE_S
    """Smoothed duration of its scrapes."""
    cpu_s: float | None = None
    """Smoothed CPU time that one of its scrapes takes of this process."""
    failures: int = 0
    """Scrapes that failed since the last one that did not."""
    loaded: bool = False
    """The last page showed requests running or waiting."""
    busy_at: float = -_NEVER
    """When a request was last sent there."""
    demanded_cores: float = 0.0
    """Its part of the whole picker's demand, before any stretching."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """When its last scrape ended: the signals are as old as that."""
    due_at: float = _NEVER
    due_if_busy_at: float = _NEVER
    """When it would be due if a request were sent there now."""
    models_due_at: float = -_NEVER


class _Timetable:
    """Targets, each with a time; the earliest first."""

    def __init__(self) -> None:
        self._at: dict[Target, float] = {}
        self._heap: list[tuple[float, int, Target]] = []
        """Also entries whose target has got another time or none since: they are skipped."""
        self._entries = itertools.count()

    def put(self, target: Target, at: float) -> None:
        self._at[target] = at
        heapq.heappush(self._heap, (at, next(self._entries), target))

    def drop(self, target: Target) -> None:
        self._at.pop(target, None)

    def clear(self) -> None:
        self._at.clear()
        self._heap.clear()

    def first_at(self) -> float:
        """Return the earliest time; infinity where nobody has one."""
        heap = self._heap
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else _NEVER

    def take(self, until: float) -> Target | None:
        """Remove and return the target of the earliest time, if that is not after `until`."""
        if self.first_at() > until:
            return None
        target = heapq.heappop(self._heap)[2]
        del self._at[target]
        return target


class ScrapePlanner:
    """Plans the scrapes of all endpoints and hands what they find to the sink.

    A target that `take_due` returns is not due again before `finish`, so there is one scrape at a time per endpoint. In
    between: `begin`, then for every page fetched `answered` or `failed`, as long as they name another page to fetch.
    """

    def __init__(self, config: ScrapeConfig, engine: str, sink: ScrapeSink, rng: random.Random) -> None:
        self._config = config
        self._engine = engine
        self._sink = sink
        self._rng = rng
        self._targets: dict[str, Target] = {}
        self._due = _Timetable()
        self._batchable = _Timetable()
        """From when on a target may be scraped along with another that is due."""
        self._demanded_cores = 0.0

    @property
    def stretch(self) -> float:
        """By what factor the CPU budget lengthens all intervals; 1: not at all."""
        return scrape_interval.stretch(self._demanded_cores, self._config.budget)

    @property
    def next_due_at(self) -> float:
        """When the next target is due; infinity: none is planned."""
        return self._due.first_at()

    def selects(self, endpoint_id: str) -> bool:
        """Tell whether an endpoint returns only the families it is asked for."""
        target = self._targets.get(endpoint_id)
        return target is not None and target.selection.selected

    # Endpoints

    def set_endpoints(self, endpoints: Sequence[Endpoint], now: float) -> list[Target]:
        """Plan scrapes of exactly these; return the targets that are removed. One whose uid changed begins anew."""
        wanted = {endpoint.id: endpoint for endpoint in endpoints}
        removed = []
        for name, target in list(self._targets.items()):
            if name not in wanted or wanted[name].uid != target.endpoint.uid:
                self._remove(target)
                removed.append(target)
            else:
                target.endpoint = wanted[name]
        added = [Target(endpoint, self._selection()) for name, endpoint in wanted.items() if name not in self._targets]
        self._targets.update((target.endpoint.id, target) for target in added)
        self._plan_first(added, now)
        return removed

    def reconfigure(self, config: ScrapeConfig, engine: str, now: float) -> None:
        """Apply another configuration: every target begins anew, whatever was under way. What a scrape costs is kept."""
        self._config, self._engine = config, engine
        self._due.clear()
        self._batchable.clear()
        for target in self._targets.values():
            self._demand(target, 0.0)
            target.selection = self._selection()
            target.failures = 0
            target.models_due_at = -_NEVER
        self._plan_first(list(self._targets.values()), now)

    def mark_busy(self, endpoint_id: str, now: float) -> bool:
        """Note that a request was sent there, which makes an idle endpoint busy; True: it is due earlier for that. O(log n)."""
        target = self._targets.get(endpoint_id)
        if target is None:
            return False
        target.busy_at = now
        if target.due_if_busy_at >= target.due_at:
            return False
        target.due_at = target.due_if_busy_at
        self._due.put(target, target.due_at)
        self._batchable.drop(target)
        return True

    def _selection(self) -> Selection:
        return Selection(allowed=self._config.select)

    def _plan_first(self, targets: Sequence[Target], now: float) -> None:
        """Spread the first scrapes of targets that begin together; none where scraping is switched off."""
        for target in targets:
            target.due_at = target.due_if_busy_at = _NEVER
            if self._config.enabled:
                delay_s = scrape_interval.first_delay_s(len(targets), self._config.budget, self._rng)
                target.due_at = target.due_if_busy_at = now + delay_s
                self._due.put(target, target.due_at)

    def _remove(self, target: Target) -> None:
        target.removed = True
        self._demand(target, 0.0)
        self._due.drop(target)
        self._batchable.drop(target)
        del self._targets[target.endpoint.id]

    # One scrape

    def take_due(self, now: float, *, batch: bool = True) -> list[Target]:
        """Return the targets to scrape now: those that are due and, with `batch`, others whose interval is nearly over.

        At most `BATCH`; call it again when `next_due_at` says so, which may be now.
        """
        taken: list[Target] = []
        while len(taken) < BATCH and (target := self._due.take(now + NEAR_S)) is not None:
            self._batchable.drop(target)
            taken.append(target)
        self._batchable.first_at()  # Forget entries that are out of date, also where nothing is batched.
        while taken and batch and len(taken) < BATCH and (target := self._batchable.take(now)) is not None:
            self._due.drop(target)
            taken.append(target)
        for target in taken:
            # Until the next interval is known a request changes nothing but `busy_at`.
            target.due_at = target.due_if_busy_at = now
        return taken

    def begin(self, target: Target, now: float) -> PageKind:
        """Begin a scrape; return the page to fetch."""
        target.started_at = target.ended_at = now
        target.asked = PageKind.SELECTED if target.selection.selects else PageKind.WHOLE
        return target.asked

    def answered(self, target: Target, page: bytes, now: float) -> PageKind | None:
        """Take the page that was fetched; return another page to fetch, None: none. Raises what the sink raises."""
        target.ended_at, target.reachable = now, True
        metrics = read_metrics(page, self._engine, scrape_s=now - target.started_at)
        if not has_load(metrics):
            detail = f"no signal of engine {self._engine} in {len(page)} bytes"
            return self.failed(target, ScrapeFailedError(ScrapeFailure.PARSE, detail), now)
        summary = PageSummary(signal_names(metrics), len(page))
        if target.asked is PageKind.SELECTED:
            if not target.selection.accepts(summary):
                target.asked = PageKind.WHOLE
                return target.asked
        elif why := target.selection.compare(summary):
            _log.info(
                "no selected metrics page from this engine: whole pages for now",
                extra={"endpoint": target.endpoint.id, "detail": why},
            )
        if target.failures:
            _log.info("scrape recovered", extra={"endpoint": target.endpoint.id, "failures": target.failures})
        target.failures = 0
        target.scrape_s = scrape_interval.smooth_scrape(target.scrape_s, metrics.scrape_s)
        target.loaded = bool(metrics.waiting or metrics.running)
        if not target.removed and self._sink.observe(target.endpoint.id, metrics, now) is True:
            target.selection.begin_anew()
            target.models_due_at = -_NEVER
        return None

    def failed(self, target: Target, error: ScrapeFailedError, now: float) -> PageKind | None:
        """Note that the page could not be fetched. Returns another page to fetch; None: the scrape has failed."""
        target.ended_at, target.reachable = now, not error.reason.unreachable
        if target.asked is PageKind.SELECTED:
            target.selection.lost(str(error))
            target.asked = PageKind.WHOLE
            return target.asked
        target.failures += 1
        target.selection.begin_anew()
        if target.failures == 1:
            _log.warning("scrape fails", extra=_reason(target, error))
        if not target.removed:
            self._sink.observe_failure(target.endpoint.id, error.reason, now)
        return None

    def finish(self, target: Target, cpu_s: float) -> None:
        """End a scrape that took `cpu_s` seconds of CPU of this process, and plan the next one."""
        target.cpu_s = scrape_interval.smooth(target.cpu_s, cpu_s)
        if target.removed:
            return
        busy = target.loaded or target.busy_at >= target.started_at - _BUSY_HOLD_S
        interval_s = self._interval_s(target, busy=busy)
        self._demand(target, scrape_interval.demand_cores(interval_s, target.cpu_s))
        batch_s, rest_s = self._rest_s(target, interval_s)
        target.due_at = target.due_if_busy_at = target.ended_at + rest_s
        self._due.put(target, target.due_at)
        if target.failures:
            return  # Neither a batch nor a request makes a failing endpoint answer: its backoff stays.
        self._batchable.put(target, target.ended_at + batch_s)
        if not busy:
            _, rest_if_busy_s = self._rest_s(target, self._interval_s(target, busy=True))
            target.due_if_busy_at = min(target.ended_at + rest_if_busy_s, target.due_at)

    def _interval_s(self, target: Target, *, busy: bool) -> float:
        return scrape_interval.base_interval_s(
            self._config, busy=busy, scrape_s=target.scrape_s, failures=target.failures
        )

    def _rest_s(self, target: Target, interval_s: float) -> tuple[float, float]:
        share = scrape_interval.batch_share(self._demanded_cores, self._config.budget)
        return scrape_interval.rest_s(
            self._config,
            interval_s=interval_s,
            scrape_s=target.scrape_s,
            stretched=self.stretch,
            batch_share=share,
            rng=self._rng,
        )

    def _demand(self, target: Target, cores: float) -> None:
        # Never below zero by rounding.
        self._demanded_cores = max(self._demanded_cores + cores - target.demanded_cores, 0.0)
        target.demanded_cores = cores

    # The list of models

    def take_models(self, target: Target, now: float) -> bool:
        """Tell whether the list of models is to be fetched now; it is then due again after its own interval.

        An endpoint that has no such list is asked as rarely as one that has, one that cannot be reached not at all.
        """
        due = bool(self._config.models_path) and target.reachable and now >= target.models_due_at
        if due:
            target.models_due_at = now + self._config.models_interval
        return due and not target.removed

    def models_answered(self, target: Target, body: bytes, now: float) -> None:
        """Take the list of models. Raises what the sink raises."""
        models = read_models(body)
        if models is None:
            self.models_failed(target, ScrapeFailedError(ScrapeFailure.PARSE, "no list of models"))
        elif not target.removed:
            self._sink.observe_models(target.endpoint.id, models, now)

    def models_failed(self, target: Target, error: ScrapeFailedError) -> None:
        """Take that the list of models could not be fetched."""
        _log.debug("models unknown", extra=_reason(target, error))


def _reason(target: Target, error: ScrapeFailedError) -> dict[str, str]:
    return {"endpoint": target.endpoint.id, "reason": error.reason.value, "detail": str(error)}
