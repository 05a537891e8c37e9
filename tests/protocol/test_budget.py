from __future__ import annotations

from extproc.protocol.budget import BodyBudget


def test_it_counts_what_is_held_and_remembers_the_peak() -> None:
    budget = BodyBudget(10)
    budget.charge(8)
    assert not budget.exceeded
    budget.charge(3)
    assert budget.exceeded
    budget.refund(11)
    assert (budget.used_bytes, budget.exceeded) == (0, False)
