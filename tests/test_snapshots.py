"""Snapshots and what is memoized of them: always what computing anew gives, and computed only where something changed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from extproc.snapshots import Snapshots, any_snapshot, column, memoized, positions, selected
from extproc.types import Endpoint, EndpointSnapshot


def test_what_is_memoized_is_computed_once_while_only_the_load_changes() -> None:
    one, other = EndpointSnapshot(Endpoint("10.0.0.1", 80)), EndpointSnapshot(Endpoint("10.0.0.2", 80))
    before = Snapshots([one, other])
    ids = memoized(before, _ids)
    assert ids == ["10.0.0.1:80", "10.0.0.2:80"]
    assert list(column(before, _in_flight)) == [0, 0]
    busier = before.with_load({1: msgspec.structs.replace(other, in_flight=1)})
    assert memoized(busier, _ids) is ids
    assert memoized(Snapshots(busier), _ids) is not ids
    assert memoized(list(before), _ids) == ids
    assert (list(column(busier, _in_flight)), list(column(before, _in_flight))) == ([0, 1], [0, 0])
    assert before == (one, other) != busier


def test_a_scrape_leaves_columns() -> None:
    before = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80)) for n in range(3)])
    asked: list[int] = []

    def noted(snapshot: EndpointSnapshot) -> bool:
        asked.append(before.index(snapshot) if snapshot in before else -1)
        return snapshot.observed_at is not None

    assert not memoized(before, lambda all_: any_snapshot(all_, noted))
    known = positions(before)
    assert known == {"10.0.0.0:80": 0, "10.0.0.1:80": 1, "10.0.0.2:80": 2}
    assert asked == [0, 1, 2]
    after = before.changed({1: msgspec.structs.replace(before[1], observed_at=5.0)})
    assert memoized(after, _any_seen)
    assert not memoized(before, _any_seen)
    assert any_snapshot(after, noted)
    assert asked == [0, 1, 2, -1], "the others are not asked again"
    assert not any_snapshot(before, noted)
    assert positions(after) is known


def _ids(snapshots: Sequence[EndpointSnapshot]) -> list[str]:
    return [snapshot.endpoint.id for snapshot in snapshots]


def _any_seen(snapshots: Sequence[EndpointSnapshot]) -> bool:
    return any(snapshot.observed_at is not None for snapshot in snapshots)


@given(st.lists(st.tuples(st.booleans(), st.dictionaries(st.integers(0, 5), st.integers(0, 9))), max_size=6))
def test_a_column_that_is_carried_along_is_what_asking_anew_gives(steps: list[tuple[bool, dict[int, int]]]) -> None:
    snapshots = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80)) for n in range(6)])
    for scraped, step in steps:
        column(snapshots, _in_flight)
        any_snapshot(snapshots, _failed)
        changes = {
            place: msgspec.structs.replace(snapshots[place], in_flight=count, scrape_failures=count * scraped)
            for place, count in step.items()
        }
        snapshots = snapshots.changed(changes) if scraped else snapshots.with_load(changes)
        assert column(snapshots, _in_flight) == column(list(snapshots), _in_flight)
        assert any_snapshot(snapshots, _failed) == any_snapshot(list(snapshots), _failed)


@given(st.lists(st.tuples(st.sampled_from([7.0, 8.0]), st.dictionaries(st.integers(0, 5), st.integers(0, 9)))))
def test_a_column_of_a_time_is_carried_along_as_long_as_the_time_is_the_same(
    steps: list[tuple[float, dict[int, int]]],
) -> None:
    snapshots = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80)) for n in range(6)])
    for at, step in steps:
        snapshots = snapshots.with_load(
            {place: msgspec.structs.replace(snapshots[place], in_flight=count) for place, count in step.items()}
        )
        assert column(snapshots, _in_flight_at, at) == [_in_flight_at(snapshot, at) for snapshot in snapshots]
        assert column(snapshots, _in_flight_at, at) is column(snapshots, _in_flight_at, at)


def _in_flight_at(snapshot: EndpointSnapshot, at: float) -> float:
    return at + snapshot.in_flight


@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 9), st.booleans()))),
        max_size=8,
    ),
    lazily=st.booleans(),
)
def test_a_selection_is_what_selecting_anew_gives(
    steps: list[tuple[bool, dict[int, tuple[int, bool]]]], *, lazily: bool
) -> None:
    snapshots = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80)) for n in range(6)])
    for number, (scraped, step) in enumerate(steps):
        if not lazily or number % 3 == 0:
            column(selected(snapshots, _well), _in_flight)
        changes = {
            place: msgspec.structs.replace(
                snapshots[place],
                in_flight=count,
                demoted=demoted if scraped else snapshots[place].demoted,
                observed_at=float(number) if scraped else snapshots[place].observed_at,
            )
            for place, (count, demoted) in step.items()
        }
        before, snapshots = snapshots, snapshots.changed(changes) if scraped else snapshots.with_load(changes)
        for whole in (snapshots, before, snapshots):
            kept = selected(whole, _well)
            assert list(kept) == [one for one in whole if not one.demoted]
            assert column(kept, _in_flight) == column(list(kept), _in_flight)
            assert memoized(kept, _any_seen) == _any_seen(list(kept))


def test_a_selection_follows_the_whole() -> None:
    whole = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80), demoted=n == 1) for n in range(4)])
    asked = 0

    def noted(snapshot: EndpointSnapshot) -> int:
        nonlocal asked
        asked += 1
        return snapshot.in_flight

    seen = memoized(selected(whole, _well), _ids)
    assert column(selected(whole, _well), noted) == [0, 0, 0]
    for place, wanted in ((3, [0, 0, 7]), (1, [0, 0, 7]), (0, [7, 0, 7])):
        asked = 0
        whole = whole.with_load({place: msgspec.structs.replace(whole[place], in_flight=7)})
        assert column(selected(whole, _well), noted) == wanted
        assert asked <= 1
        assert memoized(selected(whole, _well), _ids) is seen


def _well(snapshot: EndpointSnapshot) -> bool:
    return not snapshot.demoted


def test_snapshots_that_others_came_after_are_still_answered_for() -> None:
    """A decision is explained long after it was made."""
    one, other = EndpointSnapshot(Endpoint("10.0.0.1", 80)), EndpointSnapshot(Endpoint("10.0.0.2", 80))
    first = Snapshots([one, other])
    second = first.with_load({0: msgspec.structs.replace(one, in_flight=7)})
    beside = first.with_load({1: msgspec.structs.replace(other, in_flight=8)})
    for _ in range(2):
        assert [list(column(each, _in_flight)) for each in (second, first, beside)] == [[7, 0], [0, 0], [0, 8]]


def test_the_history_is_bounded_where_nobody_scrapes() -> None:
    snapshots = Snapshots([EndpointSnapshot(Endpoint("10.0.0.1", 80))])
    most = asked = 0

    def noted(snapshot: EndpointSnapshot) -> int:
        nonlocal asked
        asked += 1
        return snapshot.in_flight

    column(snapshots, _in_flight)
    early = snapshots
    for count in range(25_000):
        snapshots = snapshots.with_load({0: msgspec.structs.replace(snapshots[0], in_flight=count)})
        most = max(most, len(snapshots.history.changes))
        assert list(column(snapshots, noted)) == [count]
    assert most <= 10_001
    assert asked == 25_000
    assert list(column(snapshots, _in_flight)) == [24_999]
    assert list(column(early, _in_flight)) == [0]
    assert list(column(snapshots, _in_flight)) == [24_999]


def _in_flight(snapshot: EndpointSnapshot) -> int:
    return snapshot.in_flight


def _failed(snapshot: EndpointSnapshot) -> bool:
    return snapshot.scrape_failures > 0
