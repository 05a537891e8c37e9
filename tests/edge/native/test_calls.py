from __future__ import annotations

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2

from extproc.http2.frames import FrameType, frame, window_update
from extproc.http2.grpc import MessageReader, message_frame
from extproc.protocol.interfaces import PendingDecision, StreamEnd
from extproc.protocol.settings import SessionSettings
from tests.edge.native.harness import Stage, full_duplex, half_close, message, request_body, request_headers
from tests.http2.wire import Frame
from tests.protocol.dialogue import Dialogue, ScriptedHandler, chosen


def replies(frames: list[Frame]) -> list[Any]:
    data = b"".join(heard.payload for heard in frames if heard.kind == FrameType.DATA)
    return [pb.ProcessingResponse.FromString(found) for found in MessageReader(1 << 20, "identity").feed(data)]


def held_stage(held: PendingDecision, **settings: Any) -> Stage:
    return Stage(Dialogue(ScriptedHandler(answer=held), SessionSettings(**settings))).start()


class TestHeld:
    def test_the_answer_leaves_from_a_callback_of_the_loop(self) -> None:
        held = PendingDecision()
        stage = held_stage(held)
        stage.say(stage.call("process"), message(request_headers()), message(request_body(b"x", end=True)))
        held.answer(chosen())
        assert stage.heard() == []
        stage.loop.advance()
        assert [reply.WhichOneof("response") for reply in replies(stage.heard())] == ["request_headers", "request_body"]
        stage.say(half_close())
        assert stage.dialogue.handler.ends == [StreamEnd.DETACHED]

    def test_the_deadline(self) -> None:
        held = PendingDecision()
        stage = held_stage(held, deadline_s=2.0)
        stage.say(stage.call("process"), message(request_headers(end=True)))
        stage.loop.advance(1.9)
        assert stage.heard() == []
        stage.loop.advance(0.2)
        (reply,) = replies(stage.heard())
        assert reply.immediate_response.details == "extproc_decision_timeout"
        held.answer(chosen())
        stage.loop.advance()
        assert [entry[0] for entry in stage.dialogue.handler.told] == ["withdraw", "ended"]

    def test_an_answer_in_the_turn_of_a_reset_is_released(self) -> None:
        held = PendingDecision()
        stage = held_stage(held)
        stage.say(stage.call("process"), message(request_headers(end=True)))
        held.answer(chosen())
        stage.connection.connection_lost(None)
        stage.loop.advance()
        assert [entry[0] for entry in stage.dialogue.handler.told] == ["withdraw", "ended"]

    def test_what_is_too_much_waits_and_gets_no_room(self) -> None:
        held = PendingDecision()
        stage = held_stage(held, max_inspect_bytes=10)
        stage.say(stage.call("process"), message(request_headers()), message(request_body(b"x" * 100)))
        for _ in range(15):
            stage.say(message(request_body(b"y" * 16_000)))
        stage.say(message(request_body(b"", end=True)), half_close())
        assert not [heard for heard in stage.heard() if heard.kind == FrameType.WINDOW_UPDATE]
        assert stage.dialogue.budget.used_bytes - stage.context.partial_bytes <= 200
        held.answer(chosen())
        stage.loop.advance()
        parts = [reply.request_body.response.body_mutation.streamed_response.body for reply in replies(stage.heard())]
        assert parts[1] == b"x" * 100


