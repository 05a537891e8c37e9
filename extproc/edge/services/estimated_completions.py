"""Estimates when requests end whose end nobody reports: after the time that other requests take on average.

Needed for gateways that send neither the response nor an access log, and for streams that were ended with their request.
The lease alone would count such requests for minutes, and every endpoint would look as busy as its last ten minutes. With
the mean duration the number of requests in flight is right on average (Little's law). Where no end was ever reported, the
engines' metrics give an upper bound: a request that the engine no longer counts took no longer than until then. Where those
tell nothing either, the estimate is a guess, and no request is refused because of it.
"""

from __future__ import annotations

import heapq
from typing import Final

__all__ = ["EstimatedCompletions"]

_FIRST_S: Final = 30.0
"""Assumed mean until a duration is known: most answers of a language model take less."""
_WEIGHT: Final = 0.02
"""Weight of a new duration in the mean: about the last 50 count. The first ones weigh more, to replace `_FIRST_S` soon."""


class EstimatedCompletions:
    """Learns how long requests take, and returns those whose estimated end has passed. O(log n) per request."""

    __slots__ = ("_bounds", "_due", "_mean_s", "_seen")

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []
        self._mean_s = _FIRST_S
        self._seen = 0
        self._bounds = 0

    @property
    def guesses(self) -> bool:
        """Whether nothing is known of how long requests take."""
        return not self._seen and not self._bounds

    def learn(self, duration_s: float) -> None:
        """Learn from a request whose end was reported; from the first one on, bounds are ignored."""
        self._seen += 1
        self._mean_s += (duration_s - self._mean_s) * max(_WEIGHT, 1 / self._seen)

    def learn_bound(self, duration_s: float) -> None:
        """Learn an upper bound of a duration; ignored once an end has been reported."""
        if not self._seen:
            self._bounds += 1
            self._mean_s += (duration_s - self._mean_s) * max(_WEIGHT, 1 / self._bounds)

    def expect(self, decision_id: str, now: float) -> None:
        """Begin to estimate the end of a request."""
        heapq.heappush(self._due, (now + self._mean_s, decision_id))

    def due(self, now: float) -> list[str]:
        """Return the requests whose estimated end has passed, each once, in order."""
        found = []
        while self._due and self._due[0][0] <= now:
            found.append(heapq.heappop(self._due)[1])
        return found
