from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from extproc.config.schema import TlsConfig
from extproc.edge.native.server import NativeServer
from extproc.edge.native.tls import ServerTls, TlsListener
from extproc.edge.process import listen
from extproc.edge.process.listen import ConnectionBounds
from extproc.edge.process.tls import CertificateFiles, KeyPair, self_signed
from extproc.errors import ConfigError
from extproc.http2.frames import PREFACE, FrameType, frame
from extproc.http2.grpc import OK_TRAILERS
from extproc.protocol.settings import ResponsePhase, SessionSettings
from tests.edge.grpcio.harness import LIMIT_S, server_config, until
from tests.edge.native.harness import PATHS, full_duplex, message, request_body
from tests.http2.wire import Client, cut
from tests.protocol.dialogue import Dialogue

NOW = datetime.now(UTC)


def client_pair() -> KeyPair:
    """Make a certificate for clients, which is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(NOW + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False)
        .sign(key, SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return KeyPair(certificate.public_bytes(pem), key.private_bytes(pem, pkcs8, serialization.NoEncryption()))


def written(folder: Path, name: str, pair: KeyPair) -> tuple[str, str]:
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    certificate.write_bytes(pair.certificate)
    key.write_bytes(pair.private_key)
    return str(certificate), str(key)


def client_context(*alpn: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(alpn)
    return context


async def greeted(port: int, context: ssl.SSLContext) -> tuple[bytes, str | None, bytes]:
    """Connect; return the type of the first frame, the protocol agreed on and the certificate."""
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            first = await reader.readexactly(9)
            tls = writer.get_extra_info("ssl_object")
            return first[3:4], tls.selected_alpn_protocol(), tls.getpeercert(binary_form=True)
        finally:
            writer.transport.abort()


@pytest.mark.parametrize(("offered", "agreed"), [(("h2",), "h2"), ((), None), (("http/1.1", "h2"), "h2")])
async def test_alpn(offered: tuple[str, ...], agreed: str | None) -> None:
    server = NativeServer(server_config(TlsConfig(mode="self-signed")), Dialogue().shared, lambda _entry: None)
    await server.start()
    kind, protocol, _ = await greeted(server.grpc_port, client_context(*offered))
    assert (kind, protocol) == (b"\x04", agreed)
    await server.stop(0, 0)


async def test_clients_must_be_known_where_a_ca_is_named(tmp_path: Path) -> None:
    own, known, stranger = self_signed(("localhost",), NOW), client_pair(), client_pair()
    certificate, key = written(tmp_path, "tls", own)
    ca, _ = written(tmp_path, "known", known)
    config = TlsConfig(mode="files", certificate=certificate, private_key=key, client_ca=ca)
    server = NativeServer(server_config(config), Dialogue().shared, lambda _entry: None)
    await server.start()
    good = client_context("h2")
    good.load_cert_chain(*written(tmp_path, "known", known))
    assert (await greeted(server.grpc_port, good))[0] == b"\x04"
    bad = client_context("h2")
    bad.load_cert_chain(*written(tmp_path, "stranger", stranger))
    for context in (bad, client_context("h2")):
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await greeted(server.grpc_port, context)
    await server.stop(0, 0)


async def test_bad_files_leave_the_last_good_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No handshake is needed for a change to be noticed; and the loop reads no file."""
    caplog.set_level(logging.INFO)
    loop_thread = threading.get_ident()
    read = CertificateFiles.read

    def noted(files: CertificateFiles) -> Any:
        assert server.grpc_port == 0 or threading.get_ident() != loop_thread
        return read(files)

    monkeypatch.setattr(CertificateFiles, "read", noted)
    first, second = (self_signed(("localhost",), NOW) for _ in range(2))
    certificate, key = written(tmp_path, "tls", first)
    config = TlsConfig(mode="files", certificate=certificate, private_key=key)
    server = NativeServer(server_config(config), Dialogue().shared, lambda _entry: None)
    await server.start()
    monkeypatch.setattr("extproc.edge.native.tls._CHECK_S", 0.01)
    seen = [await greeted(server.grpc_port, client_context())]
    following = asyncio.ensure_future(server.follow_certificates())
    Path(certificate).write_bytes(b"half")
    async with asyncio.timeout(30):
        while "the last good ones stay" not in caplog.text:
            await asyncio.sleep(0.01)
    seen.append(await greeted(server.grpc_port, client_context()))
    written(tmp_path, "tls", second)
    os.utime(key)
    async with asyncio.timeout(30):
        while "TLS files re-read" not in caplog.text:
            await asyncio.sleep(0.01)
    seen.append(await greeted(server.grpc_port, client_context()))
    assert not following.done()
    following.cancel()
    certificates = [certificate for _, _, certificate in seen]
    assert certificates[0] == certificates[1] != certificates[2]
    await server.stop(0, 0)


