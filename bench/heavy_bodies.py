"""Legal bodies that take longest to decide on: what one client can make everybody wait for.

Each fills the inspection limit (4 MiB) with as many elements of one kind as fit, in each place where they may stand, whole
or cut, and once more in each way that has to be read twice. What is found to be worse than these belongs here.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

from extproc.request.parse_cost import PART, TOKEN_IDS, UNCOUNTED_BYTES, WHOLE, affordable

__all__ = ["LIMIT_BYTES", "Heavy", "heavy_bodies", "largest_read_whole"]

LIMIT_BYTES: Final = 4 << 20

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_EMBEDDINGS: Final = "/v1/embeddings"
_RESPONSES: Final = "/v1/responses"
_MESSAGES: Final = "/v1/messages"


class Heavy(NamedTuple):
    """One kind of body; `make` takes how many bytes it may have."""

    name: str
    path: str
    make: Callable[[int], bytes]
    complete: bool = True
    content_encoding: str = ""


_PLACES: Final = {
    "messages": (_CHAT, b'{"model":"m","messages":[', b"]}"),
    "parts": (_CHAT, b'{"model":"m","messages":[{"role":"user","content":[', b"]}]}"),
    "tool calls": (_CHAT, b'{"model":"m","messages":[{"role":"user","content":"","tool_calls":[', b"]}]}"),
    "tools": (_CHAT, b'{"model":"m","tools":[', b"]}"),
    "documents": (_CHAT, b'{"model":"m","documents":[', b"]}"),
    "template arguments": (_CHAT, b'{"model":"m","chat_template_kwargs":{"a":[', b"]}}"),
    "unknown": (_CHAT, b'{"model":"m","unknown":[', b"]}"),
    "reasoning effort": (_CHAT, b'{"model":"m","reasoning_effort":[', b"]}"),
    "adapter": (_COMPLETIONS, b'{"model":"m","prompt":"a","lora_path":[', b"]}"),
    "prompt": (_COMPLETIONS, b'{"model":"m","prompt":[', b"]}"),
    "input": (_EMBEDDINGS, b'{"model":"m","input":[', b"]}"),
    "items": (_RESPONSES, b'{"model":"m","input":[', b"]}"),
    "system": (_MESSAGES, b'{"model":"m","system":[', b"]}"),
    "anthropic": (_MESSAGES, b'{"model":"m","messages":[', b"]}"),
    "no path": ("", b'{"model":"m","messages":[', b"]}"),
    "members": (_CHAT, b'{"model":"m","messages":[{"x":1},', b"]}"),
}
_ELEMENTS: Final = (
    b"{}",
    b"[]",
    b"[1]",
    b"1",
    b"1.5",
    b"1e308",
    b"18446744073709551616",
    b"7" * 500,
    b"7" * 4200,
    b"null",
    b'""',
    b'"a"',
    b'"\\\\"',
    b'{"a":1}',
    b'{"a":{}}',
    b'{"role":""}',
    b'{"type":"x"}',
    b'{"text":""}',
    b'{"content":[{}]}',
    b'{"role":"user","content":""}',
    b'{"role":"u","content":"","name":"a"}',
    b'{"type":"image_url"}',
    b'{"type":"tool_result","content":[""]}',
    b'{"role":"user","content":"\\"\\""}',
    b'{"a":1,"b":2,"c":3,"d":4}',
)
_TEXTS: Final = {
    "prose": b"the quick brown fox. ",
    "commas": b",",
    "brackets": b"{[",
    "quotes": b'\\"',
    "backslashes": b"\\\\",
    "line breaks": b"\\n",
    "escapes": b"\\u0000",
    "pairs": b"\\ud83d\\ude00",
    "lone surrogates": b"\\ud800",
    "some lone surrogates": b"\\ud800" + b"x" * 500,
    "two bytes": "é".encode(),
    "four bytes": "😀".encode(),
    "json": b'{\\"a\\":[1,2],\\"b\\":\\"c\\"},',
}
_TWICE: Final = {
    "NaN first": (b'{"n":NaN,', b""),
    "NaN last": (b"{", b',"n":NaN}'),
    "surrogate last": (b"{", b',"n":"\\ud800"}'),
    "wrong type last": (b"{", b',"stream":[]}'),
    "great number last": (b"{", b',"max_tokens":1' + b"0" * 40 + b"}"),
    "no JSON last": (b"{", b',"n":!}'),
}
_DEEP: Final = b"[" * 2000 + b"]" * 2000
_KEYS: Final = {
    "at the top": (b"{", b"}"),
    "of a message": (b'{"messages":[{', b"}]}"),
    "of a tool call": (b'{"messages":[{"role":"user","content":"","tool_calls":{', b"}}]}"),
    "of a tool": (b'{"tools":[{', b"}]}"),
    "of template arguments": (b'{"chat_template_kwargs":{', b"}}"),
}
_LONG: Final = {
    "digits": (b'{"unknown":', b"1", b"}"),
    "digits for a limit": (b'{"max_tokens":', b"1", b"}"),
    "white space": (b'{"a":1', b" \n", b"}"),
    "deep": (b'{"messages":', b"[", b"}"),
    "a long key": (b'{"', b"k", b'":' + _DEEP + b"}"),
    "a long name": (b'{"model":"', b"m", b'"}'),
}


def _filled(head: bytes, unit: bytes, tail: bytes, separator: bytes, size: int) -> bytes:
    times = (size - len(head) - len(tail)) // (len(unit) + len(separator))
    return head + separator.join([unit] * times) + tail


def _plain() -> Iterator[Heavy]:
    for place, (path, head, tail) in _PLACES.items():
        for unit in _ELEMENTS:
            name = unit.decode() if len(unit) < 60 else f"{len(unit)} digits"
            yield Heavy(f"{place}: {name}", path, partial(_filled, head, unit, tail, b","))
    for name, unit in _TEXTS.items():
        head, tail = b'{"model":"m","messages":[{"role":"user","content":"', b'"}]}'
        yield Heavy(f"text: {name}", _CHAT, partial(_filled, head, unit, tail, b""))
    numbers = {"floats and NaN": b"1.5,NaN", "infinities": b"1e999", "NaN": b"NaN", "{NaN}": b'{"a":NaN}'}
    for name, unit in numbers.items():
        yield Heavy(f"messages: {name}", _CHAT, partial(_filled, b'{"messages":[', unit, b"]}", b","))
        yield Heavy(f"unknown: {name}", _CHAT, partial(_filled, b'{"unknown":[', unit, b"]}", b","))
    for name, (head, tail) in _KEYS.items():
        yield Heavy(f"keys {name}", _CHAT, partial(_keys, head, tail))
    yield Heavy("one key again and again", _CHAT, partial(_filled, b"{", b'"messages":[{}]', b"}", b","))
    for name, (head, unit, tail) in _LONG.items():
        yield Heavy(name, _CHAT, partial(_filled, head, unit, tail, b""))
    yield Heavy("great numbers", _CHAT, partial(_filled, b'{"unknown":[NaN,', b"1" * 4000, b"]}", b","))
    for unit in (b"[]", b'""', b"{}"):
        yield Heavy(
            f"deep at last: {unit.decode()}", _CHAT, partial(_filled, b'{"unknown":[', unit, b"," + _DEEP + b"]}", b",")
        )
    for encoding in ("utf-16", "utf-32"):
        yield Heavy(f"{encoding}: {{}}", _CHAT, partial(_encoded, encoding, '{"messages":[', "{},", "{}]}"))
        yield Heavy(f"{encoding}: lone surrogates", _CHAT, partial(_encoded, encoding, '{"model":"', "\ud800", '"}'))
        yield Heavy(f"{encoding}: text", _CHAT, partial(_encoded, encoding, '{"functions":["', "a\\n", '"]}'))


def _keys(head: bytes, tail: bytes, size: int) -> bytes:
    return head + b",".join(b'"k%d":1' % place for place in range(size // 13)) + tail


def _encoded(encoding: str, head: str, unit: str, tail: str, size: int) -> bytes:
    room = size // len("x".encode(f"{encoding}-le")) - len(head) - len(tail) - 1
    return (head + unit * (room // len(unit)) + tail).encode(encoding, "surrogatepass")


def _with(make: Callable[[int], bytes], head: bytes, tail: bytes, size: int) -> bytes:
    body = make(size - len(head) - len(tail))
    return head + (body[1:-1] + tail if tail else body[1:])


def _cut(make: Callable[[int], bytes], size: int) -> bytes:
    return make(size)[:-3]


def _packed(size: int) -> bytes:
    return gzip.compress(_filled(b'{"messages":[', b"{}", b"]}", b",", size))


def largest_read_whole(heavy: Heavy) -> bytes:
    """Make the longest body of this kind that is not taken to be too dear, which is read to its end."""
    prices = TOKEN_IDS if heavy.path in {_COMPLETIONS, _EMBEDDINGS} else WHOLE if heavy.complete else PART
    size = affordable(heavy.make(LIMIT_BYTES), prices)
    return heavy.make(max(UNCOUNTED_BYTES, size))


def heavy_bodies(*, cut: bool = True, twice: bool = True) -> Iterator[Heavy]:
    """Name them all (some 2,600); without those that are `cut`, or those that have to be read `twice`, fewer."""
    for heavy in _plain():
        yield heavy
        if cut:
            yield heavy._replace(name=f"{heavy.name}, cut", make=partial(_cut, heavy.make), complete=False)
        if twice and not heavy.name.startswith("utf"):
            for how, (head, tail) in _TWICE.items():
                yield heavy._replace(name=f"{heavy.name}, {how}", make=partial(_with, heavy.make, head, tail))
    yield Heavy("gzip", _CHAT, _packed, content_encoding="gzip")
    yield Heavy("gzip that does not say so", _CHAT, _packed)
