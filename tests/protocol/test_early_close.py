"""Which streams end with their request, and what a response on one of them does."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from extproc.errors import NoEndpointError
from extproc.protocol.early_close import _MOST_PEERS, GATEWAY_FIELDS, EarlyClose, Gateway, gateway_of
from extproc.protocol.events import BodyMode, Direction, Event, ProtocolConfig, RequestHeaders, StreamLost
from extproc.protocol.interfaces import PendingDecision, StreamEnd
from extproc.protocol.replies import BodyReply, FinishWith
from extproc.protocol.settings import ResponsePhase, SessionSettings
from tests.protocol.dialogue import (
    DIRECT,
    FDS,
    HALF_CLOSED,
    LAST,
    RESPONSE_HEADERS_PASS,
    RESPONSE_TRAILERS,
    TRAILERS,
    TRAILERS_PASS,
    Counters,
    Dialogue,
    ScriptedHandler,
    body,
    chosen,
    decision,
    headers,
    piece,
    response,
    response_body,
)

ENVOY = {
    "x-envoy-internal": "true",
    "x-forwarded-for": "10.0.0.1",
    "content-type": "application/grpc",
    "te": "trailers",
}
"""As Envoy 1.40 sends it (recorded)."""
RESPONSE = Direction.RESPONSE
PEER = "ipv4:10.0.0.1:4711"


def settings(phase: str, sample: float = 0.0) -> SessionSettings:
    return SessionSettings(response_phase=ResponsePhase(phase), response_sample=sample)


@pytest.mark.parametrize(
    ("call", "tls", "gateway"),
    [
        (ENVOY, True, Gateway.ENVOY),
        (ENVOY, False, Gateway.ENVOY_IN_CLEAR),
        ({**ENVOY, "user-agent": "grpc-c++/1.60"}, True, Gateway.OTHER),
        ({**ENVOY, "user-agent": "tonic/0.14"}, True, Gateway.OTHER),
        # A proxy between, which writes its own: what it reads together it may write apart.
        ({**ENVOY, "x-request-id": "1"}, True, Gateway.OTHER),
        ({**ENVOY, "x-envoy-internal": "false"}, True, Gateway.OTHER),
        ({"user-agent": "tonic/0.14"}, True, Gateway.OTHER),
        ({}, True, Gateway.OTHER),
    ],
)
def test_who_is_an_envoy(call: dict[str, str], tls: bool, gateway: Gateway) -> None:
    assert gateway_of(call, tls=tls) is gateway
    assert gateway_of({name: call[name] for name in call.keys() & GATEWAY_FIELDS}, tls=tls) is gateway


@pytest.mark.parametrize("gateway", Gateway)
@pytest.mark.parametrize("phase", ["keep", "close", "auto"])
def test_towards_whom(phase: str, gateway: Gateway) -> None:
    wanted = {
        "keep": set(),
        "close": {Gateway.OTHER, Gateway.ENVOY, Gateway.ENVOY_IN_CLEAR},
        "auto": {Gateway.ENVOY},
    }[phase]
    assert EarlyClose(Counters()).wanted(settings(phase), FDS, gateway, PEER) is (gateway in wanted)


@pytest.mark.parametrize(
    "config",
    [
        None,
        DIRECT,
        ProtocolConfig(BodyMode.BUFFERED, BodyMode.FULL_DUPLEX),
        ProtocolConfig(BodyMode.FULL_DUPLEX, BodyMode.STREAMED),
    ],
)
def test_only_full_duplex_both_ways(config: ProtocolConfig | None) -> None:
    assert not EarlyClose(Counters()).wanted(settings("close"), config, Gateway.ENVOY, PEER)


def test_auto_says_once_why_it_keeps_towards_an_envoy(caplog: pytest.LogCaptureFixture) -> None:
    early = EarlyClose(Counters())
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            early.wanted(settings("auto"), FDS, Gateway.ENVOY_IN_CLEAR, PEER)
            early.wanted(settings("auto"), FDS, Gateway.OTHER, PEER)
    assert len(caplog.records) == 1


def test_the_sample_keeps_its_share() -> None:
    early = EarlyClose(Counters(), random.Random(1))
    kept = sum(not early.wanted(settings("close", 0.02), FDS, Gateway.ENVOY, PEER) for _ in range(10_000))
    assert 150 < kept < 250
    assert not early.wanted(settings("close", 1.0), FDS, Gateway.ENVOY, PEER)


def test_a_late_response_stops_early_closing_towards_that_address_alone(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    early = EarlyClose(counters)
    early.late(PEER, "d1", "ResponseBody")
    assert counters.seen == [("late", "ResponseBody")]
    assert [record.__dict__["decision"] for record in caplog.records] == ["d1"]
    close = settings("close")
    assert not early.wanted(close, FDS, Gateway.ENVOY, "ipv4:10.0.0.1:9")
    assert early.wanted(close, FDS, Gateway.ENVOY, "ipv4:10.0.0.2:4711")


def test_too_many_peers_in_trouble_are_all_peers() -> None:
    early = EarlyClose(Counters())
    for number in range(_MOST_PEERS + 10):
        early.late(f"ipv4:10.{number >> 8}.{number & 255}.1:1", "d", "ResponseHeaders")
    assert not early.wanted(settings("close"), FDS, Gateway.ENVOY, "ipv4:192.168.0.1:1")
    assert len(early._stopped) == _MOST_PEERS


def closing(core: ScriptedHandler | None = None, **kept: Any) -> Dialogue:
    """A session that ends with its request."""
    options = {"response_phase": ResponsePhase.CLOSE, "response_sample": 0.0, **kept}
    return Dialogue(core or ScriptedHandler(), SessionSettings(**options), gateway=Gateway.ENVOY)


class TestSession:
    def test_the_stream_ends_behind_the_body(self) -> None:
        d = closing()
        assert d.say(headers(FDS), body(b"one"), body(b"two", end=True)) == [decision(), piece(b"onetwo"), LAST]
        assert d.session.closed
        assert d.handler.told[-1] == ("ended", "d1", StreamEnd.CLOSED_EARLY)
        assert d.session.outcome == "closed_early"
        assert d.budget.used_bytes == 0

    def test_the_bodys_end_may_come_alone(self) -> None:
        d = closing()
        assert d.say(headers(FDS), body(b"one"), body(end=True)) == [decision(), piece(b"one"), LAST]
        assert closing().say(headers(FDS), body(end=True)) == [decision(), LAST]

    def test_a_body_that_is_decided_on_its_beginning(self) -> None:
        d = closing(max_inspect_bytes=3)
        assert d.say(headers(FDS), body(b"1234")) == [decision(retry=False), piece(b"1234")]
        assert d.handler.ends == []
        assert d.say(body(b"56"), body(b"78", end=True)) == [piece(b"56"), piece(b"78"), LAST]
        assert d.handler.ends == [StreamEnd.CLOSED_EARLY]

    def test_a_held_decision(self) -> None:
        d = closing(ScriptedHandler(answer=PendingDecision()))
        assert d.say(headers(FDS), body(b"x", end=True)) == []
        assert d.session.resume(chosen(), 1.0) == [decision(), piece(b"x"), LAST]
        assert d.handler.ends == [StreamEnd.CLOSED_EARLY]

    @pytest.mark.parametrize("message", [response(), response_body(b"x"), RESPONSE_TRAILERS])
    def test_a_late_response_is_counted_once_and_gets_no_reply(self, message: Event) -> None:
        d = closing()
        d.say(headers(FDS), body(b"x", end=True))
        assert d.say(message, response_body(b"more"), HALF_CLOSED, StreamLost()) == []
        assert [seen for seen in d.counters.seen if seen[0] == "late"] == [("late", type(message).__name__)]
        assert d.handler.ends == [StreamEnd.CLOSED_EARLY]
        other = Dialogue(d.handler, d.settings, gateway=Gateway.ENVOY)
        other.shared.early_close = d.shared.early_close
        assert other.say(headers(FDS), body(b"x", end=True)) == [decision(), piece(b"x", end=True)]

    def test_what_else_comes_after_the_end_is_no_harm(self) -> None:
        d = closing()
        d.say(headers(FDS), body(b"x", end=True))
        assert d.say(body(end=True), TRAILERS, HALF_CLOSED, StreamLost()) == []
        assert d.counters.seen == []

    def test_the_sample_keeps_its_response_phase(self) -> None:
        d = closing(response_sample=1.0)
        assert d.say(headers(FDS), body(b"x", end=True)) == [decision(), piece(b"x", end=True)]
        assert d.say(response()) == [RESPONSE_HEADERS_PASS]

    @pytest.mark.parametrize("said", [headers(FDS, end=True), headers(FDS, upgrade="websocket", end=True)])
    def test_without_a_body_the_response_phase_is_kept(self, said: RequestHeaders) -> None:
        d = closing()
        assert d.say(said) == [decision()]
        assert not d.session.closed

    def test_trailers_end_a_request_later_than_its_body(self) -> None:
        d = closing()
        assert d.say(headers(FDS), body(b"x"), TRAILERS) == [decision(retry=False), piece(b"x"), TRAILERS_PASS]
        assert not d.session.closed

    @pytest.mark.parametrize("protocol", [None, DIRECT])
    def test_where_there_is_no_response_phase_nothing_changes(self, protocol: ProtocolConfig | None) -> None:
        d = closing()
        assert d.say(headers(protocol), body(b"x", end=True)) == [decision(), piece(b"x", end=True)]
        assert not d.session.closed

    def test_a_response_that_has_begun_is_not_cut(self) -> None:
        d = closing(max_inspect_bytes=1)
        d.say(headers(FDS), body(b"12"), response())
        assert d.say(body(b"3", end=True)) == [piece(b"3", end=True)]
        assert d.say(response_body(b"r", end=True)) == [BodyReply(RESPONSE, b"r", True)]
        assert d.handler.ends == [StreamEnd.COMPLETED]

    def test_an_explanation_needs_the_responses_headers(self) -> None:
        d = closing(ScriptedHandler(answer=chosen(explain=True)), allow_explain=True)
        replies = d.say(headers(FDS), body(b"x", end=True))
        assert not any(isinstance(reply, FinishWith) for reply in replies)
        assert not d.session.closed

    def test_a_refusal_is_no_early_end(self) -> None:
        d = closing(ScriptedHandler(answer=NoEndpointError("none")))
        d.say(headers(FDS), body(b"x", end=True))
        assert d.say(response()) == []
        assert not [seen for seen in d.counters.seen if seen[0] == "late"]
