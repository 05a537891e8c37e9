"""The shared nouns: what they derive, that they cannot change, and that what is unknown stays unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.types import (
    Decision,
    Endpoint,
    EndpointMetrics,
    EndpointSnapshot,
    InferenceRequest,
    Outcome,
    PrefixMatch,
    RequestKind,
    Snapshots,
    Usage,
    column,
    column_at,
    endpoint_ids,
    part,
    places,
    settled,
    somebody,
)


@pytest.mark.parametrize(
    ("address", "wanted"), [("10.0.0.1", "10.0.0.1:80"), ("2001:db8::1", "[2001:db8::1]:80"), ("::1", "[::1]:80")]
)
def test_an_endpoints_id_is_the_destination_headers_value(address: str, wanted: str) -> None:
    assert Endpoint(address, 80).id == wanted


def test_endpoints_are_equal_by_what_they_are_and_can_be_keys() -> None:
    one = Endpoint("10.0.0.1", 80, labels={"zone": "a"})
    assert one == Endpoint("10.0.0.1", 80, labels={"zone": "a"})
    assert one != Endpoint("10.0.0.1", 80, labels={"zone": "b"})
    assert one != Endpoint("10.0.0.1", 80, uid="u", labels={"zone": "a"})
    assert len({one, Endpoint("10.0.0.1", 80, labels={"zone": "a"})}) == 1


@pytest.mark.parametrize(
    "kind", [Decision, Endpoint, EndpointMetrics, EndpointSnapshot, InferenceRequest, PrefixMatch, Usage]
)
def test_data_is_frozen_and_slotted(kind: type) -> None:
    if dataclasses.is_dataclass(kind):
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert "__slots__" in vars(kind)
    else:
        assert issubclass(kind, msgspec.Struct)
        assert kind.__struct_config__.frozen


def test_what_is_settled_is_worked_out_once_while_only_the_load_changes() -> None:
    one, other = EndpointSnapshot(Endpoint("10.0.0.1", 80)), EndpointSnapshot(Endpoint("10.0.0.2", 80))
    before = Snapshots([one, other])
    ids = settled(before, endpoint_ids)
    assert ids == ["10.0.0.1:80", "10.0.0.2:80"]
    assert list(column(before, _in_flight)) == [0, 0]
    busier = before.with_load({1: msgspec.structs.replace(other, in_flight=1)})
    assert settled(busier, endpoint_ids) is ids
    assert settled(Snapshots(busier), endpoint_ids) is not ids
    assert settled(list(before), endpoint_ids) == ids
    assert (list(column(busier, _in_flight)), list(column(before, _in_flight))) == ([0, 1], [0, 0])
    assert before == (one, other) != busier


def test_a_scrape_leaves_all_that_is_worked_out_row_by_row() -> None:
    before = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80)) for n in range(3)])
    asked: list[int] = []

    def noted(snapshot: EndpointSnapshot) -> bool:
        asked.append(before.index(snapshot) if snapshot in before else -1)
        return snapshot.observed_at is not None

    assert not settled(before, lambda all_: somebody(all_, noted))
    known = places(before)
    assert known == {"10.0.0.0:80": 0, "10.0.0.1:80": 1, "10.0.0.2:80": 2}
    assert asked == [0, 1, 2]
    after = before.changed({1: msgspec.structs.replace(before[1], observed_at=5.0)})
    assert settled(after, _any_seen)
    assert not settled(before, _any_seen)
    assert somebody(after, noted)
    assert asked == [0, 1, 2, -1], "the others are not asked again"
    assert not somebody(before, noted)
    assert places(after) is known


def _any_seen(snapshots: Sequence[EndpointSnapshot]) -> bool:
    return any(snapshot.observed_at is not None for snapshot in snapshots)


@given(st.lists(st.tuples(st.booleans(), st.dictionaries(st.integers(0, 5), st.integers(0, 9))), max_size=6))
def test_a_column_that_is_carried_along_is_what_asking_anew_gives(steps: list[tuple[bool, dict[int, int]]]) -> None:
    snapshots = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80)) for n in range(6)])
    for scraped, step in steps:
        column(snapshots, _in_flight)
        somebody(snapshots, _failed)
        changes = {
            place: msgspec.structs.replace(snapshots[place], in_flight=count, scrape_failures=count * scraped)
            for place, count in step.items()
        }
        snapshots = snapshots.changed(changes) if scraped else snapshots.with_load(changes)
        assert column(snapshots, _in_flight) == column(list(snapshots), _in_flight)
        assert somebody(snapshots, _failed) == somebody(list(snapshots), _failed)


@given(st.lists(st.tuples(st.sampled_from([7.0, 8.0]), st.dictionaries(st.integers(0, 5), st.integers(0, 9)))))
def test_a_column_of_a_time_is_carried_along_as_long_as_the_time_is_the_same(
    steps: list[tuple[float, dict[int, int]]],
) -> None:
    snapshots = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80)) for n in range(6)])
    for at, step in steps:
        snapshots = snapshots.with_load(
            {place: msgspec.structs.replace(snapshots[place], in_flight=count) for place, count in step.items()}
        )
        assert column_at(snapshots, _in_flight_at, at) == [_in_flight_at(snapshot, at) for snapshot in snapshots]
        assert column_at(snapshots, _in_flight_at, at) is column_at(snapshots, _in_flight_at, at)


def _in_flight_at(snapshot: EndpointSnapshot, at: float) -> float:
    return at + snapshot.in_flight


@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 9), st.booleans()))),
        max_size=8,
    ),
    lazily=st.booleans(),
)
def test_a_part_is_what_choosing_them_anew_gives(
    steps: list[tuple[bool, dict[int, tuple[int, bool]]]], *, lazily: bool
) -> None:
    snapshots = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80)) for n in range(6)])
    for number, (scraped, step) in enumerate(steps):
        if not lazily or number % 3 == 0:
            column(part(snapshots, _well), _in_flight)
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
            kept = part(whole, _well)
            assert list(kept) == [one for one in whole if not one.demoted]
            assert column(kept, _in_flight) == column(list(kept), _in_flight)
            assert settled(kept, _any_seen) == _any_seen(list(kept))


def test_a_part_follows_along() -> None:
    whole = Snapshots([EndpointSnapshot(Endpoint(f"10.0.0.{n}", 80), demoted=n == 1) for n in range(4)])
    asked = 0

    def noted(snapshot: EndpointSnapshot) -> int:
        nonlocal asked
        asked += 1
        return snapshot.in_flight

    seen = settled(part(whole, _well), endpoint_ids)
    assert column(part(whole, _well), noted) == [0, 0, 0]
    for place, wanted in ((3, [0, 0, 7]), (1, [0, 0, 7]), (0, [7, 0, 7])):
        asked = 0
        whole = whole.with_load({place: msgspec.structs.replace(whole[place], in_flight=7)})
        assert column(part(whole, _well), noted) == wanted
        assert asked <= 1
        assert settled(part(whole, _well), endpoint_ids) is seen


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


def test_what_is_worked_out_does_not_grow_for_ever_where_nobody_scrapes() -> None:
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
        most = max(most, len(snapshots.worked.moves))
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


def test_what_nobody_said_is_unknown_not_zero() -> None:
    metrics = EndpointMetrics()
    assert (metrics.waiting, metrics.running, metrics.kv_cache_usage, metrics.cache_tokens) == (None,) * 4
    snapshot = EndpointSnapshot(Endpoint("10.0.0.1", 80))
    assert (snapshot.waiting, snapshot.observed_at, snapshot.models) == (None,) * 3
    assert Usage() == Usage(None, None, None)
    request = InferenceRequest()
    assert (request.kind, request.subset, request.max_tokens, request.complete) == (RequestKind.OTHER, None, None, True)


def test_defaults_are_not_shared() -> None:
    assert PrefixMatch().matched_bytes is not PrefixMatch().matched_bytes
    with pytest.raises(TypeError):
        Endpoint("10.0.0.1", 80).labels["x"] = "y"  # type: ignore[index]


@pytest.mark.parametrize("kind", [Outcome, RequestKind])
def test_enum_values_are_metric_labels(kind: type[Outcome | RequestKind]) -> None:
    assert all(one.value.isidentifier() and one.value.islower() for one in kind)
