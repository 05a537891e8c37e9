from __future__ import annotations

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2

from extproc.http2.frames import FrameType
from extproc.http2.grpc import MessageReader
from extproc.protocol.seams import Held, StreamEnd
from extproc.protocol.settings import SessionSettings
from tests.edge.native_harness import Stage, half_close, message, request_body, request_headers
from tests.http2.wire import Frame
from tests.protocol.dialogue import Dialogue, Pick, ScriptedCore


def replies(frames: list[Frame]) -> list[Any]:
    data = b"".join(heard.payload for heard in frames if heard.kind == FrameType.DATA)
    return [pb.ProcessingResponse.FromString(found) for found in MessageReader(1 << 20, "identity").feed(data)]


def held_stage(held: Held, **settings: Any) -> Stage:
    return Stage(Dialogue(ScriptedCore(answer=held), SessionSettings(**settings))).start()


class TestHeld:
    def test_the_answer_leaves_from_a_callback_of_the_loop(self) -> None:
        held = Held()
        stage = held_stage(held)
        stage.say(stage.call("process"), message(request_headers()), message(request_body(b"x", end=True)))
        held.answer(Pick())
        assert stage.heard() == []
        stage.loop.advance()
        assert [reply.WhichOneof("response") for reply in replies(stage.heard())] == ["request_headers", "request_body"]
        stage.say(half_close())
        assert stage.dialogue.core.ends == [StreamEnd.DETACHED]

    def test_the_deadline(self) -> None:
        held = Held()
        stage = held_stage(held, deadline_s=2.0)
        stage.say(stage.call("process"), message(request_headers(end=True)))
        stage.loop.advance(1.9)
        assert stage.heard() == []
        stage.loop.advance(0.2)
        (reply,) = replies(stage.heard())
        assert reply.immediate_response.details == "extproc_decision_timeout"
        held.answer(Pick())
        stage.loop.advance()
        assert [entry[0] for entry in stage.dialogue.core.told] == ["withdraw", "ended"]

    def test_an_answer_in_the_turn_of_a_reset_is_released(self) -> None:
        held = Held()
        stage = held_stage(held)
        stage.say(stage.call("process"), message(request_headers(end=True)))
        held.answer(Pick())
        stage.connection.connection_lost(None)
        stage.loop.advance()
        assert [entry[0] for entry in stage.dialogue.core.told] == ["withdraw", "ended"]

    def test_what_is_too_much_waits_and_gets_no_room(self) -> None:
        held = Held()
        stage = held_stage(held, max_inspect_bytes=10)
        stage.say(stage.call("process"), message(request_headers()), message(request_body(b"x" * 100)))
        for _ in range(15):
            stage.say(message(request_body(b"y" * 16_000)))
        stage.say(message(request_body(b"", end=True)), half_close())
        assert not [heard for heard in stage.heard() if heard.kind == FrameType.WINDOW_UPDATE]
        assert stage.dialogue.budget.used_bytes - stage.host.partial_bytes <= 200
        held.answer(Pick())
        stage.loop.advance()
        parts = [reply.request_body.response.body_mutation.streamed_response.body for reply in replies(stage.heard())]
        assert parts[1] == b"x" * 100


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


def test_access_logs_end_with_the_service() -> None:
    stage = Stage().start()
    stage.say(stage.call("logs"), message(b""))
    assert stage.logs.streams == 1
    stage.logs.close()
    assert stage.logs.streams == 0
    assert stage.status()["grpc-status"] == "0"
    stage.say(stage.call("logs", 3), half_close(3))
    assert stage.logs.streams == 0
