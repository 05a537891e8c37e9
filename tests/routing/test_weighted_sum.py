"""The sum at once, against the same scorers asked one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config.schema import RoutingConfig, WeightsConfig
from extproc.routing.scorers import weighted_scorers
from extproc.routing.strategies import Choice, RoutingContext, Strategy, build_strategy
from extproc.routing.weighted_sum import AtOnce
from extproc.types import Endpoint, EndpointSnapshot, InferenceRequest, PrefixMatch, Snapshots
from tests.routing.build import NOW, match, request, seen, unseen


def _situation(candidates: Sequence[EndpointSnapshot], held: PrefixMatch, what: InferenceRequest) -> RoutingContext:
    return RoutingContext(what, candidates, candidates, held, random.Random(1), NOW)


def _choose(
    strategy: Strategy, candidates: Sequence[EndpointSnapshot], held: PrefixMatch, what: InferenceRequest
) -> Choice:
    return strategy.choose(_situation(candidates, held, what))


def _whole_pool_snapshot() -> st.SearchStrategy[EndpointSnapshot]:
    """Endpoints as a router has them: mostly fresh, and mostly with every signal."""
    adapters = st.sampled_from([frozenset(), frozenset(), frozenset({"a"}), frozenset({"b"})])
    return st.builds(
        seen,
        st.just(1),
        observed_at=st.sampled_from([NOW, NOW - 0.5, NOW - 0.5, NOW - 30.0, None]),
        waiting=st.sampled_from([0.0, 3.0, 40.0]) | st.none(),
        running=st.sampled_from([0.0, 7.0]) | st.none(),
        kv_cache_usage=st.floats(0, 1.5) | st.none(),
        in_flight=st.integers(0, 50),
        in_flight_tokens=st.integers(0, 10**6),
        lora_running=adapters,
        lora_max=st.sampled_from([None, 1, 4]),
    )


@settings(deadline=None)
@given(
    st.lists(_whole_pool_snapshot(), min_size=1, max_size=8),
    st.fixed_dictionaries({name: st.sampled_from([0.0, 0.5, 3.0]) for name in WeightsConfig.__struct_fields__}),
    st.dictionaries(st.sampled_from([f"10.0.0.{n}:8000" for n in range(9)]), st.integers(-10, 2000)),
    st.sampled_from([(), (b"some prompt",)]),
    st.sampled_from(["", "key"]),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 50)), max_size=3),
)
def test_summing_up_at_once_is_the_same_as_asking_each_scorer(
    pool: list[EndpointSnapshot],
    weights: dict[str, float],
    held: dict[str, int],
    prompts: tuple[bytes, ...],
    session: str,
    moves: list[tuple[int, int]],
) -> None:
    pool = [
        msgspec.structs.replace(one, endpoint=Endpoint(f"10.0.0.{number}", 8000)) for number, one in enumerate(pool)
    ]
    strategy = build_strategy(RoutingConfig(weights=WeightsConfig(**weights)))
    what = request(model="a", prompts=prompts, session_key=session)
    found = PrefixMatch(1000, held if prompts else {})
    snapshots = Snapshots(pool)
    for number, count in [(0, 0), *moves]:
        place = number % len(pool)
        changed = msgspec.structs.replace(snapshots[place], in_flight=count)
        snapshots = snapshots.with_load({place: changed})
        at_once = _choose(strategy, snapshots, found, what)
        one_by_one = _choose(strategy, list(snapshots), found, what)
        assert at_once.scorers == one_by_one.scorers
        assert at_once.totals == pytest.approx(one_by_one.totals)
        assert [list(scores) for scores in at_once.columns()] == [list(scores) for scores in one_by_one.columns()]


def test_without_weights_of_signals_nothing_is_added_for_them() -> None:
    """Also where nothing was ever scraped, which goes with it: such an endpoint's score would be that of the unknown."""
    pool = Snapshots([unseen(1), unseen(2)])
    weights = WeightsConfig(**dict.fromkeys(WeightsConfig.__struct_fields__, 0.0) | {"prefix": 3.0, "in_flight": 2.0})
    strategy = build_strategy(RoutingConfig(weights=weights))
    held = PrefixMatch(1000, {pool[0].endpoint.id: 900})
    what = request(model="a", prompts=(b"some prompt",))
    at_once, one_by_one = (_choose(strategy, some, held, what) for some in (pool, list(pool)))
    assert at_once.totals == pytest.approx(one_by_one.totals)
    assert at_once.place == one_by_one.place == 0


def _applies(
    pool: list[EndpointSnapshot], *, held: PrefixMatch | None = None, session: float = 0.0, key: str = ""
) -> bool:
    at_once = AtOnce(weighted_scorers(WeightsConfig(session=session)))
    what = request(model="a", session_key=key)
    return at_once.sum_up(_situation(Snapshots(pool), held or match(), what)) is not None


def test_it_applies_to_whole_pools_that_tell_everything() -> None:
    old = seen(2, observed_at=NOW - 20)
    assert _applies([seen(1), seen(2)])
    assert _applies([seen(1), old]), "an idle endpoint is scraped every few seconds"
    assert _applies([seen(1), seen(2, lora_running=frozenset({"b"}))]), "an adapter that is not asked for"
    assert not _applies([seen(1), unseen(2)])
    assert not _applies([seen(1), seen(2, waiting=None)])
    assert not _applies([seen(1), seen(2, lora_running=frozenset({"a"}))])
    assert not _applies([seen(1)], session=1.0, key="k")
    assert _applies([seen(1)], session=1.0)


def test_without_any_trust_it_leaves_promise_2_to_others() -> None:
    ancient = [seen(1, observed_at=NOW - 3600), seen(2, observed_at=NOW - 3600)]
    assert not _applies(ancient)
    assert _applies(ancient, held=match(16_000, e2=14_000))