class TestTokens:
    """A response in full duplex: a message for each token, in and out."""

    def begun(self) -> Stage:
        stage = Stage(Dialogue(ScriptedHandler(wants_body=True))).start()
        headers = pb.ProcessingRequest(response_headers=pb.HttpHeaders()).SerializeToString()
        stage.say(
            stage.call("process"), message(full_duplex()), message(request_body(b"x", end=True)), message(headers)
        )
        stage.heard()
        return stage

    def test_each_comes_back_and_is_shown_to_the_core(self) -> None:
        stage = self.begun()
        stage.say(window_update(1, 1 << 20), window_update(0, 1 << 20))
        for data in (b"one", b"t" * 70_000, b"three"):
            stage.say(*[frame(FrameType.DATA, 0, 1, piece) for piece in cut(message_frame(token(data)))])
        stage.say(message(token(b"", end=True)))
        parts = [reply.response_body.response.body_mutation.streamed_response for reply in replies(stage.heard())]
        assert [(part.body, part.end_of_stream) for part in parts] == [
            (b"one", False),
            (b"t" * 62_000, False),
            (b"t" * 8_000, False),
            (b"three", False),
            (b"", True),
        ]
        told = [entry[2:] for entry in stage.dialogue.handler.told if entry[0] == "body"]
        assert told == [(b"one",), (b"t" * 70_000,), (b"three",), (b"",)]
        assert stage.dialogue.handler.ends == [StreamEnd.COMPLETED]

    def test_they_wait_while_the_peer_takes_no_answers(self) -> None:
        stage = self.begun()
        for _ in range(30):  # 65,535 bytes leave, some 256 kB wait here, and the rest is not even looked at
            stage.say(*[frame(FrameType.DATA, 0, 1, piece) for piece in cut(message_frame(token(b"t" * 15_000)))])
        told = [entry for entry in stage.dialogue.handler.told if entry[0] == "body"]
        assert 20 <= len(told) <= 25
        stage.say(window_update(1, 1 << 20), window_update(0, 1 << 20))
        assert len([entry for entry in stage.dialogue.handler.told if entry[0] == "body"]) == 30
        assert stage.context.partial_bytes == 0

    def test_room_comes_back_in_large_steps(self) -> None:
        stage = self.begun()
        stage.say(window_update(1, 1 << 20), window_update(0, 1 << 20))
        for _ in range(150):
            stage.say(message(token(b"t" * 2000)))
        updates = [heard for heard in stage.heard() if heard.kind == FrameType.WINDOW_UPDATE and heard.stream_id == 1]
        assert 2 <= len(updates) <= 3


def token(data: bytes, *, end: bool = False) -> bytes:
    out: bytes = pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=end)).SerializeToString()
    return out


def cut(data: bytes) -> list[bytes]:
    return [data[start : start + 16_384] for start in range(0, len(data), 16_384)]


def test_access_logs_end_with_the_service() -> None:
    stage = Stage().start()
    stage.say(stage.call("logs"), message(b""))
    assert stage.logs.streams == 1
    stage.logs.close()
    assert stage.logs.streams == 0
    assert stage.status()["grpc-status"] == "0"
    stage.say(stage.call("logs", 3), half_close(3))
    assert stage.logs.streams == 0


def check(name: str) -> bytes:
    data: bytes = health_pb2.HealthCheckRequest(service=name).SerializeToString()
    return data


class TestHealth:
    @pytest.mark.parametrize(
        ("said", "status"),
        [
            (message(check("liveness"), end=True), "0"),
            (message(check("nobody"), end=True), "5"),
            (message(b"\xff", end=True), "3"),
            (message(check("")) + message(check("")), "13"),
            (half_close(), "13"),
        ],
    )
    def test_check(self, said: bytes, status: str) -> None:
        stage = Stage().start()
        stage.say(stage.call("check"), said)
        assert stage.status()["grpc-status"] == status

    def test_watch(self) -> None:
        stage = Stage().start()
        stage.say(stage.call("watch"), message(check(""), end=True))
        stage.health.set_ready(True)
        stage.health.set_ready(True)
        states = [heard.payload[-1] for heard in stage.heard() if heard.kind == FrameType.DATA]
        assert states == [2, 1]
        stage.health.close()
        assert stage.status()["grpc-status"] == "0"
        assert not stage.health._watchers

    @pytest.mark.parametrize("said", [half_close(), message(check("")) + message(check(""))])
    def test_a_watch_has_one_question(self, said: bytes) -> None:
        stage = Stage().start()
        stage.say(stage.call("watch"), said)
        assert stage.status()["grpc-status"] == "13"
