from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.hashing import HashRing, rendezvous

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
