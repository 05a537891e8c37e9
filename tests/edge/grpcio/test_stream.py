from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.edge.envoy_wire.codec import decode, encode
from extproc.edge.grpcio import stream as stream_module
from extproc.errors import NoEndpointError
from extproc.protocol.events import Direction, RequestBody
from extproc.protocol.interfaces import PendingDecision, StreamEnd
from extproc.protocol.replies import BodyReply, DecisionReply
from extproc.protocol.request_buffer import BodyBudget
from extproc.protocol.session import Session
from extproc.protocol.settings import SessionSettings
from tests.edge.grpcio.harness import PROCESS, Gateway, connected, destination, running, until
from tests.protocol.dialogue import Dialogue, ScriptedHandler, chosen


async def test_a_body_in_pieces_comes_back_after_the_decision() -> None:
    d = Dialogue()
    async with running(d) as server, connected(server) as channel:
        gateway = Gateway(channel)
        await gateway.headers()
        await gateway.body(b"a" * 70_000)
        await gateway.body(b"b", end=True)
        assert destination(await gateway.hear()) == "10.0.0.1:8000"
        parts = [(await gateway.hear()).request_body.response.body_mutation.streamed_response for _ in range(3)]
        assert [(len(part.body), part.end_of_stream) for part in parts] == [(62_000, False), (8_000, False), (1, True)]
        await gateway.half_close()
        assert await gateway.hear() is None
    assert d.handler.ends == [StreamEnd.DETACHED]
    assert d.counters.seen == [("opened",), ("ended", "detached")]


async def test_nginx_gateway_fabric_says_all_at_once_and_reads_to_the_end() -> None:
    async with running(Dialogue()) as server, connected(server) as channel:
        gateway = Gateway(channel)
        await gateway.headers(mode=None, path="")
        await gateway.body(b"x" * 200_000, end=True)
        await gateway.half_close()
        replies = []
        while (reply := await gateway.hear()) is not None:
            replies.append(reply)
        assert destination(replies[0]) == "10.0.0.1:8000"
        assert sum(len(r.request_body.response.body_mutation.streamed_response.body) for r in replies[1:]) == 200_000
        assert await gateway.status() is grpc.StatusCode.OK


async def test_an_answer_of_our_own_ends_the_stream_with_ok() -> None:
    d = Dialogue(ScriptedHandler(answer=NoEndpointError("none")))
    async with running(d) as server, connected(server) as channel:
        gateway = Gateway(channel)
        await gateway.headers()
        await gateway.body(b"x", end=True)
        assert (await gateway.hear()).immediate_response.status.code == 503
        assert await gateway.hear() is None
        assert await gateway.status() is grpc.StatusCode.OK
    assert d.counters.seen == [("opened",), ("refused", 503, "no_endpoint"), ("ended", "refused")]


async def test_a_client_that_goes_away_releases_everything() -> None:
    d = Dialogue()
    async with running(d) as server, connected(server) as channel:
        gateway = Gateway(channel)
        await gateway.headers()
        await gateway.body(b"half")
        await until(lambda: d.budget.used_bytes > 0)
        gateway.call.cancel()
        await until(lambda: server.open_streams == 0)
    assert d.budget.used_bytes == 0


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (pb.ProcessingRequest(request_body=pb.HttpBody()).SerializeToString(), "RequestBody while idle"),
        (b"\xff\xff", "malformed"),
    ],
)
async def test_a_broken_protocol_ends_the_stream_with_a_status(
    data: bytes, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    d = Dialogue()
    async with running(d) as server, connected(server) as channel:
        call = channel.stream_stream(PROCESS)()
        await call.write(data)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: server.open_streams == 0)
    assert d.counters.seen == [("opened",), ("protocol_error", kind), ("ended", "undecided")]
    assert "broke the ext_proc protocol" in caplog.text


async def test_a_defect_of_ours_ends_this_stream_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await defect_ends_one_stream(stream_module, monkeypatch)
    assert "an ext_proc stream failed" in caplog.text


