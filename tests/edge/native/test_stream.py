from __future__ import annotations

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.http2.frames import ErrorCode, FrameType, Setting, frame, rst_stream, settings, window_update
from extproc.http2.grpc import Status, message_frame
from extproc.protocol.early_close import Gateway
from extproc.protocol.interfaces import StreamEnd
from extproc.protocol.settings import ResponsePhase, SessionSettings
from tests.edge.native.harness import Stage, full_duplex, half_close, message, request_body, request_headers
from tests.http2.wire import Frame
from tests.protocol.dialogue import Dialogue

DATA, HEADERS, RST = FrameType.DATA, FrameType.HEADERS, FrameType.RST_STREAM
ENVOY = (("x-envoy-internal", "true"), ("x-forwarded-for", "10.0.0.1"))


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


def closing(phase: str = "close", **settings: Any) -> Stage:
    wire = SessionSettings(response_phase=ResponsePhase(phase), response_sample=0.0)
    return Stage(Dialogue(settings=wire), **settings).start()


def request(stage: Stage, stream_id: int = 1, data: bytes = b"x") -> bytes:
    """A whole request as Envoy sends it, but for the end of its half."""
    said = (message(full_duplex(), stream_id), message(request_body(data, end=True), stream_id))
    return stage.call("process", stream_id, *ENVOY) + b"".join(said)


def response_body() -> bytes:
    data: bytes = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"token")).SerializeToString()
    return data


def on(heard: list[Frame], stream_id: int) -> list[tuple[int, int]]:
    return [(found.kind, found.flags) for found in heard if found.stream_id == stream_id]


def late(stage: Stage) -> list[Any]:
    return [seen for seen in stage.dialogue.counters.seen if seen[0] == "late"]


