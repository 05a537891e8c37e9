from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.pool.load import LoadEstimate


def scraped(waiting: float | None, running: float | None, *, in_flight: int = 0, young: int = 0) -> LoadEstimate:
    load = LoadEstimate()
    load.scraped(waiting, running, in_flight=in_flight, young=young)
    return load


def shown(load: LoadEstimate) -> tuple[float | None, float | None]:
    return load.estimate()


def test_unknown_until_scraped() -> None:
    load = LoadEstimate()
    load.sent()
    load.ended(was_waiting=True)
    assert shown(load) == (None, None)


def test_sent_counts_as_waiting_and_ended_leaves_running() -> None:
    load = scraped(2, 5, in_flight=7)
    load.sent()
    assert shown(load) == (3, 5)
    load.ended(was_waiting=False)
    assert shown(load) == (3, 4)
    load.ended(was_waiting=True)
    assert shown(load) == (2, 4)


def test_ended_takes_from_the_other_where_there_is_none() -> None:
    load = scraped(2, 0.5, in_flight=2)
    load.ended(was_waiting=False)
    assert shown(load) == (1.5, 0)
    load = scraped(0, 3)
    load.ended(was_waiting=True)
    assert shown(load) == (0, 2)
    load = scraped(0, 0)
    load.ended(was_waiting=False)
    assert shown(load) == (0, 0)


def test_started_moves_one() -> None:
    load = scraped(0, 0)
    load.sent()
    load.started()
    assert shown(load) == (0, 1)
    load.started()
    assert shown(load) == (0, 1)


def test_gauges_that_lag_are_completed() -> None:
    assert shown(scraped(0, 0, in_flight=40, young=40)) == (40, 0)
    assert shown(scraped(0, 0, in_flight=40, young=30)) == (30, 10)
    assert shown(scraped(1, 14, in_flight=16, young=16)) == (2, 14)
    assert shown(scraped(23, 14, in_flight=16, young=16)) == (23, 14)


def test_only_one_of_the_two_known() -> None:
    load = scraped(1, None, in_flight=4, young=4)
    assert shown(load) == (1, None)
    load.ended(was_waiting=False)
    assert shown(load) == (1, None)
    load = scraped(None, 3, in_flight=5, young=1)
    assert shown(load) == (None, 4)


@given(
    waiting=st.integers(0, 20),
    running=st.integers(0, 20),
    in_flight=st.integers(0, 30),
    young=st.integers(0, 30),
    steps=st.lists(st.tuples(st.sampled_from(["sent", "ended", "started"]), st.booleans())),
)
def test_never_negative_and_never_below_our_own(
    waiting: int, running: int, in_flight: int, young: int, steps: list[tuple[str, bool]]
) -> None:
    load = scraped(waiting, running, in_flight=in_flight, young=min(young, in_flight))
    for step, was_waiting in steps:
        if step == "sent":
            load.sent()
            in_flight += 1
        elif step == "started":
            load.started()
        elif in_flight:
            load.ended(was_waiting=was_waiting)
            in_flight -= 1
        now_waiting, now_running = load.estimate()
        assert now_waiting is not None
        assert now_running is not None
        assert now_waiting >= 0
        assert now_running >= 0
        assert now_waiting + now_running >= in_flight
