from __future__ import annotations

import json

import pytest

from extproc.errors import InvalidRequestError, NoEndpointError, OverloadedError
from extproc.protocol.refusal import refusal


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
