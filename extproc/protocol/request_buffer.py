"""What has been read of one request and not been answered yet: headers, body and subset hint.

Bodies are charged to one budget per process. What a request asks for is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from extproc.protocol.events import Metadata
from extproc.protocol.interfaces import Observer, RouteRequest
from extproc.protocol.settings import EXPLAIN_HEADER, SUBSET_KEY, SessionSettings

__all__ = ["BodyBudget", "BodyBuffer", "RequestBuffer", "parse_subset", "spliced"]

_CHUNK_OVERHEAD_BYTES: Final = 64
"""A bytes object's header (33) and its reference in a list (8), rounded up to a size that malloc allocates."""

_SMALL_BYTES: Final = 2048
"""A chunk shorter than this is appended to the one before: an object and a reply of its own would cost more."""

_JOINED_BYTES: Final = 32 * 1024
"""Small chunks are joined up to this size, which is below the largest piece of a reply."""


_EXPLAIN_WANTED: Final = frozenset({"1", "true"})
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class BodyBudget:
    """Counts the body bytes that all sessions of a process buffer, and says whether they exceed a limit.

    `charge` never refuses, because bytes that have arrived are in memory already; the session that exceeds the limit
    decides at once and releases its body in the same call.
    """

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """May be changed at any time."""
        self.used_bytes = 0

    @property
    def exceeded(self) -> bool:
        """Whether more is buffered than the limit allows."""
        return self.used_bytes > self.limit_bytes

    def charge(self, size_bytes: int) -> None:
        """Count bytes that are buffered from now on."""
        self.used_bytes += size_bytes

    def refund(self, size_bytes: int) -> None:
        """Count bytes that are no longer buffered."""
        self.used_bytes -= size_bytes


