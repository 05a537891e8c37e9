"""Limits how long parsing one body may block the event loop: an estimate from its characters, before it is decoded.

Bytes alone do not bound the time: a text is decoded a thousand times as fast as as many bytes of `{},`. So the characters
that begin elements are counted first, and a body that would take too long is read only up to a limit, like one that was
truncated (`truncated`). The engine gets all of it either way.

Decides where reading ends; `truncated` and `parse` read the part. Prices are measured (`python -m bench core` has the
worst bodies): the most that one such character can cost, in any field.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["PART", "RESPELLING", "TOKEN_IDS", "UNCOUNTED_BYTES", "WHOLE", "Prices", "affordable"]

UNCOUNTED_BYTES: Final = 40_000
"""Shorter bodies are not counted: even the worst of them is read soon enough."""

_GLANCE_BYTES: Final = 262_144
_SLICE_BYTES: Final = 8192
"""Granularity of the limit."""

_WINDOW: Final = 256
"""Integers of this many digits and more take time by the square of their length; Python reads up to 4,300 digits."""
_NS_PER_WINDOW: Final = 20_000

_MARKS: Final = b'{[,"\\'
_DIGITS: Final = b"0123456789"
_UNMARKED: Final = bytes(byte for byte in range(256) if byte not in _MARKS)


class Prices(NamedTuple):
    """The most that parsing costs, in nanoseconds, and the limit."""

    object: float
    list: float
    comma: float
    """One per further element or member."""
    string: float
    escape: float
    byte: float
    limit_ns: float

    def of(self, marks: bytes, n_bytes: int, strings: int, escapes: int) -> float:
        """Return the estimate for a text; `marks` contains all its brackets and commas."""
        return (
            self.object * marks.count(b"{")
            + self.list * marks.count(b"[")
            + self.comma * marks.count(b",")
            + self.string * strings
            + self.escape * escapes
            + self.byte * n_bytes
        )


WHOLE: Final = Prices(object=700, list=450, comma=130, string=120, escape=14, byte=2.2, limit_ns=25e6)
"""For a complete body: 20,000 messages or JSON objects, 100,000 values. Chats with thousands of turns have a tenth."""
TOKEN_IDS: Final = WHOLE._replace(comma=22)
"""For bodies that may have a list of token ids as prompt: 4 MiB hold 700,000 of them."""
PART: Final = Prices(object=1700, list=1300, comma=200, string=650, escape=36, byte=3, limit_ns=16e6)
"""For a truncated body: repairing it takes longer than parsing it."""
RESPELLING: Final = Prices(object=2600, list=1800, comma=1300, string=700, escape=80, byte=12, limit_ns=12e6)
"""For a body that msgspec cannot read and that is converted first (`decode.respell`), truncated or not."""


def affordable(body: bytes, prices: Prices, part: Prices | None = None) -> int:
    """Return how many leading bytes of `body` may be read: all of them, if the estimate is within the limit of `prices`.

    Otherwise as many as the prices of a `part` allow (None: the same). Costs O(body); where all marks together, those
    inside strings included, exceed the limit, a second pass leaves out those inside strings.
    """
    if len(body) <= UNCOUNTED_BYTES:
        return len(body)
    most = 0.0
    for start in range(0, len(body), _GLANCE_BYTES):
        piece = body[start : start + _GLANCE_BYTES]
        marks = piece.translate(None, _UNMARKED)
        most += prices.of(marks, len(piece), marks.count(b'"') // 2 + 1, marks.count(b"\\"))
        most += _NS_PER_WINDOW * _windows_of_digits(piece)
        if most > prices.limit_ns:
            return _walked(body, prices, prices if part is None else part)
    return len(body)


def _windows_of_digits(piece: bytes) -> int:
    """Count the windows that contain only digits; every number of twice the length of a window contains at least one."""
    if len(piece[::_WINDOW].translate(None, _DIGITS)) == -(-len(piece) // _WINDOW):
        return 0
    return sum([piece[at : at + _WINDOW].isdigit() for at in range(0, len(piece) - _WINDOW, _WINDOW)])


def _walked(body: bytes, prices: Prices, part: Prices) -> int:
    """Add up the estimate slice by slice, without what is inside strings; return where it exceeds the limit.

    Correct for UTF-8 without backslashes outside strings, at which every parser stops.
    """
    spent = spent_on_part = 0.0
    seen = -1
    in_string = 0
    start, size = 0, len(body)
    while start < size:
        end = start + _SLICE_BYTES
        piece = body[start:end]
        if piece.endswith(b"\\") and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            end += 1  # an escape must not be cut in two
            piece = body[start:end]
        escapes = piece.count(b"\\")
        if escapes and b"\\\\" not in piece and piece.count(b'"') == piece.count(b'\\"'):
            quotes, marks = 0, b"" if in_string else piece
        else:
            bare = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if escapes else piece
            parts = bare.split(b'"')
            quotes, marks = len(parts) - 1, b"".join(parts[in_string::2])
        counted = marks, len(piece), (quotes + 1) // 2, escapes
        long_numbers = _NS_PER_WINDOW * _windows_of_digits(piece)
        if seen < 0:
            spent_on_part += part.of(*counted) + long_numbers
            if spent_on_part > part.limit_ns:
                seen = start
        spent += prices.of(*counted) + long_numbers
        if spent > prices.limit_ns:
            return seen if seen >= 0 else start
        in_string = (in_string + quotes) % 2
        start = end
    return size
