from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.config.schema import WeightsConfig
from extproc.routing import scorers
from extproc.routing.scorers import (
    ALL_SCORERS,
    LoraScorer,
    PrefixScorer,
    Scale,
    Scorer,
    SessionScorer,
    weighted_scorers,
)
from extproc.routing.signals import UNKNOWN, trust_in
from extproc.types import EndpointSnapshot, PrefixMatch
from tests.routing.build import NOW, match, request, seen, snapshots, unseen

PREFIX, LORA, SESSION = PrefixScorer(), LoraScorer(), SessionScorer()
_, KV_CACHE, QUEUE, RUNNING, IN_FLIGHT, _, _ = ALL_SCORERS
LOAD = (KV_CACHE, QUEUE, RUNNING, IN_FLIGHT)


def scores(scorer: Scorer, pool: list[EndpointSnapshot], held: PrefixMatch | None = None, **fields: str) -> list[float]:
    return list(scorer.score(request(**fields), pool, held or match(), trust_in(pool, NOW)))


def test_every_weight_has_its_scorer() -> None:
    every = weighted_scorers(WeightsConfig(prefix=1, kv_cache=1, queue=1, running=1, in_flight=1, lora=1, session=1))
    assert tuple(scorer for scorer, _ in every) == ALL_SCORERS
    assert {scorer.name for scorer in ALL_SCORERS} == set(WeightsConfig.__struct_encode_fields__)


def test_a_weight_of_zero_switches_off() -> None:
    assert "queue" not in [scorer.name for scorer, _ in weighted_scorers(WeightsConfig(queue=0))]


def test_only_in_flight_and_session_look_at_the_pool() -> None:
    assert {scorer.name for scorer in ALL_SCORERS if scorer.scale is Scale.RELATIVE} == {"in-flight", "session"}


@settings(deadline=None)
@given(
    snapshots(),
    st.integers(-10, 10**9),
    st.dictionaries(st.sampled_from(["10.0.0.1:8000", "10.0.0.2:8000", "x"]), st.integers(-10, 10**10)),
    st.sampled_from(["", "m", "a"]),
    st.sampled_from(["", "key"]),
)
def test_all_scores_are_finite_and_in_range_for_any_snapshot(
    pool: list[EndpointSnapshot], prompt_bytes: int, held: dict[str, int], model: str, session: str
) -> None:
    what = request(model=model, session_key=session)
    for scorer in ALL_SCORERS:
        result = scorer.score(what, pool, PrefixMatch(prompt_bytes, held), trust_in(pool, NOW))
        assert len(result) == len(pool)
        assert all(math.isfinite(score) and 0 <= score <= 1 for score in result), scorer.name


@settings(deadline=None)
@given(
    snapshots(sane=True),
    st.integers(0, 5),
    st.tuples(st.floats(0, 100), st.floats(0, 100), st.floats(0, 1), st.integers(0, 100), st.integers(0, 10**5)),
)
def test_load_scores_never_rise_with_load(
    pool: list[EndpointSnapshot], which: int, more: tuple[float, float, float, int, int]
) -> None:
    place = which % len(pool)
    before = pool[place]
    after = replace(
        before,
        waiting=None if before.waiting is None else before.waiting + more[0],
        running=None if before.running is None else before.running + more[1],
        kv_cache_usage=None if before.kv_cache_usage is None else min(1.0, before.kv_cache_usage + more[2]),
        in_flight=before.in_flight + more[3],
        in_flight_tokens=before.in_flight_tokens + more[4],
    )
    heavier = [*pool[:place], after, *pool[place + 1 :]]
    for scorer in LOAD:
        assert scores(scorer, heavier)[place] <= scores(scorer, pool)[place] + 1e-12, scorer.name


def test_prefix_weighs_the_work_saved_and_not_only_its_share() -> None:
    short = scores(PREFIX, [seen(1)], match(120, e1=100))[0]
    long = scores(PREFIX, [seen(1)], match(24_000, e1=20_000))[0]
    assert short < 0.05
    assert long > 0.75
    assert long == pytest.approx(20_000 / (24_000 + scorers.PREFIX_OVERHEAD_BYTES))


def test_prefix_is_zero_where_nothing_is_held() -> None:
    assert scores(PREFIX, [seen(1), seen(2)], match(100)) == [0, 0]
    assert scores(PREFIX, [seen(1), seen(2)], match(100, e2=50))[0] == 0


def test_prefix_takes_no_part_without_a_prompt() -> None:
    assert PREFIX.applies(request(), [])
    assert not PREFIX.applies(request(prompts=()), [])


def test_an_index_that_claims_too_much_is_clamped() -> None:
    assert scores(PREFIX, [seen(1), seen(2)], match(100, e1=500, e2=-3)) == pytest.approx(
        [100 / (100 + scorers.PREFIX_OVERHEAD_BYTES), 0]
    )


