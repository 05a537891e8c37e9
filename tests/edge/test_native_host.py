from __future__ import annotations

import random

import pytest

from extproc.edge.native_host import ConnectionSettings, Host
from extproc.protocol.budget import BodyBudget
from extproc.protocol.seams import NullObserver
from tests.protocol.dialogue import Counters


def test_silence_is_asked_about_long_before_a_stream_of_an_hour_ends() -> None:
    settings = ConnectionSettings(max_message_bytes=1, max_partial_bytes=1)
    assert settings.keepalive_s + settings.keepalive_timeout_s < 120
    assert settings.max_age_s == 0


@pytest.mark.parametrize(("own", "limit"), [(None, 50), (7, 7)])
def test_the_limit_is_the_budgets_at_the_time(own: int | None, limit: int) -> None:
    budget = BodyBudget(100)
    host = Host(ConnectionSettings(1, own), {}, NullObserver(), lambda: 0.0, random.Random(), budget)
    budget.limit_bytes = 50  # as a reload of the configuration does
    assert host.limit_bytes == limit


def test_refused_connections_are_counted_and_seldom_logged(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    counters = Counters()
    host = Host(ConnectionSettings(1, max_connections=2), {}, counters, lambda: now[0], random.Random(), BodyBudget(1))
    assert host.admits("a", 1)
    for now[0] in (0.0, 5.0, 9.0, 10.0, 15.0):
        assert not host.admits("b", 2)
    assert counters.seen == [("protocol_error", "too many connections")] * 5
    assert len(caplog.records) == 2


def test_incomplete_messages_count_among_all_that_is_held() -> None:
    budget = BodyBudget(100)
    host = Host(ConnectionSettings(1), {}, NullObserver(), lambda: 0.0, random.Random(), budget)
    host.count_partial(60)
    assert (host.partial_bytes, budget.used_bytes) == (60, 60)
    host.count_partial(-60)
    assert (host.partial_bytes, budget.used_bytes) == (0, 0)
