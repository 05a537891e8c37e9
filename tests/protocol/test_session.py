"""Dialogues: what the gateway says, and what it must hear."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import pytest

from extproc.errors import NoEndpointError, OverloadedError, ProtocolError, RequestError
from extproc.protocol.events import (
    BodyMode,
    DeadlinePassed,
    Direction,
    Event,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    StreamLost,
    Unknown,
)
from extproc.protocol.interfaces import PendingDecision, StreamEnd
from extproc.protocol.replies import DecisionReply, Finish, HeadersReply, ImmediateReply
from extproc.protocol.request_buffer import BodyBudget
from extproc.protocol.session import Session, header_text
from extproc.protocol.settings import SessionSettings
from extproc.types import Decision
from tests.protocol.dialogue import (
    CHAT,
    DESTINATION,
    DIRECT,
    FDS,
    HALF_CLOSED,
    PASS,
    RESPONSE_HEADERS_PASS,
    RESPONSE_PASS,
    RESPONSE_TRAILERS,
    RESPONSE_TRAILERS_PASS,
    TRAILERS,
    TRAILERS_PASS,
    Dialogue,
    PlainMetadata,
    ScriptedHandler,
    body,
    chosen,
    config,
    decision,
    headers,
    piece,
    response,
    response_body,
    subset,
)

LOST = StreamLost()
PLAIN = HeadersReply(Direction.REQUEST)
RESPONSE = Direction.RESPONSE


def held_dialogue(settings: SessionSettings | None = None) -> tuple[Dialogue, PendingDecision]:
    held = PendingDecision()
    return Dialogue(ScriptedHandler(answer=held), settings or SessionSettings()), held


def refused(replies: Sequence[object]) -> ImmediateReply:
    reply, finish = replies
    assert isinstance(reply, ImmediateReply)
    assert finish == Finish()
    return reply


class TestFullDuplex:
    def test_the_headers_wait_for_the_whole_body(self) -> None:
        d = Dialogue()
        assert d.say(headers(), body(b"one "), body(b"")) == []
        big = b"x" * 3000
        assert d.say(body(big, end=True)) == [decision(), piece(b"one "), piece(big, end=True)]
        assert d.handler.asks[0].body == b"one " + big
        assert d.handler.asks[0].complete
        assert d.budget.used_bytes == 0

    def test_an_empty_chunk_may_end_the_body(self) -> None:
        d = Dialogue()
        assert d.say(headers(), body(b"one"), body(end=True)) == [decision(), piece(b"one", end=True)]

    def test_a_body_may_be_empty(self) -> None:
        assert Dialogue().say(headers(), body(end=True)) == [decision(), piece(b"", end=True)]

    def test_without_a_body_the_headers_are_answered_at_once(self) -> None:
        d = Dialogue()
        assert d.say(headers(end=True)) == [decision()]
        assert d.handler.asks[0].complete

    def test_chunks_go_back_in_pieces_of_at_most_62000_bytes(self) -> None:
        replies = Dialogue().say(headers(), body(b"x" * 130_000, end=True))
        assert replies == [decision(), piece(b"x" * 62_000), piece(b"x" * 62_000), piece(b"x" * 6_000, end=True)]

    def test_trailers_end_the_body_and_forbid_a_retry(self) -> None:
        d = Dialogue()
        assert d.say(headers(), body(b"one"), TRAILERS) == [decision(retry=False), piece(b"one"), TRAILERS_PASS]
        assert d.handler.asks[0].complete

    def test_trailers_may_follow_the_headers(self) -> None:
        assert Dialogue().say(headers(), TRAILERS) == [decision(retry=False), TRAILERS_PASS]

    def test_a_second_end_of_the_request_is_ignored(self) -> None:
        d = Dialogue()
        d.say(headers(), body(b"one", end=True))
        assert d.say(body(b"one", end=True), body(end=True)) == []
        assert d.say(TRAILERS, TRAILERS) == [TRAILERS_PASS]

    @pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX, BodyMode.BUFFERED])
    def test_an_upgrade_is_answered_at_once(self, mode: BodyMode) -> None:
        d = Dialogue()
        assert d.say(headers(config(mode), upgrade="websocket")) == [decision(retry=False)]
        assert d.handler.asks[0].upgrade
        assert not d.handler.asks[0].complete
        echoed = piece(b"frame") if mode is BodyMode.FULL_DUPLEX else PASS
        assert d.say(body(b"frame")) == [echoed]

    def test_a_body_beyond_the_inspection_limit_is_decided_on_its_beginning_and_streamed_through(self) -> None:
        d = Dialogue(settings=SessionSettings(max_inspect_bytes=4))
        assert d.say(headers(), body(b"1234")) == []
        assert d.say(body(b"56")) == [decision(retry=False), piece(b"123456")]
        assert (d.handler.asks[0].body, d.handler.asks[0].complete) == (b"1234", False)
        assert d.say(body(b"7"), body(b""), body(b"89", end=True)) == [piece(b"7"), piece(b"89", end=True)]
        assert d.counters.seen == [("cut", "inspect_limit")]

    def test_a_large_body_in_one_message_is_decided_on_its_beginning(self) -> None:
        d = Dialogue(settings=SessionSettings(max_inspect_bytes=4))
        assert d.say(headers(), body(b"123456", end=True)) == [decision(), piece(b"123456", end=True)]
        assert (d.handler.asks[0].body, d.handler.asks[0].complete) == (b"1234", False)

    def test_a_long_body_may_end_in_trailers(self) -> None:
        d = Dialogue(settings=SessionSettings(max_inspect_bytes=1))
        d.say(headers(), body(b"12"))
        assert d.say(body(b"3"), TRAILERS, TRAILERS) == [piece(b"3"), TRAILERS_PASS]

    def test_beyond_the_process_budget_what_has_been_read_decides(self) -> None:
        d = Dialogue(budget=BodyBudget(1000))
        others = d.budget
        others.charge(990)
        assert d.say(headers(), body(b"12345", end=False)) == [decision(retry=False), piece(b"12345")]
        assert (d.handler.asks[0].body, d.handler.asks[0].complete) == (b"12345", False)
        assert others.used_bytes == 990
        assert d.counters.seen == [("cut", "budget")]

    def test_thousands_of_half_bodies_stay_within_the_budget(self) -> None:
        d = Dialogue(budget=BodyBudget(1_000_000))
        sessions = [Session(d.shared) for _ in range(3000)]
        most_bytes = 0
        for session in sessions:
            session.receive(headers(), 0.0)
            session.receive(body(b"x" * 3000), 0.0)
            most_bytes = max(most_bytes, d.budget.used_bytes)
        assert most_bytes < 1_000_000 + 300_000 + 5000
        for session in sessions:
            session.receive(LOST, 0.0)
        assert d.budget.used_bytes == 0

    def test_without_protocol_config_full_duplex_is_assumed(self) -> None:
        d = Dialogue()
        assert d.say(headers(None)) == []
        assert d.say(body(b"one", end=True)) == [decision(), piece(b"one", end=True)]


class TestOtherModes:
    def test_buffered_carries_the_decision_in_the_bodys_reply(self) -> None:
        d = Dialogue()
        gone = HeadersReply(Direction.REQUEST, remove_headers=("x-extproc-explain",))
        assert d.say(headers(config(BodyMode.BUFFERED), x_extproc_explain="1")) == [gone]
        assert d.say(body(b"all", end=True)) == [decision(remove=("x-extproc-explain",), answers=RequestBody)]
        assert d.handler.asks[0].body == b"all"

    def test_buffered_with_trailers_is_whole_without_end_of_stream(self) -> None:
        d = Dialogue()
        (reply,) = d.say(headers(config(BodyMode.BUFFERED)), body(b"all"))[1:]
        assert d.handler.asks[0].complete
        assert reply == decision(retry=False, answers=RequestBody)
        assert d.say(TRAILERS) == [TRAILERS_PASS]
        d.say(LOST)
        assert d.handler.ends == [StreamEnd.DETACHED]

    def test_buffered_with_trailers_and_no_body_decides_in_the_trailers_reply(self) -> None:
        d = Dialogue()
        replies = d.say(headers(config(BodyMode.BUFFERED)), TRAILERS)
        assert replies == [PLAIN, decision(retry=False, answers=RequestTrailers)]

    def test_buffered_without_a_body_decides_on_the_headers(self) -> None:
        assert Dialogue().say(headers(config(BodyMode.BUFFERED), end=True)) == [decision()]

    def test_buffered_partial_may_go_on(self) -> None:
        d = Dialogue()
        d.say(headers(config(BodyMode.BUFFERED_PARTIAL)), body(b"begin"))
        assert not d.handler.asks[0].complete
        assert d.say(body(b"more"), body(b"end", end=True)) == [PASS, PASS]

    @pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.GRPC])
    def test_streamed_decides_on_headers_and_warns_once(self, mode: BodyMode, caplog: pytest.LogCaptureFixture) -> None:
        d = Dialogue()
        with caplog.at_level(logging.WARNING):
            assert d.say(headers(config(mode))) == [decision(retry=False)]
            Session(d.shared).receive(headers(config(mode)), 0.0)
        assert len(caplog.records) == 1
        assert not d.handler.asks[0].complete
        assert d.say(body(b"one"), body(b"two", end=True)) == [PASS, PASS]

    def test_none_decides_on_headers(self) -> None:
        d = Dialogue()
        assert d.say(headers(config(BodyMode.NONE))) == [decision(retry=False)]
        assert d.say(TRAILERS) == [TRAILERS_PASS]
        d.say(HALF_CLOSED)
        assert d.handler.ends == [StreamEnd.DETACHED]

    def test_the_default_mode_is_a_setting(self) -> None:
        d = Dialogue(settings=SessionSettings(default_body_mode=BodyMode.NONE))
        assert d.say(headers(None)) == [decision(retry=False)]


class TestDecision:
    def test_the_destination_overwrites_and_control_headers_go(self) -> None:
        d = Dialogue()
        subset_header = f"{DESTINATION}-subset"
        event = RequestHeaders({**CHAT, DESTINATION: "10.9.9.9:1", subset_header: "x"}, True, DIRECT)
        assert d.say(event) == [decision(remove=(subset_header,))]

    @pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX, BodyMode.BUFFERED, BodyMode.STREAMED, BodyMode.NONE])
    @pytest.mark.parametrize("end", [(body(b"{}", end=True),), (body(b"{}"), TRAILERS), (TRAILERS,)])
    def test_what_is_meant_for_a_picker_is_removed(self, mode: BodyMode, end: tuple[Event, ...]) -> None:
        """In the reply to the headers, in every mode: in a later one it would not count, or not come at all."""
        asked = ("x-gateway-inference-fairness-id", "x-gateway-inference-objective")
        d = Dialogue()
        event = RequestHeaders({**CHAT, **dict.fromkeys(asked, "x")}, False, config(mode))
        end = end if mode is not BodyMode.NONE else ()
        first = d.say(event, *end)[0]
        assert isinstance(first, HeadersReply | DecisionReply)
        assert first.remove_headers == asked

    def test_the_explanation_goes_into_the_metadata_and_the_response(self) -> None:
        made = chosen(explain=True)
        d = Dialogue(ScriptedHandler(answer=made, explained="longest\nprefix"), SessionSettings(allow_explain=True))
        replies = d.say(headers(FDS, end=True, x_extproc_explain="1"), response())
        assert d.handler.asks[0].explain
        assert replies == [
            decision(remove=("x-extproc-explain",), explain="longest prefix", made=made),
            HeadersReply(RESPONSE, (("x-extproc-explain", "longest prefix"),)),
        ]

    def test_a_failing_explanation_costs_only_itself(self) -> None:
        made = chosen(explain=True)
        d = Dialogue(ScriptedHandler(answer=made, failing="explanation"))
        assert d.say(headers(end=True)) == [decision(made=made)]
        assert ("internal", "explanation") in d.counters.seen

    def test_a_splice_is_applied_to_what_goes_back(self) -> None:
        d = Dialogue(ScriptedHandler(answer=chosen(body_splice=(1, 3, b"XYZ"))))
        assert d.say(headers(), body(b"abcd", end=True))[1:] == [piece(b"a"), piece(b"XYZ"), piece(b"d", end=True)]

    def test_a_splice_replaces_a_buffered_body(self) -> None:
        made = chosen(body_splice=(1, 3, b"XYZ"))
        d = Dialogue(ScriptedHandler(answer=made))
        (reply,) = d.say(headers(config(BodyMode.BUFFERED)), body(b"abcd", end=True))[1:]
        assert reply == decision(made=made, answers=RequestBody, data=b"aXYZd")

    def test_a_splice_of_what_was_not_read_is_our_mistake(self, caplog: pytest.LogCaptureFixture) -> None:
        d = Dialogue(ScriptedHandler(answer=chosen(body_splice=(1, 30, b""))))
        assert refused(d.say(headers(), body(b"abcd", end=True))).status == 500
        assert d.handler.ends == [StreamEnd.ABORTED]
        assert ("internal", "splice") in d.counters.seen
        assert "abcd" not in caplog.text

    def test_a_request_error_is_the_answer(self) -> None:
        d = Dialogue(ScriptedHandler(answer=OverloadedError("All endpoints are busy.")))
        reply = refused(d.say(headers(), body(b"x", end=True)))
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (429, "overloaded")
        assert d.session.closed
        assert d.session.outcome == "refused"
        assert d.counters.seen == [("refused", 429, "overloaded")]
        assert d.say(body(b"late"), response(), HALF_CLOSED, LOST, Unknown(), DeadlinePassed()) == []
        assert (d.handler.told, d.budget.used_bytes) == ([], 0)

    def test_a_defect_of_the_core_is_a_500_and_counted(self, caplog: pytest.LogCaptureFixture) -> None:
        d = Dialogue(ScriptedHandler(answer=ZeroDivisionError("secret prompt")))
        reply = refused(d.say(headers(end=True)))
        assert reply.status == 500
        assert b"secret" not in reply.body
        assert ("internal", "decide") in d.counters.seen
        assert "a decision failed" in caplog.text

    def test_a_failing_ledger_does_not_fail_the_request(self) -> None:
        d = Dialogue(ScriptedHandler(failing="ended"))
        assert d.say(headers(end=True), HALF_CLOSED) == [decision(), Finish()]
        assert ("internal", "ended") in d.counters.seen


class TestSubset:
    @pytest.mark.parametrize(
        ("hint", "expected"), [(["a:1"], {"a:1"}), ("a:1,b:2", {"a:1", "b:2"}), ([], set()), ("", set())]
    )
    def test_a_hint_reaches_the_core(self, hint: object, expected: set[str]) -> None:
        d = Dialogue()
        d.say(headers(end=True, hint=hint))
        assert d.handler.asks[0].subset == frozenset(expected)

    def test_no_hint_is_none(self) -> None:
        d = Dialogue()
        d.say(RequestHeaders(CHAT, True, DIRECT, PlainMetadata({"envoy.lb": {"other": "x"}})))
        assert d.handler.asks[0].subset is None

    def test_any_request_message_up_to_the_decision_may_bring_it(self) -> None:
        d = Dialogue()
        d.say(headers(), RequestTrailers(subset("a:1")))
        assert d.handler.asks[0].subset == frozenset({"a:1"})


class TestHeld:
    def test_the_answer_releases_what_was_kept(self) -> None:
        d, _ = held_dialogue()
        session = d.session
        assert d.say(headers(), body(b"one", end=True), now=5.0) == []
        deadlines = [session.deadline]
        assert session.resume(chosen(), 6.0) == [decision(), piece(b"one", end=True)]
        assert [*deadlines, session.deadline, session.pending] == [7.0, None, None]

    def test_what_comes_meanwhile_is_kept_in_order(self) -> None:
        d, _ = held_dialogue(SessionSettings(max_inspect_bytes=2))
        assert d.say(headers(), body(b"123"), body(b"45"), body(b"6"), TRAILERS) == []
        assert d.session.paused
        assert d.session.resume(chosen(), 0.0) == [
            decision(retry=False),
            piece(b"123"),
            piece(b"456"),
            TRAILERS_PASS,
        ]
        assert not d.session.paused

    def test_an_upgrade_may_be_held_too(self) -> None:
        d, _ = held_dialogue()
        assert d.say(headers(upgrade="websocket"), body(b"frame", end=True)) == []
        assert d.session.resume(chosen(), 0.0) == [decision(), piece(b"frame", end=True)]

    def test_streamed_messages_that_came_meanwhile_get_a_reply_each(self) -> None:
        d, _ = held_dialogue()
        assert d.say(headers(config(BodyMode.STREAMED)), body(b"1"), body(b"2", end=True), TRAILERS) == []
        assert d.session.resume(chosen(), 0.0) == [decision(retry=False), PASS, PASS, TRAILERS_PASS]

    def test_buffered_trailers_are_not_answered_twice(self) -> None:
        d, _ = held_dialogue()
        d.say(headers(config(BodyMode.BUFFERED)), TRAILERS)
        assert d.session.resume(chosen(), 0.0) == [decision(retry=False, answers=RequestTrailers)]

    def test_an_error_may_be_the_answer(self) -> None:
        d, _ = held_dialogue()
        d.say(headers(end=True))
        assert refused(d.session.resume(NoEndpointError("none"), 0.0)).status == 503

    def test_the_deadline_is_a_503_and_withdraws_the_question(self) -> None:
        d, _ = held_dialogue()
        d.say(headers(), body(b"one", end=True), now=5.0)
        assert d.say(DeadlinePassed(), now=6.9) == []
        reply = refused(d.say(DeadlinePassed(), now=7.0))
        assert (reply.status, reply.details) == (503, "extproc_decision_timeout")
        assert d.handler.told == [("withdraw", 7.0)]
        assert ("deadline",) in d.counters.seen
        assert d.budget.used_bytes == 0

    def test_a_decision_that_comes_too_late_is_released(self) -> None:
        d, _ = held_dialogue()
        d.say(headers(end=True), LOST)
        assert d.session.resume(NoEndpointError("none"), 0.0) == []
        assert d.session.resume(chosen(), 0.0) == []
        assert d.handler.told == [("withdraw", 0.0), ("ended", "d1", StreamEnd.ABORTED)]

    def test_envoy_that_half_closes_before_the_answer_has_lost_its_client(self) -> None:
        d, _ = held_dialogue()
        assert d.say(headers(end=True), HALF_CLOSED) == [Finish()]
        assert d.handler.told == [("withdraw", 0.0)]

    def test_a_peer_that_says_everything_at_once_gets_its_answer_and_the_end(self) -> None:
        d, _ = held_dialogue()
        assert d.say(headers(None), body(b"one", end=True), HALF_CLOSED, HALF_CLOSED) == []
        with pytest.raises(ProtocolError, match="RequestBody while half_closed"):
            d.say(body(b"more"))
        assert d.session.resume(chosen(), 0.0) == [decision(), piece(b"one", end=True), Finish()]
        assert d.handler.ends == [StreamEnd.DETACHED]

    @pytest.mark.parametrize("answer", [NoEndpointError("none"), chosen(body_splice=(5, 9, b""))])
    def test_after_a_half_close_a_refusal_ends_the_stream_once(self, answer: RequestError | Decision) -> None:
        d, _ = held_dialogue()
        d.say(headers(None, end=True), HALF_CLOSED)
        refused(d.session.resume(answer, 0.0))

    def test_a_half_closed_stream_may_still_be_lost(self) -> None:
        d, _ = held_dialogue()
        d.say(headers(None, end=True), HALF_CLOSED, LOST)
        assert d.session.closed

    def test_the_budget_pauses_a_held_request(self) -> None:
        d, _ = held_dialogue()
        d.say(headers(), body(b"one", end=True))
        assert not d.session.paused
        d.budget.limit_bytes = 1
        assert d.session.paused


class TestResponse:
    def test_full_duplex_gives_everything_back(self) -> None:
        d = Dialogue()
        d.say(headers(FDS, end=True))
        assert d.say(response(), response_body(b"x" * 70_000), response_body(b""), response_body(b"z", end=True)) == [
            RESPONSE_HEADERS_PASS,
            piece(b"x" * 62_000, direction=RESPONSE),
            piece(b"x" * 8_000, direction=RESPONSE),
            piece(b"z", end=True, direction=RESPONSE),
        ]
        assert d.handler.told == [("started", "d1", 200, None), ("ended", "d1", StreamEnd.COMPLETED)]
        assert d.say(response_body(b"z", end=True), HALF_CLOSED) == [Finish()]
        assert d.handler.ends == [StreamEnd.COMPLETED]
        assert d.session.outcome == "completed"

    @pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.BUFFERED])
    def test_other_modes_get_one_reply_per_message(self, mode: BodyMode) -> None:
        d = Dialogue()
        d.say(headers(config(BodyMode.FULL_DUPLEX, mode), end=True))
        assert d.say(response(), response_body(b"x", end=True)) == [RESPONSE_HEADERS_PASS, RESPONSE_PASS]
        assert d.handler.ends == [StreamEnd.COMPLETED]

    def test_a_buffered_response_is_whole_before_its_trailers(self) -> None:
        d = Dialogue()
        d.say(headers(config(BodyMode.FULL_DUPLEX, BodyMode.BUFFERED), end=True), response(), response_body(b"x"))
        assert d.handler.ends == [StreamEnd.COMPLETED]
        assert d.say(RESPONSE_TRAILERS, RESPONSE_TRAILERS) == [RESPONSE_TRAILERS_PASS]

    def test_a_token_needs_no_event_while_the_stream_is_open(self) -> None:
        d = Dialogue(ScriptedHandler(wants_body=True))
        assert not d.session.pass_on(b"x")
        d.say(headers(FDS, end=True), response())
        assert d.session.pass_on(b"x")
        d.say(LOST)
        assert not d.session.pass_on(b"y")
        assert [entry[2] for entry in d.handler.told if entry[0] == "body"] == [b"x"]

    def test_trailers_end_a_response(self) -> None:
        d = Dialogue()
        d.say(headers(FDS, end=True), response(), response_body(b"x"))
        assert d.say(RESPONSE_TRAILERS) == [RESPONSE_TRAILERS_PASS]
        assert d.handler.ends == [StreamEnd.COMPLETED]

    def test_only_the_trailers_may_be_shown(self) -> None:
        d = Dialogue()
        assert d.say(headers(end=True), RESPONSE_TRAILERS) == [decision(), RESPONSE_TRAILERS_PASS]
        assert d.handler.told == [("ended", "d1", StreamEnd.COMPLETED)]

    def test_the_core_sees_the_body_if_it_wants_to(self) -> None:
        d = Dialogue(ScriptedHandler(wants_body=True))
        d.say(headers(FDS, end=True), response(), response_body(b"a"), response_body(b"b", end=True))
        assert d.handler.told[1:3] == [("body", "d1", b"a"), ("body", "d1", b"b")]

    def test_status_and_served_endpoint_reach_the_core(self) -> None:
        d = Dialogue()
        served = PlainMetadata({"envoy.lb": {f"{DESTINATION}-served": "10.0.0.2:8000"}})
        d.say(headers(FDS, end=True), ResponseHeaders({":status": "503"}, True, None, served))
        assert d.handler.told[0] == ("started", "d1", 503, "10.0.0.2:8000")

    @pytest.mark.parametrize("value", [None, 5.0])
    def test_a_served_endpoint_that_is_no_text_is_none(self, value: object) -> None:
        d = Dialogue()
        served = PlainMetadata({"envoy.lb": {f"{DESTINATION}-served": value}})
        d.say(headers(FDS, end=True), ResponseHeaders({":status": "odd"}, True, None, served))
        assert d.handler.told[0] == ("started", "d1", 0, None)

    def test_a_failing_note_does_not_fail_the_response(self) -> None:
        d = Dialogue(ScriptedHandler(failing="started"))
        assert d.say(headers(FDS, end=True), response())[1:] == [RESPONSE_HEADERS_PASS]
        assert ("internal", "response_started") in d.counters.seen

    def test_a_response_may_come_before_the_request_has_ended(self) -> None:
        d = Dialogue(settings=SessionSettings(max_inspect_bytes=1))
        d.say(headers(FDS), body(b"12"))
        assert d.say(response("413"), body(b"3"), response_body(b"no", end=True), body(b"4", end=True)) == [
            RESPONSE_HEADERS_PASS,
            piece(b"3"),
            piece(b"no", end=True, direction=RESPONSE),
            piece(b"4", end=True),
        ]
        assert d.handler.ends == [StreamEnd.COMPLETED]

    def test_a_stream_that_begins_with_the_response_has_nothing_to_release(self) -> None:
        d = Dialogue(ScriptedHandler(wants_body=True))
        assert d.say(ResponseHeaders({":status": "200"}, False, FDS), response_body(b"x", end=True), HALF_CLOSED) == [
            RESPONSE_HEADERS_PASS,
            piece(b"x", end=True, direction=RESPONSE),
            Finish(),
        ]
        assert d.handler.told == []
        assert d.session.outcome == "undecided"

    def test_a_stream_may_begin_with_the_responses_body(self) -> None:
        d = Dialogue()
        event = ResponseBody(b"x", False, config(BodyMode.NONE, BodyMode.STREAMED))
        assert d.say(event) == [RESPONSE_PASS]


class TestAnsweredBySomebodyElse:
    """A response that comes before our decision is a local reply: ours would only cut it short."""

    def test_the_core_is_not_asked_any_more(self) -> None:
        d = Dialogue()
        event = RequestHeaders({**CHAT, DESTINATION: "10.9.9.9:1"}, False, FDS)
        assert d.say(event, response("401", end=True), body(b"one", end=True)) == [
            RESPONSE_HEADERS_PASS,
            DecisionReply(RequestHeaders, None, (DESTINATION,)),
            piece(b"one", end=True),
        ]
        assert d.handler.asks == []

    def test_a_late_refusal_lets_the_request_go(self) -> None:
        d, _ = held_dialogue()
        d.say(headers(FDS, end=True), response("401"))
        assert d.session.resume(NoEndpointError("none"), 0.0) == [DecisionReply(RequestHeaders, None)]
        assert not d.session.closed

    def test_a_late_deadline_too(self) -> None:
        d, _ = held_dialogue()
        d.say(headers(FDS, end=True), response("401"))
        assert d.say(DeadlinePassed(), now=2.0) == [DecisionReply(RequestHeaders, None)]
        assert d.handler.told == [("withdraw", 2.0)]

    def test_a_late_decision_is_released_as_aborted(self) -> None:
        d, _ = held_dialogue()
        d.say(headers(FDS, end=True), response("401", end=True))
        assert d.session.resume(chosen(), 0.0) == [decision()]
        assert d.handler.ends == []
        d.say(LOST)
        assert d.handler.ends == [StreamEnd.ABORTED]


class TestEnd:
    def test_half_close_before_the_end_of_the_request_is_a_client_that_left(self) -> None:
        d = Dialogue()
        assert d.say(headers(), body(b"half"), HALF_CLOSED) == [Finish()]
        assert (d.handler.asks, d.handler.told, d.budget.used_bytes) == ([], [], 0)

    def test_a_lost_stream_gets_no_reply(self) -> None:
        d = Dialogue()
        assert d.say(headers(), body(b"half"), LOST) == []
        assert d.session.closed
        assert d.budget.used_bytes == 0

    @pytest.mark.parametrize("end", [HALF_CLOSED, LOST])
    def test_direct_is_detached(self, end: Event) -> None:
        d = Dialogue()
        d.say(headers(end=True), end)
        assert d.handler.ends == [StreamEnd.DETACHED]
        assert d.session.outcome == "detached"

    def test_nginx_gateway_fabric_is_detached_and_gets_the_end(self) -> None:
        d = Dialogue()
        event = RequestHeaders({"content-type": "application/json"}, False)
        replies = d.say(event, body(b"x" * 100_000, end=True), HALF_CLOSED)
        assert isinstance(replies[0], DecisionReply)
        assert replies[-1] == Finish()
        assert d.handler.asks[0].path == ""
        assert d.handler.ends == [StreamEnd.DETACHED]

    @pytest.mark.parametrize(("by_log", "how"), [(False, StreamEnd.ABORTED), (True, StreamEnd.DETACHED)])
    def test_a_response_phase_that_was_configured_and_never_came(self, by_log: bool, how: StreamEnd) -> None:
        d = Dialogue(ScriptedHandler(by_log=by_log))
        d.say(headers(FDS, end=True), LOST)
        assert d.handler.ends == [how]

    def test_without_word_of_the_access_log_there_is_none(self) -> None:
        d = Dialogue(ScriptedHandler(failing="access_log_connected"))
        d.say(headers(FDS, end=True), LOST)
        assert d.handler.ends == [StreamEnd.ABORTED]

    def test_a_response_that_breaks_off_is_aborted(self) -> None:
        d = Dialogue(ScriptedHandler(by_log=True))
        d.say(headers(FDS, end=True), response(), response_body(b"x"), LOST)
        assert d.handler.ends == [StreamEnd.ABORTED]

    def test_a_decided_request_that_breaks_off_is_aborted(self) -> None:
        d = Dialogue(settings=SessionSettings(max_inspect_bytes=1))
        d.say(headers(), body(b"12"), LOST)
        assert d.handler.ends == [StreamEnd.ABORTED]

    def test_a_message_nobody_knows_is_ignored(self) -> None:
        assert Dialogue().say(Unknown(), headers(), Unknown()) == []

    def test_a_late_timer_is_ignored(self) -> None:
        assert Dialogue().say(DeadlinePassed(), headers(), DeadlinePassed()) == []


def test_an_illegal_message_raises_and_changes_nothing() -> None:
    d = Dialogue()
    with pytest.raises(ProtocolError, match="RequestBody while idle"):
        d.say(body(b"x"))
    d.say(headers(FDS), body(b"one"))
    held = d.budget.used_bytes
    with pytest.raises(ProtocolError, match="RequestHeaders while collecting"):
        d.say(headers(FDS))
    assert d.budget.used_bytes == held
    assert d.say(body(b"two", end=True)) == [decision(), piece(b"onetwo", end=True)]
    d.say(response())
    with pytest.raises(ProtocolError, match="ResponseHeaders while flowing"):
        d.say(response())
    assert d.say(response_body(end=True)) == [piece(b"", end=True, direction=RESPONSE)]


def test_a_running_session_keeps_the_settings_it_began_with() -> None:
    d = Dialogue(settings=SessionSettings(max_inspect_bytes=4))
    d.shared.settings = SessionSettings(max_inspect_bytes=1000)
    d.say(headers(), body(b"12345"))
    assert len(d.handler.asks) == 1


def test_an_explanation_is_one_line_of_printable_text() -> None:
    assert header_text("a\r\nb\té") == "a b "
    assert len(header_text("x" * 10_000)) == 4096
