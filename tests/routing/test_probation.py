"""What becomes of choices that fall on endpoints on probation."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from extproc.config.schema import LimitsConfig, PrefixCacheConfig, RoutingConfig, StrategyName, WeightsConfig
from extproc.errors import OverloadedError
from extproc.routing.explain import as_dict, compact, sentence
from extproc.routing.scheduler import Scheduler
from extproc.types import Decision, EndpointSnapshot, InferenceRequest, PrefixMatch
from tests.routing.build import NOW, match, request, seen

LOAD_AWARE: tuple[StrategyName, ...] = ("weighted", "least-load", "prefix-cache", "prefix-hash")
DRAWS = 2000


def decisions(
    pool: list[EndpointSnapshot],
    config: RoutingConfig,
    held: PrefixMatch | None = None,
    what: InferenceRequest | None = None,
    draws: int = DRAWS,
) -> list[Decision]:
    scheduler = Scheduler(config)
    rng = random.Random(5)
    return [
        scheduler.schedule(
            what or request(prompts=(f"{number}".encode() * 50,)),
            pool,
            held or match(),
            rng=rng,
            now=NOW,
            decision_id="",
            prompt_tokens=0,
        )
        for number in range(draws)
    ]


def share_of_first(made: list[Decision]) -> float:
    return Counter(decision.endpoint.address for decision in made)["10.0.0.1"] / len(made)


def fleet(probation: float | None, **fields: Any) -> list[EndpointSnapshot]:
    """The first of four is idle, the others have ten requests each."""
    busy: dict[str, Any] = {"in_flight": 10, "running": 10.0, "kv_cache_usage": 0.5}
    return [seen(1, probation=probation, **fields), *(seen(number, **busy) for number in (2, 3, 4))]


@pytest.mark.parametrize("strategy", LOAD_AWARE)
@pytest.mark.parametrize("probation", [1.0, 0.25, 0.1])
def test_an_idle_one_gets_its_turn_and_no_more(strategy: StrategyName, probation: float) -> None:
    config = RoutingConfig(strategy=strategy)
    assert share_of_first(decisions(fleet(None), config)) > 0.3
    # Of prefix-hash the homes stay at share 1, a quarter; what the others are too busy for comes by turns.
    most = 0.25 * probation if strategy != "prefix-hash" or probation < 1 else 0.5
    assert share_of_first(decisions(fleet(probation), config)) < most * 1.2


@pytest.mark.parametrize("strategy", ["random", "round-robin", "session"])
def test_strategies_that_do_not_look_at_load_go_on_as_they_are(strategy: StrategyName) -> None:
    what = request(session_key="k")
    config = RoutingConfig(strategy=strategy)
    assert share_of_first(decisions(fleet(0.25), config, what=what)) == share_of_first(
        decisions(fleet(None), config, what=what)
    )


def test_session_without_a_key_looks_at_load() -> None:
    assert share_of_first(decisions(fleet(0.25), RoutingConfig(strategy="session"))) < 0.08


@pytest.mark.parametrize("strategy", ["weighted", "prefix-cache"])
def test_at_its_fair_share_it_keeps_what_it_holds_alone(strategy: StrategyName) -> None:
    config = RoutingConfig(strategy=strategy, prefix_cache=PrefixCacheConfig(balance_abs=100))
    assert share_of_first(decisions(fleet(1.0), config, match(100, e1=100), draws=200)) == 1.0
    assert share_of_first(decisions(fleet(0.25), config, match(100, e1=100))) < 0.08
    # What others hold as well speaks for nobody.
    held = match(100, e1=100, e2=100, e3=100, e4=100)
    if strategy == "weighted":
        assert share_of_first(decisions(fleet(1.0), config, held)) == pytest.approx(0.25, abs=0.04)


def test_at_its_fair_share_it_keeps_its_sessions() -> None:
    config = RoutingConfig(weights=WeightsConfig(session=100.0))
    keys = [f"k{number}" for number in range(200)]
    homes = {key: decisions(fleet(None), config, what=request(session_key=key), draws=1)[0].endpoint for key in keys}
    for key, home in homes.items():
        made = decisions(fleet(1.0), config, what=request(session_key=key), draws=5)
        assert {decision.endpoint for decision in made} == {home}


def test_several_get_their_turns_together() -> None:
    pool = [seen(number, probation=1.0) for number in (1, 2, 3)] + [seen(4, in_flight=50)]
    made = decisions(pool, RoutingConfig())
    to_the_sound_one = sum(decision.endpoint.address == "10.0.0.4" for decision in made) / len(made)
    assert to_the_sound_one == pytest.approx(0.25, abs=0.04)


def test_where_all_are_on_probation_the_requests_may_be_what_fails() -> None:
    pool = [seen(1, probation=0.25), seen(2, probation=1.0, in_flight=9)]
    assert share_of_first(decisions(pool, RoutingConfig(), draws=200)) == 1.0


def test_the_others_are_full_then_only_its_turn_is_not_refused() -> None:
    config = RoutingConfig(limits=LimitsConfig(in_flight=10))
    scheduler = Scheduler(config)
    rng = random.Random(1)
    refused, said = 0, ""
    for _ in range(DRAWS):
        try:
            scheduler.schedule(request(), fleet(0.25), match(), rng=rng, now=NOW, decision_id="", prompt_tokens=0)
        except OverloadedError as error:
            refused += 1
            said = str(error)
    assert said == "3 endpoints have reached a limit, and requests fail at the other 1; try again later."
    assert 1 - refused / DRAWS == pytest.approx(0.0625, abs=0.02)


def test_a_decision_says_what_kept_an_endpoint_from_being_chosen() -> None:
    made = decisions(fleet(0.25), RoutingConfig())
    passed = next(decision for decision in made if decision.endpoint.address != "10.0.0.1")
    assert passed.filtered == (("10.0.0.1:8000", "probation"),)
    assert "filtered out: 1 by probation" in sentence(passed)
    assert "filtered probation=1" in compact(passed)
    assert as_dict(passed)["filtered"] == [{"endpoint": "10.0.0.1:8000", "filter": "probation"}]
    assert len(passed.candidates) == 3
    turn = next(decision for decision in made if decision.endpoint.address == "10.0.0.1")
    assert turn.note == "highest score, its turn on probation"
    assert "its turn on probation" in sentence(turn)


def test_a_second_choice_is_a_sound_one() -> None:
    pool = [seen(1, in_flight=2), seen(2, probation=1.0, in_flight=1), seen(3, in_flight=3)]
    scheduler = Scheduler(RoutingConfig(fallbacks=2))
    made = scheduler.schedule(
        request(),
        pool,
        match(10_000, e1=10_000),
        rng=random.Random(1),
        now=NOW,
        decision_id="",
        prompt_tokens=0,
    )
    assert [endpoint.address for endpoint in made.fallbacks] == ["10.0.0.3", "10.0.0.2"]