async def defect_ends_one_stream(edge: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an edge fail to write an answer; its next stream is served."""
    d = Dialogue()
    monkeypatch.setattr(edge, "encode", lambda reply: 1 / 0)
    async with running(d) as server, connected(server) as channel:
        gateway = Gateway(channel)
        await gateway.headers(end=True)
        assert await gateway.status() is grpc.StatusCode.INTERNAL
        monkeypatch.setattr(edge, "encode", encode)
        second = Gateway(channel)
        await second.headers(end=True)
        assert destination(await second.hear()) == "10.0.0.1:8000"
    assert ("internal", "stream") in d.counters.seen
    assert d.handler.ends[0] is StreamEnd.DETACHED


class TestHeld:
    """The decision waits; the stream goes on."""

    async def test_the_answer_comes_out_and_the_stream_goes_on(self) -> None:
        held = PendingDecision()
        d = Dialogue(ScriptedHandler(answer=held))
        async with running(d) as server, connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers()
            await gateway.body(b"x", end=True)
            await until(lambda: len(d.handler.asks) == 1)
            held.answer(chosen())
            assert destination(await gateway.hear()) == "10.0.0.1:8000"
            assert (await gateway.hear()).HasField("request_body")
            await gateway.say(response_headers=pb.HttpHeaders())
            assert (await gateway.hear()).HasField("response_headers")
            await gateway.half_close()
            assert await gateway.hear() is None

    async def test_what_comes_meanwhile_is_taken(self) -> None:
        held = PendingDecision()
        d = Dialogue(ScriptedHandler(answer=held), SessionSettings(max_inspect_bytes=10_000))
        async with running(d) as server, connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers(mode=1)
            await until(lambda: len(d.handler.asks) == 1)
            await gateway.body(b"1")
            await gateway.body(b"2", end=True)
            held.answer(chosen())
            assert destination(await gateway.hear()) == "10.0.0.1:8000"
            assert (await gateway.hear()).HasField("request_body")
            assert (await gateway.hear()).HasField("request_body")

    async def test_a_held_request_that_is_too_large_is_not_read_further(self) -> None:
        held = PendingDecision()
        d = Dialogue(ScriptedHandler(answer=held), SessionSettings(max_inspect_bytes=10), BodyBudget(1 << 30))
        async with running(d) as server, connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers()
            await gateway.body(b"x" * 100)
            await gateway.body(b"y", end=True)
            await until(lambda: len(d.handler.asks) == 1)
            held.answer(chosen())
            bodies = b""
            assert destination(await gateway.hear()) == "10.0.0.1:8000"
            while not (
                part := (await gateway.hear()).request_body.response.body_mutation.streamed_response
            ).end_of_stream:
                bodies += part.body
            assert bodies + part.body == b"x" * 100 + b"y"

    async def test_a_refusal_ends_the_stream(self) -> None:
        held = PendingDecision()
        d = Dialogue(ScriptedHandler(answer=held))
        async with running(d) as server, connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers(end=True)
            await until(lambda: len(d.handler.asks) == 1)
            held.answer(NoEndpointError("none"))
            assert (await gateway.hear()).immediate_response.status.code == 503
            assert await gateway.hear() is None

    async def test_the_deadline_answers(self) -> None:
        held = PendingDecision()
        d = Dialogue(ScriptedHandler(answer=held), SessionSettings(deadline_s=0.01))
        async with running(d) as server, connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers(end=True)
            assert (await gateway.hear()).immediate_response.details == "extproc_decision_timeout"
            assert await gateway.hear() is None
            await until(lambda: server.open_streams == 0)
            held.answer(chosen())
        assert [entry[0] for entry in d.handler.told] == ["withdraw", "ended"]
        assert d.handler.ends == [StreamEnd.ABORTED]

    async def test_a_half_close_without_protocol_config_waits_for_the_answer(self) -> None:
        held = PendingDecision()
        d = Dialogue(ScriptedHandler(answer=held))
        async with running(d) as server, connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers(mode=None, end=True)
            await gateway.half_close()
            await until(lambda: len(d.handler.asks) == 1)
            held.answer(chosen())
            assert destination(await gateway.hear()) == "10.0.0.1:8000"
            assert await gateway.hear() is None

    async def test_a_client_that_goes_away_withdraws_the_question(self) -> None:
        held = PendingDecision()
        d = Dialogue(ScriptedHandler(answer=held))
        async with running(d) as server, connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers(end=True)
            await until(lambda: len(d.handler.asks) == 1)
            gateway.call.cancel()
            await until(lambda: server.open_streams == 0)
            held.answer(chosen())
        assert [entry[0] for entry in d.handler.told] == ["withdraw", "ended"]


class FakeContext:
    """A stream whose read never returns, for what no real client can time."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def peer(self) -> str:
        return "fake"

    async def read(self) -> Any:
        await asyncio.Event().wait()

    async def write(self, data: bytes) -> None:
        self.written.append(data)


async def test_an_answer_in_the_turn_of_a_cancellation_is_released() -> None:
    held = PendingDecision()
    d = Dialogue(ScriptedHandler(answer=held))
    session = Session(d.shared)
    session.receive(
        decode(pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True)).SerializeToString()),
        0.0,
    )
    wait = stream_module._Wait(session, held, FakeContext(), lambda: 0.0, BodyBudget(1 << 30))
    running_wait = asyncio.ensure_future(wait.run())
    await asyncio.sleep(0)
    held.answer(chosen())
    running_wait.cancel()
    await asyncio.gather(running_wait, return_exceptions=True)
    assert [entry[0] for entry in d.handler.told] == ["withdraw", "ended"]


async def test_a_transport_that_fails_is_a_lost_stream() -> None:
    class Broken(FakeContext):
        async def read(self) -> Any:
            raise grpc.aio.InternalError("gone")

    d = Dialogue()
    await stream_module.serve_stream(d.shared, Broken(), lambda: 0.0)
    assert d.counters.seen == [("opened",), ("ended", "undecided")]


class _Unread:
    """A peer that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()

    async def write(self, _data: bytes) -> None:
        await self.reads.wait()


async def test_a_body_counts_as_held_until_the_peer_has_taken_it() -> None:
    peer, budget = _Unread(), BodyBudget(1)
    replaced = DecisionReply(RequestBody, chosen(), data=b"x" * 40)
    replies: list[Any] = [replaced, BodyReply(Direction.REQUEST, b"x" * 60), BodyReply(Direction.REQUEST)]
    sending = asyncio.ensure_future(stream_module._send(replies, peer, budget))
    await until(lambda: budget.used_bytes == 100)
    assert budget.exceeded
    peer.reads.set()
    assert await sending is False
    assert budget.used_bytes == 0
