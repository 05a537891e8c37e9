from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from extproc.config.schema import PrefixCacheConfig, PrefixHashConfig, RoutingConfig, StrategyName, WeightsConfig
from extproc.routing import hashing
from extproc.routing.scheduler import Scheduler
from extproc.routing.scorers import KvCacheScorer, QueueScorer, RunningScorer
from extproc.routing.strategies import (
    Choice,
    PrefixCache,
    PrefixHash,
    RoutingContext,
    Strategy,
    build_strategy,
    requests_at,
)
from extproc.snapshots import Snapshots
from extproc.types import Endpoint, EndpointSnapshot, InferenceRequest, PrefixMatch
from tests.routing.build import NOW, match, request, seen, snapshots, unseen

NAMES: tuple[StrategyName, ...] = get_args(StrategyName)


def choose(
    strategy: Strategy,
    candidates: Sequence[EndpointSnapshot],
    held: PrefixMatch | None = None,
    what: InferenceRequest | None = None,
    *,
    pool: Sequence[EndpointSnapshot] | None = None,
    seed: int = 0,
) -> Choice:
    return strategy.choose(
        RoutingContext(what or request(), pool or candidates, candidates, held or match(), random.Random(seed), NOW)
    )


def picks(strategy: Strategy, pool: Sequence[EndpointSnapshot], times: int = 200) -> Counter[int]:
    return Counter(choose(strategy, pool, seed=seed).place for seed in range(times))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_builds_its_strategy(name: StrategyName) -> None:
    assert build_strategy(RoutingConfig(strategy=name)).name == name


@settings(deadline=None)
@given(
    snapshots(),
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(["10.0.0.1:8000", "10.0.0.2:8000", "x"]), st.integers(-10, 10**4)),
    st.sampled_from([(), (b"",), (b"some prompt",)]),
    st.sampled_from(["", "key"]),
    st.integers(0, 100),
)
def test_every_strategy_fills_its_choice_for_any_snapshot(
    pool: list[EndpointSnapshot],
    name: StrategyName,
    held: dict[str, int],
    prompts: tuple[bytes, ...],
    session: str,
    seed: int,
) -> None:
    what = request(prompts=prompts, session_key=session)
    choice = choose(build_strategy(RoutingConfig(strategy=name)), pool, PrefixMatch(1000, held), what, seed=seed)
    assert 0 <= choice.place < len(pool)
    assert choice.note
    columns = choice.columns()
    assert len(columns) == len(choice.scorers) > 0
    assert all(len(column) == len(pool) and all(0 <= score <= 1 for score in column) for column in columns)
    assert len(choice.totals) == len(pool)
    if name != "weighted":
        assert choice.totals[choice.place] == max(choice.totals)
        assert [weight for _, weight in choice.scorers] == [1.0]


class TestWeighted:
    strategy = build_strategy(RoutingConfig())

    def test_prefers_the_holder_of_the_prefix(self) -> None:
        pool = [seen(1), seen(2, in_flight=2, running=2.0), seen(3)]
        assert choose(self.strategy, pool, match(16_000, e2=14_000)).place == 1

    def test_leaves_a_holder_that_is_far_busier_than_the_rest(self) -> None:
        pool = [seen(1), seen(2, in_flight=60, waiting=30.0), seen(3)]
        assert choose(self.strategy, pool, match(16_000, e2=14_000)).place != 1

    def test_totals_are_the_weighted_sum(self) -> None:
        choice = choose(self.strategy, [seen(1), seen(2, in_flight=3)], match(16_000, e2=14_000))
        for place, total in enumerate(choice.totals):
            parts = zip(choice.scorers, choice.columns(), strict=True)
            assert total == pytest.approx(sum(weight * column[place] for (_, weight), column in parts))

    def test_scorers_that_do_not_apply_take_no_part(self) -> None:
        strategy = build_strategy(RoutingConfig(weights=WeightsConfig(session=1)))
        assert {"prefix", "lora", "session"}.isdisjoint(
            name for name, _ in choose(strategy, [seen(1)], what=request(prompts=())).scorers
        )

    def test_without_any_signal_it_is_least_load_and_random_among_equals(self) -> None:
        pool = [unseen(1, in_flight=41), unseen(2, in_flight=40), unseen(3, in_flight=40), unseen(4, in_flight=90)]
        counts = picks(self.strategy, pool)
        assert set(counts) == {1, 2}
        assert min(counts.values()) > 70
        assert choose(self.strategy, pool).note == "least load"

    def test_signals_of_long_ago_are_none(self) -> None:
        old = NOW - 3600
        pool = [seen(1, observed_at=old, in_flight=1), seen(2, observed_at=old, waiting=100.0, kv_cache_usage=1.0)]
        assert set(picks(self.strategy, pool)) == {1}

    def test_without_weights_it_still_balances(self) -> None:
        off = WeightsConfig(prefix=0, kv_cache=0, queue=0, running=0, in_flight=0, lora=0, session=0)
        strategy = build_strategy(RoutingConfig(weights=off))
        assert set(picks(strategy, [unseen(1, in_flight=2), unseen(2, in_flight=1)])) == {1}
        assert set(picks(strategy, [seen(1, in_flight=2), seen(2, in_flight=1)])) == {1}


