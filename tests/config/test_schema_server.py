"""The section `server`."""

from __future__ import annotations

from extproc.config.schema import ServerConfig


def test_a_connection_lives_for_ever_unless_told() -> None:
    assert not ServerConfig().max_connection_age
    assert 0 < ServerConfig().max_connection_age_jitter < 0.5


def test_most_streams_may_end_early_where_that_is_asked_for() -> None:
    assert 0 < ServerConfig().response_sample < 0.1
