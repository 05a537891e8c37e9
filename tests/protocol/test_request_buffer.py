from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.interfaces import Observer
from extproc.protocol.replies import pieces
from extproc.protocol.request_buffer import BodyBudget, BodyBuffer, RequestBuffer, parse_subset, spliced
from extproc.protocol.settings import SessionSettings
from tests.protocol.dialogue import CHAT, Dialogue, subset


def test_dropping_lets_everything_go_but_how_far_the_request_has_come() -> None:
    d = Dialogue()
    buffer = RequestBuffer(d.budget, d.counters, SessionSettings(max_inspect_bytes=2))
    buffer.headers = {":method": "GET"}
    buffer.note_subset(subset("a:1"))
    buffer.keep(b"abc", 50)
    buffer.ended = True
    assert buffer.too_large
    request = buffer.route_request(complete=True)
    assert (request.method, request.body, request.complete, request.subset) == ("GET", b"ab", False, frozenset({"a:1"}))
    buffer.drop()
    buffer.drop()
    assert d.budget.used_bytes == 0
    assert (buffer.chunks(), buffer.subset, buffer.retriable, buffer.too_large) == ([], None, True, False)
    assert buffer.headers == {}


def test_trailers_forbid_a_retry() -> None:
    buffer = RequestBuffer(BodyBudget(1), Observer(), SessionSettings())
    assert not buffer.retriable
    buffer.ended = buffer.trailers = True
    assert not buffer.retriable


@given(st.lists(st.one_of(st.binary(max_size=8), st.integers(2000, 5000).map(bytes))))
def test_a_body_comes_out_as_it_went_in_and_the_budget_gets_everything_back(chunks: list[bytes]) -> None:
    budget = BodyBudget(1 << 30)
    buffer = BodyBuffer(budget, 10)
    for chunk in chunks:
        buffer.add(chunk)
    whole = b"".join(chunks)
    assert buffer.size_bytes == len(whole)
    assert budget.used_bytes >= len(whole) + 10
    assert buffer.joined() == b"".join(buffer.chunks()) == whole
    assert all(buffer.chunks())
    buffer.release()
    buffer.release()
    assert budget.used_bytes == 0
    assert buffer.chunks() == []


def test_a_body_that_comes_byte_by_byte_becomes_few_chunks() -> None:
    buffer = BodyBuffer(BodyBudget(1 << 30))
    for _ in range(100_000):
        buffer.add(b"x")
    assert [len(chunk) for chunk in buffer.chunks()] == [32_768, 32_768, 32_768, 1_696]


def test_a_chunk_that_is_large_enough_is_not_copied() -> None:
    chunk = bytes(3000)
    buffer = BodyBuffer(BodyBudget(1 << 30))
    buffer.add(b"small")
    buffer.add(chunk)
    assert buffer.chunks()[1] is chunk


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", []), (b"abc", [b"abc"]), (b"abcd", [b"abc", b"d"]), (b"abcdef", [b"abc", b"def"])],
)
def test_pieces_are_cut_only_where_needed(data: bytes, expected: list[bytes]) -> None:
    assert list(pieces(data, 3)) == expected


@given(st.lists(st.binary(max_size=6)), st.data(), st.binary(max_size=4))
def test_a_splice_is_the_splice_of_the_whole(chunks: list[bytes], data: st.DataObject, replacement: bytes) -> None:
    whole = b"".join(chunks)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    assert b"".join(spliced(chunks, start, end, replacement)) == whole[:start] + replacement + whole[end:]


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (2, 1), (0, 4)])
def test_a_splice_outside_of_what_was_read_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="lies outside the 3 bytes read"):
        spliced([b"abc"], start, end, b"")


def test_it_counts_what_is_held_and_remembers_the_peak() -> None:
    budget = BodyBudget(10)
    budget.charge(8)
    assert not budget.exceeded
    budget.charge(3)
    assert budget.exceeded
    budget.refund(11)
    assert (budget.used_bytes, budget.exceeded) == (0, False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["10.0.0.1:80", "10.0.0.2:80"], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80, 10.0.0.2:80", {"10.0.0.1:80", "10.0.0.2:80"}),
        (["10.0.0.1:80,10.0.0.2:80", " [2600::1]:80 "], {"10.0.0.1:80", "10.0.0.2:80", "[2600::1]:80"}),
        (("10.0.0.1",), {"10.0.0.1"}),
        ([], set()),
        ("", set()),
        (" , ", set()),
        ([""], set()),
        (5.0, set()),
        ({"a": "b"}, set()),
    ],
)
def test_every_encoding_seen_in_the_field_is_read_and_a_present_hint_never_widens(
    value: object, expected: set[str]
) -> None:
    assert parse_subset(value) == expected


@pytest.mark.parametrize(
    ("allow", "value", "wanted"), [(True, "1", True), (True, "True", True), (True, "0", False), (False, "1", False)]
)
def test_an_explanation_needs_both_the_client_and_the_settings(allow: bool, value: str, wanted: bool) -> None:
    buffer = RequestBuffer(BodyBudget(1), Observer(), SessionSettings(allow_explain=allow))
    buffer.headers = {**CHAT, "x-extproc-explain": value}
    request = buffer.route_request(complete=True)
    assert request.explain is wanted
    assert (request.method, request.path, request.upgrade) == ("POST", "/v1/chat/completions", False)


def test_what_the_gateway_does_not_send_is_empty() -> None:
    buffer = RequestBuffer(BodyBudget(1), Observer(), SessionSettings())
    buffer.headers = {"upgrade": "websocket"}
    request = buffer.route_request(complete=False)
    assert (request.method, request.path, request.upgrade) == ("", "", True)
