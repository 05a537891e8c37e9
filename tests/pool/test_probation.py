"""When an endpoint is on probation, for which share, and what ends it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pool.probation import FAIR, REFUSING, RefusalHistory


def busy(gap_s: float = 0.5, until: float = 100.0) -> RefusalHistory:
    """An endpoint with a success every `gap_s` until then."""
    record = RefusalHistory()
    for number in range(int(until / gap_s)):
        record.succeeded((number + 1) * gap_s)
    return record


def failing(record: RefusalHistory, start: float, end: float, every_s: float = 0.1) -> float:
    at = start
    while at <= end:
        record.failed(at)
        at += every_s
    return at - every_s


def test_four_failures_in_a_row_and_not_three() -> None:
    record = busy()
    for number in range(3):
        record.failed(100.0 + number / 100)
    assert record.share(100.1) is None
    record.failed(100.1)
    assert record.share(100.1) == FAIR


def test_one_bad_request_in_two_is_nothing() -> None:
    record = busy()
    for number in range(200):
        record.failed(100.0 + number)
        record.succeeded(100.5 + number)
        assert record.share(100.5 + number) is None


def test_no_success_for_much_longer_than_usual() -> None:
    record = busy(gap_s=0.5)
    last = failing(record, 100.0, 102.5)
    assert record.share(last) == FAIR
    last = failing(record, last, 103.5)
    assert record.share(last) == REFUSING


@pytest.mark.parametrize(("gap_s", "least", "most"), [(0.01, 0.9, 1.2), (1.0, 5.5, 6.5), (8.0, 14.5, 15.5)])
def test_how_long_that_is_depends_on_the_endpoint(gap_s: float, least: float, most: float) -> None:
    record = busy(gap_s)
    last = failing(record, 100.0, 100.0 + least)
    assert record.share(last) == FAIR
    last = failing(record, last, 100.0 + most)
    assert record.share(last) == REFUSING


def test_a_flood_beside_successes_never_refuses() -> None:
    record = busy(gap_s=1.0)
    for second in range(100, 200):
        failing(record, float(second), second + 0.9, every_s=0.02)
        assert record.share(second + 0.9) == FAIR
        record.succeeded(second + 1.0)


def test_idle_hours_do_not_make_it_slow_to_see() -> None:
    record = busy(gap_s=0.5)
    record.succeeded(40_000.0)
    last = failing(record, 40_001.0, 40_017.0)
    assert record.share(last) == REFUSING


def test_three_successes_end_it() -> None:
    record = busy()
    last = failing(record, 100.0, 130.0)
    assert record.share(last) == REFUSING
    record.succeeded(131.0)
    assert record.share(131.0) == FAIR
    record.succeeded(131.1)
    record.succeeded(131.2)
    assert record.share(131.2) is None
    for _ in range(20):
        record.succeeded(132.0)
    assert record.level == 0.0
    assert not record.succeeded(133.0)


def test_it_lapses_and_comes_back_with_the_next_failure() -> None:
    record = busy()
    last = failing(record, 100.0, 130.0)
    assert record.share(last + 31.0) is None
    record.failed(last + 32.0)
    assert record.share(last + 32.0) == REFUSING


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 60)), max_size=60))
def test_the_level_stays_in_range_and_success_never_raises_it(events: list[tuple[bool, float]]) -> None:
    record, now = RefusalHistory(), 0.0
    for good, gap_s in events:
        now += gap_s
        before = record.level
        if good:
            record.succeeded(now)
            assert record.level <= before
        else:
            record.failed(now)
        assert 0.0 <= record.level <= 1.0
        assert record.share(now) in {None, FAIR, REFUSING}
