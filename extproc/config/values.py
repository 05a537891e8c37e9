"""The scalar types of the configuration and the parsing of their text forms.

Durations (`250ms`, `5s`, `2m`, `1h`), sizes (`64KiB`, `4MiB`, `1GiB`) and endpoints (`host:port`, `[IPv6]:port`).
The range of each key is in the schema.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

__all__ = [
    "MAX_BYTES",
    "MAX_SECONDS",
    "Bytes",
    "EndpointText",
    "PositiveSeconds",
    "Seconds",
    "Section",
    "parse_bytes",
    "parse_endpoint",
    "parse_seconds",
]


class Seconds(float):
    """A duration in seconds; in the document a number of seconds, or text with a unit (`250ms`, `5s`, `2m`, `1h`)."""


class Bytes(int):
    """A size in bytes; in the document a number of bytes, or text with a unit (`64KiB`, `4MiB`, `1GiB`)."""


PositiveSeconds = Annotated[Seconds, Meta(extra_json_schema={"exclusiveMinimum": 0})]
"""A duration that must not be zero: an interval or a deadline. The bound holds for text too (see `check`)."""

EndpointText = Annotated[str, Meta(extra_json_schema={"format": "endpoint"})]
"""`host:port`, as `parse_endpoint` reads it."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: frozen, keyword only, unknown keys refused."""


MAX_SECONDS: Final = 10 * 365 * 86_400.0
"""Ten years: longer than any sensible interval, short enough for every timer of every library."""
MAX_BYTES: Final = 2**63 - 1

_SECONDS_PER: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES_PER: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DURATION: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(ms|s|m|h)", re.ASCII)
_SIZE: Final = re.compile(r"([0-9]{1,19})(B|KiB|MiB|GiB|TiB)", re.ASCII)
_HOST: Final = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?", re.ASCII)
_PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)


def parse_seconds(value: object) -> Seconds:
    """Return a duration from a number of seconds or text with a unit; ValueError says what is allowed."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        if found is None:
            raise ValueError("a number of seconds, or text such as 250ms, 5s, 2m or 1h")
        seconds = float(found[1]) * _SECONDS_PER[found[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if 0 <= value <= MAX_SECONDS else math.inf
    else:
        raise ValueError("a number of seconds, or text such as 250ms, 5s, 2m or 1h")  # noqa: TRY004 - one exception for callers
    if not seconds <= MAX_SECONDS:
        raise ValueError("a duration from 0 to 10 years")
    return Seconds(seconds)


def parse_bytes(value: object) -> Bytes:
    """Return a size from a whole number of bytes or text with a unit; ValueError says what is allowed."""
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found is None:
            raise ValueError("a whole number of bytes, or text such as 64KiB, 4MiB or 1GiB")
        size = int(found[1]) * _BYTES_PER[found[2]]
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise ValueError("a whole number of bytes, or text such as 64KiB, 4MiB or 1GiB")  # noqa: TRY004 - one exception for callers
    if not 0 <= size <= MAX_BYTES:
        raise ValueError("a size from 0 to 2^63 - 1 bytes")
    return Bytes(size)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split `host:port` into host (a name, IPv4 or IPv6 address without brackets) and port (1 to 65535).

    IPv6 addresses are written in brackets, as in a URL. ValueError says what is wrong and what would be right.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not rest.startswith(":"):
            raise ValueError("an IPv6 address must be in brackets, [address]:port")
        try:
            host = str(ipaddress.IPv6Address(host))
        except ValueError:
            raise ValueError(f"{host[:60]!r} is not a valid IPv6 address") from None
        port_text = rest[1:]
    else:
        host, colon, port_text = text.rpartition(":")
        if not colon:
            raise ValueError("the port is missing")
        if ":" in host:
            raise ValueError("too many colons; an IPv6 address must be in brackets, [address]:port")
        if re.fullmatch(r"[0-9.]+", host):
            try:
                host = str(ipaddress.IPv4Address(host))
            except ValueError:
                raise ValueError(f"{host[:60]!r} is not a valid IPv4 address") from None
        elif _HOST.fullmatch(host) is None:
            raise ValueError(f"{host[:60]!r} is not a valid host name")
    if _PORT.fullmatch(port_text) is None or not 1 <= int(port_text) <= 65535:
        raise ValueError(f"{port_text[:20]!r} is not a valid port (1 to 65535)")
    return host, int(port_text)
