from __future__ import annotations

import pytest

from extproc.protocol.decision import SentDecision, header_text, route_request_of, served_by
from extproc.protocol.events import PlainMetadata
from extproc.protocol.settings import SessionSettings
from tests.protocol.dialogue import CHAT, DESTINATION, Pick


@pytest.mark.parametrize(
    ("allow", "value", "wanted"), [(True, "1", True), (True, "True", True), (True, "0", False), (False, "1", False)]
)
def test_an_explanation_needs_both_the_client_and_the_settings(allow: bool, value: str, wanted: bool) -> None:
    settings = SessionSettings(allow_explain=allow)
    ask = route_request_of({**CHAT, "x-extproc-explain": value}, b"x", True, None, "peer", settings)
    assert ask.explain is wanted
    assert (ask.method, ask.path, ask.upgrade) == ("POST", "/v1/chat/completions", False)


def test_what_the_gateway_does_not_send_is_empty() -> None:
    ask = route_request_of({"upgrade": "websocket"}, b"", False, frozenset(), "", SessionSettings())
    assert (ask.method, ask.path, ask.upgrade) == ("", "", True)


def test_an_explanation_is_one_line_of_printable_text() -> None:
    assert header_text("a\r\nb\té") == "a b "
    assert len(header_text("x" * 10_000)) == 4096


def test_the_absence_of_a_decision_still_takes_the_clients_own_destination_away() -> None:
    sent = SentDecision.unrouted({DESTINATION: "10.9.9.9:1", "x-extproc-explain": "1"}, SessionSettings())
    assert sent.remove_headers == (DESTINATION, "x-extproc-explain")
    assert sent.set_headers == ()
    assert sent.headers_reply().dynamic_metadata is None


def test_a_buffered_body_that_changes_brings_its_length() -> None:
    sent = SentDecision.of(Pick(), {}, SessionSettings(clear_route_cache=True), retriable=False)
    assert sent.body_reply(b"four").set_headers[-1] == ("content-length", "4")
    assert sent.body_reply(None).set_headers == ((DESTINATION, "10.0.0.1:8000"),)
    assert sent.body_reply(None).clear_route_cache


def test_metadata_reads_like_any_mapping() -> None:
    metadata = SentDecision.of(Pick(), {}, SessionSettings(), retriable=True).dynamic_metadata
    plain = {
        "envoy.lb": {DESTINATION: "10.0.0.1:8000", "x-extproc-decision": "d1"},
        "extproc": {"decision": "d1", "retry": True},
    }
    assert metadata == plain
    assert metadata is not None
    assert (list(metadata), len(metadata), metadata["extproc"]) == (["envoy.lb", "extproc"], 2, plain["extproc"])


def test_an_explanation_stands_in_it_as_well() -> None:
    sent = SentDecision.of(Pick(explain="why"), {}, SessionSettings(), retriable=False)
    assert sent.dynamic_metadata is not None
    assert sent.dynamic_metadata["extproc"] == {"decision": "d1", "explain": "why"}


def test_who_served_is_a_text_or_nothing() -> None:
    settings = SessionSettings()
    key = settings.served_key
    found = [served_by(PlainMetadata({"envoy.lb": {key: value}}), settings) for value in ("a:1", 7)]
    assert [*found, served_by(None, settings), served_by(PlainMetadata(), settings)] == ["a:1", None, None, None]
