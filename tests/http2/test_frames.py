from __future__ import annotations

from extproc.http2.frames import ErrorCode, Setting, goaway, rst_stream, settings, window_update


def test_frames_as_rfc_9113_draws_them() -> None:
    assert settings([(Setting.MAX_FRAME_SIZE, 16_384)]) == bytes.fromhex("000006 04 00 00000000 0005 00004000")
    assert window_update(3, 1) == bytes.fromhex("000004 08 00 00000003 00000001")
    assert rst_stream(5, ErrorCode.CANCEL) == bytes.fromhex("000004 03 00 00000005 00000008")
    assert goaway(1, ErrorCode.NO_ERROR, b"x") == bytes.fromhex("000009 07 00 00000000 00000001 00000000 78")