class TestLeastLoad:
    strategy = build_strategy(RoutingConfig(strategy="least-load"))

    def test_takes_the_larger_of_own_count_and_scrape(self) -> None:
        assert requests_at(seen(1, in_flight=3, waiting=2.0, running=4.0), NOW) == 6
        assert requests_at(seen(1, in_flight=9, waiting=2.0, running=4.0), NOW) == 9
        assert requests_at(unseen(1, in_flight=3), NOW) == 3
        assert requests_at(seen(1, in_flight=3, running=None), NOW) == 3

    def test_believes_an_old_scrape_less(self) -> None:
        assert requests_at(seen(1, observed_at=NOW - 11, running=8.0), NOW) == pytest.approx(4)

    def test_takes_the_least_and_chooses_among_equals_at_random(self) -> None:
        pool = [seen(1, in_flight=1), seen(2), seen(3), seen(4, running=2.0)]
        counts = picks(self.strategy, pool)
        assert set(counts) == {1, 2}
        assert min(counts.values()) > 70
        assert choose(self.strategy, pool).note == "least load, 2 tied"
        assert choose(self.strategy, pool[:2]).note == "least load"


def test_random_is_even() -> None:
    counts = picks(build_strategy(RoutingConfig(strategy="random")), [seen(n) for n in range(4)], 2000)
    assert min(counts.values()) > 400


class TestRoundRobin:
    def test_takes_turns(self) -> None:
        strategy = build_strategy(RoutingConfig(strategy="round-robin"))
        pool = [seen(1), seen(2), seen(3)]
        assert [choose(strategy, pool).place for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]

    def test_a_filtered_endpoint_loses_its_turn_and_nobody_else(self) -> None:
        strategy = build_strategy(RoutingConfig(strategy="round-robin"))
        pool = [seen(1), seen(2), seen(3)]
        assert choose(strategy, pool).place == 0
        rest = [pool[0], pool[2]]
        assert rest[choose(strategy, rest, pool=pool).place] is pool[2]
        assert rest[choose(strategy, rest, pool=pool).place] is pool[0]
        assert choose(strategy, pool).place == 1

    def test_a_pool_that_shrank_starts_somewhere(self) -> None:
        strategy = build_strategy(RoutingConfig(strategy="round-robin"))
        for _ in range(3):
            choose(strategy, [seen(1), seen(2), seen(3)])
        assert choose(strategy, [seen(1), seen(2)]).place == 1


class TestSession:
    strategy = build_strategy(RoutingConfig(strategy="session"))

    def test_a_key_stays_where_it_is_whatever_the_load(self) -> None:
        pool = [seen(number) for number in range(1, 6)]
        home = choose(self.strategy, pool, what=request(session_key="s")).place
        pool[home] = seen(home + 1, in_flight=100)
        assert choose(self.strategy, pool, what=request(session_key="s"), seed=7).place == home

    def test_without_key_it_is_least_load(self) -> None:
        choice = choose(self.strategy, [seen(1, in_flight=1), seen(2)])
        assert (choice.place, choice.note) == (1, "no session key, least load")


