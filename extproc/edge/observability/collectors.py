"""Metrics that are read at a scrape: endpoints, prefix index, buffers.

They cost nothing between scrapes, and a series disappears with its source. What is counted as it happens is in
`telemetry`, which also registers these.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from extproc import __version__
from extproc.edge.observability.instruments import Definition, Instruments
from extproc.prefix.entries import PrefixIndexStats
from extproc.types import EndpointSnapshot

__all__ = ["CollectorSources", "Collectors"]

_NODE_BYTES: Final = 400
_BLOCK_BYTES: Final = 8
"""What a node and a block of the prefix index take, on average, as measured."""


def _nothing() -> tuple[EndpointSnapshot, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class CollectorSources:
    """Where values are read at a scrape; each is called on the event loop and must be cheap."""

    snapshots: Callable[[], Iterable[EndpointSnapshot]] = _nothing
    index: Callable[[], PrefixIndexStats | None] = lambda: None
    buffered_bytes: Callable[[], int] = lambda: 0
    log_dropped: Callable[[], int] = lambda: 0
    scrape_stretch: Callable[[], float] = lambda: 1.0
    scrape_selects: Callable[[str], bool] = lambda _: False
    """Whether only the metric families in use are scraped from the endpoint of this id."""
    task_failures: Callable[[], Mapping[str, int]] = dict
    """Failures by kind of background task."""
    discovery_fails: Callable[[], bool] = lambda: False
    """Whether a look-up of endpoints fails or finds none at present."""
    now: Callable[[], float] = time.monotonic
    """The router's clock, on which `EndpointSnapshot.observed_at` is measured."""


class Collectors:
    """Registers the families and fills them from the sources in force."""

    def __init__(self, instruments: Instruments, sources: CollectorSources, endpoints: Callable[[], int]) -> None:
        self.sources = sources
        self._endpoints = endpoints
        version = (__version__, platform.python_version())
        instruments.collector(_ENDPOINT, self._read_endpoints)
        instruments.collector(_INDEX, self._read_index)
        instruments.collector((_EVICTED,), self._read_evictions)
        instruments.collector(_PROCESS, self._read_process)
        instruments.collector((_TASKS,), self._read_tasks)
        instruments.collector((_BUILD,), lambda: ((version, (1,)),))

    def _read_endpoints(self) -> Iterable[tuple[tuple[str, ...], tuple[float | None, ...]]]:
        now = self.sources.now()
        for snapshot in self.sources.snapshots():
            observed = snapshot.observed_at
            yield (
                (snapshot.endpoint.id,),
                (
                    snapshot.waiting,
                    snapshot.running,
                    snapshot.kv_cache_usage,
                    None if observed is None else max(0.0, now - observed),
                    snapshot.health_score,
                    float(snapshot.demoted),
                    float(snapshot.probation is not None),
                    snapshot.in_flight,
                    snapshot.in_flight_tokens,
                    snapshot.scrape_failures,
                    float(self.sources.scrape_selects(snapshot.endpoint.id)),
                ),
            )

    def _read_index(self) -> Iterable[tuple[tuple[str, ...], tuple[float | None, ...]]]:
        stats = self.sources.index()
        if stats is not None:
            size = stats.nodes * _NODE_BYTES + stats.blocks * _BLOCK_BYTES
            yield (), (stats.blocks, stats.held_blocks, stats.nodes, size, stats.lookups, stats.hits)

    def _read_evictions(self) -> Iterable[tuple[tuple[str, ...], tuple[float | None, ...]]]:
        stats = self.sources.index()
        if stats is not None:
            yield from (((cause.value,), (count,)) for cause, count in stats.evicted.items())

    def _read_process(self) -> Iterable[tuple[tuple[str, ...], tuple[float | None, ...]]]:
        sources = self.sources
        values = sources.buffered_bytes(), sources.log_dropped(), sources.scrape_stretch()
        yield (), (self._endpoints(), float(sources.discovery_fails()), *values)

    def _read_tasks(self) -> Iterable[tuple[tuple[str, ...], tuple[float | None, ...]]]:
        yield from (((kind,), (count,)) for kind, count in self.sources.task_failures().items())


def _per_endpoint(name: str, text: str) -> Definition:
    return Definition(f"extproc_endpoint_{name}", "gauge", text, ("endpoint",))


_ENDPOINT: Final = (
    _per_endpoint(
        "waiting_requests", "Requests queued in the engine: scraped, corrected by requests sent and ended since."
    ),
    _per_endpoint("running_requests", "Requests in the engine's batch: scraped, corrected likewise."),
    _per_endpoint("kv_cache_usage_ratio", "Share of the engine's KV cache held by running requests."),
    _per_endpoint("signal_age_seconds", "Age of the last successful scrape; absent: never scraped."),
    _per_endpoint("health_score", "Passive health: 1 none of the recent requests failed, 0 all did."),
    _per_endpoint("demoted", "1: chosen only where no other endpoint is eligible."),
    _per_endpoint("on_probation", "1: its requests fail, and it gets at most its fair share of them."),
    _per_endpoint("in_flight_requests", "Requests sent to it that have not ended."),
    _per_endpoint("in_flight_tokens", "Prompt tokens of those requests that were not predicted as cached."),
    _per_endpoint("scrape_failures_in_a_row", "Scrapes that failed since the last one that worked."),
    _per_endpoint(
        "scrape_selected", "1: only the metric families in use are scraped (`pool.scrape.select`), 0: the whole page."
    ),
)
_INDEX: Final = (
    Definition("extproc_prefix_index_blocks", "gauge", "Distinct prefix blocks remembered."),
    Definition(
        "extproc_prefix_index_held_blocks", "gauge", "Prefix blocks, counted once per endpoint that holds them."
    ),
    Definition("extproc_prefix_index_nodes", "gauge", "Nodes of the index's tree."),
    Definition("extproc_prefix_index_bytes", "gauge", "Estimated memory of the index."),
    Definition("extproc_prefix_lookups_total", "counter", "Prompts looked up in the index."),
    Definition("extproc_prefix_hits_total", "counter", "Prompts of which some endpoint was known to hold a part."),
)
_PROCESS: Final = (
    Definition("extproc_endpoints", "gauge", "Endpoints in the pool."),
    Definition(
        "extproc_discovery_failing",
        "gauge",
        "1: a look-up of endpoints fails or finds none; `/readyz` says which and why.",
    ),
    Definition("extproc_buffered_bytes", "gauge", "Bytes of request bodies buffered."),
    Definition("extproc_log_lines_dropped_total", "counter", "Log lines dropped because the output was blocked."),
    Definition(
        "extproc_scrape_interval_stretch",
        "gauge",
        "Factor by which `pool.scrape.budget` stretches all scrape intervals; 1: not at all.",
    ),
)
_EVICTED: Final = Definition(
    "extproc_prefix_evicted_blocks_total", "counter", "Prefix blocks that left the index, by cause.", ("cause",)
)
_TASKS: Final = Definition(
    "extproc_background_task_failures_total",
    "counter",
    "Background tasks that failed by a defect and were started again, by kind; the log has the traceback.",
    ("task",),
)
_BUILD: Final = Definition(
    "extproc_build_info", "gauge", "Always 1; the labels tell the version.", ("version", "python")
)
