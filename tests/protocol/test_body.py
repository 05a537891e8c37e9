from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.body import BodyBuffer, pieces, spliced
from extproc.protocol.budget import BodyBudget


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
