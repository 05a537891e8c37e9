from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.signals import FRESH_S, HALF_TRUST_S, MISSING, UNKNOWN, confidence, shrink_to_mean, trust_in
from extproc.snapshots import Snapshots
from extproc.types import EndpointSnapshot
from tests.routing.build import NOW, seen, unseen


def tempered(scores: list[float | None], pool: list[EndpointSnapshot]) -> list[float]:
    told = [MISSING if score is None else score for score in scores]
    return list(shrink_to_mean(told, trust_in(pool, NOW)))


def test_confidence_is_full_while_fresh_and_half_at_its_time_constant() -> None:
    assert confidence(0) == confidence(FRESH_S) == 1
    assert confidence(FRESH_S + HALF_TRUST_S) == pytest.approx(0.5)
    assert confidence(60) < 0.03


def test_never_scraped_is_not_believed_at_all() -> None:
    assert confidence(None) == 0


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=2))
def test_confidence_never_rises_with_age(ages: list[float]) -> None:
    values = [confidence(age) for age in sorted(ages)]
    assert all(0 <= value <= 1 for value in values)
    assert all(earlier >= later for earlier, later in pairwise(values))


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=8))
def test_trust_is_the_confidence_in_each(ages: list[float | None]) -> None:
    pool = [unseen(1) if age is None else seen(1, observed_at=NOW - age) for age in ages]
    wanted = [confidence(None if s.observed_at is None else NOW - s.observed_at) for s in pool]
    assert (trust_in(pool, NOW) or [1.0] * len(pool)) == wanted


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(0, 1e5), min_size=1, max_size=8), st.floats(1e5, 1e6))
def test_in_a_whole_pool_ages_are_rounded_down_and_shared_by_decisions_close_to_one_another(
    scrapes: list[float | None], now: float
) -> None:
    pool = Snapshots([unseen(1) if at is None else seen(1, observed_at=at) for at in scrapes])
    trust = trust_in(pool, now) or [1.0] * len(pool)
    assert trust == pytest.approx([confidence(None if at is None else now - at) for at in scrapes], abs=0.017)
    step = now // 0.25 * 0.25
    assert (trust_in(pool, step) is None) or trust_in(pool, step) is trust_in(pool, step + 0.2)


def test_fresh_scores_pass_unchanged() -> None:
    assert tempered([0.1, 0.9], [seen(1), seen(2, observed_at=NOW - FRESH_S)]) == [0.1, 0.9]


def test_unknown_is_the_mean_of_the_known() -> None:
    assert tempered([0.2, None, 0.6], [seen(1), seen(2), seen(3)]) == pytest.approx([0.2, 0.4, 0.6])


def test_never_scraped_is_average_whatever_its_value() -> None:
    assert tempered([0.2, 1.0, 0.6], [seen(1), unseen(2), seen(3)]) == pytest.approx([0.2, 0.4, 0.6])


def test_nobody_known_is_the_same_for_all() -> None:
    assert tempered([None, None], [unseen(1), seen(2)]) == [UNKNOWN, UNKNOWN]
    assert tempered([0.3, 0.9], [unseen(1), unseen(2)]) == [UNKNOWN, UNKNOWN]


def test_the_older_the_closer_to_neutral() -> None:
    distances = []
    for age in (0.5, 5, 20, 100, 10_000):
        (
            stale,
            *_,
        ) = tempered([1.0, 0.0, 0.0], [seen(1, observed_at=NOW - age), seen(2), seen(3)])
        distances.append(stale)
    assert distances == sorted(distances, reverse=True)
    assert distances[0] == 1.0
    assert distances[-1] == pytest.approx(0.0, abs=1e-5)


def test_equally_old_scores_lose_their_differences_alike() -> None:
    old = NOW - FRESH_S - HALF_TRUST_S
    result = tempered([0.0, 1.0], [seen(1, observed_at=old), seen(2, observed_at=old)])
    assert result == pytest.approx([0.25, 0.75])
