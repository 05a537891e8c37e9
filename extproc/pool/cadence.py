"""When to scrape an endpoint next; pure arithmetic, the waiting is `edge.scrape`'s.

A busy endpoint is looked at more often than an idle one, never so often that its pages cost the engine more than
1 / `cost_factor` of its time, and a failing one ever more rarely. The whole picker has a budget too: where all
endpoints together would be scraped more than `SCRAPES_PER_S` times a second, every interval is stretched by the same
factor (the ledger of our own decisions fills the time between).
"""

from __future__ import annotations

import random
from typing import Final

from extproc.config.schema import ScrapeConfig

__all__ = ["SCRAPES_PER_S", "base_interval_s", "first_delay_s", "next_interval_s", "smooth", "stretch"]

SCRAPES_PER_S: Final = 50.0
"""Budget of the whole picker; at about 1 ms of our CPU for a scrape, 5 % of a core."""
_JITTER: Final = 0.1
_BACKOFF_CAP_S: Final = 30.0
_SMOOTHING: Final = 0.3


def base_interval_s(config: ScrapeConfig, *, busy: bool, scrape_s: float, failures: int = 0) -> float:
    """Compute the interval that one endpoint asks for, in seconds, before jitter and budget.

    `scrape_s` is the smoothed duration of its scrapes, `failures` how many failed in a row: each doubles the interval,
    up to 30 s or the idle interval, whichever is longer.
    """
    interval = float(config.busy_interval if busy else config.idle_interval)
    interval = max(interval, config.cost_factor * scrape_s)
    if failures > 0:
        cap = max(_BACKOFF_CAP_S, float(config.idle_interval))
        # 2 ** 20 is beyond any cap, and larger powers only overflow.
        interval = max(interval, min(interval * 2.0 ** min(failures, 20), cap))
    return interval


def stretch(demand_per_s: float) -> float:
    """Compute by what factor all intervals grow, given the scrapes a second that all endpoints ask for together."""
    return max(demand_per_s / SCRAPES_PER_S, 1.0)


def next_interval_s(
    config: ScrapeConfig,
    *,
    busy: bool,
    scrape_s: float,
    rng: random.Random,
    failures: int = 0,
    demand_per_s: float = 0.0,
) -> float:
    """Compute the time from the end of one scrape to the start of the next, in seconds.

    Jittered by 10 % either way, so that endpoints do not fall into step, but never below the engine's share
    (`cost_factor` times `scrape_s`).
    """
    interval = base_interval_s(config, busy=busy, scrape_s=scrape_s, failures=failures) * stretch(demand_per_s)
    interval = max(interval, config.cost_factor * scrape_s / (1.0 - _JITTER))
    return interval * rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)


def first_delay_s(endpoints: int, rng: random.Random) -> float:
    """Compute the delay of an endpoint's first scrape: spread over the time in which the budget allows one of each."""
    return rng.uniform(0.0, max(endpoints - 1, 0) / SCRAPES_PER_S)


def smooth(previous_s: float | None, sample_s: float) -> float:
    """Update the smoothed scrape time (exponentially weighted, the first sample as it is), in seconds."""
    return sample_s if previous_s is None else previous_s + _SMOOTHING * (sample_s - previous_s)
