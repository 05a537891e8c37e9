from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from extproc.routing import hashing
from extproc.routing.hashing import AT_ONCE, PER_STEP, HashRing, rendezvous

IDS = tuple(f"10.0.0.{number}:8000" for number in range(1, 9))


def _home(key: str, ids: tuple[str, ...]) -> str:
    values = rendezvous(key, ids)
    return ids[values.index(max(values))]


def test_rendezvous_spreads_keys_evenly() -> None:
    counts = Counter(_home(f"session-{number}", IDS) for number in range(4000))
    assert set(counts) == set(IDS)
    assert max(counts.values()) < 1.3 * 500


def test_rendezvous_moves_only_the_keys_of_a_lost_endpoint() -> None:
    for number in range(500):
        key = f"session-{number}"
        before = _home(key, IDS)
        if before != IDS[3]:
            assert _home(key, IDS[:3] + IDS[4:]) == before


@settings(deadline=None)
@given(st.text())
def test_rendezvous_takes_any_text(key: str) -> None:
    assert rendezvous(key, IDS) == rendezvous(key, IDS)


def test_a_point_that_two_names_share_is_the_lesser_ones_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "xxh3_64_intdigest", lambda _data, seed: seed << 60)
    for names in (("a", "b"), ("b", "a")):
        ring = HashRing(names, 4)
        assert list(ring.walk(0)) == ["a"]
        ring.follow(["a"])
        assert list(ring.walk(0)) == ["a"], "what was another's does not go with who leaves"


def test_rendezvous_takes_lone_surrogates() -> None:
    assert len(rendezvous("\ud800", IDS)) == len(IDS)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_a_walk_names_everybody_once_in_an_order_that_does_not_depend_on_the_pools(key: int) -> None:
    walk = list(HashRing(IDS, 16).walk(key))
    assert sorted(walk) == sorted(IDS)
    assert walk == list(HashRing(tuple(reversed(IDS)), 16).walk(key))


def test_an_empty_ring_names_nobody() -> None:
    assert list(HashRing((), 16).walk(5)) == []


def test_the_ring_spreads_keys_by_its_replicas() -> None:
    ring = HashRing(IDS, 128)
    counts = Counter(next(ring.walk(number * 2**64 // 4000)) for number in range(4000))
    assert max(counts.values()) < 1.4 * 500


def test_a_new_endpoint_takes_keys_and_shuffles_none_among_the_others() -> None:
    small, large = HashRing(IDS[:7], 64), HashRing(IDS, 64)
    for number in range(500):
        key = number * 2**64 // 500
        assert next(large.walk(key)) in {next(small.walk(key)), IDS[7]}


def _reference(ids: set[str], replicas: int, key: int) -> list[str]:
    """The whole circle, sorted, from the key on."""
    ring = sorted((xxh3_64_intdigest(one.encode(), replica), one) for one in ids for replica in range(replicas))
    return list(dict.fromkeys([one for point, one in ring if point >= key] + [one for _, one in ring]))


SETS = st.sets(st.integers(0, 30).map(lambda number: f"10.0.0.{number}:8000"), max_size=12)


@settings(deadline=None)
@given(st.lists(SETS, min_size=1, max_size=5), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_a_ring_that_has_followed_changes_is_as_one_made_anew(sets: list[set[str]], keys: list[int]) -> None:
    ring = HashRing((), 16)
    for ids in sets:
        ring.follow(sorted(ids))
        assert ring.complete
        for key in keys:
            assert list(ring.walk(key)) == _reference(ids, 16, key)


@settings(deadline=None)
@given(SETS, SETS, SETS, st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_a_ring_that_follows_in_steps_ends_as_one_made_anew(
    before: set[str], between: set[str], after: set[str], points: int, key: int
) -> None:
    """Also where the set changes again while it still follows: then nobody has half of its points."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "AT_ONCE", points)
        ring = HashRing(sorted(before), 16)
        ring.follow(sorted(between))
        assert set(ring.walk(key)) <= before | between
        ring.follow(sorted(after))
        steps = 0
        while not ring.complete:
            ring.advance(points)
            steps += 1
        assert steps <= 16 * 60 / points + 1
    assert list(ring.walk(key)) == _reference(after, 16, key)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per point that is worked out."""
    made: list[int] = []

    def counting(data: bytes, replica: int) -> int:
        made.append(replica)
        return xxh3_64_intdigest(data, replica)

    monkeypatch.setattr(hashing, "xxh3_64_intdigest", counting)
    return made


def test_a_change_of_a_large_pool_takes_no_more_than_a_bounded_step(hashed: list[int]) -> None:
    many = [f"10.1.{number >> 8}.{number & 255}:8000" for number in range(600)]
    ring = HashRing(many, 128)
    while not ring.complete:
        ring.advance(PER_STEP)
    for ids, points in (
        ([*many, "10.9.9.9:8000"], 128),
        (many, 128),
        ([f"10.2.{number >> 8}.{number & 255}:8000" for number in range(600)], AT_ONCE),
        ((), AT_ONCE),
    ):
        hashed.clear()
        ring.follow(ids)
        assert len(hashed) == points
        if not ring.complete:
            hashed.clear()
            ring.advance(PER_STEP)
            assert len(hashed) == PER_STEP


def test_endpoints_join_before_others_leave() -> None:
    """A pool that is replaced as a whole has somebody on the ring from the first decision on."""
    old, new = ([f"10.{number}.{n >> 8}.{n & 255}:8000" for n in range(600)] for number in (1, 2))
    ring = HashRing(old, 128)
    ring.follow(new)
    assert len(set(ring.walk(7)) & set(new)) >= AT_ONCE // 128


def test_what_comes_and_goes_for_ever_is_not_kept() -> None:
    ring = HashRing((), 128)
    for number in range(3000):
        ring.follow([f"10.0.{number >> 8}.{number & 255}:8000"])
    assert sum(map(len, ring._arcs)) < 100_000
    assert list(ring.walk(1)) == ["10.0.11.183:8000"]
