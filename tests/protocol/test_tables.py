"""Every state meets every event: the expected table is written out here, independently of the code's."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from extproc.protocol.events import Event
from extproc.protocol.tables import (
    Action,
    IllegalEventError,
    RequestState,
    ResponseState,
    StreamState,
    action_for,
)

KINDS = {kind.__name__: kind for kind in get_args(Event)}
REQUEST_KINDS = ("RequestHeaders", "RequestBody", "RequestTrailers")
RESPONSE_KINDS = ("ResponseHeaders", "ResponseBody", "ResponseTrailers")
STREAM_KINDS = ("HalfClosed", "StreamLost", "DeadlinePassed", "Unknown")

REQUEST = {
    "idle": ("START", None, None),
    "collecting": (None, "COLLECT", "COLLECT_TRAILERS"),
    "awaiting_body": (None, "DECIDE_ON_BODY", "DECIDE_ON_TRAILERS"),
    "pending": (None, "KEEP", "KEEP_TRAILERS"),
    "passing": (None, "PASS", "PASS_TRAILERS"),
    "done": (None, "IGNORE", "PASS_TRAILERS"),
}
RESPONSE = {
    "idle": ("RESPOND", "RESPOND_BODY", "RESPOND_TRAILERS"),
    "flowing": (None, "RESPOND_BODY", "RESPOND_TRAILERS"),
    "done": (None, "IGNORE", "RESPOND_TRAILERS"),
}
STREAM = {
    "open": ("HALF_CLOSE", "LOSE", "TIME_OUT", "IGNORE"),
    "half_closed": ("IGNORE", "LOSE", "TIME_OUT", None),
    "closed_early": ("IGNORE",) * 4,
    "closed": ("IGNORE",) * 4,
}


def test_the_expectation_names_every_event_and_every_state() -> None:
    assert set(KINDS) == {*REQUEST_KINDS, *RESPONSE_KINDS, *STREAM_KINDS}
    assert set(REQUEST) == {state.value for state in RequestState}
    assert set(RESPONSE) == {state.value for state in ResponseState}
    assert set(STREAM) == {state.value for state in StreamState}


def _expected(kind: str, stream: StreamState, request: RequestState, response: ResponseState) -> str | None:
    if kind in STREAM_KINDS:
        return STREAM[stream.value][STREAM_KINDS.index(kind)]
    if stream is StreamState.CLOSED_EARLY and kind in RESPONSE_KINDS:
        return "LATE"
    if stream in (StreamState.CLOSED, StreamState.CLOSED_EARLY):
        return "IGNORE"
    if stream is StreamState.HALF_CLOSED:
        return None
    if kind in REQUEST_KINDS:
        return REQUEST[request.value][REQUEST_KINDS.index(kind)]
    return RESPONSE[response.value][RESPONSE_KINDS.index(kind)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", StreamState)
def test_every_state_meets_every_event(kind: str, stream: StreamState) -> None:
    for request, response in itertools.product(RequestState, ResponseState):
        expected = _expected(kind, stream, request, response)
        if expected is None:
            with pytest.raises(IllegalEventError, match=kind) as error:
                action_for(KINDS[kind], stream, request, response)
            assert error.value.kind.startswith(f"{kind} while ")
        else:
            assert action_for(KINDS[kind], stream, request, response) is Action[expected]
