from __future__ import annotations

from extproc.errors import InternalError, NoEndpointError
from extproc.protocol.interfaces import Observer, RouteRequest
from extproc.protocol.request_buffer import BodyBudget, RequestBuffer
from extproc.protocol.settings import SessionSettings
from tests.protocol.dialogue import Dialogue, ScriptedHandler, chosen

ASK = RequestBuffer(BodyBudget(1), Observer(), SessionSettings()).route_request(complete=True)


def test_errors_of_a_decision_come_back_as_values() -> None:
    pick, error = chosen(), NoEndpointError("none")
    assert Dialogue(ScriptedHandler(answer=pick)).shared.decide(ASK, 0.0) is pick
    assert Dialogue(ScriptedHandler(answer=error)).shared.decide(ASK, 0.0) is error
    assert isinstance(Dialogue(ScriptedHandler(answer=KeyError())).shared.decide(ASK, 0.0), InternalError)


def test_a_defect_while_a_response_is_shown_is_counted_and_does_not_end_the_stream() -> None:
    dialogue = Dialogue(ScriptedHandler(failing="body"))
    dialogue.shared.response_body("d1", b"data")
    assert dialogue.counters.seen == [("internal", "response_body")]


def test_an_error_that_came_back_leads_to_no_frames() -> None:
    def decide(_ask: RouteRequest) -> None:
        try:
            int("none")
        except ValueError as cause:
            raise NoEndpointError("none") from cause

    error = Dialogue(ScriptedHandler(answer=decide)).shared.decide(ASK, 0.0)
    assert isinstance(error, NoEndpointError)
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
