from __future__ import annotations

import pytest

from extproc.errors import RequestError
from extproc.protocol.interfaces import PendingDecision, RouteResult
from tests.protocol.dialogue import Pick


def test_a_held_decision_goes_to_its_listener() -> None:
    heard: list[RouteResult | RequestError] = []
    held = PendingDecision()
    held.listen(heard.append)
    pick = Pick()
    held.answer(pick)
    assert heard == [pick]


def test_an_answer_nobody_listens_to_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="before its stream listened"):
        PendingDecision().answer(Pick())
