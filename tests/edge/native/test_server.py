"""Every test of the grpc.aio edge once more, on the native transport; what only this transport does stands in test_connection."""

from __future__ import annotations

import asyncio
import sys

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.demo.processes import free_ports
from extproc.edge.native import calls as native_calls
from extproc.edge.native.server import NativeServer
from extproc.http2.frames import PREFACE, Flag, FrameType, frame
from extproc.protocol.interfaces import StreamEnd
from extproc.protocol.settings import ResponsePhase, SessionSettings
from tests.edge.grpcio import harness as grpc_harness
from tests.edge.grpcio import test_server as test_grpc_server
from tests.edge.grpcio import test_services, test_stream
from tests.edge.grpcio.harness import LIMIT_S, Gateway, connected, destination, running, until
from tests.edge.grpcio.test_server import (  # noqa: F401 - collected here as well
    TestPorts,
    TestStop,
    test_a_connection_that_grows_old_lets_its_requests_finish_and_ends_its_access_log,
    test_a_message_larger_than_grpcs_default_is_taken,
    test_access_logs_reach_the_sink_and_are_counted,
    test_one_held_stream_does_not_hold_others,
    test_plaintext,
    test_two_thousand_streams_may_be_open,
)
from tests.edge.grpcio.test_services import (  # noqa: F401 - collected here as well
    test_a_watch_tells_every_change_once,
    test_readiness_is_told_and_liveness_is_not,
    test_unknown_names_and_bad_messages,
)
from tests.edge.grpcio.test_stream import (  # noqa: F401 - collected here as well
    TestHeld,
    defect_ends_one_stream,
    test_a_body_in_pieces_comes_back_after_the_decision,
    test_a_broken_protocol_ends_the_stream_with_a_status,
    test_a_client_that_goes_away_releases_everything,
    test_an_answer_of_our_own_ends_the_stream_with_ok,
    test_nginx_gateway_fabric_says_all_at_once_and_reads_to_the_end,
)
from tests.edge.native.harness import full_duplex, message, process_fields, request_headers
from tests.http2.wire import Client, Frame, cut
from tests.protocol.dialogue import Dialogue


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the harness, and the tests that build a server themselves, use this transport."""
    for module in (grpc_harness, test_grpc_server):
        monkeypatch.setattr(module, "GrpcioServer", NativeServer)


def test_the_shared_tests_know_nothing_of_a_transport() -> None:
    assert not hasattr(test_services, "GrpcioServer")
    assert not hasattr(test_stream, "GrpcioServer")


class TestTls(test_grpc_server.TestTls):
    # OpenSSL wants a client's certificate to be one (clientAuth); test_tls has such a pair.
    test_a_client_ca_admits_only_its_own = None  # type: ignore[assignment]


async def test_a_defect_of_ours_ends_this_stream_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await defect_ends_one_stream(native_calls, monkeypatch)
    assert "an ext_proc stream failed" in caplog.text


async def test_a_grpc_client_takes_an_early_end_for_an_end() -> None:
    """No Envoy, but gRPC's own idea of a stream that ends with OK while its client has not said all."""
    d = Dialogue(settings=SessionSettings(response_phase=ResponsePhase.CLOSE, response_sample=0.0))
    async with running(d) as server, connected(server) as channel:
        for _ in range(3):
            gateway = Gateway(channel)
            await gateway.call.write(pb.ProcessingRequest.FromString(full_duplex()))
            await gateway.body(b"one", end=True)
            assert destination(await gateway.hear()) == "10.0.0.1:8000"
            pieces = [(await gateway.hear()).request_body.response.body_mutation.streamed_response for _ in range(2)]
            assert [(piece.body, piece.end_of_stream) for piece in pieces] == [(b"one", False), (b"", True)]
            assert await gateway.hear() is None
            assert await gateway.status() is grpc.StatusCode.OK
        await until(lambda: server.open_streams == 0)
    assert d.handler.ends == [StreamEnd.CLOSED_EARLY] * 3


async def heard(reader: asyncio.StreamReader, kind: FrameType) -> Frame:
    """Read to the next frame of a kind."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            head = await reader.readexactly(9)
            (found,) = cut(head + await reader.readexactly(int.from_bytes(head[:3], "big")))
            if found.kind == kind:
                return found


async def test_a_stream_that_a_peer_begins_before_it_reads_the_goaway_is_served() -> None:
    """What is on its way when a picker goes down must not meet a connection that takes nothing more."""
    d, client = Dialogue(), Client(started=False)
    async with running(d) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.grpc_port)
        writer.write(PREFACE + frame(FrameType.SETTINGS, 0, 0))
        await heard(reader, FrameType.SETTINGS)
        stopping = asyncio.ensure_future(server.stop(0, LIMIT_S))
        await heard(reader, FrameType.GOAWAY)
        last_call = await heard(reader, FrameType.PING)
        # The peer has not read these: it answers the PING after what it has begun.
        writer.write(client.headers(1, process_fields("process")) + message(request_headers(end=True), end=True))
        await heard(reader, FrameType.DATA)
        writer.write(frame(FrameType.PING, Flag.ACK, 0, last_call.payload))
        await heard(reader, FrameType.GOAWAY)
        await asyncio.wait_for(stopping, LIMIT_S)
        writer.close()
    assert ("ended", "detached") in d.counters.seen


async def test_a_peer_that_does_not_answer_the_goaway_keeps_nobody_for_long() -> None:
    async with running(Dialogue()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.grpc_port)
        writer.write(PREFACE + frame(FrameType.SETTINGS, 0, 0))
        await heard(reader, FrameType.SETTINGS)
        await asyncio.wait_for(server.stop(0, 10 * LIMIT_S), LIMIT_S)
        writer.close()


SERVE = """
import os, sys, threading
from extproc.cli import main

def report():
    sys.stdin.readline()
    print(sorted({"grpc", "grpc_health"} & set(sys.modules)), flush=True)
    os._exit(0)

threading.Thread(target=report, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""


async def test_a_picker_that_decides_has_no_grpc_in_memory() -> None:
    port, *others = map(str, free_ports(4))
    options = ("--host", "--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port", "--endpoint")
    values = ("127.0.0.1", port, *others, "127.0.0.1:1")
    argv = ("serve", *(word for pair in zip(options, values, strict=True) for word in pair))
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, *argv, stdin=pipe, stdout=pipe)
    try:
        async with asyncio.timeout(LIMIT_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
            gateway = Gateway(channel)
            await gateway.headers()
            await gateway.body(b'{"model": "m", "prompt": "x"}', end=True)
            assert destination(await gateway.hear()) == "127.0.0.1:1"
            said, _ = await child.communicate(b"report\n")
            assert said.decode().splitlines()[-1] == "[]", "after what the log has said"
            assert child.returncode == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
