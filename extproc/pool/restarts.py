"""Detect engine restarts from an endpoint's successive metrics pages.

What follows from a restart (prefixes forgotten, requests released) is decided in `pool` and `router`. Failed scrapes are
not taken into account.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final

from extproc.types import EndpointMetrics

__all__ = ["Lifetime"]

_COUNTERS: Final = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_queries_total",
    "prefix_hits_total",
    "requests_total",
)
_VALUES: Final = attrgetter(*_COUNTERS)
_CLOCK_STEP_S: Final = 1.0
"""Some exporters compute the start for each page from a boot time in whole seconds, which changes as the clock is set."""
_ROUNDING_S: Final = 0.002
"""Start times are printed with all digits; Linux counts them in steps of 10 ms."""
_PAGES_WITHOUT: Final = 2
"""Consecutive pages that lack all known counters: one may be damaged, the second is another process's."""


class Lifetime:
    """What one endpoint's pages have shown of its process.

    The process has been replaced when its start time differs, when a counter fell, or when all its counters are gone.
    In multiprocess mode (SGLang, TensorRT-LLM) there is no start time, and a labelled counter is absent until its first
    use: so the last value is kept over pages that lack it.
    """

    __slots__ = ("_counters", "_jumped", "_restless", "_seen_at", "_start_s", "_without")

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._start_s: float | None = None
        self._counters: dict[str, float] = {}
        """The last value of each counter."""
        self._seen_at: float | None = None
        """Time of the last page that was certainly this process's."""
        self._without = 0
        self._jumped = False
        self._restless = False
        """The start time varies by fractions of a second from page to page, so that those are ignored."""

    def observe(self, metrics: EndpointMetrics, now: float) -> float | None:
        """Take in a page; return when the previous process was last seen, None if there was no restart."""
        values = {name: value for name, value in zip(_COUNTERS, _VALUES(metrics), strict=True) if value is not None}
        known = self._counters
        start_s = metrics.process_start_time_s
        has_begun_anew = self._has_moved(start_s)
        missed = False
        if known and not has_begun_anew:
            has_begun_anew = any(value < known.get(name, 0.0) for name, value in values.items())
            # Counters that are zero may appear and disappear.
            missed = any(known.values()) and not any(known.get(name) for name in values)
            if missed and start_s is None:
                self._without += 1
                has_begun_anew = has_begun_anew or self._without >= _PAGES_WITHOUT
        if not missed:
            self._without = 0
        if start_s is not None:
            self._start_s = start_s
        if has_begun_anew:
            last_seen_at, self._seen_at = self._seen_at, now
            self._counters, self._without = values, 0
            return now if last_seen_at is None else last_seen_at
        known.update(values)
        if not missed or start_s is not None:
            self._seen_at = now
        return None

    def _has_moved(self, start_s: float | None) -> bool:
        """Return whether a start time is another process's."""
        if start_s is None or self._start_s is None:
            return False
        apart_s = abs(start_s - self._start_s)
        if apart_s > _CLOCK_STEP_S + _ROUNDING_S:
            self._jumped = self._restless = False
            return True
        if abs(apart_s - round(apart_s)) <= _ROUNDING_S:
            self._jumped = False
            return False
        if self._jumped:
            # Twice in a row is no restart, but a start that is computed from clocks that disagree.
            self._restless = True
        self._jumped = True
        return not self._restless
