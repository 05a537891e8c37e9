from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import grpc
import msgspec
import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2

from extproc.config.schema import Seconds, TlsConfig
from extproc.edge.grpcio.server import GrpcioServer
from extproc.edge.process.tls import self_signed
from extproc.errors import ConfigError
from extproc.protocol.interfaces import PendingDecision, StreamEnd
from extproc.protocol.outcome import LogEntry
from tests.edge.grpcio.harness import (
    ACCESS_LOGS,
    LIMIT_S,
    Gateway,
    connected,
    destination,
    running,
    server_config,
    until,
)
from tests.protocol.dialogue import Dialogue, ScriptedHandler, chosen


async def asked(channel: grpc.aio.Channel) -> str:
    """Send one small request and return its destination."""
    gateway = Gateway(channel)
    await gateway.headers(end=True)
    found = destination(await gateway.hear())
    await gateway.half_close()
    assert await gateway.hear() is None
    assert await gateway.status() is grpc.StatusCode.OK
    return found


async def test_plaintext() -> None:
    async with running(Dialogue()) as server, connected(server) as channel:
        assert await asked(channel) == "10.0.0.1:8000"
        assert server.open_streams == 0


async def test_a_message_larger_than_grpcs_default_is_taken() -> None:
    d = Dialogue()
    async with running(d) as server, connected(server) as channel:
        gateway = Gateway(channel)
        await gateway.headers(mode=2)
        await gateway.hear()
        await gateway.body(bytes(20_000_000), end=True)
        assert (await gateway.hear()).HasField("request_body")
    assert not d.handler.asks[0].complete


class TestTls:
    async def test_self_signed(self) -> None:
        tls = TlsConfig(mode="self-signed")
        async with running(Dialogue(), tls=tls) as server, connected(server) as channel:
            # Plaintext to a TLS port gets nowhere.
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asked(channel)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE

    async def test_files_change_while_running(self, tmp_path: Path) -> None:
        first, second = (self_signed(("localhost",), datetime.now(UTC)) for _ in range(2))
        certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
        certificate.write_bytes(first.certificate)
        key.write_bytes(first.private_key)
        tls = TlsConfig(mode="files", certificate=str(certificate), private_key=str(key))
        async with running(Dialogue(), tls=tls) as server:
            async with connected(server, grpc.ssl_channel_credentials(first.certificate)) as channel:
                await asked(channel)
                certificate.write_bytes(second.certificate)
                key.write_bytes(second.private_key)
                assert await asyncio.to_thread(server.read_certificates_again) == "read"
                await asked(channel)  # a connection keeps the certificate it began with
            async with connected(server, grpc.ssl_channel_credentials(second.certificate)) as channel:
                await asked(channel)

    async def test_a_client_ca_admits_only_its_own(self, tmp_path: Path) -> None:
        own, client, stranger = (self_signed(("localhost",), datetime.now(UTC)) for _ in range(3))
        for name, data in (("tls.crt", own.certificate), ("tls.key", own.private_key), ("ca.crt", client.certificate)):
            (tmp_path / name).write_bytes(data)
        tls = TlsConfig(
            mode="files",
            certificate=str(tmp_path / "tls.crt"),
            private_key=str(tmp_path / "tls.key"),
            client_ca=str(tmp_path / "ca.crt"),
        )
        async with running(Dialogue(), tls=tls) as server:
            good = grpc.ssl_channel_credentials(own.certificate, client.private_key, client.certificate)
            async with connected(server, good) as channel:
                await asked(channel)
            for bad in (
                grpc.ssl_channel_credentials(own.certificate),
                grpc.ssl_channel_credentials(own.certificate, stranger.private_key, stranger.certificate),
            ):
                async with connected(server, bad) as channel:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await asked(channel)

    async def test_a_bad_file_stops_the_start(self, tmp_path: Path) -> None:
        tls = TlsConfig(mode="files", certificate=str(tmp_path / "none"), private_key="x")
        with pytest.raises(ConfigError, match=r"server\.tls\.certificate"):
            await GrpcioServer(server_config(tls), Dialogue().shared, lambda _entry: None).start()


class TestPorts:
    async def test_a_port_in_use_is_said(self) -> None:
        async with running(Dialogue()) as server:
            second = GrpcioServer(server_config(grpc_port=server.grpc_port), Dialogue().shared, lambda _entry: None)
            with pytest.raises(ConfigError, match=r"server\.grpc_port: cannot listen on 127\.0\.0\.1"):
                await second.start()
            await second.stop()

    async def test_a_health_port_in_use_is_said(self) -> None:
        async with running(Dialogue()) as server:
            config = type(server_config())(host="127.0.0.1", grpc_port=0, health_port=server.health_port)
            with pytest.raises(ConfigError, match=r"server\.health_port: cannot listen"):
                await GrpcioServer(config, Dialogue().shared, lambda _entry: None).start()

    async def test_ipv6_hosts(self) -> None:
        config = type(server_config())(host="::1", grpc_port=0, health_port=0)
        server = GrpcioServer(config, Dialogue().shared, lambda _entry: None)
        try:
            await server.start()
        except ConfigError:
            pytest.skip("no IPv6 here")
        assert server.grpc_port != server.health_port
        await server.stop(0, 0)


