"""TLS of the grpc.aio transport: gRPC's credentials, which follow their files."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import grpc

from extproc.config.schema import TlsConfig
from extproc.edge.process.tls import CertificateFiles, KeyPair, host_names, read_client_ca, self_signed
from extproc.errors import ConfigError

__all__ = ["ServerTls"]

_log = logging.getLogger(__name__)


class ServerTls:
    """How the gRPC port is secured; where that is by files, gRPC asks `reload` at every handshake."""

    def __init__(self, config: TlsConfig, now: datetime | None = None) -> None:
        """Raise ConfigError naming the key and the file that cannot be used. `now` dates a self-signed certificate."""
        self._config = config
        self._files = CertificateFiles(config)
        self.credentials: grpc.ServerCredentials | None = None
        """What the port is opened with; None: plaintext."""
        if config.mode == "self-signed":
            pair = self_signed(host_names(), now or datetime.now(UTC))
            initial = _configuration(pair, read_client_ca(config))
            self.credentials = grpc.dynamic_ssl_server_credentials(initial, lambda: None, bool(config.client_ca))
        elif config.mode == "files":
            initial = _configuration(*self._files.read())
            self.credentials = grpc.dynamic_ssl_server_credentials(initial, self.reload, bool(config.client_ca))

    def read_again(self) -> str:
        """Check the files, and have the next handshake read them, changed or not; return the result for the log."""
        if self._config.mode != "files":
            return f"none ({self._config.mode})"
        try:
            CertificateFiles(self._config).read()
        except ConfigError as error:
            return f"refused, the last good ones stay: {error}"
        self._files = CertificateFiles(self._config)
        return "read"

    def reload(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new files if they changed and can be used; else None, and the last good ones stay.

        gRPC calls it on a thread of its own. Files that are half written are tried again when they change again.
        """
        try:
            if not self._files.changed:
                return None
            loaded = _configuration(*self._files.read())
        except ConfigError as error:
            _log.warning("TLS files changed and cannot be used; the last good ones stay", extra={"problem": str(error)})
            return None
        _log.info("TLS files re-read", extra={"certificate": self._config.certificate})
        return loaded


def _configuration(pair: KeyPair, client_ca: bytes | None) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.private_key, pair.certificate)], client_ca)
