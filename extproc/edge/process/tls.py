"""Certificates of the gRPC port: files, checked when they are read, or a self-signed one made at start.

Gateways that do not verify (Envoy AI Gateway, kgateway, agentgateway) speak TLS to any certificate, hence `self-signed`.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from extproc.config.schema import TlsConfig
from extproc.errors import ConfigError, ConfigProblem

__all__ = ["CertificateFiles", "KeyPair", "host_names", "read_client_ca", "self_signed"]

_VALID_DAYS: Final = 3650
_HALF_PEM: Final = "write matching PEM files; in Kubernetes mount the Secret as a volume"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate chain and its private key, both PEM."""

    certificate: bytes
    private_key: bytes


class CertificateFiles:
    """Certificate, key and client CA on disk; `changed` is checked on every handshake (three `stat` calls)."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._seen: tuple[tuple[int, int, int], ...] = ()

    @property
    def changed(self) -> bool:
        """Whether a file differs from the one that was read last."""
        return self._stamps() != self._seen

    def read(self) -> tuple[KeyPair, bytes | None]:
        """Read and check the files: certificate and key, and the client CA. Raises ConfigError."""
        # Stamped before reading: a change in between is seen as one, and read again.
        self._seen = self._stamps()
        certificate = _read(self._config.certificate, "server.tls.certificate")
        key = _read(self._config.private_key, "server.tls.private_key")
        _check_pair(certificate, key, self._config)
        return KeyPair(certificate, key), read_client_ca(self._config)

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        names = (self._config.certificate, self._config.private_key, self._config.client_ca)
        return tuple(_stamp(name) for name in names if name)


def _stamp(name: str) -> tuple[int, int, int]:
    try:
        status = Path(name).stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _problem(key: str, message: str, remedy: str = "") -> ConfigError:
    return ConfigError((ConfigProblem(key, message, remedy),))


def _read(name: str, key: str) -> bytes:
    if not name:
        raise _problem(key, "is empty", "name a PEM file, or use `mode: self-signed` or `mode: plaintext`")
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise _problem(key, f"cannot read {name}: {error.strerror}", "check the path and its permissions") from error


def _check_pair(certificate: bytes, key: bytes, config: TlsConfig) -> None:
    try:
        chain = x509.load_pem_x509_certificates(certificate)
    except ValueError as error:
        raise _problem("server.tls.certificate", f"{config.certificate} holds no PEM certificate", _HALF_PEM) from error
    try:
        private = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:
        message = f"{config.private_key} holds no PEM private key without a passphrase"
        raise _problem("server.tls.private_key", message, _HALF_PEM) from error
    if private.public_key() != chain[0].public_key():
        message = f"{config.private_key} is not the key of {config.certificate}"
        raise _problem("server.tls.private_key", message, _HALF_PEM)


def read_client_ca(config: TlsConfig) -> bytes | None:
    """Read and check the CA of client certificates; None where none is asked for. Raises ConfigError."""
    if not config.client_ca:
        return None
    data = _read(config.client_ca, "server.tls.client_ca")
    try:
        x509.load_pem_x509_certificates(data)
    except ValueError as error:
        message = f"{config.client_ca} holds no PEM certificate"
        raise _problem("server.tls.client_ca", message, "name the CA that signs client certificates") from error
    return data


def host_names() -> tuple[str, ...]:
    """Return the names in a self-signed certificate."""
    return ("localhost", socket.gethostname(), "127.0.0.1", "::1")


def self_signed(names: tuple[str, ...], now: datetime) -> KeyPair:
    """Make an ECDSA P-256 certificate for `names` (host names and addresses), valid ten years from a day before `now`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "extproc")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in dict.fromkeys(names)]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(key, SHA256())
    )
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
