"""The nouns of the index."""

from __future__ import annotations

from array import array

from extproc.prefix.entries import BlockState, EvictionCause, PrefixHandle
from extproc.prefix.tree import Holder, RadixTree


def test_equal_requests_vouch_separately() -> None:
    holder = Holder("10.0.0.1:8000", 1, RadixTree().root)
    one, other = (PrefixHandle(holder, (array("Q", [1]),), []) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2


def test_values_are_metric_labels() -> None:
    """Dashboards know them, so a change is a breaking one."""
    assert {cause.value for cause in EvictionCause} == {
        "capacity",
        "bound",
        "correction",
        "restart",
        "retracted",
    }
    assert {state.value for state in BlockState} == {"speculative", "confirmed"}
