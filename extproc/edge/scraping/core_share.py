"""How much of a core the event loop's thread takes, for work that is best done in another way while it has much to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Wakefulness"]

_OVER_S: Final = 0.1
"""Over how long it is measured, at least."""


class Wakefulness:
    """The share of a core that the calling thread has taken lately."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._share = 0.0
        self._since = clock()
        self._cpu_since = cpu_clock()

    def share(self) -> float:
        """Return it, between 0 and 1; 0 in the first tenth of a second."""
        now = self._clock()
        passed_s = now - self._since
        if passed_s >= _OVER_S:
            cpu_s = self._cpu_clock()
            self._share = min((cpu_s - self._cpu_since) / passed_s, 1.0)
            self._since, self._cpu_since = now, cpu_s
        return self._share
