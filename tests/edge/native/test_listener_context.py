from __future__ import annotations

import random
from typing import Any

import pytest

from extproc.edge.native.listener_context import ConnectionSettings, ListenerContext
from extproc.protocol.interfaces import Observer
from extproc.protocol.request_buffer import BodyBudget
from tests.protocol.dialogue import Counters


def test_silence_is_asked_about_long_before_a_stream_of_an_hour_ends() -> None:
    settings = ConnectionSettings(max_message_bytes=1, max_partial_bytes=1)
    assert settings.keepalive_s + settings.keepalive_timeout_s < 120
    assert settings.max_age_s == 0


@pytest.mark.parametrize(("own", "limit"), [(None, 50), (7, 7)])
def test_the_limit_is_the_budgets_at_the_time(own: int | None, limit: int) -> None:
    budget = BodyBudget(100)
    host = ListenerContext(ConnectionSettings(1, own), {}, Observer(), lambda: 0.0, random.Random(), budget)
    budget.limit_bytes = 50  # as a reload of the configuration does
    assert host.limit_bytes == limit


def test_refused_connections_are_counted_and_seldom_logged(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    counters = Counters()
    host = ListenerContext(
        ConnectionSettings(1, max_connections=2), {}, counters, lambda: now[0], random.Random(), BodyBudget(1)
    )
    assert host.admits("a", 1)
    for now[0] in (0.0, 5.0, 9.0, 10.0, 15.0):
        assert not host.admits("b", 2)
    assert counters.seen == [("protocol_error", "too many connections")] * 5
    assert len(caplog.records) == 2


class Connected:
    """A connection as a host sees it."""

    def __init__(self, *, preface_received: bool = True, streams: int = 0, closing: bool = False) -> None:
        self.http2 = self
        self.preface_received = preface_received
        self.streams = range(streams)
        self.closing = closing
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


BUSY = {"streams": 1}


@pytest.mark.parametrize(
    ("there", "idle_yields", "goes"),
    [
        ([{}, BUSY, {"preface_received": False}, {"preface_received": False}], False, 2),
        ([{}, BUSY, {"closing": True}, {"preface_received": False}], False, 2),
        ([{}, BUSY], False, None),
        ([BUSY, {}, {}, {"preface_received": False}], True, 3),
        ([BUSY, {}, {}], True, 1),
        ([BUSY, BUSY], True, None),
    ],
)
def test_who_makes_place(there: list[dict[str, Any]], idle_yields: bool, goes: int | None) -> None:
    settings = ConnectionSettings(1, max_connections=len(there), idle_yields=idle_yields)
    host = ListenerContext(settings, {}, Observer(), lambda: 0.0, random.Random(), BodyBudget(1))
    connections: list[Any] = [Connected(**told) for told in there]
    host.connections = dict.fromkeys(connections)
    assert host.admits("new") is (goes is not None)
    assert [one.aborted for one in connections] == [number == goes for number in range(len(there))]
    assert list(host.connections) == [one for one in connections if not one.aborted]


def test_incomplete_messages_count_among_all_that_is_held() -> None:
    budget = BodyBudget(100)
    host = ListenerContext(ConnectionSettings(1), {}, Observer(), lambda: 0.0, random.Random(), budget)
    host.count_partial(60)
    assert (host.partial_bytes, budget.used_bytes) == (60, 60)
    host.count_partial(-60)
    assert (host.partial_bytes, budget.used_bytes) == (0, 0)