class TestEarlyEnd:
    def test_the_end_leaves_in_one_small_write_after_everything_else(self) -> None:
        stage = closing()
        stage.say(request(stage), request(stage, 3), stage.call("process", 5), message(request_headers(end=True), 5))
        (first,) = stage.socket.writes
        stage.loop.advance()
        assert stage.socket.writes[0] == first
        (end,) = stage.socket.writes[1:]
        assert len(end) <= 2 * 60
        stage.socket.writes[:] = [first]
        heard = stage.heard()
        assert on(heard, 1) == on(heard, 3) == [(HEADERS, 4), (DATA, 0), (DATA, 0)]
        assert on(heard, 5) == [(HEADERS, 4), (DATA, 0)]
        stage.socket.writes[:] = [end]
        heard = stage.heard()
        assert [(found.kind, found.flags, found.stream_id) for found in heard] == [
            (DATA, 0, 1), (HEADERS, 5, 1), (DATA, 0, 3), (HEADERS, 5, 3),
        ]  # fmt: skip
        last = pb.ProcessingResponse.FromString(heard[0].payload[5:])
        streamed = last.request_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (b"", True)
        assert stage.client.fields(heard[1].payload) == [("grpc-status", "0")]
        assert stage.dialogue.handler.ends == [StreamEnd.CLOSED_EARLY] * 2

    def test_many_ends_are_several_writes_in_several_turns(self) -> None:
        stage = closing()
        stage.say(*(request(stage, 1 + 2 * number) for number in range(40)))
        stage.socket.writes.clear()
        stage.loop.advance()
        assert [len(written) < 1400 for written in stage.socket.writes] == [True] * 3
        assert len([found for found in stage.heard() if found.flags == 5]) == 40

    @pytest.mark.parametrize("end", [rst_stream(1, ErrorCode.CANCEL), half_close()])
    def test_the_stream_is_over_when_the_peer_says_so(self, end: bytes) -> None:
        stage = closing()
        stage.say(request(stage))
        stage.loop.advance()
        assert list(stage.connection.streams) == [1]
        stage.say(end)
        assert not stage.connection.streams
        assert stage.connection.http2.open_streams == 0
        assert stage.dialogue.counters.seen == [("opened",), ("ended", "closed_early")]
        assert not [found for found in stage.heard() if found.kind == RST]

    @pytest.mark.parametrize("end", [rst_stream(1, ErrorCode.CANCEL), half_close()])
    def test_a_peer_that_ends_before_our_end_is_written(self, end: bytes) -> None:
        stage = closing()
        stage.say(request(stage), end)
        stage.loop.advance()
        assert not stage.connection.streams
        assert stage.connection.http2.open_streams == 0
        assert stage.dialogue.handler.ends == [StreamEnd.CLOSED_EARLY]

    def test_a_late_response_is_noticed_and_changes_the_next_request(self) -> None:
        stage = closing()
        stage.say(request(stage))
        stage.loop.advance()
        stage.say(message(response_body()), message(response_body()))
        assert late(stage) == [("late", "ResponseBody")]
        stage.say(rst_stream(1, ErrorCode.CANCEL), request(stage, 3))
        stage.heard()
        stage.loop.advance()
        assert stage.heard() == []
        assert stage.dialogue.handler.ends == [StreamEnd.CLOSED_EARLY]

    def test_a_peer_that_never_ends_its_half_is_reset(self) -> None:
        stage = closing(linger_s=10.0)
        stage.say(request(stage))
        stage.loop.advance()
        stage.heard()
        stage.loop.advance(10.0)
        assert stage.heard() == []
        stage.loop.advance(10.0)
        (reset,) = stage.heard()
        assert (reset.kind, reset.payload) == (RST, ErrorCode.NO_ERROR.to_bytes(4, "big"))
        assert not stage.connection.streams
        stage.loop.advance(30.0)
        assert "linger" not in stage.connection._timers

    def test_a_message_that_cannot_be_read_ends_the_rest(self) -> None:
        stage = closing()
        stage.say(request(stage))
        stage.loop.advance()
        stage.heard()
        stage.say(message(b"\xff"))
        assert [found.kind for found in stage.heard()] == [RST]
        assert not stage.connection.streams

    def test_the_end_waits_for_what_waits_for_a_window(self) -> None:
        stage = closing()
        stage.say(settings(((Setting.INITIAL_WINDOW_SIZE, 100),)))
        stage.heard()
        stage.say(request(stage, data=bytes(1000)))
        stage.loop.advance()
        assert not [found for found in stage.heard() if found.flags == 5]
        assert stage.dialogue.budget.used_bytes > 900
        stage.say(window_update(1, 100_000))
        assert not [found for found in stage.heard() if found.flags == 5]
        stage.loop.advance()
        assert on(stage.heard(), 1) == [(DATA, 0), (HEADERS, 5)]
        assert stage.dialogue.budget.used_bytes == 0

    def test_a_deadline_of_the_calls_own_is_over_with_it(self) -> None:
        stage = closing()
        said = request(stage)[len(stage.call("process", 1, *ENVOY)) :]
        stage = closing()
        stage.say(stage.call("process", 1, *ENVOY, ("grpc-timeout", "50m")), said)
        stage.loop.advance(1.0)
        assert not [found for found in stage.heard() if found.kind == RST]

    def test_a_connection_that_is_lost_meanwhile(self) -> None:
        stage = closing()
        stage.say(request(stage))
        stage.connection.connection_lost(None)
        stage.loop.advance(100.0)
        assert len(stage.socket.writes) == 1
        assert stage.dialogue.counters.seen.count(("ended", "closed_early")) == 1

    @pytest.mark.parametrize(("tls", "ends"), [(True, [StreamEnd.CLOSED_EARLY]), (False, [])])
    def test_auto_wants_an_envoy_on_tls(self, tls: bool, ends: list[StreamEnd]) -> None:
        stage = closing("auto")
        stage.connection.tls = tls
        stage.say(request(stage))
        assert stage.dialogue.handler.ends == ends
        stage.say(stage.call("process", 3, ("user-agent", "tonic/0.14")), message(full_duplex(), 3))
        stage.say(message(request_body(b"x", end=True), 3))
        assert stage.dialogue.handler.ends == ends


def test_who_calls_is_read_from_the_header_fields() -> None:
    stage = Stage().start()
    stage.say(stage.call("process", 1, *ENVOY), stage.call("process", 3))
    found = [stage.connection.streams[number].gateway for number in (1, 3)]  # type: ignore[union-attr]
    assert found == [Gateway.ENVOY_IN_CLEAR, Gateway.OTHER]


def test_a_left_stream_takes_parts_of_a_message_too() -> None:
    stage = closing()
    stage.say(request(stage))
    stage.loop.advance()
    data = message_frame(response_body())
    stage.say(frame(0, 0, 1, data[:3]), frame(0, 0, 1, data[3:]))
    assert late(stage) == [("late", "ResponseBody")]
