"""What a peer may cost: sizes, counts, and how many frames that carry nothing it may send.

Attacks on HTTP/2 are legal frames in unreasonable numbers, so each limit here is a judgement; the reason stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from extproc.http2.frames import DEFAULT_FRAME_BYTES

__all__ = [
    "ANSWER_EARNS_BYTES",
    "FIELD_COST",
    "HEADERS_EARN",
    "STREAMS_PER_COST",
    "USUAL_BLOCK_BYTES",
    "USUAL_FIELDS",
    "Limits",
    "TokenBucket",
]

HEADERS_EARN: Final = 4
"""Tokens that a request brings (`Limits.idle_frames`)."""
STREAMS_PER_COST: Final = 10
"""A SETTINGS frame that moves all windows costs one more token for as many streams, and what it lets leave earns none."""
USUAL_FIELDS: Final = 64
FIELD_COST: Final = 2
"""Tokens for each field of a block beyond the usual number: it comes as a single byte, and costs what two frames do."""
USUAL_BLOCK_BYTES: Final = 512
"""What a block that opens a stream may have before it is charged: a gateway's own fields with those of tracing, and no dearer
than the rest of what a stream takes."""
ANSWER_EARNS_BYTES: Final = 2048
"""Charged bytes that an answered stream gives back, so that a gateway whose requests all have long headers never runs out."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection (10.5); the defaults hold about 10,000 ext_proc streams of one Envoy worker.

    Beside its streams a connection holds one incomplete frame, one incomplete header block, HPACK's table, 64 decoded
    blocks of at most 64 fields, and how 1,024 streams ended: below 1 MB. A stream holds what its owner makes it keep.
    While one read is dealt with, its events come on top: a field that came as one byte takes 60.
    """

    concurrent_streams: int = 10_000
    """SETTINGS_MAX_CONCURRENT_STREAMS: a stream lasts as long as its response, and Envoy opens another connection beyond."""
    frame_bytes: int = DEFAULT_FRAME_BYTES
    """SETTINGS_MAX_FRAME_SIZE: the largest payload we take."""
    stream_window: int = 256 * 1024
    """SETTINGS_INITIAL_WINDOW_SIZE: what one stream may have under way that nobody has looked at."""
    connection_window: int = 16 * 1024 * 1024
    """All streams together; returned on receipt, so that one stream's held body cannot starve the others."""
    header_block_bytes: int = 32 * 1024
    """A header block as sent, over all CONTINUATION frames: far above what gRPC metadata needs."""
    header_list_bytes: int = 64 * 1024
    """SETTINGS_MAX_HEADER_LIST_SIZE: a block decoded, 32 bytes more per field. At most 2,048 fields, whatever the bomb."""
    continuations: int = 32
    """CONTINUATION frames of one block (CVE-2024-27316): enough for `header_block_bytes` in pieces of 1 kB."""
    table_bytes: int = 4096
    """SETTINGS_HEADER_TABLE_SIZE: the memory HPACK may keep for a peer."""
    decoded_bytes: int = 256 * 1024
    """Burst of encoded bytes of header blocks that are decoded: the library takes 0.2 us for a
    byte that is Huffman coded. Free are `USUAL_BLOCK_BYTES` of a block that opens a stream, and what is known already."""
    decoded_bytes_per_s: float = 64 * 1024.0
    """What comes back of that, 1.5 % of a core; answers earn more."""
    idle_frames: int = 10_000
    """Burst of frames that carry nothing (SETTINGS, PING, WINDOW_UPDATE, PRIORITY, unknown ones, empty DATA; CVE-2019-9512,
    -9515, -9518)."""
    idle_frames_per_s: float = 1000.0
    """What comes back of that; work done earns more, see `connection`. A ping flood of this rate costs 0.3 % of a core."""
    resets: int = 10_000
    """Burst of streams cut short without an answer: everything that may be open may be cancelled at once (CVE-2023-44487)."""
    resets_per_s: float = 200.0
    """What comes back of that; each answered stream earns one more, so that half of all streams may be cancelled for ever."""
    premature_s: float = 1.0
    """Only a stream reset within this time was cut short: patience makes an attack no dearer than honest work, and clients
    that give up while their requests are held are honest. Envoy draws the same line at the same second
    (`overload.premature_reset_min_stream_lifetime_seconds`)."""


class TokenBucket:
    """A bucket of tokens: what is spent faster than it comes back ends the connection."""

    __slots__ = ("_capacity", "_last", "_per_s", "left")

    def __init__(self, capacity: float, per_s: float, now: float) -> None:
        self._capacity = capacity
        self._per_s = per_s
        self._last = now
        self.left = capacity
        """May be added to by work done; what exceeds the capacity is lost at the next spending."""

    def spend(self, now: float, cost: int = 1) -> bool:
        """Take tokens; return False where none are left. `now` in seconds, monotonic."""
        left = min(self._capacity, self.left + (now - self._last) * self._per_s) - cost
        self._last = now
        self.left = left
        return left >= 0
