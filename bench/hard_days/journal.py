"""What engines write down of each request that names itself, and how the run reads it.

One JSON object per line in a file; times are those of the monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

__all__ = ["DISCARD", "NAME", "Entry", "Lag", "Tail", "Visit"]

NAME: Final = "x-hard-days-request"
"""Request header: the request's own name. Not x-request-id, which Envoy replaces."""
DISCARD: Final = "x-hard-days-discard"
"""Request header: the engine takes the body's digest and answers, without reading what it says."""


class Visit(msgspec.Struct, frozen=True, tag="visit", omit_defaults=True):
    """One request at one engine."""

    name: str
    engine: int
    """From 0."""
    begin_s: float
    end_s: float
    status: int = 0
    """What it answered; 0: the connection ended first."""
    fault: str = ""
    """The fault that it met."""
    sha256: str = ""
    """Of the body, if all of it came."""


class Lag(msgspec.Struct, frozen=True, tag="lag"):
    """The engines' process was not served by the machine, or by itself, for a while."""

    end_s: float
    seconds: float


Entry = Visit | Lag
_DECODER: Final = msgspec.json.Decoder(Entry)


class Tail:
    """Reads what has been added to the file since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def read(self) -> list[Entry]:
        """Return the new entries."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_DECODER.decode(line) for line in lines if line]
