"""Decides when broken promises prove that an endpoint has evicted what it used longest ago. Evicts nothing itself.

An engine that had less of a prompt than the index promised has evicted it, or never cached it: prompts whose log
probabilities are requested, adapters that were reloaded, data-parallel ranks with a cache each. Only eviction concerns
other entries, namely those used earlier; and then promises of that age break for all prompts, and none of that age is
kept. So broken promises are counted against kept ones, by age.
"""

from __future__ import annotations

from collections import deque
from math import log2
from typing import Final

__all__ = ["Promises"]

_BINS: Final = 48
_PER_DOUBLING: Final = 2
_LEAST_AGE_S: Final = 0.05
_PROOF: Final = 8.0
"""Broken promises, of different prompts and without a kept one among them, that are taken as proof. With half of the
traffic from a client whose prompts never hit, one series in 250 is as long by chance."""
_AFTER: Final = 4.0
"""Upper bound of the suspicion after it has been acted upon."""
_RECENT: Final = 16


class Promises:
    """Kept and broken promises of one endpoint."""

    __slots__ = ("_broken", "_suspicion")

    def __init__(self) -> None:
        self._suspicion: list[float] | None = None
        """By age: broken promises, less what kept ones outweigh. None: all zero."""
        self._broken: deque[int] = deque(maxlen=_RECENT)

    def kept(self, age_s: float) -> None:
        """Note that the endpoint had a prompt that it last used `age_s` ago."""
        suspicion = self._suspicion
        if suspicion is None:
            return
        for place in range(_bin(age_s) + 1):
            suspicion[place] = max(0.0, 0.5 * suspicion[place] - 1.0)
        if not any(suspicion):
            self._suspicion = None

    def broken(self, age_s: float, prefix: int) -> bool:
        """Note that it lacked one; return whether all that was last used then or earlier is proved to be gone.

        `prefix` identifies what was promised: repeats of one prompt count once.
        """
        if prefix in self._broken:
            return False
        self._broken.append(prefix)
        suspicion = self._suspicion
        if suspicion is None:
            suspicion = self._suspicion = [0.0] * _BINS
        first = _bin(age_s)
        for place in range(first, _BINS):
            suspicion[place] += 1.0
        if suspicion[first] < _PROOF:
            return False
        for place in range(first, _BINS):
            suspicion[place] = min(suspicion[place], _AFTER)
        return True


def _bin(age_s: float) -> int:
    if age_s <= _LEAST_AGE_S:
        return 0
    return min(_BINS - 1, int(_PER_DOUBLING * log2(age_s / _LEAST_AGE_S)))
