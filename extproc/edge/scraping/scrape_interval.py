"""How long to wait between two scrapes of an endpoint; pure arithmetic, which `planner` applies.

A busy endpoint is scraped more often than an idle one, never so often that its pages cost the engine more than
1 / `cost_factor` of its time, and a failing one ever more rarely. The whole picker has a budget too, in cores of its own
CPU: where the scrapes of all endpoints together would cost more, every interval is lengthened by the same factor, and
signals get older than asked for (the ledger of the picker's own decisions fills the time between).

Greatest age of signals: from one complete page to the next pass the rest between two scrapes and the time d that the next
scrape takes (both pages, where a selected one was not enough); nothing else, since the list of models is fetched at the
same time, not in turn. A rest is at most the larger of 14/15 of the wished age and 29 of 30 smoothed scrape times. So
the age is at most the larger of the wish, 30 smoothed scrape times and 30 d: a d below a thirtieth of the wish fits into
its last fifteenth, and 29 times a longer one is more than the wish. (A `cost_factor` above 30 takes the place of the 30.)
"""

from __future__ import annotations

import random
from typing import Final

from extproc.config.schema import ScrapeConfig

__all__ = [
    "FIRST_CPU_S",
    "FIRST_SCRAPE_S",
    "base_interval_s",
    "batch_share",
    "demand_cores",
    "first_delay_s",
    "rest_s",
    "smooth",
    "smooth_scrape",
    "stretch",
]

FIRST_CPU_S: Final = 0.001
"""CPU time that the spread of first scrapes assumes for each; with a new connection it is about that."""
FIRST_SCRAPE_S: Final = 0.01
"""Assumed duration before the first scrape: that one has a new connection, and all of a pool come at once."""
_RESERVE: Final = 1 / 15
"""Part of the wished age that is kept free, one half for the next scrape itself, one for an event loop that is late."""
_JITTER: Final = 0.1
"""Intervals are shortened by up to this share, so that pickers that started together do not scrape at the same time."""
_BATCH_SHARE: Final = 0.8
"""Share of its interval after which an endpoint may be scraped along with another. An earlier one adds scrapes, and makes
batches no larger."""
_BACKOFF_CAP_S: Final = 30.0
_SMOOTHING: Final = 0.3
_OUTLIER: Final = 3.0
"""A scrape that took so many times longer than usual has waited for something: it says little of what a page costs."""


def base_interval_s(config: ScrapeConfig, *, busy: bool, scrape_s: float, failures: int = 0) -> float:
    """Compute the time between the starts of two scrapes of one endpoint, in seconds, before jitter and budget.

    `scrape_s` is the smoothed duration of its scrapes, `failures` how many failed in a row: each doubles the interval,
    up to 30 s or the idle interval, whichever is longer.
    """
    wish = float(config.busy_interval if busy else config.idle_interval)
    interval = max(wish * (1.0 - _RESERVE) + scrape_s, config.cost_factor * scrape_s)
    if failures > 0:
        cap = max(_BACKOFF_CAP_S, float(config.idle_interval))
        # 2 ** 20 is beyond any cap, and larger powers only overflow.
        interval = max(interval, min(interval * 2.0 ** min(failures, 20), cap))
    return interval


def demand_cores(interval_s: float, cpu_s: float) -> float:
    """Compute what one endpoint's scrapes cost, in cores: `cpu_s` of CPU each, one per `interval_s`, shortened by jitter."""
    return cpu_s / (interval_s * (1.0 - _JITTER))


def stretch(demanded_cores: float, budget_cores: float) -> float:
    """Compute by what factor all intervals grow, given what all endpoints' scrapes together would cost, in cores."""
    return max(demanded_cores / budget_cores, 1.0)


def batch_share(demanded_cores: float, budget_cores: float) -> float:
    """Compute after which share of its interval an endpoint may be scraped along with another that is due.

    Early enough that endpoints come to be due together. What goes early every time, because there are more endpoints than
    fit into a batch or intervals differ, adds scrapes, and these have to fit into the budget.
    """
    return min(max(_BATCH_SHARE, demanded_cores / budget_cores * (1.0 - _JITTER)), 1.0 - _JITTER)


def rest_s(
    config: ScrapeConfig,
    *,
    interval_s: float,
    scrape_s: float,
    stretched: float,
    batch_share: float,
    rng: random.Random,
) -> tuple[float, float]:
    """Compute two times from the end of one scrape to the start of the next, in seconds.

    After the first the endpoint may be scraped along with another, after the second it is due. `interval_s` comes from
    `base_interval_s`, `stretched` and `batch_share` from the functions of these names. From start to start both are at
    least `cost_factor` times `scrape_s`.
    """
    least_s = config.cost_factor * scrape_s

    def rest(share: float) -> float:
        return max(max(interval_s * share, least_s) * stretched - scrape_s, 0.0)

    return rest(batch_share), rest(rng.uniform(1.0 - _JITTER, 1.0))


def first_delay_s(endpoints: int, budget_cores: float, rng: random.Random) -> float:
    """Compute the delay of an endpoint's first scrape: spread over the time in which the budget allows one of each."""
    return rng.uniform(0.0, max(endpoints - 1, 0) * FIRST_CPU_S / budget_cores)


def smooth(previous_s: float | None, sample_s: float) -> float:
    """Update a smoothed time (exponentially weighted, the first sample as it is), in seconds."""
    return sample_s if previous_s is None else previous_s + _SMOOTHING * (sample_s - previous_s)


def smooth_scrape(previous_s: float, sample_s: float) -> float:
    """Update the smoothed duration of an endpoint's scrapes, in seconds; the first time from `FIRST_SCRAPE_S`.

    Outliers count as three times the usual, so that one page that waited for a long prefill does not delay the next for
    seconds; a lasting change is followed by 60 % per scrape.
    """
    return smooth(previous_s, min(sample_s, _OUTLIER * previous_s))
