"""Limits per connection: sizes, counts, and token buckets for frames that carry nothing, resets and header decoding.

Attacks on HTTP/2 are legal frames in unreasonable numbers, so each limit is a judgement; its reason is beside it.
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
"""Tokens that a request earns (`Limits.idle_frames`)."""
STREAMS_PER_COST: Final = 10
"""A SETTINGS frame that changes all windows costs one more token per this many streams, and the data it releases earns none."""
USUAL_FIELDS: Final = 64
FIELD_COST: Final = 2
"""Tokens for each field of a block beyond the usual number: it may arrive as a single byte, and costs as much as two frames."""
USUAL_BLOCK_BYTES: Final = 512
"""Bytes that a block that opens a stream may have before it is charged: enough for a gateway's own fields and tracing."""
ANSWER_EARNS_BYTES: Final = 2048
"""Decoding bytes that an answered stream earns, so that a gateway whose requests all have long headers never runs out."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection (10.5); the defaults hold about 10,000 ext_proc streams of one Envoy worker.

    Beside its streams a connection holds one incomplete frame, one incomplete header block, HPACK's table, 64 decoded
    blocks of at most 64 fields, and how 1,024 streams ended: below 1 MB. A stream holds the data its owner queues.
    While one read is handled its events come on top: a field that arrived as one byte takes 60.
    """

    concurrent_streams: int = 10_000
    """SETTINGS_MAX_CONCURRENT_STREAMS: a stream lasts as long as its response, and Envoy opens another connection beyond."""
    frame_bytes: int = DEFAULT_FRAME_BYTES
    """SETTINGS_MAX_FRAME_SIZE: the largest payload we take."""
    stream_window: int = 256 * 1024
    """SETTINGS_INITIAL_WINDOW_SIZE: bytes of one stream that may be unread."""
    connection_window: int = 16 * 1024 * 1024
    """Bytes of all streams together; credit is returned on receipt, so that one stream's unread body cannot starve the others."""
    header_block_bytes: int = 32 * 1024
    """A header block as sent, over all CONTINUATION frames: far above what gRPC metadata needs."""
    header_list_bytes: int = 64 * 1024
    """SETTINGS_MAX_HEADER_LIST_SIZE: a decoded block, 32 bytes more per field. So a block has at most 2,048 fields, however well it compresses."""
    continuations: int = 32
    """CONTINUATION frames of one block (CVE-2024-27316): enough for `header_block_bytes` in pieces of 1 kB."""
    table_bytes: int = 4096
    """SETTINGS_HEADER_TABLE_SIZE: the memory HPACK may keep for a peer."""
    decoded_bytes: int = 256 * 1024
    """Burst of encoded bytes of header blocks that are decoded; Huffman coding makes them expensive. Free are
    `USUAL_BLOCK_BYTES` of a block that opens a stream, and blocks that are cached."""
    decoded_bytes_per_s: float = 64 * 1024.0
    """Refill of that; answers earn more."""
    idle_frames: int = 10_000
    """Burst of frames that carry nothing (SETTINGS, PING, WINDOW_UPDATE, PRIORITY, unknown ones, empty DATA; CVE-2019-9512,
    -9515, -9518)."""
    idle_frames_per_s: float = 1000.0
    """Refill of that; requests and answers earn more, see `connection`."""
    resets: int = 10_000
    """Burst of streams cut short without an answer (CVE-2023-44487): all streams that may be open may be cancelled at once."""
    resets_per_s: float = 200.0
    """Refill of that; each answered stream earns one more, so that half of all streams may always be cancelled."""
    premature_s: float = 1.0
    """Only a stream that is reset within this time was cut short: an attack that waits longer costs no more than ordinary
    work, and clients may give up while their requests wait for a decision. Envoy's default is the same
    (`overload.premature_reset_min_stream_lifetime_seconds`)."""


class TokenBucket:
    """A token bucket: `capacity` tokens at first and at most, `per_s` of them refilled every second."""

    __slots__ = ("_capacity", "_last", "_per_s", "tokens")

    def __init__(self, capacity: float, per_s: float, now: float) -> None:
        self._capacity = capacity
        self._per_s = per_s
        self._last = now
        self.tokens = capacity
        """Completed work may add to it; what exceeds the capacity is cut at the next `spend`."""

    def spend(self, now: float, cost: int = 1) -> bool:
        """Take tokens; return False where none are left. `now` in seconds, monotonic."""
        self.tokens = min(self._capacity, self.tokens + (now - self._last) * self._per_s) - cost
        self._last = now
        return self.tokens >= 0
