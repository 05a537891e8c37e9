"""JSON as engines read it, with errors that name the field.

`msgspec` reads a body in one pass and is stricter than the `json.loads` behind the engines' web framework (FastAPI):
lone surrogates, `NaN`, a byte order mark or UTF-16 are refused. A body that only it refuses is spelled again in plain
JSON, so that no request is lost that an engine would have taken; where that would take too long, `TooDearError` says so.
What the fields mean is left to `parse`.
"""

from __future__ import annotations

import contextlib
import json
import re
from codecs import getincrementaldecoder
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from extproc.errors import ExtprocError, InvalidRequestError
from extproc.request.effort import RESPELLING, affordable

__all__ = [
    "ANY",
    "MAX_DEPTH",
    "TOKEN",
    "TooDearError",
    "decode",
    "decode_field",
    "given",
    "in_utf8",
    "respell",
    "too_deep",
    "wrong_type",
]

MAX_DEPTH = 512
"""Nesting that is certainly too deep; Python's own readers, the engines' among them, give up at about 1,000."""

TOKEN = re.compile(
    rb"""
    "(?:[^"]*+(?<=[^\\]\\)")*+[^"]*+(?<!\\)"         # each inner quote after one backslash, the last after none
    | "[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(?P<cut>))      # any
    | \[ | \] | \{ | \}                                 # one by one: so `re` knows all that a match can begin with
    """,
    re.DOTALL | re.VERBOSE,
)
"""A whole string, a string that the end of input cuts (group `cut`), or a bracket. Possessive, hence linear.

The first form is what strings are like; it passes over a byte several times as fast as a character class.
"""

_PLACE = re.compile(r" - at `(key in )?\$\.?(.*)`$", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_PRIVATE_USE = 0x10F000 - 0xD800
"""Lone surrogates cannot be encoded; each is mapped to one character of its own in the last private use plane."""
_MOST_SURROGATES = 10_000
"""Each costs a call; a text has one where a client has cut an emoji in two."""
_MOST_ODD_BYTES = 262_144
"""Of UTF-16 or UTF-32 with lone surrogates: Python calls an error handler for each, twice."""

_TOKENS_NAMED = 10_000
"""Strings and brackets among which the field of what is nested too deeply is looked for."""

T = TypeVar("T")

ANY: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(Any, float_hook=msgspec.Raw)
"""Of values that are only spelled again. Numbers with a fraction or an exponent stay as they are written, because
msgspec takes long to read large exponents (docs/develop/cost.md)."""


class TooDearError(ExtprocError):
    """A text that has to be spelled again, and is too long or has too many elements for that: to be read in part."""


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode one JSON object.

    Raises InvalidRequestError if it is not JSON, not what the decoder expects, or nested too deeply; TooDearError.
    """
    try:
        return decode_field(body, decoder)
    except RecursionError as error:
        raise too_deep(body) from error
    except msgspec.ValidationError as error:
        raise wrong_type(error) from error


def decode_field(text: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode any JSON value, if need be by way of `respell`; msgspec's ValidationError and RecursionError pass."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        if "out of range" not in str(error):
            raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    return decoder.decode(respell(bytes(text)))


def given(raw: msgspec.Raw) -> bool:
    """Tell whether an undecoded field is there: absent is the empty Raw, and null means the same."""
    return len(raw) > 4 or (len(raw) > 0 and bytes(raw) != b"null")


def respell(body: bytes) -> bytes:
    """Return what `json.loads` makes of `body` as plain JSON; InvalidRequestError if that cannot read it either.

    Numbers beyond a double, NaN and Infinity become strings, which no number field accepts. RecursionError passes;
    TooDearError where it would take more than a few milliseconds.
    """
    body = in_utf8(body)
    if affordable(body, RESPELLING) < len(body):
        raise TooDearError("too many elements to be spelled again")
    try:
        value = json.loads(body, parse_constant=str, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequestError("the body is not valid JSON: it is not UTF-8") from error
    except ValueError as error:
        where = f": {error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidRequestError(f"the body is not valid JSON{where}") from None  # the error would keep the body
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        if len(text) - len(_SURROGATE.sub("", text)) > _MOST_SURROGATES:
            raise TooDearError("too many lone surrogates") from error
        return _SURROGATE.sub(lambda match: chr(ord(match[0]) + _PRIVATE_USE), text).encode()


def in_utf8(body: bytes, *, complete: bool = True) -> bytes:
    """Return a body that is in UTF-16 or UTF-32, or begins with a byte order mark, in plain UTF-8; others as they are.

    Raises InvalidRequestError where a `complete` one is not what it looks like, TooDearError where it would take too long to
    find out; of others no more comes back than is affordable.
    """
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[3:]
    with contextlib.suppress(UnicodeDecodeError):
        # An incremental decoder leaves the half of a character at the end.
        return (body.decode(encoding) if complete else getincrementaldecoder(encoding)().decode(body)).encode()
    if len(body) > _MOST_ODD_BYTES:
        if complete:
            raise TooDearError(f"too long for {encoding.upper()} with lone surrogates")
        body = body[:_MOST_ODD_BYTES]
    try:
        # Lone surrogates are what `json.loads` takes and msgspec refuses.
        return body.decode(encoding, "surrogatepass" if complete else "ignore").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: it is not {encoding.upper()}") from error


def too_deep(body: bytes) -> InvalidRequestError:
    """Return the error for a body nested beyond what any engine reads; names the top-level field, if it is soon found."""
    depth = 0
    field = string = ""
    for match in islice(TOKEN.finditer(body), _TOKENS_NAMED):
        token = match[0]
        if token in {b"[", b"{"}:
            depth += 1
            if depth == 2:
                field = string
            elif depth > MAX_DEPTH:
                break
        elif token in {b"]", b"}"}:
            depth -= 1
        elif depth == 1:
            string = token[1:65].removesuffix(b'"').decode("utf-8", "replace")
    place = f"{field}: " if field else ""
    return InvalidRequestError(f"{place}nested too deeply", param=field or None)


def _finite(text: str) -> float | str:
    """Return the number, or the text where a double cannot hold it."""
    value = float(text)
    return text if value in {float("inf"), float("-inf")} else value


def wrong_type(error: msgspec.ValidationError, field: str = "") -> InvalidRequestError:
    """Translate msgspec's ``Expected `X`, got `Y` - at `$.a[1].b` ``; `[...]` (some key) ends the path.

    `field` is where in the body the value stands, if it was decoded by itself.
    """
    text = str(error)
    match = _PLACE.search(text)
    if match is None and not field:
        return InvalidRequestError(f"the body must be a JSON object: {_lower(text)}")
    said, inside = (text[: match.start()], match[2].partition("[...]")[0]) if match else (text, "")
    param = f"{field}{inside}"
    return InvalidRequestError(f"{param}: {_lower(said)}", param=param)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
