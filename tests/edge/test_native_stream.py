from __future__ import annotations

from extproc.http2.frames import FrameType
from extproc.http2.grpc import Status
from tests.edge.native_harness import Stage, message, request_headers


def test_a_stream_ends_once() -> None:
    stage = Stage().start()
    stage.say(stage.call("process"), message(request_headers()))
    stream = stage.connection.streams[1]
    stream.finish(Status.CANCELLED, "enough")  # type: ignore[union-attr]
    stream.finish()  # type: ignore[union-attr]
    stream.drop()
    stage.connection.flush()
    assert [heard.kind for heard in stage.heard()] == [FrameType.HEADERS, FrameType.RST_STREAM]
    assert stage.dialogue.counters.seen.count(("ended", "undecided")) == 1
