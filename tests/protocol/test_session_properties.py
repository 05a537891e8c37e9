"""Whatever the gateway does, bytes come back once, slots are released once, and no byte stays charged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import NoEndpointError, ProtocolError
from extproc.protocol.early_close import Gateway
from extproc.protocol.events import (
    BodyMode,
    DeadlinePassed,
    Direction,
    Event,
    HalfClosed,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamLost,
    Unknown,
)
from extproc.protocol.interfaces import PendingDecision, RouteRequest
from extproc.protocol.replies import (
    BodyReply,
    DecisionReply,
    Finish,
    FinishWith,
    HeadersReply,
    ImmediateReply,
    Reply,
    TrailersReply,
)
from extproc.protocol.request_buffer import BodyBudget
from extproc.protocol.settings import ResponsePhase, SessionSettings
from extproc.types import Decision
from tests.protocol.dialogue import CHAT, FDS, TRAILERS, Dialogue, ScriptedHandler, body, chosen, headers

BODY = b'{"model": "m", "prompt": "' + bytes(range(256)) * 30 + b'"}'
SETTINGS = SessionSettings(max_inspect_bytes=4096, piece_bytes=1000)
CLOSING = replace(SETTINGS, response_phase=ResponsePhase.CLOSE, response_sample=0.3)


ANSWERS: dict[type[Event], type[HeadersReply | BodyReply | TrailersReply]] = {
    RequestHeaders: HeadersReply,
    RequestBody: BodyReply,
    RequestTrailers: TrailersReply,
}


def chunked(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def echoed(replies: Sequence[Reply], direction: Direction = Direction.REQUEST) -> bytes:
    return b"".join(r.data or b"" for r in replies if isinstance(r, BodyReply) and r.direction is direction)


def checked_order(replies: Sequence[Reply], direction: Direction) -> None:
    """Headers, body, trailers; one headers reply at most; nothing after an end of stream or trailers."""
    mine = []
    for reply in replies:
        if isinstance(reply, DecisionReply):
            if direction is Direction.REQUEST:
                mine.append(ANSWERS[reply.answers])
        elif not isinstance(reply, Finish | FinishWith | ImmediateReply) and reply.direction is direction:
            mine.append(type(reply))
    rank = [(HeadersReply, BodyReply, TrailersReply).index(kind) for kind in mine]
    assert rank == sorted(rank)
    assert rank.count(0) <= 1
    assert rank.count(2) <= 1
    bodies = [r for r in replies if isinstance(r, BodyReply) and r.direction is direction]
    bodies += [r.last for r in replies if isinstance(r, FinishWith) and r.last.direction is direction]
    assert not any(r.end_of_stream for r in bodies[:-1])


@given(st.lists(st.integers(0, 10_000), max_size=12), st.booleans(), st.booleans())
def test_any_chunking_gives_the_same_decision_and_the_same_bytes(
    cuts: list[int], empty_end: bool, trailers: bool
) -> None:
    d = Dialogue()
    chunks = chunked(BODY, cuts)
    events: list[Event] = [headers()]
    if trailers:
        events += [*(body(chunk) for chunk in chunks), TRAILERS]
    elif empty_end:
        events += [*(body(chunk) for chunk in chunks), body(end=True)]
    else:
        events += [*(body(chunk) for chunk in chunks[:-1]), body(chunks[-1], end=True)]
    replies = d.say(*events)
    assert [ask.body for ask in d.handler.asks] == [BODY]
    assert d.handler.asks[0].complete
    assert echoed(replies) == BODY
    checked_order(replies, Direction.REQUEST)
    last = replies[-1]
    assert isinstance(last, TrailersReply) if trailers else isinstance(last, BodyReply) and last.end_of_stream
    assert d.budget.used_bytes == 0


@given(st.lists(st.integers(0, 10_000), max_size=12), st.integers(0, 9000), st.integers(0, 9000))
def test_beyond_any_limit_the_bytes_still_come_back(cuts: list[int], inspect: int, budget: int) -> None:
    d = Dialogue(settings=SessionSettings(max_inspect_bytes=inspect, piece_bytes=700), budget=BodyBudget(budget))
    chunks = chunked(BODY, cuts)
    replies = d.say(headers(), *(body(chunk) for chunk in chunks), body(end=True))
    assert echoed(replies) == BODY
    assert len(d.handler.asks) == 1
    assert BODY.startswith(d.handler.asks[0].body)
    assert len(d.handler.asks[0].body) <= inspect
    checked_order(replies, Direction.REQUEST)
    assert d.budget.used_bytes == 0


_CONFIGS = st.one_of(
    st.none(), st.builds(ProtocolConfig, st.sampled_from(list(BodyMode)), st.sampled_from(list(BodyMode)))
)
_DATA = st.binary(max_size=3).map(lambda data: data * 900)
_HEADERS = st.sampled_from([CHAT, {**CHAT, "upgrade": "websocket"}])
_EVENTS = st.one_of(
    st.builds(RequestHeaders, _HEADERS, st.booleans(), _CONFIGS, st.none(), st.just(100)),
    st.builds(RequestBody, _DATA, st.booleans()),
    st.builds(RequestBody, _DATA, st.booleans()),
    st.just(RequestTrailers()),
    st.builds(ResponseHeaders, st.just({":status": "200"}), st.booleans(), _CONFIGS),
    st.builds(ResponseBody, _DATA, st.booleans()),
    st.just(ResponseTrailers()),
    st.just(HalfClosed()),
    st.just(StreamLost()),
    st.just(DeadlinePassed()),
    st.just(Unknown()),
)
_ANSWERS = st.sampled_from(
    [chosen(), chosen(body_splice=(0, 2, b"xyz")), PendingDecision(), NoEndpointError("none"), KeyError("k")]
)


@given(
    st.builds(RequestHeaders, _HEADERS, st.booleans(), _CONFIGS, st.none(), st.just(100)),
    st.lists(st.one_of(_EVENTS, st.just("answer")), max_size=14),
    _ANSWERS,
    st.booleans(),
    st.booleans(),
    st.sampled_from([SETTINGS, CLOSING]),
)
def test_any_sequence_releases_everything_exactly_once(
    first: RequestHeaders,
    events: list[Event | str],
    answer: object,
    by_log: bool,
    late: bool,
    settings: SessionSettings,
) -> None:
    decided: list[str] = []

    def decide(_ask: RouteRequest) -> object:
        if isinstance(answer, Decision):
            decided.append(answer.id)
        return answer

    d = Dialogue(ScriptedHandler(answer=decide, by_log=by_log), settings, gateway=Gateway.ENVOY)
    replies: list[Reply] = []
    answered = False
    for now, event in enumerate([first, *events]):
        before = (d.budget.used_bytes, len(d.handler.told), d.session.closed)
        try:
            if isinstance(event, str):
                if d.session.pending is not None and not answered:
                    answered = True
                    decided.append("d1")
                    replies += d.session.resume(chosen(), float(now))
            else:
                replies += d.session.receive(event, float(now))
        except ProtocolError:
            assert before == (d.budget.used_bytes, len(d.handler.told), d.session.closed)
    replies += d.session.receive(StreamLost(), 100.0)
    if late and d.handler.asks and isinstance(answer, PendingDecision) and not answered:
        decided.append("d1")
        assert d.session.resume(chosen(), 101.0) == []
    assert d.session.closed
    assert d.budget.used_bytes == 0
    assert len(d.handler.ends) == len(decided)
    assert (d.session.pending, d.session.deadline) == (None, None)
    checked_order(replies, Direction.REQUEST)
    checked_order(replies, Direction.RESPONSE)
    finishes = [index for index, reply in enumerate(replies) if isinstance(reply, Finish | FinishWith)]
    assert finishes in ([], [len(replies) - 1])


@given(st.lists(st.tuples(_DATA, st.just(0)), max_size=8))
def test_response_bytes_come_back(chunks: list[tuple[bytes, int]]) -> None:
    d = Dialogue(settings=SETTINGS)
    d.say(headers(FDS, end=True), ResponseHeaders({":status": "200"}))
    replies = d.say(*(ResponseBody(data) for data, _ in chunks), ResponseBody(b"", end_of_stream=True))
    assert echoed(replies, Direction.RESPONSE) == b"".join(data for data, _ in chunks)
    checked_order(replies, Direction.RESPONSE)


def test_a_body_of_single_bytes_costs_few_replies() -> None:
    d = Dialogue()
    replies = d.say(headers(), *(body(bytes((byte,))) for byte in BODY), body(end=True))
    assert echoed(replies) == BODY
    assert len(replies) == 2
