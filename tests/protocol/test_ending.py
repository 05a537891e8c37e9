from __future__ import annotations

import pytest

from extproc.protocol.ending import stream_end
from extproc.protocol.events import BodyMode
from extproc.protocol.interfaces import StreamEnd
from extproc.protocol.tables import RequestState, ResponseState

NONE, FDS = BodyMode.NONE, BodyMode.FULL_DUPLEX
DONE = RequestState.DONE
IDLE, FLOWING, OVER = ResponseState.IDLE, ResponseState.FLOWING, ResponseState.DONE
COMPLETED, ABORTED, DETACHED = StreamEnd.COMPLETED, StreamEnd.ABORTED, StreamEnd.DETACHED


@pytest.mark.parametrize(
    ("request_state", "response_state", "mode", "configured", "by_log", "expected"),
    [
        (RequestState.PASSING, IDLE, NONE, True, True, DETACHED),
        (RequestState.PASSING, IDLE, NONE, True, False, ABORTED),
        (RequestState.PASSING, IDLE, NONE, False, True, ABORTED),
        (RequestState.PASSING, IDLE, FDS, True, True, ABORTED),
        (RequestState.PASSING, FLOWING, NONE, True, True, ABORTED),
        (DONE, IDLE, NONE, True, False, DETACHED),
        (DONE, IDLE, NONE, True, True, DETACHED),
        (DONE, IDLE, FDS, False, False, DETACHED),
        (DONE, IDLE, FDS, True, False, ABORTED),
        (DONE, IDLE, FDS, True, True, DETACHED),
        (DONE, FLOWING, FDS, True, True, ABORTED),
        (DONE, FLOWING, NONE, True, True, DETACHED),
        (DONE, FLOWING, NONE, True, False, COMPLETED),
        (DONE, OVER, FDS, True, True, ABORTED),
    ],
)
def test_what_an_end_means(
    request_state: RequestState,
    response_state: ResponseState,
    mode: BodyMode,
    configured: bool,
    by_log: bool,
    expected: StreamEnd,
) -> None:
    assert stream_end(request_state, response_state, mode, configured, lambda: by_log) is expected
