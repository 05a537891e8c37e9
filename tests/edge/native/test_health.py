from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from extproc.http2.frames import FrameType
from tests.edge.native.harness import Stage, half_close, message


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
