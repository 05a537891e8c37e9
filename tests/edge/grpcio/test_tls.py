from __future__ import annotations

import os
from pathlib import Path

import pytest

from extproc.config.schema import TlsConfig
from extproc.edge.grpcio.tls import ServerTls
from tests.edge.process.test_tls import pair, written


def test_plaintext_needs_no_credentials() -> None:
    assert ServerTls(TlsConfig()).credentials is None
    assert ServerTls(TlsConfig()).read_again() == "none (plaintext)"


def test_credentials_of_a_certificate_made_at_start_and_of_files(tmp_path: Path) -> None:
    made = ServerTls(TlsConfig(mode="self-signed"))
    assert made.credentials is not None
    assert made.read_again() == "none (self-signed)"
    assert ServerTls(written(tmp_path, pair(), client_ca=pair().certificate)).credentials is not None


class TestReload:
    def test_unchanged_files_are_not_read_again(self, tmp_path: Path) -> None:
        assert ServerTls(written(tmp_path, pair())).reload() is None

    def test_changed_files_are(self, tmp_path: Path) -> None:
        tls = ServerTls(written(tmp_path, pair()))
        written(tmp_path, pair())
        os.utime(tmp_path / "tls.crt", ns=(1, 1))
        assert tls.reload() is not None
        assert tls.reload() is None

    def test_bad_files_leave_the_last_good_ones(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        tls = ServerTls(written(tmp_path, pair()))
        (tmp_path / "tls.key").write_text("half wri")
        assert tls.reload() is None
        assert "the last good ones stay" in caplog.text
        written(tmp_path, pair())
        os.utime(tmp_path / "tls.key", ns=(2, 2))
        assert tls.reload() is not None

    def test_files_are_read_again_on_demand(self, tmp_path: Path) -> None:
        tls = ServerTls(written(tmp_path, pair()))
        assert tls.read_again() == "read"
        assert tls.reload() is not None, "at the next handshake"
        assert tls.reload() is None
        (tmp_path / "tls.key").write_text("half wri")
        assert tls.read_again().startswith("refused, the last good ones stay: ")

    def test_a_file_that_vanished_leaves_them_too(self, tmp_path: Path) -> None:
        tls = ServerTls(written(tmp_path, pair()))
        (tmp_path / "tls.crt").unlink()
        assert tls.reload() is None
