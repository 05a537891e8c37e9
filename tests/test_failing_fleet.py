"""No black hole: whatever k of n endpoints answer at once, at most k of n requests fail, and it heals; and no weapon.

Each case runs the whole core (`Router`) in `failing_fleet` with a fixed seed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from extproc.config.schema import StrategyName
from tests.failing_fleet import SERVICE_S, SLOTS, STATUSES, Case, run

LOAD_AWARE: tuple[StrategyName, ...] = ("weighted", "least-load", "prefix-cache", "prefix-hash")
STICKY: tuple[StrategyName, ...] = ("weighted", "prefix-cache")
SAYS_BROKEN = ("500", "reset", "connect")
"""Faults that say of themselves that it is the endpoint that is broken."""
FLEETS: tuple[tuple[StrategyName, int, int], ...] = (("weighted", 4, 3), ("least-load", 10, 6), ("prefix-hash", 4, 3))

CASES = [
    *(
        Case(fault, strategy, scraped, load)
        for fault, load in (("503", 0.4), ("404", 0.2), ("500", 0.2))
        for strategy in LOAD_AWARE
        for scraped in (True, False)
    ),
    *(Case(fault, load=load) for fault in STATUSES for load in (0.02, 0.5)),
    *(
        Case(fault, strategy, scraped, 0.15, endpoints, broken)
        for fault, scraped in (("404", True), ("429", False), ("500", True), ("reset", False), ("connect", True))
        for strategy, endpoints, broken in FLEETS
    ),
    *(
        Case(fault, strategy, True, 0.3, prompts=prompts)
        for fault in ("401", "503", "reset")
        for strategy in STICKY
        for prompts in ("hot", "unique")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_at_most_its_share_of_errors_and_it_heals(case: Case) -> None:
    result = run(case)
    break_at, heal_at = case.warm_s, case.warm_s + case.broken_s
    share = case.broken / case.endpoints
    rate = case.load * SLOTS / SERVICE_S * case.endpoints
    assert result.errors(0.0, break_at) == 0.0
    assert result.errors(break_at, heal_at) <= share
    if case.fault in SAYS_BROKEN:
        # Two requests more, so that a handful of them are not taken for a trend.
        assert result.errors(heal_at - 25.0, heal_at) <= share / 4 + 2 / (rate * 25.0)
    assert result.errors(heal_at, heal_at + case.healed_s) == 0.0
    if case.prompts != "hot":
        # Where a prompt leads to one endpoint the shares are even only on average.
        assert result.share(range(case.broken), heal_at + 30.0, heal_at + 45.0) >= share / 2


_ATTACKS: tuple[tuple[StrategyName, bool, float, float, bool], ...] = (
    ("weighted", True, 0.3, 50.0, False),
    ("weighted", True, 0.3, 50.0, True),
    ("weighted", False, 0.4, 5.0, True),
    ("least-load", True, 0.3, 50.0, False),
    ("least-load", False, 0.4, 50.0, True),
    ("prefix-cache", True, 0.3, 50.0, True),
    ("prefix-cache", False, 0.4, 50.0, False),
    ("prefix-hash", True, 0.3, 50.0, True),
)
ATTACKS = [
    Case("404", strategy, scraped, load, broken=0, attack=attack, attack_pinned=pinned, healed_s=0.0)
    for strategy, scraped, load, attack, pinned in _ATTACKS
]


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: f"{case}-{case.attack:g}-{case.attack_pinned}")
def test_a_client_whose_requests_all_fail_changes_nothing_for_others(case: Case) -> None:
    seeds = (1, 2)
    end = case.warm_s + case.broken_s
    with_it = [run(replace(case, seed=seed)) for seed in seeds]
    # The same requests of others, seed by seed; the attacker's own end as they begin, so they take no room.
    without = [run(replace(case, seed=seed, attack=1e-9)) for seed in seeds]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    latency_s = [mean([result.mean_latency_s(case.warm_s, end) for result in runs]) for runs in (with_it, without)]
    cached = [mean([result.cached_share(case.warm_s, end) for result in runs]) for runs in (with_it, without)]
    assert latency_s[0] <= latency_s[1] * 1.05
    assert cached[0] >= cached[1] - 0.05
    for result in with_it:
        assert result.errors(0.0, end) == 0.0
        for place in range(case.endpoints):
            assert 0.1 < result.share(range(place, place + 1), case.warm_s, end) < 0.4
