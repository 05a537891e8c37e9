"""Decode JSON as engines do, with errors that name the field.

`msgspec` is stricter than the `json.loads` behind the engines' web framework (FastAPI): it refuses lone surrogates, `NaN`,
a byte order mark and UTF-16. A body that only msgspec refuses is converted to plain JSON first (`respell`), so that every
request that an engine accepts is routed; `TooExpensiveError` where that would take too long. `parse` reads the fields.
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
from extproc.request.parse_cost import RESPELLING, affordable

__all__ = [
    "ANY",
    "MAX_DEPTH",
    "TOKEN",
    "TooExpensiveError",
    "decode",
    "decode_field",
    "given",
    "in_utf8",
    "respell",
    "too_deep",
    "wrong_type",
]

MAX_DEPTH = 512
"""Deepest nesting that is read; Python's own parsers, the engines' among them, stop at about 1,000."""

TOKEN = re.compile(
    rb"""
    "(?:[^"]*+(?<=[^\\]\\)")*+[^"]*+(?<!\\)"         # each inner quote after one backslash, the last after none
    | "[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(?P<cut>))      # any
    | \[ | \] | \{ | \}                                 # one by one: so `re` knows all that a match can begin with
    """,
    re.DOTALL | re.VERBOSE,
)
"""A whole string, a string that the end of input cuts (group `cut`), or a bracket. Possessive, hence linear.

The first form, which fits nearly all strings, is much faster than the second.
"""

_PLACE = re.compile(r" - at `(key in )?\$\.?(.*)`$", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_PRIVATE_USE = 0x10F000 - 0xD800
"""Lone surrogates cannot be encoded; each is mapped to one character of its own in the last private use plane."""
_MOST_SURROGATES = 10_000
"""A text has one where a client has split an emoji."""
_MOST_ODD_BYTES = 262_144
"""Longest body in UTF-16 or UTF-32 with lone surrogates: Python calls an error handler for each, twice."""

_TOKENS_NAMED = 10_000
"""Number of strings and brackets searched for the name of the field that is nested too deeply."""

T = TypeVar("T")

ANY: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(Any, float_hook=msgspec.Raw)
"""Decodes values that are only written again. Numbers with a fraction or an exponent stay as they are written: msgspec is
slow where the exponent is large."""


class TooExpensiveError(ExtprocError):
    """A text that would have to be converted and is too long, or has too many elements, for that: read only a part."""


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode one JSON object.

    Raises InvalidRequestError if it is not JSON, not what the decoder expects, or nested too deeply; TooExpensiveError.
    """
    try:
        return decode_field(body, decoder)
    except RecursionError as error:
        raise too_deep(body) from error
    except msgspec.ValidationError as error:
        raise wrong_type(error) from error


def decode_field(text: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode any JSON value, by way of `respell` where necessary; msgspec's ValidationError and RecursionError propagate."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        if "out of range" not in str(error):
            raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    return decoder.decode(respell(bytes(text)))


def given(raw: msgspec.Raw) -> bool:
    """Return whether an undecoded field is present: neither absent (the empty Raw) nor null."""
    return len(raw) > 4 or (len(raw) > 0 and bytes(raw) != b"null")


def respell(body: bytes) -> bytes:
    """Return `body`, as `json.loads` reads it, as plain JSON. Raises InvalidRequestError if that cannot read it either.

    Numbers beyond a double, NaN and Infinity become strings, which no number field accepts. RecursionError propagates;
    TooExpensiveError where it would block the event loop for too long.
    """
    body = in_utf8(body)
    if affordable(body, RESPELLING) < len(body):
        raise TooExpensiveError("too many elements to be spelled again")
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
            raise TooExpensiveError("too many lone surrogates") from error
        return _SURROGATE.sub(lambda match: chr(ord(match[0]) + _PRIVATE_USE), text).encode()


def in_utf8(body: bytes, *, complete: bool = True) -> bytes:
    """Return a body in UTF-16 or UTF-32, or with a byte order mark, in plain UTF-8; any other unchanged.

    Raises InvalidRequestError where a `complete` one is not in the encoding that it seems to have, TooExpensiveError where
    that would take too long to determine; of an incomplete one only an affordable part is returned.
    """
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[3:]
    with contextlib.suppress(UnicodeDecodeError):
        # An incremental decoder ignores an incomplete character at the end.
        return (body.decode(encoding) if complete else getincrementaldecoder(encoding)().decode(body)).encode()
    if len(body) > _MOST_ODD_BYTES:
        if complete:
            raise TooExpensiveError(f"too long for {encoding.upper()} with lone surrogates")
        body = body[:_MOST_ODD_BYTES]
    try:
        # Lone surrogates: `json.loads` accepts them, msgspec does not.
        return body.decode(encoding, "surrogatepass" if complete else "ignore").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: it is not {encoding.upper()}") from error


def too_deep(body: bytes) -> InvalidRequestError:
    """Return the error for a body nested deeper than any engine reads; names the top-level field if it is found quickly."""
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

    `field` is the place of the value in the body, if it was decoded separately.
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
