from __future__ import annotations

import asyncio
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from extproc.config.schema import TlsConfig
from extproc.edge.native_server import NativeServer
from extproc.edge.native_tls import server_context
from extproc.edge.tls import KeyPair, self_signed
from extproc.errors import ConfigError
from tests.edge.grpc_harness import LIMIT_S, server_config
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


async def test_bad_files_leave_the_last_good_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (self_signed(("localhost",), NOW) for _ in range(2))
    certificate, key = written(tmp_path, "tls", first)
    config = TlsConfig(mode="files", certificate=certificate, private_key=key)
    server = NativeServer(server_config(config), Dialogue().shared, lambda _entry: None)
    await server.start()
    seen = [await greeted(server.grpc_port, client_context())]
    Path(certificate).write_bytes(b"half")
    seen.append(await greeted(server.grpc_port, client_context()))
    assert "the last good ones stay" in caplog.text
    written(tmp_path, "tls", second)
    os.utime(key)
    seen.append(await greeted(server.grpc_port, client_context()))
    certificates = [certificate for _, _, certificate in seen]
    assert certificates[0] == certificates[1] != certificates[2]
    await server.stop(0, 0)


def test_plaintext_has_no_context_and_bad_files_are_said(tmp_path: Path) -> None:
    assert server_context(TlsConfig()) is None
    with pytest.raises(ConfigError, match=r"server\.tls\.certificate"):
        server_context(TlsConfig(mode="files", certificate=str(tmp_path / "none"), private_key="x"))
