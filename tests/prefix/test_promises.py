"""When broken promises prove an eviction, and when they do not."""

from __future__ import annotations

import random

import pytest

from extproc.prefix.promises import Promises


def test_one_broken_promise_proves_nothing() -> None:
    assert not Promises().broken(10.0, 1)


def test_a_row_of_different_prompts_proves_it_and_the_next_ones_sooner() -> None:
    promises = Promises()
    assert [promises.broken(10.0 + number, number) for number in range(12)].index(True) == 7
    assert [promises.broken(10.0 + number, number) for number in range(20, 30)].index(True) <= 3


def test_the_same_prompt_over_and_over_is_one_voice() -> None:
    promises = Promises()
    assert not any(promises.broken(10.0, 7) for _ in range(100))


def test_a_younger_promise_that_broke_speaks_against_older_ones_not_the_other_way_round() -> None:
    young, old = Promises(), Promises()
    for number in range(7):
        young.broken(1.0, number)
        old.broken(100.0, number)
    assert young.broken(100.0, 99)
    assert not old.broken(1.0, 99)


def test_promises_as_old_that_are_kept_clear_the_suspicion() -> None:
    promises = Promises()
    for number in range(7):
        promises.broken(10.0, number)
    promises.kept(1.0)
    promises.kept(60.0)
    promises.kept(60.0)
    assert not promises.broken(10.0, 99)
    for _ in range(5):
        promises.kept(1e9)
    assert promises._suspicion is None
    promises.kept(1.0)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_client_whose_prompts_never_hit_proves_nothing_among_others(share: float) -> None:
    rng, promises = random.Random(1), Promises()
    proofs = 0
    for number in range(20_000):
        if rng.random() < share:
            proofs += promises.broken(rng.uniform(0.1, 30.0), number)
        else:
            promises.kept(rng.uniform(0.1, 60.0))
    assert proofs <= 5


def test_any_age_is_taken() -> None:
    promises = Promises()
    for age in (0.0, -1.0, 1e-9, 1e12):
        promises.broken(age, int(age))
        promises.kept(age)
