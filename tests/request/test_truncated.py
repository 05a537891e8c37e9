from __future__ import annotations

import pytest

from extproc.errors import InvalidRequestError
from extproc.request import truncated
from extproc.request.truncated import repair_truncated


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # nothing, or all of it
        (b"", b"{}"),
        (b" \n", b"{}"),
        (b"\xef\xbb\xbf", b"{}"),
        (b"{", b"{}"),
        (b'{"a":1} ', b'{"a":1} '),
        # strings and what looks like their end
        (rb'{"a":"x\"","b":"\"","c":"\\","d":"x\\\"y\\","e":"', rb'{"a":"x\"","b":"\"","c":"\\","d":"x\\\"y\\"}'),
        (b'{"prompt":"x\\"y\\\\\\"z\\', rb'{"prompt":"x\"y\\\"z"}'),
        # top-level members
        (b'{"a', b"{}"),
        (b'{"a"', b"{}"),
        (b'{"a" : ', b"{}"),
        (b'{"a":"x', b"{}"),
        (b'{"a":1', b"{}"),
        (b'{"a":1,', b'{"a":1}'),
        (b'{"a":1 , "b"', b'{"a":1 }'),
        (b'{"a":"x"', b'{"a":"x"}'),
        (b'{"a":"x" , ', b'{"a":"x" }'),
        (b'{"a":"x","b":tr', b'{"a":"x"}'),
        (b'{"a":"x","b":{"c":[1,2', b'{"a":"x"}'),
        (b'{"a":[1],"b":[{"c":"d', b'{"a":[1]}'),
        (b'{"a":{"b":1}', b'{"a":{"b":1}}'),
        # prompts
        (b'{"prompt":"ab', b'{"prompt":"ab"}'),
        (b'{"t":1,"prompt": "ab', b'{"t":1,"prompt": "ab"}'),
        (b'{"prompt":["ab","c', b'{"prompt":["ab","c"]}'),
        (b'{"prompt":["ab"', b'{"prompt":["ab"]}'),
        (b'{"prompt":[1,2,34', b'{"prompt":[1,2]}'),
        (b'{"prompt":[1', b'{"prompt":[]}'),
        (b'{"prompt":[[1,2],[3,4', b'{"prompt":[[1,2],[3]]}'),
        (b'{"prompt":[[1,2], ', b'{"prompt":[[1,2]]}'),
        (b'{"prompt":{"x":"y', b"{}"),
        (b'{"instructions":"ab', b'{"instructions":"ab"}'),
        # messages
        (b'{"messages":[', b'{"messages":[]}'),
        (b'{"messages":[{"role":"user"', b'{"messages":[{"role":"user"}]}'),
        (b'{"messages":[{"role":"us', b'{"messages":[]}'),
        (b'{"messages":[{"content":"hi', b'{"messages":[]}'),
        (b'{"messages":[{"content":"hi","role":"user"', b'{"messages":[{"role":"user","content":"hi"}]}'),
        (b'{"messages":[{"role":"user","content":"hi', b'{"messages":[{"role":"user","content":"hi"}]}'),
        (b'{"messages":[{"role":"user","name":"x","content":"h', b'{"messages":[{"role":"user","content":"h"}]}'),
        (b'{"messages":[{"role":"a","content":null,"tool_calls":[{"id', b'{"messages":[{"role":"a","content":null}]}'),
        (b'{"messages":[{"role":"a","content":{"x', b'{"messages":[{"role":"a"}]}'),
        (b'{"messages":[{"role":"user","content":"hi"}, {"ro', b'{"messages":[{"role":"user","content":"hi"}]}'),
        (b'{"input":[{"type":"call","role":"x","content":"y', b'{"input":[]}'),
        (b'{"input":[{"type":"message","role":"x","content":"y', b'{"input":[{"role":"x","content":"y"}]}'),
        (b'{"messages":[{"x":bad,"role":"user","content":"hi', b'{"messages":[]}'),
        # parts
        (b'{"system":[{"type":"text","text":"ab', b'{"system":[{"type":"text","text":"ab"}]}'),
        (b'{"system":[{"text":"ab', b'{"system":[]}'),
        (b'{"system":[{"type":"image","text":"ab', b'{"system":[]}'),
        (b'{"system":[{"type":"text","text":"ab"},{"type":"image', b'{"system":[{"type":"text","text":"ab"}]}'),
        (b'{"system":[{"type":"text","note":{"a', b'{"system":[{"type":"text"}]}'),
        (
            b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"}, {"type":"text","text":"b',
            b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"}, {"type":"text","text":"b"}]}]}',
        ),
        # tools: whole ones only
        (b'{"tools":[{"a":1},{"b":', b'{"tools":[{"a":1}]}'),
        (b'{"tools":["a","b', b'{"tools":["a"]}'),
        # what the engine has after the field that was cut goes
        (b'{"model":"m","messages":[{"role":"user"}],"tools":[{"a":1},{', b'{"model":"m","tools":[{"a":1}]}'),
        (b'{"model":"m","messages":[{"role":"user"}],"system":"x', b'{"model":"m","system":"x"}'),
        (b'{"model":"m","messages":[{"role":"user"}],"tools":', b'{"model":"m"}'),
        (b'{"tools":[{"a":1}],"messages":[{"role":"u', b'{"tools":[{"a":1}],"messages":[]}'),
    ],
)
def test_what_is_kept(body: bytes, expected: bytes) -> None:
    assert repair_truncated(body) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"ab\\", b"ab"),
        (b"ab\\u00", b"ab"),
        (b"ab\\u00e9", b"ab\\u00e9"),
        (b"ab\\ud83d", b"ab"),
        (b"ab\\ud83d\\", b"ab"),
        (b"ab\\ud83d\\ude", b"ab"),
        (b"ab\\ud83d\\ude00", b"ab\\ud83d\\ude00"),
        (b"ab\\\\ud83d", b"ab\\\\ud83d"),
        ("aé".encode()[:-1], b"a"),
        ("aé".encode(), "aé".encode()),
        ("a你".encode()[:-1], b"a"),
        ("a你".encode()[:-2], b"a"),
        ("a你".encode(), "a你".encode()),
        ("a😀".encode()[:-1], b"a"),
        ("a😀".encode()[:-2], b"a"),
        ("a😀".encode()[:-3], b"a"),
        ("a😀".encode(), "a😀".encode()),
        (b"", b""),
        (b"a\x80\x80\x80\x80", b""),
        (b"a\\ud83d and more", b""),
    ],
)
def test_string_ends_with_a_whole_character(text: bytes, expected: bytes) -> None:
    assert repair_truncated(b'{"prompt":"' + text) == b'{"prompt":"' + expected + b'"}'


@pytest.mark.parametrize("body", [b"[", b"x", b'"', b'{"a":]', b'{"a":[}', b"{{", b"{[", b'{"a":[1],{'])
def test_what_can_not_become_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        repair_truncated(body)


def test_deep_nesting_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="tools: nested too deeply"):
        repair_truncated(b'{"tools":' + b"[" * 10_000)


def test_very_many_tokens_are_a_cut_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"model":"m","prompt":["ab","cd"]}'
    expected = [b"}", b"}", b"}", b'"model":"m"}', b'"model":"m"}', b'"model":"m","prompt":[]}']
    for count, rest in enumerate(expected[1:], start=1):
        monkeypatch.setattr(truncated, "_MAX_TOKENS", count)
        assert repair_truncated(body) == b"{" + rest
