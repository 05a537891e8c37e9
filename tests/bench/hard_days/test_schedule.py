import itertools

import pytest

from bench.hard_days.schedule import ENGINES, KINDS, Group, Times, draw, times_of

FULL = times_of(3)


def test_a_seed_always_gives_the_same_faults() -> None:
    assert draw(7, FULL) == draw(7, FULL)
    assert draw(7, FULL) != draw(8, FULL)
    assert draw(7, FULL, pickers=1) != draw(7, FULL, pickers=2) or all(not kind.pickers for kind in KINDS.values())


@pytest.mark.parametrize("seed", range(20))
def test_faults_stay_within_their_time_and_their_engines(seed: int) -> None:
    faults = draw(seed, FULL)
    assert faults == sorted(faults, key=lambda fault: fault.at_s)
    for fault in faults:
        assert FULL.warm_s <= fault.at_s <= fault.end_s <= FULL.faults_s + 0.01
        assert set(fault.engines) <= set(range(ENGINES))
        assert bool(fault.engines) == (fault.kind.group in {Group.ENGINE, Group.METRICS, Group.POOL})
        assert 0 <= fault.variant < fault.kind.variants


@pytest.mark.parametrize("seed", range(20))
def test_one_act_at_a_time_on_pickers_files_and_envoy_and_some_engine_is_well(seed: int) -> None:
    faults = draw(seed, times_of(20))
    for group in (Group.PICKER, Group.CONFIG, Group.POOL, Group.PROXY):
        acts = [fault for fault in faults if fault.kind.group is group]
        assert acts
        for before, after in itertools.pairwise(acts):
            assert after.at_s >= before.end_s + before.kind.spacing_s - 0.02
    for fault in faults:
        broken = {
            engine
            for other in faults
            if other.kind.group is Group.ENGINE and other.at_s <= fault.at_s < other.end_s
            for engine in other.engines
        }
        assert len(broken) < ENGINES


def test_a_long_run_has_every_kind_and_they_overlap() -> None:
    faults = draw(1, times_of(10))
    assert {fault.kind.name for fault in faults} == {kind.name for kind in KINDS.values() if kind.pickers in {0, 1}}
    under_way = [sum(other.at_s <= fault.at_s < other.end_s for other in faults) for fault in faults]
    assert max(under_way) >= 4
    assert sum(under_way) / len(under_way) > 2


def test_only_some_kinds() -> None:
    assert {fault.kind.name for fault in draw(1, FULL, only=["heavy", "picker-kill"])} == {"heavy", "picker-kill"}
    assert draw(1, FULL, only=["picker-kill"])


def test_a_full_run_leaves_half_a_minute_to_heal_and_a_short_one_has_some_of_all() -> None:
    assert Times(15.0, 140.0, 180.0) == FULL
    short = times_of(0.5)
    assert 0 < short.warm_s < short.faults_s < short.load_s == 30


def test_a_fault_describes_itself() -> None:
    line = draw(1, FULL, only=["metrics-nonsense"])[0].line()
    assert "metrics-nonsense" in line
    assert "engine" in line
    assert "form" in line
