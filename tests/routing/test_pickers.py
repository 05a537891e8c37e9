from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.pickers import by_total, load_of, pick_best, pick_least_loaded
from tests.routing.build import seen, unseen


def test_a_clear_best_is_taken() -> None:
    assert pick_best([0.1, 0.9, 0.5], [seen(1), seen(2), seen(3)], 0.1, random.Random(0)) == (1, "highest score")


def test_of_a_near_tie_the_less_loaded_of_two_is_taken_and_never_the_most_loaded() -> None:
    pool = [seen(1, in_flight=3), seen(2, in_flight=1), seen(3, in_flight=2), seen(4)]
    rng = random.Random(1)
    picks = Counter(pick_best([1.0, 0.99, 0.98, 0.5], pool, 0.05, rng)[0] for _ in range(300))
    # Endpoint 2 wins both of the three pairs it is in; the most loaded loses every pair.
    assert set(picks) == {1, 2}
    assert 150 < picks[1] < 250


def test_equal_loads_are_chosen_evenly() -> None:
    rng = random.Random(2)
    picks = Counter(pick_best([1.0] * 4, [seen(n) for n in range(1, 5)], 0.0, rng)[0] for _ in range(4000))
    assert min(picks.values()) > 850


def test_waiting_requests_break_the_tie_of_in_flight() -> None:
    assert load_of(seen(1, waiting=2.0)) > load_of(unseen(2))
    assert load_of(unseen(1, in_flight=1)) == load_of(seen(2, in_flight=1, waiting=1.0))
    pool = [seen(1, waiting=2.0), seen(2)]
    rng = random.Random(3)
    assert {pick_best([1.0, 1.0], pool, 0.0, rng)[0] for _ in range(50)} == {1}


def test_who_does_not_tell_what_waits_is_no_better_for_it() -> None:
    rng = random.Random(3)
    pool = [seen(1, in_flight=1, waiting=1.0), unseen(2, in_flight=1)]
    picks = Counter(pick_best([1.0, 1.0], pool, 0.0, rng)[0] for _ in range(1000))
    assert 450 < picks[0] < 550


def test_exact_ties_without_signals_go_to_the_least_loaded_of_all() -> None:
    pool = [unseen(1, in_flight=2), unseen(2, in_flight=1), unseen(3, in_flight=1), unseen(4)]
    rng = random.Random(4)
    assert {pick_least_loaded([1.0, 1.0, 1.0, 0.9], pool, rng)[0] for _ in range(50)} == {1, 2}


def test_fallbacks_come_best_first_and_prefer_other_addresses() -> None:
    pool = [seen(1, port=8000), seen(1, port=8001), seen(2), seen(3), seen(3, port=8001)]
    assert by_total([1.0, 0.9, 0.3, 0.5, 0.4], pool, 0, 8) == [3, 2, 1, 4]
    assert by_total([1.0, 0.9, 0.3, 0.5, 0.4], pool, 0, 2) == [3, 2]


def test_equal_fallbacks_are_ordered_by_load() -> None:
    pool = [seen(1), seen(2, in_flight=5), seen(3, in_flight=1)]
    assert by_total([1.0, 0.5, 0.5], pool, 0, 2) == [2, 1]


@settings(deadline=None)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.floats(0, 1), st.integers(0, 2**32))
def test_a_pick_is_within_the_tolerance(totals: list[float], tolerance: float, seed: int) -> None:
    pool = [seen(number) for number in range(len(totals))]
    index, note = pick_best(totals, pool, tolerance, random.Random(seed))
    assert totals[index] >= max(totals) - tolerance * max(totals)
    assert note