class TestPrefixHash:
    pool = tuple(seen(number) for number in range(1, 9))

    def test_equal_beginnings_share_a_home_and_others_spread(self) -> None:
        strategy = PrefixHash(PrefixHashConfig(prefix_bytes=10))
        homes = [
            choose(strategy, self.pool, what=request(prompts=(b"%010d tail %d" % (group, tail),))).place
            for group in range(40)
            for tail in range(3)
        ]
        assert all(len(set(homes[start : start + 3])) == 1 for start in range(0, 120, 3))
        assert len(set(homes)) == 8

    def test_models_are_kept_apart(self) -> None:
        strategy = PrefixHash(PrefixHashConfig())
        assert len({choose(strategy, self.pool, what=request(model=f"m{n}")).place for n in range(40)}) > 4

    def test_what_is_chosen_at_home_is_not_chosen_for_its_load(self) -> None:
        strategy = PrefixHash(PrefixHashConfig())
        home = choose(strategy, self.pool).place
        for prompts, expected in (((), True), (request().prompts, False)):
            context = RoutingContext(request(prompts=prompts), self.pool, self.pool, match(), random.Random(0), NOW)
            assert strategy.chosen_for_load(context, home) is expected

    def test_a_home_above_the_bound_passes_on_to_the_next(self) -> None:
        strategy = PrefixHash(PrefixHashConfig(load_factor=1.25))
        home = choose(strategy, self.pool)
        assert home.note == "home on the ring"
        busy = [seen(n + 1, in_flight=10 if n == home.place else 4) for n in range(8)]
        second = choose(strategy, busy)
        assert second.place != home.place
        assert second.note == "next on the ring, 1 before it above the load bound"
        assert second.totals[home.place] == 0
        busy[home.place] = seen(home.place + 1, in_flight=5)
        assert choose(strategy, busy).place == home.place

    def test_filtered_endpoints_are_passed_over_without_moving_the_others(self) -> None:
        strategy = PrefixHash(PrefixHashConfig())
        home = choose(strategy, self.pool).place
        rest = [snapshot for place, snapshot in enumerate(self.pool) if place != (home + 1) % 8]
        assert rest[choose(strategy, rest, pool=self.pool).place] is self.pool[home]
        assert choose(strategy, [self.pool[(home + 1) % 8]], pool=self.pool).place == 0

    def test_the_walk_ends_where_no_fallback_can_come_from(self) -> None:
        many = [seen(number) for number in range(1, 31)]
        choice = choose(PrefixHash(PrefixHashConfig()), many)
        assert sum(score > 0 for score in choice.totals) == 9

    def test_without_prompt_it_is_least_load(self) -> None:
        choice = choose(PrefixHash(PrefixHashConfig()), [seen(1, in_flight=1), seen(2)], what=request(prompts=()))
        assert (choice.place, choice.note) == (1, "no prompt, least load")


class TestPrefixCache:
    strategy = PrefixCache(PrefixCacheConfig(min_match=0.3, balance_abs=16, balance_rel=1.5))

    def test_takes_the_longest_match(self) -> None:
        choice = choose(self.strategy, [seen(1), seen(2, in_flight=9), seen(3)], match(100, e1=40, e2=80))
        assert (choice.place, choice.note) == (1, "longest prefix")

    def test_equal_matches_go_to_the_less_loaded(self) -> None:
        assert choose(self.strategy, [seen(1, in_flight=2), seen(2)], match(100, e1=80, e2=80)).place == 1

    @pytest.mark.parametrize("held", [match(100, e1=29), match(100), match(0)])
    def test_a_short_match_is_none(self, held: PrefixMatch) -> None:
        choice = choose(self.strategy, [seen(1, in_flight=2), seen(2)], held)
        assert (choice.place, choice.note) == (1, "no match long enough, least load")

    @pytest.mark.parametrize(("most", "least", "balanced"), [(17, 0, False), (16, 0, True), (40, 27, True)])
    def test_imbalance_must_be_both_absolute_and_relative(self, most: int, least: int, *, balanced: bool) -> None:
        choice = choose(self.strategy, [seen(1, in_flight=most), seen(2, in_flight=least)], match(100, e1=90))
        assert choice.place == (0 if balanced else 1)
        if not balanced:
            assert choice.note == f"out of balance ({least} to {most} in flight), least load"

    def test_a_threshold_of_zero_still_needs_a_match(self) -> None:
        strategy = PrefixCache(PrefixCacheConfig(min_match=0))
        assert choose(strategy, [seen(1, in_flight=1), seen(2)], match(100, e9=50)).place == 1