def test_plaintext_has_no_context_and_bad_files_are_said(tmp_path: Path) -> None:
    assert ServerTls(TlsConfig()).context is None
    with pytest.raises(ConfigError, match=r"server\.tls\.certificate"):
        ServerTls(TlsConfig(mode="files", certificate=str(tmp_path / "none"), private_key="x"))


def broken(*_: object, **__: object) -> Any:
    raise FileNotFoundError(2, "No usable temporary directory found")


class TestWhereFilesCannotBeWritten:
    def test_a_key_lies_in_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "TemporaryDirectory", broken)
        monkeypatch.setattr(tempfile, "mkdtemp", broken)
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert ServerTls(TlsConfig(mode="self-signed")).context is not None
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    @pytest.mark.parametrize("missing", [True, False])
    def test_temporary_files_do_where_there_are_none_in_memory(
        self, missing: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_memory_files(monkeypatch, missing=missing)
        assert ServerTls(TlsConfig(mode="self-signed")).context is not None

    async def test_neither(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        first, second = (self_signed(("localhost",), NOW) for _ in range(2))
        certificate, key = written(tmp_path, "tls", first)
        config = TlsConfig(mode="files", certificate=certificate, private_key=key)
        server = NativeServer(server_config(config), Dialogue().shared, lambda _entry: None)
        await server.start()
        seen = [await greeted(server.grpc_port, client_context())]
        monkeypatch.setattr(tempfile, "TemporaryDirectory", broken)
        without_memory_files(monkeypatch)
        with pytest.raises(ConfigError, match="cannot be passed to OpenSSL"):
            ServerTls(config)
        written(tmp_path, "tls", second)
        os.utime(key, ns=(1, 1))
        assert "the last good ones stay" in await asyncio.to_thread(server.read_certificates_again)
        seen.append(await greeted(server.grpc_port, client_context()))
        assert seen[0] == seen[1]
        await server.stop(0, 0)


def without_memory_files(monkeypatch: pytest.MonkeyPatch, *, missing: bool = True) -> None:
    if missing:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", broken)


@contextlib.asynccontextmanager
async def listening(bound: socket.socket, told: list[Any], handshake_s: float = 10.0) -> AsyncIterator[TlsListener]:
    context = ServerTls(TlsConfig(mode="self-signed")).context
    assert context is not None
    listener = TlsListener(
        bound, context, Hello, handshake_s, lambda *what: told.append(what), ConnectionBounds("grpc")
    )
    try:
        yield listener
    finally:
        listener.close()
        listener.close()


class Hello(asyncio.Protocol):
    """Says one frame header."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"abcdefghi")  # type: ignore[attr-defined]


class Exhausted(socket.socket):
    """A listening socket for which there is no descriptor at first."""

    refusals = 1

    def accept(self) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def port_of(bound: socket.socket) -> int:
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    port: int = bound.getsockname()[1]
    return port


def on_every_loop(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    for new_loop in loops():
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(run())


class TestListener:
    def test_handshakes_that_fail_are_told_of(self) -> None:
        async def run() -> None:
            told: list[Any] = []
            names = []
            # Only what never comes may take too long: the others have all the time a busy machine may need.
            for said, handshake_s in ((PREFACE, LIMIT_S), (b"\x16", 0.05)):
                bound = socket.socket()
                port = port_of(bound)
                async with asyncio.timeout(LIMIT_S), listening(bound, told, handshake_s):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    names.append(writer.get_extra_info("sockname"))
                    writer.write(said)
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
                    writer.transport.abort()
                    if handshake_s == LIMIT_S:
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()  # a probe of the port
                        assert (await greeted(port, client_context()))[0] == b"d"
                    await until(lambda: len(told) == len(names))
            assert [(how, peer) for how, peer, _ in told] == [("failed", names[0]), ("timeout", names[1])]
            assert "SSL" in told[0][2]

        on_every_loop(run)

    def test_without_descriptors_it_goes_on_a_little_later(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(listen, "_RETRY_S", 0.02)

        async def run() -> None:
            bound = Exhausted()
            port = port_of(bound)
            async with listening(bound, []):
                assert (await greeted(port, client_context()))[0] == b"d"

        on_every_loop(run)
        assert caplog.text.count("cannot accept a connection") == len(loops())

    def test_its_end_ends_handshakes_and_retries(self) -> None:
        async def run() -> None:
            told: list[Any] = []
            bound = socket.socket()
            port = port_of(bound)
            async with asyncio.timeout(LIMIT_S):
                async with listening(bound, told) as listener:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    await until(lambda: bool(listener._handshakes))
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.transport.abort()
                await until(lambda: not listener._handshakes)
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", port)
                bound = Exhausted()
                port = port_of(bound)
                async with listening(bound, told) as listener:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    await until(lambda: listener._retry is not None)
                writer.transport.abort()
                assert listener._retry is not None
                assert listener._retry.cancelled()
            assert told == []

        on_every_loop(run)


async def records(port: int, said: bytes, until_end: bytes) -> list[bytes]:
    """Say something over TLS; return what each record of the answer holds, up to the one that ends with `until_end`."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_context("h2").wrap_bio(incoming, outgoing)
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def record() -> None:
            head = await reader.readexactly(5)
            incoming.write(head + await reader.readexactly(int.from_bytes(head[3:5], "big")))

        try:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
                    await record()
            tls.write(said)
            writer.write(outgoing.read())
            found: list[bytes] = []
            while not found or not found[-1].endswith(until_end):
                await record()
                with contextlib.suppress(ssl.SSLWantReadError):
                    found.append(tls.read(1 << 16))
            return found
        finally:
            writer.transport.abort()


def loops() -> list[Any]:
    try:
        import uvloop
    except ImportError:
        return [asyncio.new_event_loop]
    return [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("new_loop", loops())
def test_the_end_of_a_body_and_of_its_stream_are_one_record(new_loop: Any) -> None:
    """What makes an early end safe on TLS: a record is read whole, or not yet."""
    settings = SessionSettings(response_phase=ResponsePhase.CLOSE, response_sample=0.0)

    async def run() -> list[bytes]:
        dialogue = Dialogue(settings=settings)
        server = NativeServer(server_config(TlsConfig(mode="self-signed")), dialogue.shared, lambda _entry: None)
        await server.start()
        try:
            fields = ((":path", PATHS["process"]), ("content-type", "application/grpc"))
            client = Client(started=False)
            said = [PREFACE + frame(FrameType.SETTINGS, 0, 0)]
            for stream_id in (1, 3, 5):
                head = ((":method", "POST"), (":scheme", "http"), *fields, ("te", "trailers"))
                said += [client.headers(stream_id, head), message(full_duplex(), stream_id)]
                said.append(message(request_body(bytes(9000), end=True), stream_id))
            return await records(server.grpc_port, b"".join(said), OK_TRAILERS)
        finally:
            await server.stop(0, 0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        found = runner.run(run())
    ends = [(heard.kind, heard.flags, heard.stream_id) for heard in cut(found[-1])]
    assert ends == [(kind, flags, number) for number in (1, 3, 5) for kind, flags in ((0, 0), (1, 5))]
    assert len(found[-1]) <= 3 * 60
