"""Requests whose end nobody tells: their number in flight is right on average."""

from __future__ import annotations

import random

from extproc.edge.services.estimated_completions import EstimatedCompletions


def test_a_first_guess_until_something_was_learned() -> None:
    ends = EstimatedCompletions()
    ends.expect("a", 100.0)
    assert ends.due(129.9) == []
    assert ends.due(130.0) == ["a"]
    assert ends.due(1000.0) == []


def test_the_first_durations_count_at_once_and_later_ones_change_it_slowly() -> None:
    ends = EstimatedCompletions()
    ends.learn(4.0)
    ends.expect("a", 0.0)
    for _ in range(1000):
        ends.learn(2.0)
    ends.expect("b", 0.0)
    ends.learn(1000.0)
    ends.expect("c", 0.0)
    assert ends.due(2.1) == ["b"]
    assert ends.due(4.1) == ["a"]
    assert ends.due(21.9) == []
    assert ends.due(22.1) == ["c"]


def test_the_number_in_flight_is_right_on_average() -> None:
    rng = random.Random(1)
    ends = EstimatedCompletions()
    for _ in range(500):
        ends.learn(rng.expovariate(1 / 3.0))
    open_now, counted = 0, []
    for step in range(4000):
        now = step / 100
        ends.expect(str(step), now)
        open_now += 1 - len(ends.due(now))
        counted.append(open_now)
    # 100 requests a second of 3 s each.
    assert 200 < sum(counted[1000:]) / len(counted[1000:]) < 400


def test_a_bound_counts_until_an_end_was_seen() -> None:
    ends = EstimatedCompletions()
    assert ends.guesses
    ends.learn_bound(2.0)
    assert not ends.guesses
    ends.expect("a", 0.0)
    assert ends.due(2.1) == ["a"]
    ends.learn(0.5)
    ends.learn_bound(100.0)
    ends.expect("b", 10.0)
    assert ends.due(10.6) == ["b"]
