"""The choice among scored candidates: the best, or the less loaded of two at random where several are nearly as good.

If all pickers took the best, those that see the same scores would choose the same endpoint (herding); two random choices
spread them at little loss. Source: Mitzenmacher, The power of two choices in randomized load balancing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from extproc.types import EndpointSnapshot

__all__ = ["by_total", "load_of", "pick_best", "pick_least_loaded"]


def load_of(snapshot: EndpointSnapshot) -> tuple[int, float]:
    """Return a sort key: requests in flight, then requests waiting (where that is unknown, all of ours are assumed to wait)."""
    return snapshot.in_flight, snapshot.in_flight if snapshot.waiting is None else snapshot.waiting


def pick_best(
    totals: Sequence[float], candidates: Sequence[EndpointSnapshot], near_tie: float, rng: random.Random
) -> tuple[int, str]:
    """Return the index of the choice and the reason.

    Candidates whose total is below the best by at most `near_tie` of it are tied: of two of them at random the less loaded
    is taken.
    """
    best = max(totals)
    floor = best - near_tie * best
    tied = [index for index, total in enumerate(totals) if total >= floor]
    count = len(tied)
    if count == 1:
        return tied[0], "highest score"
    # rng.sample(tied, 2) is much slower.
    first = int(rng.random() * count)
    second = int(rng.random() * (count - 1))
    if second >= first:
        second += 1
    one, other = candidates[tied[first]], candidates[tied[second]]
    # `load_of`, written out for the most usual case.
    less = load_of(other) < load_of(one) if other.in_flight == one.in_flight else other.in_flight < one.in_flight
    return tied[second if less else first], f"near tie of {count}, less loaded of two"


def pick_least_loaded(
    totals: Sequence[float], candidates: Sequence[EndpointSnapshot], rng: random.Random
) -> tuple[int, str]:
    """Choose the best; of equal totals the one with the fewest requests in flight, at random where these are equal too."""
    best = max(totals)
    least = min([c.in_flight for c, total in zip(candidates, totals, strict=True) if total == best])
    tied = [
        index
        for index, (candidate, total) in enumerate(zip(candidates, totals, strict=True))
        if total == best and candidate.in_flight == least
    ]
    return tied[int(rng.random() * len(tied))], "least load"


def by_total(totals: Sequence[float], candidates: Sequence[EndpointSnapshot], chosen: int, count: int) -> list[int]:
    """Return up to `count` further indexes, best total first.

    Other addresses come before further ports of one already named, because it is mostly a machine that fails. Equal
    totals: less loaded first. Endpoints on probation come last, whatever their total.
    """

    def rank(index: int) -> tuple[bool, float, int, float]:
        return candidates[index].probation is not None, -totals[index], *load_of(candidates[index])

    order = sorted(range(len(totals)), key=rank)
    addresses = {candidates[chosen].endpoint.address}
    elsewhere: list[int] = []
    beside: list[int] = []
    for index in order:
        if index == chosen:
            continue
        address = candidates[index].endpoint.address
        (beside if address in addresses else elsewhere).append(index)
        addresses.add(address)
    return (elsewhere + beside)[:count]
