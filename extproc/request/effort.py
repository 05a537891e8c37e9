"""How much of a body may be read in one go: a bound on elements that is known before any of them is decoded.

A decision runs on the event loop, so what one body can cost is what everybody else can be made to wait. Bytes alone do
not bound it: 4 MiB of text are decoded in 3 ms, 4 MiB of `{},` take two seconds. So the characters that elements are
made of are counted first, at less than a nanosecond a byte, and what would take too long is read only as far as it is
affordable, as a body is that was cut (`cut`). The engine gets all of it either way.

Decides where reading ends; what is made of the part is left to `cut` and `parse`. Prices are measured
(`python -m bench core` has the worst bodies): the dearest that one such character can stand for, in any field.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["PART", "RESPELLING", "TOKEN_IDS", "UNCOUNTED_BYTES", "WHOLE", "Prices", "affordable"]

UNCOUNTED_BYTES: Final = 40_000
"""Bodies up to here are not counted: the worst of them is still affordable, and counting would cost all others time."""

_GLANCE_BYTES: Final = 262_144
_SLICE_BYTES: Final = 8192
"""How exactly the end of what is affordable is found."""

_WINDOW: Final = 256
"""Whole numbers of this many digits, and more, take time by the square of their length: Python reads up to 4,300 digits."""
_NS_PER_WINDOW: Final = 20_000

_MARKS: Final = b'{[,"\\'
_DIGITS: Final = b"0123456789"
_UNMARKED: Final = bytes(byte for byte in range(256) if byte not in _MARKS)


class Prices(NamedTuple):
    """What reading costs at most, in nanoseconds, and how much may be spent."""

    object: float
    list: float
    comma: float
    """One per further element or member."""
    string: float
    escape: float
    byte: float
    limit_ns: float

    def of(self, marks: bytes, n_bytes: int, strings: int, escapes: int) -> float:
        """Return the price of a text; `marks` has all its brackets and commas."""
        return (
            self.object * marks.count(b"{")
            + self.list * marks.count(b"[")
            + self.comma * marks.count(b",")
            + self.string * strings
            + self.escape * escapes
            + self.byte * n_bytes
        )


WHOLE: Final = Prices(object=700, list=450, comma=130, string=120, escape=14, byte=2.2, limit_ns=25e6)
"""Of a complete body: 20,000 messages or JSON objects, 100,000 values. Chats with thousands of turns have a tenth."""
TOKEN_IDS: Final = WHOLE._replace(comma=22)
"""Where lists are prompts: a body of 4 MiB holds 700,000 token ids."""
PART: Final = Prices(object=1700, list=1300, comma=200, string=650, escape=36, byte=3, limit_ns=16e6)
"""Of a part: finding out where it was cut takes longer than reading it."""
RESPELLING: Final = Prices(object=2600, list=1800, comma=1300, string=700, escape=80, byte=12, limit_ns=12e6)
"""Of what has to be written anew before it can be read (`decode.respell`), part or whole."""


def affordable(body: bytes, prices: Prices, part: Prices | None = None) -> int:
    """Return how many leading bytes of `body` are to be read: all of them, if they cost no more than the limit of `prices`.

    Otherwise as many as the prices of a `part` allow (None: the same). Linear in the length of `body`. First
    all marks count, also those inside strings; only if these would be too dear are those inside strings left out.
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
    """Count the windows that hold nothing but digits, one of which at least is in every number that is twice as long."""
    if len(piece[::_WINDOW].translate(None, _DIGITS)) == -(-len(piece) // _WINDOW):
        return 0
    return sum([piece[at : at + _WINDOW].isdigit() for at in range(0, len(piece) - _WINDOW, _WINDOW)])


def _walked(body: bytes, prices: Prices, part: Prices) -> int:
    """Add up the price slice by slice, without what stands inside strings; return where it passes the limit.

    Holds for UTF-8 without backslashes outside strings: no reader goes on beyond one of those.
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