class TestLargePools:
    """What a scrape or a changed pool adds to a decision is counted, not timed: it must not depend on the pool's size."""

    SIZE = 1000

    def _pool(self, first: int = 0) -> Snapshots:
        made = [Endpoint(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", 8000) for n in range(first, first + self.SIZE)]
        return Snapshots(
            [
                EndpointSnapshot(one, NOW - 3.0, kv_cache_usage=0.5, models=frozenset({"m"}), waiting=1.0, running=2.0)
                for one in made
            ]
        )

    def test_after_a_scrape_only_its_endpoint_is_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looked: list[EndpointSnapshot] = []

        def counting(of: Callable[[EndpointSnapshot], float]) -> Callable[[EndpointSnapshot], float]:
            def counted(snapshot: EndpointSnapshot) -> float:
                looked.append(snapshot)
                return of(snapshot)

            return counted

        for scorer in (KvCacheScorer, QueueScorer, RunningScorer):
            monkeypatch.setattr(scorer, "of", staticmethod(counting(scorer.of)))
        scheduler = Scheduler(RoutingConfig())
        pool = self._pool()
        what = request(model="m", prompts=(b"some prompt",))

        def decide() -> int:
            looked.clear()
            rng = random.Random(1)
            scheduler.schedule(what, pool, match(), rng=rng, now=NOW, decision_id="d", prompt_tokens=0)
            return len(looked)

        assert decide() >= 3 * self.SIZE
        assert decide() == 0
        for place in (5, 900):
            pool = pool.changed({place: msgspec.structs.replace(pool[place], observed_at=NOW, waiting=7.0)})
            assert decide() <= 2 * 3
            assert set(looked) == {pool[place]}

    def test_a_pool_that_is_replaced_is_hashed_in_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hashed: list[int] = []

        def counting(data: bytes, replica: int) -> int:
            hashed.append(replica)
            return xxh3_64_intdigest(data, replica)

        monkeypatch.setattr(hashing, "xxh3_64_intdigest", counting)
        scheduler = Scheduler(RoutingConfig(strategy="prefix-hash"))
        what = request(model="m", prompts=(b"some prompt",))
        for first in (0, 5000):
            pool = self._pool(first)
            ids = {one.endpoint.id for one in pool}
            steps: list[int] = []
            while not steps or steps[-1]:
                hashed.clear()
                made = scheduler.schedule(
                    what, pool, match(), rng=random.Random(1), now=NOW, decision_id="d", prompt_tokens=0
                )
                assert made.endpoint.id in ids
                steps.append(len(hashed))
            assert steps[0] <= hashing.AT_ONCE + hashing.PER_STEP
            assert max(steps[1:]) == hashing.PER_STEP
        anew = Scheduler(RoutingConfig(strategy="prefix-hash", prefix_hash=PrefixHashConfig()))
        others = [
            anew.schedule(what, pool, match(), rng=random.Random(1), now=NOW, decision_id="d", prompt_tokens=0)
            for _ in range(1000)
        ]
        assert others[-1].endpoint == made.endpoint, "in the end it is the ring of that pool, however it came about"

    def test_where_nobody_eligible_is_on_the_ring_yet_load_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hashing, "AT_ONCE", 128)
        strategy = build_strategy(RoutingConfig(strategy="prefix-hash"))
        pool = self._pool()
        last = pool[-1:]
        what = request(model="m", prompts=(b"some prompt",))
        choice = strategy.choose(RoutingContext(what, pool, last, match(), random.Random(1), NOW))
        assert (choice.place, choice.note) == (0, "ring incomplete, least load")
