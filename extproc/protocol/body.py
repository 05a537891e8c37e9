"""Hold a request body while it arrives, and cut and splice it on its way back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from extproc.protocol.budget import BodyBudget

__all__ = ["BodyBuffer", "pieces", "spliced"]

_CHUNK_OVERHEAD_BYTES: Final = 64
"""A bytes object's header (33) and its place in a list (8), rounded up to what malloc gives."""

_SMALL_BYTES: Final = 2048
"""A chunk shorter than this is copied behind its neighbour: an object and a reply of its own would cost more."""

_JOINED_BYTES: Final = 32 * 1024
"""Small chunks are joined up to this size, which stays below the largest piece of a reply."""


class BodyBuffer:
    """The chunks of one body as they came, small neighbours joined, every byte charged to the process's budget.

    `add` costs amortised O(chunk), so a body that comes byte by byte costs O(body).
    """

    __slots__ = ("_budget", "_charged", "_chunks", "_tail", "size_bytes")

    def __init__(self, budget: BodyBudget, overhead_bytes: int = 0) -> None:
        self._budget = budget
        self._chunks: list[bytes] = []
        self._tail: bytearray | None = None
        self._charged = overhead_bytes
        self.size_bytes = 0
        """Body bytes held."""
        budget.charge(overhead_bytes)

    def _charge(self, size_bytes: int) -> None:
        self._charged += size_bytes
        self._budget.charge(size_bytes)

    def add(self, data: bytes, *, last: bool = False) -> None:
        """Append a chunk; an empty one leaves no trace. Behind the `last` one nothing comes that it could be joined with."""
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
        """Return the body as one value; free where it came in one chunk."""
        chunks = self._chunks if self._tail is None else self.chunks()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Let everything go and refund the budget; harmless when repeated."""
        self._budget.refund(self._charged)
        self._charged = 0
        self._chunks = []
        self._tail = None
        self.size_bytes = 0


def pieces(data: bytes, limit_bytes: int) -> Iterator[bytes]:
    """Yield `data` itself where it is small enough, else slices of at most `limit_bytes`; nothing for no data."""
    if len(data) <= limit_bytes:
        if data:
            yield data
        return
    for start in range(0, len(data), limit_bytes):
        yield data[start : start + limit_bytes]


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
