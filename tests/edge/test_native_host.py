from __future__ import annotations

from extproc.edge.native_host import ConnectionSettings


def test_silence_is_asked_about_long_before_a_stream_of_an_hour_ends() -> None:
    settings = ConnectionSettings(max_message_bytes=1, max_partial_bytes=1)
    assert settings.keepalive_s + settings.keepalive_timeout_s < 120
    assert settings.max_age_s == 0