def test_kv_cache_is_the_free_share() -> None:
    pool = [seen(1, kv_cache_usage=0.25), seen(2, kv_cache_usage=1.0), seen(3, kv_cache_usage=0.0)]
    assert scores(KV_CACHE, pool) == [0.75, 0, 1]


def test_queue_saturates_smoothly() -> None:
    half = scorers.QUEUE_HALF
    pool = [seen(1), seen(2, waiting=1.0), seen(3, waiting=half), seen(4, waiting=1000.0)]
    empty, one, some, many = scores(QUEUE, pool)
    assert empty == 1
    assert one > 0.9  # one request is no reason to lose a prefix
    assert some == 0.5
    assert many < 0.02


def test_running_says_half_at_its_constant() -> None:
    assert scores(RUNNING, [seen(1, running=scorers.RUNNING_HALF), seen(2)]) == [0.5, 1]


@pytest.mark.parametrize("scorer", [KV_CACHE, QUEUE, RUNNING])
def test_never_scraped_is_average_not_idle(scorer: Scorer) -> None:
    pool = [seen(1), seen(2, waiting=50.0, running=50.0, kv_cache_usage=0.9), unseen(3)]
    idle, busy, unknown = scores(scorer, pool)
    assert unknown == pytest.approx((idle + busy) / 2)
    assert scores(scorer, [unseen(1), unseen(2)]) == [UNKNOWN, UNKNOWN]


def test_in_flight_compares_with_the_least_loaded() -> None:
    smoothing = scorers.IN_FLIGHT_SMOOTHING
    pool = [seen(1), seen(2, in_flight=1), seen(3, in_flight=int(smoothing))]
    assert scores(IN_FLIGHT, pool) == pytest.approx([1, smoothing / (smoothing + 1), 0.5])


def test_in_flight_tells_twice_the_load_apart_at_any_level() -> None:
    quiet = scores(IN_FLIGHT, [seen(1, in_flight=10), seen(2, in_flight=20)])[1]
    busy = scores(IN_FLIGHT, [seen(1, in_flight=100), seen(2, in_flight=200)])[1]
    smoothing = scorers.IN_FLIGHT_SMOOTHING
    assert quiet == pytest.approx((10 + smoothing) / (20 + smoothing))
    assert busy == pytest.approx((100 + smoothing) / (200 + smoothing))


def test_uncached_tokens_count_as_requests() -> None:
    tokens = int(3 * scorers.TOKENS_PER_REQUEST)
    three_more = scorers.IN_FLIGHT_SMOOTHING / (scorers.IN_FLIGHT_SMOOTHING + 3)
    assert scores(IN_FLIGHT, [seen(1), seen(2, in_flight_tokens=tokens), seen(3, in_flight=3)])[1:] == pytest.approx(
        [three_more, three_more]
    )


def test_a_ledger_below_zero_counts_as_empty() -> None:
    assert scores(IN_FLIGHT, [seen(1, in_flight=-5), seen(2), seen(3, in_flight=int(scorers.IN_FLIGHT_SMOOTHING))]) == [
        1,
        1,
        0.5,
    ]


def test_lora_prefers_loaded_then_free_then_loading_then_full() -> None:
    pool = [
        seen(1, lora_running=frozenset({"a"}), lora_max=1),
        seen(2, lora_running=frozenset({"b"}), lora_max=2),
        seen(3, lora_running=frozenset({"b"}), lora_waiting=frozenset({"a"}), lora_max=2),
        seen(4, lora_running=frozenset({"b", "c"}), lora_max=2),
    ]
    assert scores(LORA, pool, model="a") == [1.0, 0.8, 0.6, 0.0]
    assert scores(LORA, [*pool, seen(5)], model="a")[4] == pytest.approx(0.6)


def test_lora_counts_only_for_adapters() -> None:
    pool = [seen(1, lora_running=frozenset({"a"}), lora_max=2), seen(2, lora_waiting=frozenset({"b"}), lora_max=2)]
    assert LORA.applies(request(model="a"), pool)
    assert LORA.applies(request(model="b"), pool)
    assert not LORA.applies(request(model="base"), pool)
    assert not LORA.applies(request(model=""), pool)


def test_a_session_has_one_home_that_survives_the_loss_of_others() -> None:
    pool = [seen(number) for number in range(1, 6)]
    before = scores(SESSION, pool, session_key="s")
    assert sorted(before) == [0, 0, 0, 0, 1]
    home = before.index(1)
    rest = [snapshot for place, snapshot in enumerate(pool) if place != (home + 1) % 5]
    after = scores(SESSION, rest, session_key="s")
    assert rest[after.index(1)] is pool[home]


def test_a_request_without_key_has_no_session() -> None:
    assert SESSION.applies(request(session_key="s"), [])
    assert not SESSION.applies(request(), [])
