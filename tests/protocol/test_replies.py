from __future__ import annotations

import json
from typing import get_args

import msgspec
import pytest

from extproc.errors import InvalidRequestError, NoEndpointError, OverloadedError
from extproc.protocol.events import Direction, Event
from extproc.protocol.replies import BodyReply, Finish, Reply, echo, echo_all, refusal


@pytest.mark.parametrize("kind", [*get_args(Event), *get_args(Reply)])
def test_events_and_replies_are_small_values_that_cannot_change(kind: type[Finish]) -> None:
    assert issubclass(kind, msgspec.Struct)
    assert kind.__struct_config__.frozen
    assert "__dict__" not in dir(kind)


def test_an_error_becomes_the_openai_error_object() -> None:
    reply = refusal(InvalidRequestError('"messages" must be a list', param="messages"))
    assert reply.status == 400
    assert json.loads(reply.body) == {
        "error": {
            "message": '"messages" must be a list',
            "type": "invalid_request_error",
            "param": "messages",
            "code": "invalid_request",
        }
    }
    assert reply.headers == (("content-type", "application/json"), ("x-extproc-drop-reason", "invalid_request"))
    assert reply.details == "extproc_invalid_request"


@pytest.mark.parametrize("error", [NoEndpointError, OverloadedError])
def test_retry_after_goes_with_429_and_503(error: type[NoEndpointError | OverloadedError]) -> None:
    assert ("retry-after", str(error.retry_after_s)) in refusal(error("no")).headers


R = Direction.REQUEST


def test_a_small_chunk_goes_back_as_it_came() -> None:
    data = b"abc"
    (reply,) = echo(R, data, False, 3)
    assert isinstance(reply, BodyReply)
    assert reply.data is data


def test_no_data_is_no_reply_unless_it_ends_the_body() -> None:
    assert echo(R, b"", False, 3) == echo_all(R, [], False, 3) == []
    assert echo(R, b"", True, 3) == echo_all(R, [], True, 3) == [BodyReply(R, b"", True)]


def test_only_the_last_piece_ends_the_body() -> None:
    assert echo_all(R, [b"abcd", b"efgh"], True, 3) == [
        BodyReply(R, b"abc", False),
        BodyReply(R, b"d", False),
        BodyReply(R, b"efg", False),
        BodyReply(R, b"h", True),
    ]
