"""When endpoints are scraped, how old signals get, and what the budget does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import ScrapeConfig, Seconds
from extproc.edge.scraping.scrape_interval import (
    FIRST_CPU_S,
    FIRST_SCRAPE_S,
    base_interval_s,
    batch_share,
    demand_cores,
    first_delay_s,
    rest_s,
    smooth,
    smooth_scrape,
    stretch,
)

CONFIG = ScrapeConfig()


def test_busy_more_often_than_idle() -> None:
    # A fifteenth of the wish is left for the scrape itself and a late event loop.
    assert base_interval_s(CONFIG, busy=True, scrape_s=0.001) == pytest.approx(0.25 * 14 / 15 + 0.001)
    assert base_interval_s(CONFIG, busy=False, scrape_s=0.001) == pytest.approx(5.0 * 14 / 15 + 0.001)


def test_cost_bounds_the_rate() -> None:
    assert base_interval_s(CONFIG, busy=True, scrape_s=0.037) == pytest.approx(30 * 0.037)


@pytest.mark.parametrize(
    ("busy", "failures", "interval_s"),
    [(True, 1, 0.5), (True, 3, 2.0), (True, 7, 30.0), (True, 10_000, 30.0), (False, 1, 10.0), (False, 3, 30.0)],
)
def test_backoff(busy: bool, failures: int, interval_s: float) -> None:
    found = base_interval_s(CONFIG, busy=busy, scrape_s=0.0, failures=failures)
    assert interval_s * 14 / 15 * (1 - 1e-9) <= found <= interval_s


def test_backoff_never_shortens() -> None:
    assert base_interval_s(CONFIG, busy=True, scrape_s=2.0, failures=3) == 60.0


def test_budget_stretches_all_alike() -> None:
    assert stretch(0.0, 0.3) == 1.0
    assert stretch(0.3, 0.3) == 1.0
    assert stretch(1.2, 0.3) == pytest.approx(4.0)


@given(
    busy=st.booleans(),
    scrape_s=st.floats(0, 10),
    failures=st.integers(0, 100),
    stretched=st.floats(1, 1000),
    demanded=st.floats(0, 2),
    seed=st.integers(),
)
def test_intervals_stay_above_the_cost_and_below_the_wish(
    busy: bool, scrape_s: float, failures: int, stretched: float, demanded: float, seed: int
) -> None:
    base = base_interval_s(CONFIG, busy=busy, scrape_s=scrape_s, failures=failures)
    share, rng = batch_share(demanded, 1.0), random.Random(seed)
    batch, rest = rest_s(CONFIG, interval_s=base, scrape_s=scrape_s, stretched=stretched, batch_share=share, rng=rng)
    least = CONFIG.cost_factor * scrape_s
    assert 0.0 <= batch <= rest * (1 + 1e-9)
    assert batch + scrape_s >= max(0.8 * base, least) * stretched * (1 - 1e-9)
    assert rest + scrape_s >= max(0.9 * base, least) * stretched * (1 - 1e-9)
    assert rest + scrape_s <= base * stretched * (1 + 1e-9)


@given(
    wish_s=st.floats(0.01, 10),
    cost_factor=st.floats(0, 200),
    scrape_s=st.floats(0, 1),
    next_s=st.floats(0, 1),
    seed=st.integers(),
)
def test_signals_are_never_older_than_wished_or_thirty_scrapes(
    wish_s: float, cost_factor: float, scrape_s: float, next_s: float, seed: int
) -> None:
    config = ScrapeConfig(busy_interval=Seconds(wish_s), cost_factor=cost_factor)
    base = base_interval_s(config, busy=True, scrape_s=scrape_s)
    _, rest = rest_s(
        config, interval_s=base, scrape_s=scrape_s, stretched=1.0, batch_share=0.8, rng=random.Random(seed)
    )
    age_s = rest + next_s
    assert age_s <= max(wish_s, max(30.0, cost_factor) * max(scrape_s, next_s)) * (1 + 1e-9)


@given(
    pools=st.lists(st.tuples(st.integers(1, 500), st.booleans(), st.floats(0, 0.05)), min_size=1, max_size=5),
    cpu_s=st.floats(1e-5, 0.01),
    budget=st.floats(0.001, 4),
)
def test_the_whole_picker_stays_within_its_budget(
    pools: list[tuple[int, bool, float]], cpu_s: float, budget: float
) -> None:
    """Even where each is scraped in a batch as early as possible, every time."""
    bases = [(count, base_interval_s(CONFIG, busy=busy, scrape_s=s), s) for count, busy, s in pools]
    demanded = sum(count * demand_cores(base, cpu_s) for count, base, _ in bases)
    stretched, share = stretch(demanded, budget), batch_share(demanded, budget)
    used = 0.0
    for count, base, scrape_s in bases:
        interval_s = max(base * share, CONFIG.cost_factor * scrape_s) * stretched
        used += count * cpu_s / interval_s
    assert used <= budget * (1 + 1e-9)


def test_how_early_a_batch_takes_an_endpoint_is_bounded_by_the_budget() -> None:
    assert [batch_share(demanded, 0.3) for demanded in (0.0, 0.1, 0.3, 3.0)] == [0.8, 0.8, 0.9, 0.9]
    assert batch_share(0.28, 0.3) == pytest.approx(0.84)


def test_first_scrapes_are_spread_by_the_budget() -> None:
    assert first_delay_s(1, 0.3, random.Random(0)) == 0.0
    delays = [first_delay_s(100, 0.3, random.Random(seed)) for seed in range(50)]
    assert 0.0 <= min(delays) < max(delays) <= 99 * FIRST_CPU_S / 0.3


def test_smooth() -> None:
    assert smooth(None, 0.02) == 0.02
    assert smooth(0.01, 0.02) == pytest.approx(0.013)


def test_one_slow_scrape_says_little_many_say_all() -> None:
    assert smooth_scrape(0.01, 5.0) == pytest.approx(0.016)
    assert smooth_scrape(0.01, 0.001) == pytest.approx(0.0073)
    scrape_s = 0.001
    for _ in range(20):
        scrape_s = smooth_scrape(scrape_s, 0.1)
    assert scrape_s == pytest.approx(0.1, rel=0.05)


def test_a_slow_start_does_not_blind() -> None:
    """All of a large pool are connected to at once: what that took says nothing of the pages to come."""
    scrape_s = smooth_scrape(FIRST_SCRAPE_S, 2.0)
    assert base_interval_s(CONFIG, busy=True, scrape_s=scrape_s) < 0.5
