"""TLS of the native transport: an `ssl` context with ALPN h2 that follows its files.

A connection keeps the certificate it began with; the files are looked at on every handshake, as with grpc.aio.
"""

from __future__ import annotations

import logging
import ssl
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from extproc.config.schema import TlsConfig
from extproc.edge.tls import CertificateFiles, KeyPair, host_names, read_client_ca, self_signed
from extproc.errors import ConfigError, ConfigProblem

__all__ = ["server_context"]

_log = logging.getLogger(__name__)


def server_context(config: TlsConfig, now: datetime | None = None) -> ssl.SSLContext | None:
    """Return the context of the gRPC port; None for plaintext.

    Raises ConfigError naming the key and the file that cannot be used. `now` dates a self-signed certificate.
    """
    if config.mode == "plaintext":
        return None
    if config.mode == "self-signed":
        return _context(self_signed(host_names(), now or datetime.now(UTC)), read_client_ca(config))
    return _Following(config).context


class _Following:
    """A context that hands every handshake over to the newest good files."""

    def __init__(self, config: TlsConfig) -> None:
        self._files = CertificateFiles(config)
        self._newest = self.context = _context(*self._files.read())
        # Called on every ClientHello, with a server name or without.
        self.context.sni_callback = self._on_hello

    def _on_hello(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        if self._files.changed:
            try:
                self._newest = _context_of(self._files)
                _log.info("TLS files re-read")
            except ConfigError as error:
                _log.warning(
                    "TLS files changed and cannot be used; the last good ones stay", extra={"problem": str(error)}
                )
        if self._newest is not self.context:
            connection.context = self._newest


def _context_of(files: CertificateFiles) -> ssl.SSLContext:
    return _context(*files.read())


def _context(pair: KeyPair, client_ca: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # RFC 9113 9.2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION  # RFC 9113 9.2.1
    # A ticket would outlive the change of a certificate, and connections are few and long.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    # RFC 9113 3.3. Clients that name no protocol are taken for HTTP/2: nothing else is spoken here.
    context.set_alpn_protocols(["h2"])
    try:
        # `ssl` reads a chain from files only: our own copy, so that what was checked is what is used.
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
            certificate.write_bytes(pair.certificate)
            key.touch(mode=0o600)
            key.write_bytes(pair.private_key)
            context.load_cert_chain(certificate, key)
        if client_ca is not None:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
            # As with grpc.aio: what is named is trusted, whether or not its own issuer is named too.
            context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    except (ssl.SSLError, UnicodeDecodeError) as error:
        problem = ConfigProblem("server.tls", f"OpenSSL refuses the certificate: {error}", "check the PEM files")
        raise ConfigError((problem,)) from error
    return context