class BodyBuffer:
    """The chunks of one body in order, small ones joined, every byte charged to the budget.

    `add` costs amortised O(chunk), so a body that arrives byte by byte costs O(body).
    """

    __slots__ = ("_budget", "_charged", "_chunks", "_tail", "size_bytes")

    def __init__(self, budget: BodyBudget, overhead_bytes: int = 0) -> None:
        self._budget = budget
        self._chunks: list[bytes] = []
        self._tail: bytearray | None = None
        self._charged = overhead_bytes
        self.size_bytes = 0
        """Body bytes buffered."""
        budget.charge(overhead_bytes)

    def _charge(self, size_bytes: int) -> None:
        self._charged += size_bytes
        self._budget.charge(size_bytes)

    def add(self, data: bytes, *, last: bool = False) -> None:
        """Append a chunk; an empty one is ignored. `last`: no other follows, so it is not copied to join it with one."""
        size = len(data)
        if not size:
            return
        self.size_bytes += size
        tail = self._tail
        if size >= _SMALL_BYTES or (last and tail is None):
            if tail is not None:
                self._close_tail(tail)
            self._chunks.append(data)
            size += _CHUNK_OVERHEAD_BYTES
            self._charged += size
            self._budget.charge(size)
        elif tail is None:
            self._tail = bytearray(data)
            self._charge(size + _CHUNK_OVERHEAD_BYTES)
        else:
            tail += data
            self._charge(size)
            if len(tail) >= _JOINED_BYTES:
                self._close_tail(tail)

    def _close_tail(self, tail: bytearray) -> None:
        self._chunks.append(bytes(tail))
        self._tail = None

    def chunks(self) -> list[bytes]:
        """Return the body as chunks, in order; the buffer keeps them."""
        if self._tail is not None:
            self._close_tail(self._tail)
        return self._chunks

    def joined(self) -> bytes:
        """Return the body as one value; without a copy where it came in one chunk."""
        chunks = self._chunks if self._tail is None else self.chunks()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Release the chunks and refund the budget; harmless when repeated."""
        self._budget.refund(self._charged)
        self._charged = 0
        self._chunks = []
        self._tail = None
        self.size_bytes = 0


def spliced(chunks: list[bytes], start: int, end: int, replacement: bytes) -> list[bytes]:
    """Return the chunks with bytes `start` to `end` of their concatenation replaced; untouched chunks are not copied.

    Raises ValueError unless 0 <= start <= end <= total length.
    """
    total = sum(map(len, chunks))
    if not 0 <= start <= end <= total:
        raise ValueError(f"splice {start}:{end} lies outside the {total} bytes read")
    before: list[bytes] = []
    after: list[bytes] = []
    offset = 0
    for chunk in chunks:
        stop = offset + len(chunk)
        if stop <= start:
            before.append(chunk)
        elif offset >= end:
            after.append(chunk)
        else:
            before.append(chunk[: max(0, start - offset)])
            after.append(chunk[max(0, end - offset) :])
        offset = stop
    return [chunk for chunk in (*before, replacement, *after) if chunk]


def parse_subset(value: object) -> frozenset[str]:
    """Return the addresses that a gateway's subset hint names, as written but for white space; empty where it names none.

    Defined as a list of `ip:port` strings (Endpoint Picker Protocol); gateways also send one comma-joined string, items
    that contain commas, and bare addresses that stand for all ports. Any other value names no address, because a hint
    that is present must never widen the choice to the whole pool.
    """
    if isinstance(value, str):
        return frozenset(item for part in value.split(",") if (item := part.strip()))
    if isinstance(value, list | tuple):
        return frozenset().union(*(parse_subset(item) for item in value))
    return frozenset()


class RequestBuffer(msgspec.Struct, eq=False):
    """Headers, body and subset hint until the decision, and how much of the request has arrived; a struct as in `events`."""

    budget: BodyBudget
    observer: Observer
    settings: SessionSettings
    headers: Mapping[str, str] = _NO_HEADERS
    body: BodyBuffer | None = None
    """None: no body is buffered (there is none, or the gateway does not send it before the decision)."""
    subset: frozenset[str] | None = None
    ended: bool = False
    """An `end_of_stream` has arrived."""
    trailers: bool = False
    """The trailers have arrived."""
    owed_bodies: int = 0
    """Body messages that arrived while the decision was pending, in modes where each needs one reply."""

    @property
    def retriable(self) -> bool:
        """Whether the request has ended without trailers."""
        return self.ended and not self.trailers

    @property
    def too_large(self) -> bool:
        """Whether the body exceeds what is buffered of one request."""
        return self.body is not None and self.body.size_bytes > self.settings.max_inspect_bytes

    def note_subset(self, metadata: Metadata | None) -> None:
        """Take the subset hint, if this message has one (Envoy repeats it on every message)."""
        if metadata is not None:
            value = metadata.value(self.settings.subset_namespace, SUBSET_KEY)
            if value is not None:
                self.subset = parse_subset(value)

    def keep(self, data: bytes, overhead_bytes: int = 0, *, last: bool = False) -> None:
        """Buffer body bytes; `overhead_bytes`: what else is charged for this request."""
        if self.body is None:
            self.body = BodyBuffer(self.budget, overhead_bytes)
        if data:
            self.body.add(data, last=last)

    def chunks(self) -> list[bytes]:
        """Return the buffered body as chunks."""
        return [] if self.body is None else self.body.chunks()

    def route_request(self, *, complete: bool) -> RouteRequest:
        """Return what is to be decided; `complete` becomes False where the body exceeds the inspection limit."""
        body = b"" if self.body is None else self.body.joined()
        if len(body) > self.settings.max_inspect_bytes:
            body, complete = body[: self.settings.max_inspect_bytes], False
            self.observer.body_cut("inspect_limit")
        headers, explain = self.headers, self.settings.allow_explain
        return RouteRequest(
            method=headers.get(":method", ""),
            path=headers.get(":path", ""),
            headers=headers,
            body=body,
            complete=complete,
            subset=self.subset,
            upgrade="upgrade" in headers,
            explain=explain and headers.get(EXPLAIN_HEADER, "").lower() in _EXPLAIN_WANTED,
        )

    def drop(self) -> None:
        """Release headers, body and hint; how much of the request has arrived stays known."""
        if self.body is not None:
            self.body.release()
            self.body = None
        self.headers = _NO_HEADERS
        self.subset = None
