from __future__ import annotations

import pytest

from extproc.errors import NoEndpointError, RequestError
from extproc.protocol.interfaces import Observer, Observers, PendingDecision
from extproc.types import Decision
from tests.protocol.dialogue import Counters, chosen


def test_an_answer_goes_to_its_listener() -> None:
    heard: list[Decision | RequestError] = []
    pending = PendingDecision()
    pending.listen(heard.append)
    pending.answer(chosen())
    assert heard == [chosen()]


def test_an_answer_nobody_listens_to_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="before its stream listened"):
        PendingDecision().answer(chosen())


def test_an_event_goes_to_all_who_define_it_in_their_order() -> None:
    class Openings(Observer):
        def stream_opened(self) -> None:
            counters.seen.append(("another",))

    counters = Counters()
    observers = Observers(Openings(), counters, Observer())
    observers.stream_opened()
    observers.refused(NoEndpointError("none"), {})
    observers.arrived({"x": "y"})
    assert counters.seen == [("another",), ("opened",), ("refused", 503, "no_endpoint")]


def test_an_event_of_one_reader_costs_one_call() -> None:
    counters = Counters()
    assert Observers(counters, Observer()).body_cut == counters.body_cut
