from __future__ import annotations

import pytest

from extproc.http2.frames import ErrorCode, StreamLevelError
from extproc.http2.streams import ClosedStreams, Closing, Stream


def test_closed_streams_are_remembered_for_a_while() -> None:
    closed = ClosedStreams()
    closed.add(1, Closing.RESET)
    closed.add(1, Closing.ENDED)
    assert closed.how(1) is Closing.ENDED
    for stream_id in range(3, 5001, 2):
        closed.add(stream_id, Closing.RESET)
    assert closed.how(1) is Closing.UNKNOWN
    assert closed.how(4999) is Closing.RESET
    assert len(closed._how) == len(closed._order) == 1024


def test_what_a_stream_may_take() -> None:
    stream = Stream(1, send_window=0, receive_window=10, content_remaining=3)
    stream.take(5, 3)
    with pytest.raises(StreamLevelError) as error:
        stream.take(6, 0)
    assert error.value.code is ErrorCode.FLOW_CONTROL_ERROR
    stream.end_remote()
    with pytest.raises(StreamLevelError) as error:
        stream.take(1, 1)
    assert error.value.code is ErrorCode.STREAM_CLOSED
