from __future__ import annotations

import pytest

from extproc.prefix.text import SHORT, Text, measure
from extproc.prefix.token_deltas import Comparison, TokenDeltas


def words(n_bytes: int) -> Text:
    return measure((b"a" * n_bytes,))


def window(requests: int = 20, prompt_bytes: int = 400, reported: int = 0, model: str = "m") -> TokenDeltas:
    """An endpoint whose counters stood at (1000 tokens, 50 requests), and what has ended there since."""
    deltas = TokenDeltas()
    assert deltas.observed("e", 1000.0, 50.0, 0) is None
    for number in range(requests):
        deltas.ended("e", model, words(prompt_bytes), reported=number < reported)
    return deltas


def test_what_the_counters_grew_by_is_compared_with_our_bytes() -> None:
    deltas = window()
    assert deltas.observed("e", 3000.0, 70.0, 5) == Comparison("m", 20, {SHORT: 8000.0}, 8000, 2000)
    assert deltas.observed("e", 3000.0, 70.0, 5) is None, "a new window has begun"


def test_several_models_make_no_single_one() -> None:
    deltas = window(19)
    deltas.ended("e", "other", words(400), reported=False)
    assert deltas.observed("e", 3000.0, 70.0, 0) == Comparison(None, 20, {SHORT: 8000.0}, 8000, 2000)


@pytest.mark.parametrize(("requests", "in_flight"), [(19, 0), (20, 6)])
def test_it_waits_for_enough_requests(requests: int, in_flight: int) -> None:
    deltas = window(requests)
    assert deltas.observed("e", 3000.0, 50.0 + requests, in_flight) is None
    for _ in range(10):
        deltas.ended("e", "m", words(400), reported=False)
    found = deltas.observed("e", 4000.0, 60.0 + requests, in_flight)
    assert found is not None
    assert found.requests == requests + 10


@pytest.mark.parametrize(
    ("tokens", "requests"),
    [(3000.0, 73.0), (3000.0, 67.0), (1000.0, 70.0), (10.0, 70.0)],
    ids=["somebody else's", "lost ones", "no tokens", "restarted"],
)
def test_an_unfair_comparison_is_dropped(tokens: float, requests: float) -> None:
    assert window().observed("e", tokens, requests, 0) is None


def test_answers_that_named_their_tokens_have_taught_already() -> None:
    assert window(reported=10).observed("e", 3000.0, 70.0, 0) is None
    assert window(reported=9).observed("e", 3000.0, 70.0, 0) is not None


def test_a_prompt_not_seen_whole_voids_the_window_at_once() -> None:
    deltas = window(3)
    deltas.ended("e", "m", None, reported=False)
    assert deltas.observed("e", 3000.0, 54.0, 0) is None
    for _ in range(20):
        deltas.ended("e", "m", words(400), reported=False)
    assert deltas.observed("e", 5000.0, 74.0, 0) == Comparison("m", 20, {SHORT: 8000.0}, 8000, 2000)


def test_without_counters_or_after_a_restart_there_is_no_window() -> None:
    deltas = TokenDeltas()
    deltas.ended("e", "m", words(400), reported=False)
    assert deltas.observed("e", None, 1.0, 0) is None
    assert deltas.observed("e", 1.0, None, 0) is None
    deltas = window()
    deltas.forget("e")
    deltas.forget("e")
    assert deltas.observed("e", 3000.0, 70.0, 0) is None
