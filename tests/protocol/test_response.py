from __future__ import annotations

from extproc.protocol.events import BodyMode, Direction, ResponseHeaders
from extproc.protocol.replies import HeadersReply
from extproc.protocol.response import ResponseMachine
from extproc.protocol.tables import ResponseState
from tests.protocol.dialogue import Dialogue, response_body


def machine(mode: BodyMode) -> ResponseMachine:
    return ResponseMachine(Dialogue().shared, mode, 62_000)


def test_headers_may_be_all() -> None:
    m = machine(BodyMode.FULL_DUPLEX)
    assert m.headers(ResponseHeaders({}, True), "", "", None, 0.0) == [HeadersReply(Direction.RESPONSE)]
    assert m.state is ResponseState.DONE


def test_a_body_flows_until_it_ends() -> None:
    m = machine(BodyMode.STREAMED)
    states = []
    for end in (False, True):
        m.body(response_body(b"x", end=end), "", 0.0)
        states.append(m.state)
    assert states == [ResponseState.FLOWING, ResponseState.DONE]
