"""When to scrape an endpoint next; pure arithmetic, the waiting is `edge.scraping.scraper`'s.

A busy endpoint is looked at more often than an idle one, never so often that its pages cost the engine more than
1 / `cost_factor` of its time, and a failing one ever more rarely. The whole picker has a budget too, in cores of our own
CPU: where the scrapes of all endpoints together would cost more, every interval is stretched by the same factor, and
signals get older than asked for (the ledger of our own decisions fills the time between).

How old signals get: from one complete page to the next, which is the rest between them and the time d the next scrape
takes (both pages, where a selected one did not do); nothing else comes between, since the list of models is asked for
beside it, not in turn. A rest is at most the larger of 14/15 of the wished age and 29 of 30 smoothed scrape times s. So
the age is at most the larger of the wish, 30 s and 30 d: a d below a thirtieth of the wish finds room in its last
fifteenth, and 29 times a longer one is more than the wish. (A `cost_factor` above 30 takes the place of the 30.)
"""

from __future__ import annotations

import random
from typing import Final

from extproc.config.schema import ScrapeConfig

__all__ = [
    "FIRST_CPU_S",
    "FIRST_SCRAPE_S",
    "base_interval_s",
    "demand_cores",
    "first_delay_s",
    "joins_from",
    "rest_s",
    "smooth",
    "smooth_scrape",
    "stretch",
]

FIRST_CPU_S: Final = 0.001
"""What a scrape is taken to cost us until it has been measured; with a new connection it is about that."""
FIRST_SCRAPE_S: Final = 0.01
"""How long a scrape is taken to last before the first: that one has a new connection, and all of a pool come at once. A
real vLLM takes 6 to 37 ms."""
_SHARE_LEFT: Final = 1 / 15
"""Part of the wished age that is left, one half for the next scrape itself, one for an event loop that is late."""
_JITTER: Final = 0.1
"""Intervals are shortened by up to this, so that pickers do not stay in step where they have begun together."""
_JOINS_FROM: Final = 0.8
"""Part of its interval after which an endpoint may go along with another: less finds no more company, and takes more pages."""
_BACKOFF_CAP_S: Final = 30.0
_SMOOTHING: Final = 0.3
_OUTLIER: Final = 3.0
"""A scrape that took so many times longer than usual has waited for something: it is no measure of what a page costs."""


def base_interval_s(config: ScrapeConfig, *, busy: bool, scrape_s: float, failures: int = 0) -> float:
    """Compute the time between the starts of two scrapes that one endpoint asks for, in seconds, before jitter and budget.

    `scrape_s` is the smoothed duration of its scrapes, `failures` how many failed in a row: each doubles the interval,
    up to 30 s or the idle interval, whichever is longer.
    """
    wish = float(config.busy_interval if busy else config.idle_interval)
    interval = max(wish * (1.0 - _SHARE_LEFT) + scrape_s, config.cost_factor * scrape_s)
    if failures > 0:
        cap = max(_BACKOFF_CAP_S, float(config.idle_interval))
        # 2 ** 20 is beyond any cap, and larger powers only overflow.
        interval = max(interval, min(interval * 2.0 ** min(failures, 20), cap))
    return interval


def demand_cores(interval_s: float, cpu_s: float) -> float:
    """Compute what one endpoint's scrapes would cost us, in cores: `cpu_s` of CPU each, one per `base_interval_s`, shortened by jitter."""
    return cpu_s / (interval_s * (1.0 - _JITTER))


def stretch(demanded_cores: float, budget_cores: float) -> float:
    """Compute by what factor all intervals grow, given what all endpoints' scrapes together would cost us."""
    return max(demanded_cores / budget_cores, 1.0)


def joins_from(demanded_cores: float, budget_cores: float) -> float:
    """Compute from which part of its interval on an endpoint may be scraped along with another that is due.

    Early enough that endpoints fall into step, up to as many as go at once; what goes early every time, because there are
    more of them or intervals differ, takes pages that nobody needs, and they have to find room in the budget.
    """
    return min(max(_JOINS_FROM, demanded_cores / budget_cores * (1.0 - _JITTER)), 1.0 - _JITTER)


def rest_s(
    config: ScrapeConfig, *, interval_s: float, scrape_s: float, stretched: float, joins: float, rng: random.Random
) -> tuple[float, float]:
    """Compute two times from the end of one scrape to the start of the next, in seconds: when it may go along, when it is due.

    `interval_s` comes from `base_interval_s`, `stretched` from `stretch`, `joins` from `joins_from`. Neither takes from
    the engine's share: `cost_factor` times `scrape_s` from start to start.
    """
    least_s = config.cost_factor * scrape_s

    def rest(share: float) -> float:
        return max(max(interval_s * share, least_s) * stretched - scrape_s, 0.0)

    return rest(joins), rest(rng.uniform(1.0 - _JITTER, 1.0))


def first_delay_s(endpoints: int, budget_cores: float, rng: random.Random) -> float:
    """Compute the delay of an endpoint's first scrape: spread over the time in which the budget allows one of each."""
    return rng.uniform(0.0, max(endpoints - 1, 0) * FIRST_CPU_S / budget_cores)


def smooth(previous_s: float | None, sample_s: float) -> float:
    """Update a smoothed time (exponentially weighted, the first sample as it is), in seconds."""
    return sample_s if previous_s is None else previous_s + _SMOOTHING * (sample_s - previous_s)


def smooth_scrape(previous_s: float, sample_s: float) -> float:
    """Update the smoothed duration of an endpoint's scrapes, in seconds; the first time from `FIRST_SCRAPE_S`.

    Outliers count as three times the usual, so that one page behind a long prefill does not leave us blind for seconds;
    what lasts is followed by 60 % per scrape.
    """
    return smooth(previous_s, min(sample_s, _OUTLIER * previous_s))
