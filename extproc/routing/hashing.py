"""Consistent hashing: a ring with virtual nodes, and rendezvous hashing. Which endpoints may be chosen is decided elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["HashRing", "rendezvous"]


def rendezvous(key: str, endpoint_ids: Sequence[str]) -> list[int]:
    """Return one 64-bit value per endpoint; the largest is the key's home. Cost: 0.2 us per endpoint.

    Every picker computes the same without talking to the others. Source: Thaler and Ravishankar, highest random weight.
    """
    seed = xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))
    return [xxh3_64_intdigest(endpoint_id.encode(), seed) for endpoint_id in endpoint_ids]


class HashRing:
    """Endpoints at `replicas` pseudo-random points each of a circle of 64-bit numbers.

    The same for equal sets of endpoints in any order, in every process. Cost: some 0.4 us per point when built,
    one binary search per look-up.
    """

    __slots__ = ("_owners", "_points", "endpoint_ids")

    def __init__(self, endpoint_ids: tuple[str, ...], replicas: int) -> None:
        self.endpoint_ids = endpoint_ids
        ring = sorted(
            (xxh3_64_intdigest(endpoint_id.encode(), replica), endpoint_id)
            for endpoint_id in set(endpoint_ids)
            for replica in range(replicas)
        )
        self._points = [point for point, _ in ring]
        self._owners = [owner for _, owner in ring]

    def walk(self, key: int) -> Iterator[str]:
        """Yield each endpoint once, clockwise from `key` (64 bit)."""
        owners = self._owners
        start = bisect_left(self._points, key)
        seen: set[str] = set()
        for index in range(start, start + len(owners)):
            owner = owners[index % len(owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
