from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import HealthConfig
from extproc.pool.health import HEALTHY, Health, SeenFailures, Verdict, demoted, verdict
from extproc.types import Outcome

CONFIG = HealthConfig()


def test_verdicts() -> None:
    bad = {outcome for outcome in Outcome if verdict(outcome) in {Verdict.BAD, Verdict.UNREACHABLE}}
    assert bad == {Outcome.SERVER_ERROR, Outcome.RESET, Outcome.TIMEOUT, Outcome.CONNECT_FAILURE}
    assert {outcome for outcome in Outcome if verdict(outcome) is Verdict.GOOD} == {Outcome.OK}


def test_two_failures_demote_one_does_not() -> None:
    once = HEALTHY.failed(0.0, 10.0)
    twice = once.failed(0.0, 10.0)
    assert once.score(0.0, 10.0) == 0.5
    assert twice.score(0.0, 10.0) == 0.25
    assert demoted({"a": 0.5}, 4, CONFIG) == frozenset()
    assert demoted({"a": 0.25}, 4, CONFIG) == {"a"}


def test_heals_by_half_and_then_entirely() -> None:
    health = Health(badness=1.0, at=100.0)
    assert health.score(110.0, 10.0) == 0.5
    assert health.score(120.0, 10.0) == 0.75
    assert health.score(300.0, 10.0) == 1.0
    assert health.score(50.0, 10.0) == 0.0
    assert health.score(100.0, 0.0) == 1.0


def test_successes_heal() -> None:
    health = HEALTHY.failed(0.0, 10.0)
    assert health.succeeded(0.0, 10.0).score(0.0, 10.0) == 0.75
    for _ in range(12):
        health = health.succeeded(0.0, 10.0)
    assert health is HEALTHY
    assert HEALTHY.succeeded(0.0, 10.0) is HEALTHY


def test_one_percent_of_failures_never_demotes() -> None:
    health = HEALTHY
    worst = 1.0
    for number in range(1000):
        now = number * 0.01
        health = health.failed(now, 10.0) if number % 100 == 0 else health.succeeded(now, 10.0)
        worst = min(worst, health.score(now, 10.0))
    assert worst >= CONFIG.demote_below


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100))))
def test_a_score_stays_in_range(events: list[tuple[bool, float]]) -> None:
    health = HEALTHY
    for failed, now in events:
        health = health.failed(now, 10.0) if failed else health.succeeded(now, 10.0)
        assert 0.0 <= health.score(now, 10.0) <= 1.0


@pytest.mark.parametrize(
    ("endpoints", "share", "names"),
    [(1, 1.0, ""), (2, 0.5, "a"), (3, 0.5, "a"), (4, 0.5, "ab"), (4, 1.0, "abc"), (4, 0.0, ""), (0, 0.5, "")],
)
def test_worst_first_and_never_too_many(endpoints: int, share: float, names: str) -> None:
    scores = {"c": 0.3, "a": 0.1, "b": 0.2, "d": 0.9} if endpoints else {}
    config = HealthConfig(max_demoted_share=share)
    assert demoted(scores, endpoints, config) == frozenset(names)


def test_repeats_of_one_request_count_once() -> None:
    seen = SeenFailures()
    assert seen.first("r", Verdict.BAD, "a")
    assert not seen.first("r", Verdict.BAD, "a")
    assert not seen.first("r", Verdict.BAD, "b")
    assert seen.first("r", Verdict.UNREACHABLE, "a")
    assert not seen.first("r", Verdict.UNREACHABLE, "a")
    assert seen.first("r", Verdict.UNREACHABLE, "b")
    assert seen.first("", Verdict.BAD, "a")
    assert seen.first("", Verdict.BAD, "a")


def test_memory_of_failures_is_bounded() -> None:
    seen = SeenFailures(remembered=2)
    assert [seen.first(name, Verdict.BAD, "a") for name in ("1", "2", "3", "1", "3")] == [True, True, True, True, False]
