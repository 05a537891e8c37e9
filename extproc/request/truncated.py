"""Repair a body that was truncated at some byte.

A body beyond the inspection limit is decided on its first part. This module repairs that part into a JSON document that
`parse` can read, and keeps only what makes the prompt a prefix of that of the whole body: a truncated text up to its end,
of a list its complete elements, of a message its role and the part of its content that is there. Of the fields that make
up a prompt, those that come after the truncated one in the engine's order are dropped; those that follow in the rest of
the document are unknown (tools written after the messages, for example), and then the prompt is not a prefix of the whole
one.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from extproc.errors import InvalidRequestError
from extproc.request.canonical import TEXT_PARTS
from extproc.request.decode import MAX_DEPTH, TOKEN, decode, too_deep

__all__ = ["repair_truncated"]

_MAX_TOKENS = 30_000
"""Strings and brackets read; a body with more counts as truncated there. Of valid JSON `parse_cost` allows no more."""

_ORDER = {
    b"chat_template": 0,
    b"reasoning_effort": 1,
    b"chat_template_kwargs": 1,
    b"documents": 2,
    b"tools": 3,
    b"functions": 4,
    b"instructions": 5,
    b"system": 5,
    b"messages": 6,
    b"input": 6,
}
"""Position in the canonical prompt of each field that can be a part of it."""

_CHILDREN = {
    ("root", b"messages"): "items",
    ("root", b"input"): "items",
    ("root", b"prompt"): "items",
    ("root", b"system"): "parts",
    ("root", b"instructions"): "parts",
    ("root", b"tools"): "whole",
    ("root", b"functions"): "whole",
    ("items", b"{"): "message",
    ("items", b"["): "whole",
    ("message", b"content"): "parts",
    ("parts", b"{"): "part",
}
"""Containers of which a part is kept: (kind of the parent, key or opening bracket) -> kind."""

_TEXTS = {
    ("root", b"prompt"),
    ("root", b"input"),
    ("root", b"instructions"),
    ("root", b"system"),
    ("message", b"content"),
    ("part", b"text"),
    ("items", b""),
}
"""Strings of which a part is kept: (kind of the container, key; in a list: empty)."""

_CLOSER = {b"{": b"}", b"[": b"]"}
_WHITE = b" \t\r\n"
_MEMBERS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class _Open:
    """A container that is open at the end."""

    bracket: bytes
    start: int
    key_start: int
    """Where its key starts; in a list, where it starts itself."""
    key: bytes
    """Its key as written, without quotes; empty in a list."""


@dataclass(slots=True)
class _Walk:
    """The state at the end: the open containers from the outside in, and the last string or bracket."""

    opened: list[_Open]
    last_start: int
    last_end: int
    last_is_string: bool
    cut: int
    """Where the truncated string starts, else where the body ends."""
    in_string: bool
    """The body ends in a string."""


def repair_truncated(body: bytes) -> bytes:
    """Return a JSON object of what `body`, the beginning of a request, contains for certain.

    Raises InvalidRequestError if no continuation could make it a JSON object, or if it is nested too deeply. A body
    that is complete is returned unchanged. Costs O(body).
    """
    body = body.removeprefix(b"\xef\xbb\xbf")
    start = body.lstrip(_WHITE)[:1]
    if not start:
        return b"{}"
    if start != b"{":
        raise InvalidRequestError("the body must be a JSON object")
    walk = _walk(body)
    if not walk.opened:
        return body
    mended, field = _mend(body, walk)
    return _in_order(mended, field)


def _walk(body: bytes) -> _Walk:
    """Follow the brackets to the end. Raises InvalidRequestError if they do not match or nest too deeply."""
    opened: list[_Open] = []
    start = end = 0
    char = b""
    key_start = key_end = 0
    for count, match in enumerate(TOKEN.finditer(body)):
        last, last_start, last_end = char, start, end
        start, end = match.span()
        char = body[start : start + 1]
        if count == _MAX_TOKENS or match.lastgroup:
            return _Walk(opened, last_start, last_end, last == b'"', start, match.lastgroup is not None)
        if char == b'"':
            key_start, key_end = start, end
        elif char in _CLOSER:
            if opened and opened[-1].bracket == b"{":
                if last != b'"':
                    raise InvalidRequestError(f"the body is not valid JSON: a key is missing at byte {start}")
                opened.append(_Open(char, start, key_start, body[key_start + 1 : key_end - 1]))
            else:
                opened.append(_Open(char, start, start, b""))
            if len(opened) > MAX_DEPTH:
                raise too_deep(body)
        elif _CLOSER[opened.pop().bracket] != char:
            raise InvalidRequestError(f"the body is not valid JSON: brackets do not match at byte {start}")
        elif not opened:
            break
    return _Walk(opened, start, end, char == b'"', len(body), in_string=False)


def _mend(body: bytes, walk: _Walk) -> tuple[bytes, bytes]:
    """Close what is open, from the inside out; return the document and the truncated top-level field (or empty)."""
    kinds = _kinds(walk.opened)
    depth = len(kinds) - 1
    inner = walk.opened[depth]
    if depth < len(walk.opened) - 1:
        field = walk.opened[1].key
        piece = body[inner.start : _before(body, walk.opened[depth + 1].key_start)]
    else:
        end, key = _whole_until(body, inner, walk)
        field = walk.opened[1].key if depth else key
        text = b""
        if walk.in_string and (kinds[depth], key) in _TEXTS and _is_value(body, inner, walk):
            end, text = walk.cut, _mended_string(body, walk.cut)
        piece = body[inner.start : end] + text
    piece += _CLOSER[inner.bracket]
    for level in range(depth - 1, -1, -1):
        outer, inner = walk.opened[level], walk.opened[level + 1]
        kept = _kept(kinds[level + 1], piece)
        if kept is None:
            piece = body[outer.start : _before(body, inner.key_start)] + _CLOSER[outer.bracket]
        else:
            piece = body[outer.start : inner.start] + kept + _CLOSER[outer.bracket]
    return piece, field


def _kinds(opened: list[_Open]) -> list[str]:
    """Return the kinds of the open containers from the outside in, as far as a part of them is kept."""
    kinds = ["root"]
    for container in opened[1:]:
        kind = _CHILDREN.get((kinds[-1], container.key or container.bracket))
        if kind is None or (container.key and container.bracket != b"["):
            break
        kinds.append(kind)
    return kinds


def _whole_until(body: bytes, inner: _Open, walk: _Walk) -> tuple[int, bytes]:
    """Return where the complete members of the innermost container end, and the key of the truncated one."""
    comma = body.rfind(b",", walk.last_end, walk.cut)
    if comma >= 0:
        return comma, b""
    is_key = inner.bracket == b"{" and walk.last_is_string and body[: walk.last_start].rstrip(_WHITE)[-1:] != b":"
    if is_key:
        return _before(body, walk.last_start), body[walk.last_start + 1 : walk.last_end - 1]
    return walk.last_end, b""


def _is_value(body: bytes, inner: _Open, walk: _Walk) -> bool:
    """Return whether the truncated string is a value and not a key."""
    return inner.bracket == b"[" or body[walk.last_end : walk.cut].strip(_WHITE) == b":"


def _before(body: bytes, position: int) -> int:
    """Return where the member before `position` ends: before white space and a comma."""
    end = position
    while body[end - 1] in _WHITE:
        end -= 1
    return end - 1 if body[end - 1 : end] == b"," else end


def _kept(kind: str, piece: bytes) -> bytes | None:
    """Return what is kept of a truncated container; None for nothing.

    Of a message, role and content, because the rest of it is framed after its content; of a part, its text.
    """
    if kind not in {"message", "part"}:
        return piece
    try:
        members = decode(piece, _MEMBERS)
    except InvalidRequestError:
        return None
    if kind == "message":
        if "role" not in members or bytes(members.get("type", b'"message"')) != b'"message"':
            return None
        members = {key: members[key] for key in ("role", "content") if key in members}
    elif bytes(members.get("type", b"")).strip(b'"').decode("utf-8", "replace") not in TEXT_PARTS:
        return None
    return msgspec.json.encode(members)


def _in_order(document: bytes, field: bytes) -> bytes:
    """Drop the fields that the canonical prompt puts after the truncated `field`."""
    rank = _ORDER.get(field)
    if rank is None:
        return document
    members = decode(document, _MEMBERS)
    return msgspec.json.encode({key: value for key, value in members.items() if _ORDER.get(key.encode(), -1) <= rank})


def _mended_string(body: bytes, start: int) -> bytes:
    """Return the truncated JSON string that starts at `start`, closed, without an incomplete last character."""
    text = _whole_escapes(_whole_characters(body[start:]))
    for candidate in (text, text[:-6]):
        try:
            msgspec.json.decode(candidate + b'"', type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # the first half of a surrogate pair: six bytes
        return candidate + b'"'
    return b'""'


def _whole_escapes(text: bytes) -> bytes:
    """Drop an incomplete escape at the end of `text`."""
    place = text.rfind(b"\\", -6)
    if place < 0:
        return text
    run = len(text[: place + 1]) - len(text[: place + 1].rstrip(b"\\"))
    if run % 2 == 0:  # escaped backslashes
        return text
    length = 6 if text[place + 1 : place + 2] == b"u" else 2
    return text[:place] if len(text) - place < length else text


def _whole_characters(text: bytes) -> bytes:
    """Drop an incomplete UTF-8 character at the end of `text`."""
    for length in range(1, 4):
        lead = text[-length]
        if lead < 0x80:
            break
        if lead >= 0xC0:
            whole = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return text[:-length] if length < whole else text
    return text
