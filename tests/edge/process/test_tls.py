from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509

from extproc.config.schema import TlsConfig
from extproc.edge.process.tls import CertificateFiles, KeyPair, self_signed
from extproc.errors import ConfigError

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def written(folder: Path, pair: KeyPair, *, client_ca: bytes | None = None) -> TlsConfig:
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.private_key)
    ca = ""
    if client_ca is not None:
        (folder / "ca.crt").write_bytes(client_ca)
        ca = str(folder / "ca.crt")
    return TlsConfig(
        mode="files", certificate=str(folder / "tls.crt"), private_key=str(folder / "tls.key"), client_ca=ca
    )


def pair() -> KeyPair:
    return self_signed(("localhost",), NOW)


def test_a_self_signed_certificate_names_its_hosts_and_lasts() -> None:
    made = self_signed(("localhost", "127.0.0.1", "::1", "localhost"), NOW)
    certificate = x509.load_pem_x509_certificate(made.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("127.0.0.1"), ip_address("::1")]
    assert certificate.not_valid_before_utc == NOW - timedelta(days=1)
    assert certificate.not_valid_after_utc > NOW + timedelta(days=3000)


def test_files_are_read_and_checked(tmp_path: Path) -> None:
    config = written(tmp_path, pair(), client_ca=pair().certificate)
    made = CertificateFiles(config)
    found, client_ca = made.read()
    assert (found.certificate, client_ca) == ((tmp_path / "tls.crt").read_bytes(), (tmp_path / "ca.crt").read_bytes())


@pytest.mark.parametrize(
    ("broken", "key", "text"),
    [
        ("tls.crt", "server.tls.certificate", "holds no PEM certificate"),
        ("tls.key", "server.tls.private_key", "holds no PEM private key"),
        ("ca.crt", "server.tls.client_ca", "holds no PEM certificate"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(tmp_path: Path, broken: str, key: str, text: str) -> None:
    config = written(tmp_path, pair(), client_ca=pair().certificate)
    (tmp_path / broken).write_text("nonsense")
    with pytest.raises(ConfigError, match=text) as error:
        CertificateFiles(config).read()
    assert error.value.problems[0].path == key
    assert str(tmp_path / broken) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    config = written(tmp_path, pair())
    (tmp_path / "tls.key").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*tls\.key: No such file"):
        CertificateFiles(config).read()


def test_a_name_left_empty_is_said() -> None:
    with pytest.raises(ConfigError, match=r"server\.tls\.certificate: is empty"):
        CertificateFiles(TlsConfig(mode="files")).read()


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    config = written(tmp_path, KeyPair(pair().certificate, pair().private_key))
    with pytest.raises(ConfigError, match="is not the key of"):
        CertificateFiles(config).read()


def test_files_are_changed_until_they_are_read(tmp_path: Path) -> None:
    files = CertificateFiles(written(tmp_path, pair()))
    assert files.changed
    files.read()
    assert not files.changed
    os.utime(tmp_path / "tls.crt", ns=(1, 1))
    assert files.changed
    files.read()
    (tmp_path / "tls.crt").unlink()
    assert files.changed
