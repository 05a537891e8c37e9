from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import ScrapeConfig
from extproc.pool.cadence import SCRAPES_PER_S, base_interval_s, first_delay_s, next_interval_s, smooth, stretch

CONFIG = ScrapeConfig()


def test_busy_more_often_than_idle() -> None:
    assert base_interval_s(CONFIG, busy=True, scrape_s=0.001) == 0.25
    assert base_interval_s(CONFIG, busy=False, scrape_s=0.001) == 5.0


def test_cost_bounds_the_rate() -> None:
    assert base_interval_s(CONFIG, busy=True, scrape_s=0.037) == pytest.approx(30 * 0.037)


@pytest.mark.parametrize(
    ("busy", "failures", "interval_s"),
    [(True, 1, 0.5), (True, 3, 2.0), (True, 7, 30.0), (True, 10_000, 30.0), (False, 1, 10.0), (False, 3, 30.0)],
)
def test_backoff(busy: bool, failures: int, interval_s: float) -> None:
    assert base_interval_s(CONFIG, busy=busy, scrape_s=0.0, failures=failures) == interval_s


def test_backoff_never_shortens() -> None:
    assert base_interval_s(CONFIG, busy=True, scrape_s=2.0, failures=3) == 60.0


def test_budget_stretches_all_alike() -> None:
    assert stretch(0.0) == 1.0
    assert stretch(SCRAPES_PER_S) == 1.0
    assert stretch(4 * SCRAPES_PER_S) == 4.0


@given(
    busy=st.booleans(),
    scrape_s=st.floats(0, 10),
    failures=st.integers(0, 100),
    demand=st.floats(0, 10_000),
    seed=st.integers(),
)
def test_jitter_keeps_within_ten_percent_and_above_the_cost(
    busy: bool, scrape_s: float, failures: int, demand: float, seed: int
) -> None:
    base = base_interval_s(CONFIG, busy=busy, scrape_s=scrape_s, failures=failures) * stretch(demand)
    interval = next_interval_s(
        CONFIG,
        busy=busy,
        scrape_s=scrape_s,
        rng=random.Random(seed),
        failures=failures,
        demand_per_s=demand,
    )
    assert interval >= max(0.9 * base, CONFIG.cost_factor * scrape_s) * (1 - 1e-9)
    assert interval <= 1.1 * max(base, CONFIG.cost_factor * scrape_s / 0.9) * (1 + 1e-9)


def test_first_scrapes_are_spread() -> None:
    assert first_delay_s(1, random.Random(0)) == 0.0
    delays = [first_delay_s(100, random.Random(seed)) for seed in range(50)]
    assert 0.0 <= min(delays) < max(delays) <= 99 / SCRAPES_PER_S


def test_smooth() -> None:
    assert smooth(None, 0.02) == 0.02
    assert smooth(0.01, 0.02) == pytest.approx(0.013)