class TestStop:
    async def test_streams_may_finish_and_others_are_cut(self) -> None:
        d = Dialogue()
        async with running(d) as server, connected(server) as channel:
            logs = channel.stream_unary(ACCESS_LOGS)()
            await logs.write(b"")
            await until(lambda: server.access_log.streams == 1)
            gateway = Gateway(channel)
            await gateway.headers()
            await until(lambda: server.open_streams == 1)
            stopping = asyncio.ensure_future(server.stop(0, LIMIT_S))
            await until(lambda: not server.health.ready)
            await gateway.body(b"x", end=True)
            assert destination(await gateway.hear()) == "10.0.0.1:8000"
            await gateway.hear()
            await gateway.half_close()
            assert await gateway.status() is grpc.StatusCode.OK
            await asyncio.wait_for(stopping, LIMIT_S / 2)
            assert await logs == b""
            await server.stop(0, 0)
        assert d.handler.ends == [StreamEnd.DETACHED]

    async def test_what_outlasts_the_grace_period_is_cut_and_released(self) -> None:
        d = Dialogue()
        async with running(d) as server, connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers()
            await gateway.body(b"half")
            await until(lambda: d.budget.used_bytes > 0)
            await server.stop(0, 0)
            await until(lambda: server.open_streams == 0)
        assert d.budget.used_bytes == 0
        assert ("ended", "undecided") in d.counters.seen

    async def test_new_connections_are_refused_after_the_drain(self) -> None:
        async with running(Dialogue()) as server:
            await server.stop(0, 0)
            async with connected(server) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await asked(channel)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE

    async def test_the_delays_are_the_configurations(self) -> None:
        config = type(server_config())(host="127.0.0.1", grpc_port=0, health_port=0, drain_delay=0, grace_period=0)  # type: ignore[arg-type]
        server = GrpcioServer(config, Dialogue().shared, lambda _entry: None)
        await server.start()
        await server.stop()
        assert server.open_streams == 0


async def test_access_logs_reach_the_sink_and_are_counted() -> None:
    got: list[LogEntry] = []
    d = Dialogue()
    async with running(d, sink=got.append) as server, connected(server) as channel:
        message = als_pb2.StreamAccessLogsMessage()
        entry = accesslog_pb2.HTTPAccessLogEntry()
        entry.common_properties.metadata.filter_metadata["envoy.lb"].update({"x-extproc-decision": "d1"})
        message.http_logs.log_entry.append(entry)
        call = channel.stream_unary(ACCESS_LOGS)()
        await call.write(message.SerializeToString())
        await until(lambda: len(got) == 1)
        assert server.access_log.streams == 1
        await call.done_writing()
        assert await call == b""
        await until(lambda: server.access_log.streams == 0)
    assert [value for kind, value in d.counters.seen if kind == "log_streams"] == [1, 0]


async def test_a_connection_that_grows_old_lets_its_requests_finish_and_ends_its_access_log() -> None:
    d = Dialogue()
    config = msgspec.structs.replace(server_config(), max_connection_age=Seconds(0.05))
    server = GrpcioServer(config, d.shared, lambda _entry: None)
    await server.start()
    try:
        async with connected(server) as channel:
            gateway = Gateway(channel)
            await gateway.headers()
            log = channel.stream_unary(ACCESS_LOGS)()
            await log.write(b"")
            assert await log == b""
            await until(lambda: server.access_log.streams == 0)
            await gateway.body(b"x", end=True)
            assert destination(await gateway.hear()) == "10.0.0.1:8000"
            await gateway.half_close()
            assert await asked(channel) == "10.0.0.1:8000"
    finally:
        await server.stop(0, 0)


async def test_two_thousand_streams_may_be_open() -> None:
    d = Dialogue()
    async with running(d) as server, connected(server) as channel:
        gateways = [Gateway(channel) for _ in range(2000)]
        for gateway in gateways:
            await gateway.headers()
        await until(lambda: server.open_streams == 2000)
        for gateway in gateways:
            await gateway.body(b"x", end=True)
        for gateway in gateways:
            assert destination(await gateway.hear()) == "10.0.0.1:8000"
            gateway.call.cancel()
        await until(lambda: server.open_streams == 0)
    assert len(d.handler.ends) == 2000
    assert d.budget.used_bytes == 0


async def test_one_held_stream_does_not_hold_others() -> None:
    held = PendingDecision()
    answers = iter([held, chosen()])
    d = Dialogue(ScriptedHandler(answer=lambda _ask: next(answers)))
    async with running(d) as server, connected(server) as channel:
        waiting = Gateway(channel)
        await waiting.headers(end=True)
        await until(lambda: len(d.handler.asks) == 1)
        assert await asked(channel) == "10.0.0.1:8000"
        held.answer(chosen("10.0.0.2:8000", "d2"))
        assert destination(await waiting.hear()) == "10.0.0.2:8000"
