from __future__ import annotations

import pytest

from extproc.protocol.events import BodyMode, Direction, ResponseHeaders
from extproc.protocol.replies import HeadersReply
from extproc.protocol.response import ResponseMachine
from extproc.protocol.settings import SERVED_KEY
from extproc.protocol.tables import ResponseState
from tests.protocol.dialogue import Dialogue, PlainMetadata, response_body


def machine(mode: BodyMode) -> ResponseMachine:
    return ResponseMachine(Dialogue().shared, mode, 62_000)


def test_headers_may_be_all() -> None:
    m = machine(BodyMode.FULL_DUPLEX)
    assert m.headers(ResponseHeaders({}, True), "", "", 0.0) == [HeadersReply(Direction.RESPONSE)]
    assert m.state is ResponseState.DONE


def test_a_body_flows_until_it_ends() -> None:
    m = machine(BodyMode.STREAMED)
    states = []
    for end in (False, True):
        m.body(response_body(b"x", end=end), "")
        states.append(m.state)
    assert states == [ResponseState.FLOWING, ResponseState.DONE]


def test_a_piece_goes_the_short_way_only_where_it_would_come_back_as_it_is() -> None:
    m = machine(BodyMode.FULL_DUPLEX)
    assert not m.pass_on(b"x", "d1")  # no headers yet: the body's beginning is an event of its own
    m.headers(ResponseHeaders({}), "", "", 0.0)
    assert m.pass_on(b"x", "d1")
    assert m.pass_on(b"x" * 62_000, "d1")
    assert not m.pass_on(b"", "d1")
    assert not m.pass_on(b"x" * 62_001, "d1")
    m.mode = BodyMode.STREAMED
    assert not m.pass_on(b"x", "d1")
    m.mode = BodyMode.FULL_DUPLEX
    m.body(response_body(b"", end=True), "d1")
    assert not m.pass_on(b"x", "d1")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (PlainMetadata({"envoy.lb": {SERVED_KEY: "a:1"}}), "a:1"),
        (PlainMetadata({"envoy.lb": {SERVED_KEY: 7}}), None),
        (PlainMetadata(), None),
        (None, None),
    ],
)
def test_who_served_is_a_text_or_nothing(metadata: PlainMetadata | None, expected: str | None) -> None:
    d = Dialogue()
    m = ResponseMachine(d.shared, BodyMode.NONE, 62_000)
    m.headers(ResponseHeaders({":status": "200"}, metadata=metadata), "d1", "", 0.0)
    assert d.handler.told == [("started", "d1", 200, expected)]
