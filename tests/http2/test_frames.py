from __future__ import annotations

import pytest

from extproc.http2.frames import (
    MAX_WINDOW,
    ConnectionLevelError,
    ErrorCode,
    PeerSettings,
    Setting,
    goaway,
    read_settings,
    rst_stream,
    settings,
    window_update,
)


def test_frames_as_rfc_9113_draws_them() -> None:
    assert settings([(Setting.MAX_FRAME_SIZE, 16_384)]) == bytes.fromhex("000006 04 00 00000000 0005 00004000")
    assert window_update(3, 1) == bytes.fromhex("000004 08 00 00000003 00000001")
    assert rst_stream(5, ErrorCode.CANCEL) == bytes.fromhex("000004 03 00 00000005 00000008")
    assert goaway(1, ErrorCode.NO_ERROR, b"x") == bytes.fromhex("000009 07 00 00000000 00000001 00000000 78")


def payload(*values: tuple[int, int]) -> bytes:
    return settings(values)[9:]


def test_what_is_said_and_what_is_not() -> None:
    assert read_settings(b"") == PeerSettings(None, None)
    assert read_settings(payload((Setting.HEADER_TABLE_SIZE, 0), (Setting.ENABLE_PUSH, 0), (99, 1))) == (None, None)
    assert read_settings(payload((Setting.INITIAL_WINDOW_SIZE, 0), (Setting.MAX_FRAME_SIZE, 16_384))) == (0, 16_384)


def test_the_last_one_counts() -> None:
    twice = payload((Setting.INITIAL_WINDOW_SIZE, 5), (Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW))
    assert read_settings(twice).initial_window == MAX_WINDOW


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        (Setting.ENABLE_PUSH, 2, ErrorCode.PROTOCOL_ERROR),
        (Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW + 1, ErrorCode.FLOW_CONTROL_ERROR),
        (Setting.MAX_FRAME_SIZE, 16_383, ErrorCode.PROTOCOL_ERROR),
        (Setting.MAX_FRAME_SIZE, 16_777_216, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_values_out_of_range(key: int, value: int, code: ErrorCode) -> None:
    with pytest.raises(ConnectionLevelError) as caught:
        read_settings(payload((key, value)))
    assert caught.value.code is code
