from __future__ import annotations

import pytest

from extproc.errors import RequestError
from extproc.protocol.interfaces import PendingDecision
from extproc.types import Decision
from tests.protocol.dialogue import chosen


def test_a_held_decision_goes_to_its_listener() -> None:
    heard: list[Decision | RequestError] = []
    held = PendingDecision()
    held.listen(heard.append)
    held.answer(chosen())
    assert heard == [chosen()]


def test_an_answer_nobody_listens_to_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="before its stream listened"):
        PendingDecision().answer(chosen())
