"""Consistent hashing: a ring with virtual nodes, and rendezvous hashing. Which endpoints may be chosen is decided elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["AT_ONCE", "PER_STEP", "HashRing", "rendezvous"]


def rendezvous(key: str, endpoint_ids: Sequence[str]) -> list[int]:
    """Return one 64-bit value per endpoint; the largest is the key's home.

    Every picker computes the same without talking to the others. Source: Thaler and Ravishankar, highest random weight.
    """
    seed = xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))
    return [xxh3_64_intdigest(endpoint_id.encode(), seed) for endpoint_id in endpoint_ids]


class HashRing:
    """Endpoints at `replicas` pseudo-random points each of a circle of 64-bit numbers.

    The same for equal sets of endpoints in any order, in every process, once it is complete. It follows a changed set at
    once up to `AT_ONCE` points (100 endpoints of 128), and beyond that by `PER_STEP` points with each `advance`, because
    large pools take too long for one decision. Endpoints join it before others leave.

    A look-up is a binary search in one arc, which is sorted first if points have joined or left it.
    """

    __slots__ = ("_arcs", "_on", "_ordered", "_owners", "_pending", "_replicas", "_wanted")

    def __init__(self, endpoint_ids: Iterable[str], replicas: int) -> None:
        self._replicas = replicas
        self._owners: dict[int, str] = {}
        self._arcs: list[list[int]] = [[] for _ in range(_ARCS)]
        """The points, by their leading bits; some may have lost their owner."""
        self._ordered = bytearray(_ARCS)
        self._wanted: dict[str, None] = {}
        self._on: dict[str, int] = {}
        """Number of points each endpoint has on the ring; always its first ones."""
        self._pending: list[str] = []
        """Endpoints whose points have to join or leave; the last is next."""
        self.follow(endpoint_ids)

    @property
    def complete(self) -> bool:
        """Whether all endpoints that should be on the ring are, and no others."""
        return not self._pending

    def follow(self, endpoint_ids: Iterable[str]) -> None:
        """Set the endpoints of the ring; up to `AT_ONCE` points join or leave now, the rest with `advance`."""
        wanted = dict.fromkeys(endpoint_ids)
        on, replicas = self._on, self._replicas
        joining = [name for name in wanted if on.get(name) != replicas]
        self._wanted = wanted
        self._pending = [name for name in on if name not in wanted] + joining[::-1]
        self.advance(AT_ONCE)

    def advance(self, points: int) -> None:
        """Let up to so many points join or leave."""
        while points > 0 and self._pending:
            name = self._pending[-1]
            have = self._on.get(name, 0)
            if name in self._wanted:
                wanted = self._replicas
                until = min(wanted, have + points)
                self._put(name, have, until)
            else:
                wanted = 0
                until = max(wanted, have - points)
                self._take(name, until, have)
            points -= abs(until - have)
            if until:
                self._on[name] = until
            else:
                del self._on[name]
            if until == wanted:
                self._pending.pop()

    def _put(self, name: str, first: int, end: int) -> None:
        data, owners, arcs, ordered = name.encode(), self._owners, self._arcs, self._ordered
        # Points without an owner are removed when an arc is sorted, which happens only to arcs that are looked at.
        most = 2 * len(owners) // _ARCS + 64
        for replica in range(first, end):
            point = xxh3_64_intdigest(data, replica)
            if owners.setdefault(point, name) > name:
                owners[point] = name
            number = point >> _ARC_BITS
            arcs[number].append(point)
            ordered[number] = False
            if len(arcs[number]) > most:
                self._order(number)

    def _take(self, name: str, first: int, end: int) -> None:
        data, owners, ordered = name.encode(), self._owners, self._ordered
        for replica in range(first, end):
            point = xxh3_64_intdigest(data, replica)
            if owners.get(point) == name:
                del owners[point]
                ordered[point >> _ARC_BITS] = False

    def _order(self, number: int) -> list[int]:
        arc = self._arcs[number]
        if not self._ordered[number]:
            arc = self._arcs[number] = sorted(self._owners.keys() & arc)
            self._ordered[number] = True
        return arc

    def walk(self, key: int) -> Iterator[str]:
        """Yield each endpoint once, clockwise from `key` (64 bit)."""
        owners, left = self._owners, len(self._on)
        seen: set[str] = set()
        first = key >> _ARC_BITS
        for number in range(first, first + _ARCS + 1):
            arc = self._order(number % _ARCS)
            if number == first:
                points = arc[bisect_left(arc, key) :]
            elif number == first + _ARCS:
                points = arc[: bisect_left(arc, key)]
            else:
                points = arc
            for point in points:
                owner = owners[point]
                if owner not in seen:
                    seen.add(owner)
                    yield owner
                    if len(seen) == left:
                        return


AT_ONCE: Final = 12_800
"""Points that join or leave in one call."""
PER_STEP: Final = 256
"""Points that join or leave with one decision."""
_ARCS: Final = 1024
_ARC_BITS: Final = 64 - 10
