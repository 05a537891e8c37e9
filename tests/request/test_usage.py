from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.request.usage import UsageReader
from extproc.types import Usage

OPENAI = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
RESPONSES = {"input_tokens": 10, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 8}}
ANTHROPIC = {"input_tokens": 1, "output_tokens": 3, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 1}
FULL = Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=8)


def read(content_type: str, *chunks: bytes) -> Usage | None:
    reader = UsageReader(content_type)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.result()


def events(*data: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in data) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("usage", [OPENAI, RESPONSES, ANTHROPIC])
def test_json_response(usage: dict[str, Any]) -> None:
    body = json.dumps({"id": "x", "choices": [{"text": 'a "usage": {"prompt_tokens": 1}'}], "usage": usage}, indent=1)
    assert read("application/json", body.encode()) == FULL


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 10}, Usage(prompt_tokens=10)),
        ({"prompt_tokens": 10, "prompt_tokens_details": None}, Usage(prompt_tokens=10)),
        ({"input_tokens": 10}, Usage(prompt_tokens=10)),
        ({"output_tokens": 1}, Usage(completion_tokens=1)),
        ({"prompt_tokens": True, "completion_tokens": -1, "cache_read_input_tokens": "8"}, None),
        ({}, None),
        (None, None),
        ([], None),
        ({"padding": "x" * 5000, "prompt_tokens": 10}, None),
    ],
)
def test_usage_with_gaps(usage: Any, expected: Usage | None) -> None:
    assert read("application/json", json.dumps({"usage": usage}).encode()) == expected


def test_last_usage_of_a_document_counts() -> None:
    assert (
        read("", json.dumps({"content": [{"input": {"usage": {"prompt_tokens": 1}}}], "usage": RESPONSES}).encode())
        == FULL
    )


def test_huge_document_is_read_from_its_end_in_bounded_memory() -> None:
    reader = UsageReader("application/json")
    reader.feed(b'{"choices": ["')
    for _ in range(1000):
        reader.feed(b"x" * 1000)
        assert len(reader._held) <= 2 * 65_536
    reader.feed(b'"], "usage": ' + json.dumps(OPENAI).encode() + b"}")
    assert reader.result() == FULL
    assert reader.result() == FULL


def test_stream_with_usage_in_the_last_event() -> None:
    stream = events({"choices": [{}], "usage": None}, {"choices": [], "usage": OPENAI})
    assert read("text/event-stream; charset=utf-8", stream) == FULL


def test_stream_with_continuous_usage() -> None:
    early = OPENAI | {"completion_tokens": 1}
    assert read("text/event-stream", events({"usage": early}, {"usage": early}, {"usage": OPENAI})) == FULL


def test_anthropic_stream_tells_it_in_two_parts() -> None:
    start = {"message": {"usage": {"input_tokens": 2, "cache_read_input_tokens": 8, "output_tokens": 1}}}
    assert read("text/event-stream", events(start, {"usage": {"output_tokens": 3}})) == FULL


def test_stream_without_usage() -> None:
    assert read("text/event-stream", events({"choices": [{"delta": {"content": '"usage": {}'}}]})) is None


def test_usage_in_a_line_without_end() -> None:
    assert read("text/event-stream", b"data: " + json.dumps({"usage": OPENAI}).encode()) == FULL


def test_nested_garbage_is_no_usage() -> None:
    assert read("", b'{"usage": {"a":' + b"[" * 4000) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), max_size=8))
def test_any_chunking_gives_the_same(cuts: list[int]) -> None:
    stream = events({"choices": [{"text": "é"}]}, {"usage": RESPONSES}, {"choices": []})
    places = [0, *sorted(cuts), len(stream)]
    assert read("text/event-stream", *(stream[a:b] for a, b in pairwise(places))) == FULL
