"""How busy the event loop's thread is, for work that is better done in another way while it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["ThreadCpuShare"]

_WINDOW_S: Final = 0.1
"""Shortest time over which it is measured."""


class ThreadCpuShare:
    """The share of a core that the calling thread has used lately."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._share = 0.0
        self._since = clock()
        self._cpu_since = cpu_clock()

    def recent(self) -> float:
        """Return it, between 0 and 1, of the time since the last call or, where that was just now, the one before; at first 0."""
        now = self._clock()
        passed_s = now - self._since
        if passed_s >= _WINDOW_S:
            cpu_s = self._cpu_clock()
            self._share = min((cpu_s - self._cpu_since) / passed_s, 1.0)
            self._since, self._cpu_since = now, cpu_s
        return self._share
