from __future__ import annotations

import pytest

from extproc.errors import RequestError
from extproc.protocol.interfaces import NullObserver, PendingDecision, RouteResult, StreamObserver
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


def test_the_null_observer_counts_nothing() -> None:
    observer: StreamObserver = NullObserver()
    observer.stream_opened()
    observer.stream_ended("completed")
    observer.immediate(503, "no_endpoint")
    observer.protocol_error("x")
    observer.deadline_passed()
    observer.body_cut("budget")
    observer.internal_error("decide")
    observer.access_log_streams(1)
    observer.access_log_entry("final")
