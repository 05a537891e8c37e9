from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.errors import InvalidRequestError
from extproc.request.decode import TOKEN, TooExpensiveError, decode, in_utf8, respell, too_deep


class Thing(msgspec.Struct):
    a: str = ""
    n: int | None = None
    items: list[dict[str, Any]] = []


THING = msgspec.json.Decoder(Thing)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "the body is not valid JSON: Expecting value at character 0", None),
        (b"{", "the body is not valid JSON", None),
        (b"{} {}", "the body is not valid JSON: Extra data at character 3", None),
        (b'{"a": "\xff"}', "the body is not valid JSON: it is not UTF-8", None),
        (b'{"n": ' + b"1" * 5000 + b', "a": nan}', "the body is not valid JSON", None),
        (b"[1]", "the body must be a JSON object: expected `object`, got `array`", None),
        (b"5", "the body must be a JSON object: expected `object`, got `int`", None),
        (b'{"a": 5}', "a: expected `str`, got `int`", "a"),
        (b'{"items": [{}, 5]}', "items[1]: expected `object`, got `int`", "items[1]"),
        (b'{"n": 1e999}', "n: expected `int | null`, got `str`", "n"),
        (b'{"n": NaN}', "n: expected `int | null`, got `str`", "n"),
    ],
)
def test_error_says_what_and_where(body: bytes, message: str, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, THING)
    assert caught.value.message.startswith(message)
    assert caught.value.param == param


def test_error_never_quotes_the_body() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(b'{"a": secret}', THING)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"a": "x"}',
        '{"a": "x"}'.encode("utf-16"),
        b'{"a": "x", "unread": NaN}',
        b'{"a": "x", "items": [{"m": 1e999}]}',
        b'{"a": "x", "unread": "\\ud800"}',
    ],
)
def test_what_the_engines_reader_takes_is_taken(body: bytes) -> None:
    assert decode(body, THING).a == "x"


def test_lone_surrogates_stay_distinct() -> None:
    one, two = (decode(b'{"a": "\\u%s"}' % unit, THING).a for unit in (b"d800", b"dfff"))
    assert one != two


def test_lone_surrogates_without_end_are_too_dear() -> None:
    assert len(respell(b'"' + b"\\ud800" * 10_000 + b'"')) == 40_002
    with pytest.raises(TooExpensiveError, match="too many lone surrogates"):
        respell(b'"' + b"\\ud800" * 10_001 + b'"')


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be", "utf-32-le", "utf-8-sig"]
)
def test_other_encodings_are_read(encoding: str) -> None:
    assert in_utf8('{"a": "ä"}'.encode(encoding)) == '{"a": "ä"}'.encode()


def test_lone_surrogates_of_other_encodings_stay() -> None:
    text = '{"a": "\ud800"}'
    for encoding in ("utf-16-le", "utf-32-be"):
        assert in_utf8(text.encode(encoding, "surrogatepass")) == text.encode("utf-8", "surrogatepass")


def test_a_long_body_in_another_encoding_with_lone_surrogates_is_read_in_part() -> None:
    body = ('{"a": "\ud800' + "x" * 140_000 + '"}').encode("utf-16-le", "surrogatepass")
    with pytest.raises(TooExpensiveError, match="too long for UTF-16-LE"):
        in_utf8(body)
    assert in_utf8(body, complete=False).startswith(b'{"a": "xxx')


def test_what_only_looks_like_another_encoding_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="it is not UTF-32-LE"):
        in_utf8(b"{\x00\x00\x00\x00\x00\x00\xff")


def test_respelling_keeps_the_value() -> None:
    assert (
        respell(b'{"a": "\\u00e9", "b": [1.5, -Infinity, 1e999]}') == '{"a":"é","b":[1.5,"-Infinity","1e999"]}'.encode()
    )


@pytest.mark.parametrize("depth", [5_000, 200_000])
def test_deep_nesting_names_the_field(depth: int) -> None:
    body = b'{"a": "x", "b": [[]], "items": [{"x": ' + b"[" * depth + b"]" * depth + b"}]}"
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, THING)
    assert caught.value.message == "items: nested too deeply"
    assert caught.value.param == "items"


def test_deep_nesting_without_a_field() -> None:
    error = too_deep(b"[" * 5_000)
    assert error.message == "nested too deeply"
    assert error.param is None


def test_deep_nesting_that_only_the_second_reader_sees() -> None:
    body = b'{"a": "\\ud800", "items": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        decode(body, THING)


def test_deepest_field_is_found_in_a_shallow_body() -> None:
    assert too_deep(json.dumps({"a": [{"b": 1}], "c": 1}).encode()).param == "a"


PLAIN_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|(?P<cut>))|[\[\]{}]', re.DOTALL)


@settings(deadline=None)
@given(st.lists(st.sampled_from([b'"', b'"', b"\\", b"\\", b"a", b"{", b"]"]), max_size=14).map(b"".join))
def test_tokens_are_those_of_the_plain_pattern(text: bytes) -> None:
    found, expected = ([(m.span(), m.lastgroup) for m in p.finditer(text)] for p in (TOKEN, PLAIN_TOKEN))
    assert found == expected
