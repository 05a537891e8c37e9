from __future__ import annotations

import pytest

from extproc.protocol.events import BodyMode
from extproc.protocol.interfaces import StreamEnd
from extproc.protocol.outcome import (
    LogEntry,
    LogFlag,
    is_local_reply,
    log_outcome,
    response_outcome,
    served_elsewhere,
    stream_end,
    stream_outcome,
)
from extproc.protocol.tables import RequestState, ResponseState
from extproc.types import Outcome

UPSTREAM = "10.0.0.1:8000"


def entry(status: int = 200, *flags: LogFlag, details: str = "via_upstream", upstream: str = UPSTREAM) -> LogEntry:
    return LogEntry("d1", status=status, details=details, flags=frozenset(flags), upstream=upstream)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (entry(200), Outcome.OK),
        (entry(302), Outcome.OK),
        (entry(404), Outcome.CLIENT_ERROR),
        (entry(429), Outcome.BUSY),
        (entry(503), Outcome.BUSY),
        (entry(500), Outcome.SERVER_ERROR),
        (entry(503, details=""), Outcome.BUSY),
        (entry(503, details="", upstream=""), Outcome.ABORTED),
        (entry(500, details="ext_proc_error_gRPC_error_14"), Outcome.ABORTED),
        (entry(403, details="rbac_access_denied", upstream=""), Outcome.CLIENT_ERROR),
        (entry(0), Outcome.ABORTED),
        (entry(503, LogFlag.UPSTREAM_CONNECTION_FAILURE), Outcome.CONNECT_FAILURE),
        (entry(503, LogFlag.NO_HEALTHY_UPSTREAM, upstream=""), Outcome.CONNECT_FAILURE),
        (entry(503, LogFlag.DNS_RESOLUTION_FAILURE, upstream=""), Outcome.CONNECT_FAILURE),
        (entry(503, LogFlag.UPSTREAM_OVERFLOW), Outcome.BUSY),
        (entry(504, LogFlag.UPSTREAM_REQUEST_TIMEOUT), Outcome.TIMEOUT),
        (entry(200, LogFlag.DURATION_TIMEOUT), Outcome.TIMEOUT),
        (entry(200, LogFlag.STREAM_IDLE_TIMEOUT), Outcome.TIMEOUT),
        (entry(101, LogFlag.UPSTREAM_CONNECTION_TERMINATION), Outcome.OK),
        (entry(101, LogFlag.DOWNSTREAM_CONNECTION_TERMINATION), Outcome.OK),
        (entry(200, LogFlag.UPSTREAM_REMOTE_RESET), Outcome.RESET),
        (entry(503, LogFlag.UPSTREAM_CONNECTION_TERMINATION), Outcome.RESET),
        (entry(200, LogFlag.DOWNSTREAM_CONNECTION_TERMINATION), Outcome.CLIENT_GONE),
        (entry(0, LogFlag.DOWNSTREAM_REMOTE_RESET, LogFlag.LOCAL_RESET), Outcome.CLIENT_GONE),
        (
            entry(0, LogFlag.UPSTREAM_CONNECTION_FAILURE, LogFlag.DOWNSTREAM_CONNECTION_TERMINATION),
            Outcome.CONNECT_FAILURE,
        ),
        (
            entry(503, LogFlag.UPSTREAM_RETRY_LIMIT_EXCEEDED, LogFlag.UPSTREAM_CONNECTION_FAILURE),
            Outcome.CONNECT_FAILURE,
        ),
        (entry(500, LogFlag.UPSTREAM_RETRY_LIMIT_EXCEEDED), Outcome.SERVER_ERROR),
        (LogEntry("d1", interim=True, status=500), None),
    ],
)
def test_an_access_log_entry_says_how_a_request_ended(log: LogEntry, expected: Outcome | None) -> None:
    assert log_outcome(log) is expected


@pytest.mark.parametrize(
    ("log", "elsewhere"),
    [
        (LogEntry("d", upstream=UPSTREAM), False),
        (LogEntry("d", upstream="10.0.0.2:8000"), True),
        (LogEntry("d", upstream="10.0.0.2:8000", served=UPSTREAM), False),
        (LogEntry("d"), False),
    ],
)
def test_another_endpoint_may_have_answered(log: LogEntry, elsewhere: bool) -> None:
    assert served_elsewhere(log, UPSTREAM) is elsewhere


@pytest.mark.parametrize(
    ("headers", "local"),
    [
        ({"x-envoy-upstream-service-time": "12"}, False),
        ({"server": "uvicorn"}, False),
        ({"content-type": "text/plain"}, True),
    ],
)
def test_a_local_reply_bears_no_mark_of_an_endpoint(headers: dict[str, str], local: bool) -> None:
    assert is_local_reply(headers) is local


@pytest.mark.parametrize(
    ("status", "local", "expected"),
    [
        (503, True, Outcome.CONNECT_FAILURE),
        (504, True, Outcome.TIMEOUT),
        (500, True, Outcome.ABORTED),
        (403, True, Outcome.CLIENT_ERROR),
        (503, False, Outcome.BUSY),
        (504, False, Outcome.SERVER_ERROR),
        (200, False, Outcome.OK),
    ],
)
def test_a_status_means_something_else_when_it_is_the_gateways_own(status: int, local: bool, expected: Outcome) -> None:
    assert response_outcome(status, local=local) is expected


@pytest.mark.parametrize(
    ("how", "status", "expected"),
    [
        (StreamEnd.DETACHED, 0, None),
        (StreamEnd.COMPLETED, 200, Outcome.OK),
        (StreamEnd.COMPLETED, 0, Outcome.OK),
        (StreamEnd.COMPLETED, 503, Outcome.BUSY),
        (StreamEnd.ABORTED, 200, Outcome.ABORTED),
        (StreamEnd.ABORTED, 0, Outcome.ABORTED),
        (StreamEnd.ABORTED, 500, Outcome.SERVER_ERROR),
    ],
)
def test_what_a_stream_has_shown(how: StreamEnd, status: int, expected: Outcome | None) -> None:
    assert stream_outcome(how, status, local=False) is expected


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
