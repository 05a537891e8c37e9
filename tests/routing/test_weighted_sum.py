"""The weighted sum, against the scorers' values times their weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config.schema import RoutingConfig, WeightsConfig
from extproc.routing.scorers import ALL_SCORERS
from extproc.routing.strategies import Choice, RoutingContext, Strategy, build_strategy
from extproc.snapshots import Snapshots
from extproc.types import Endpoint, EndpointSnapshot, InferenceRequest, PrefixMatch
from tests.routing.build import NOW, match, request, seen, unseen


def _choose(
    strategy: Strategy, candidates: Sequence[EndpointSnapshot], held: PrefixMatch, what: InferenceRequest
) -> Choice:
    return strategy.choose(RoutingContext(what, candidates, candidates, held, random.Random(1), NOW))


def _sums(choice: Choice) -> list[float]:
    """The definition: each scorer's values times its weight."""
    columns = choice.columns()
    weights = [weight for _, weight in choice.scorers]
    return [
        sum(weight * scores[place] for weight, scores in zip(weights, columns, strict=True))
        for place in range(len(choice.totals))
    ]


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
def test_totals_are_the_sums_of_weighted_scores(
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
        choice = _choose(strategy, snapshots, found, what)
        plain = _choose(strategy, list(snapshots), found, what)
        assert choice.totals == pytest.approx(_sums(choice))
        assert choice.scorers == plain.scorers
        assert choice.totals == pytest.approx(plain.totals)
        assert [list(scores) for scores in choice.columns()] == [list(scores) for scores in plain.columns()]


def test_without_weights_of_signals_nothing_is_added_for_them() -> None:
    """Also where nothing was ever scraped, which goes with it: such an endpoint's score would be that of the unknown."""
    pool = Snapshots([unseen(1), unseen(2)])
    weights = WeightsConfig(**dict.fromkeys(WeightsConfig.__struct_fields__, 0.0) | {"prefix": 3.0, "in_flight": 2.0})
    strategy = build_strategy(RoutingConfig(weights=weights))
    held = PrefixMatch(1000, {pool[0].endpoint.id: 900})
    what = request(model="a", prompts=(b"some prompt",))
    choice = _choose(strategy, pool, held, what)
    assert choice.totals == pytest.approx(_sums(choice))
    assert choice.place == 0
    assert [name for name, _ in choice.scorers] == ["prefix", "in-flight"]


def test_scorers_that_look_at_the_request_take_part_where_they_apply() -> None:
    strategy = build_strategy(RoutingConfig(weights=WeightsConfig(session=1.0)))
    pool = Snapshots([seen(1, lora_running=frozenset({"a"}), lora_max=1), seen(2, lora_max=1)])
    for fields, wanted in (
        ({"prompts": ()}, []),
        ({"prompts": (b"p",)}, ["prefix"]),
        ({"model": "a"}, ["prefix", "lora"]),
        ({"prompts": (), "session_key": "k"}, ["session"]),
    ):
        names = [name for name, _ in _choose(strategy, pool, match(), request(**fields)).scorers]
        assert [name for name in names if name in {"prefix", "lora", "session"}] == wanted
        assert names == sorted(names, key=[scorer.name for scorer in ALL_SCORERS].index)
