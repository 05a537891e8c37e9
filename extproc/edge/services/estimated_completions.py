"""When to take a request for ended whose end nobody will tell us of: after the time such requests take on average.

Streams that were ended with their request, gateways that show neither the response nor an access log: the lease, made
for entries that got lost, would keep the slot for minutes, and every endpoint would look as busy as its last ten
minutes. With the mean time the number of requests in flight is right on average (Little's law), which is what load is
judged by. Where no end was ever seen, the engines' pages give a bound: a request that an engine has no more took no
longer than until then. Where they tell nothing either, the estimate is a guess, and no request is refused for it.
"""

from __future__ import annotations

import heapq
from typing import Final

__all__ = ["EstimatedCompletions"]

_FIRST_S: Final = 30.0
"""Assumed until an end has been seen: most answers of a language model take less."""
_WEIGHT: Final = 0.02
"""Of one new duration: the last 50 or so count. The first ones count more, or `_FIRST_S` would stay for long."""


class EstimatedCompletions:
    """Learns how long requests take, and says whose time is over. Costs O(log n) a request."""

    __slots__ = ("_bounds", "_due", "_mean_s", "_seen")

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []
        self._mean_s = _FIRST_S
        self._seen = 0
        self._bounds = 0

    @property
    def guesses(self) -> bool:
        """Whether nothing at all is known of how long requests take."""
        return not self._seen and not self._bounds

    def learn(self, duration_s: float) -> None:
        """Take note of a request whose end was seen; what is known of bounds counts no more."""
        self._seen += 1
        self._mean_s += (duration_s - self._mean_s) * max(_WEIGHT, 1 / self._seen)

    def learn_bound(self, duration_s: float) -> None:
        """Take note that a request took no longer than that; counts until an end has been seen."""
        if not self._seen:
            self._bounds += 1
            self._mean_s += (duration_s - self._mean_s) * max(_WEIGHT, 1 / self._bounds)

    def expect(self, decision_id: str, now: float) -> None:
        """Take note of a request whose end will not be seen."""
        heapq.heappush(self._due, (now + self._mean_s, decision_id))

    def over(self, now: float) -> list[str]:
        """Return the requests whose time is over, each once, in order."""
        found = []
        while self._due and self._due[0][0] <= now:
            found.append(heapq.heappop(self._due)[1])
        return found
