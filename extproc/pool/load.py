"""One endpoint's load between two scrapes: what the page said, corrected by what we have sent and seen end since.

A scrape gives waiting W and running R of all clients' requests. From then on each request we send adds one to the
waiting, and each end subtracts one: from the waiting if it was sent since the scrape and has not started, else from the
running. The gauges lag, since an engine sets them at its steps. So where W + R is less than our own requests in flight,
the missing ones are added: as waiting those sent within `GAUGE_LAG_S` before the scrape, the others as running (their
response may still be on its way to a slow client). Hence waiting + running is never less than our own in flight, and
neither is ever negative.
"""

from __future__ import annotations

from typing import Final

__all__ = ["GAUGE_LAG_S", "LoadEstimate"]

GAUGE_LAG_S: Final = 1.0
"""How long a request may be under way before a scrape must show it: network, tokenizing, and one engine step, which
with a full chunk of prefill takes some 0.5 s on slow accelerators."""


class LoadEstimate:
    """Waiting and running requests of one endpoint, estimated."""

    __slots__ = ("_knows_running", "_knows_waiting", "_running", "_waiting")

    def __init__(self) -> None:
        self._waiting = 0.0
        self._running = 0.0
        self._knows_waiting = False
        self._knows_running = False

    def estimate(self) -> tuple[float | None, float | None]:
        """Return the requests in its queue and those in its batch; None: no page has this value."""
        return self._waiting if self._knows_waiting else None, self._running if self._knows_running else None

    def scraped(self, waiting: float | None, running: float | None, *, in_flight: int, young: int) -> None:
        """Start from a page, when `in_flight` of ours were in flight, `young` of them sent within the gauges' lag.

        If an engine reports only one of the two (Triton), the rest of our own in flight is kept as the other, so that
        ends are subtracted from the right one; it is never shown.
        """
        self._knows_waiting = waiting is not None
        self._knows_running = running is not None
        self._waiting = waiting or 0.0
        self._running = running or 0.0
        missing = max(in_flight - self._waiting - self._running, 0.0)
        # Where running is not reported, running requests are missing anyway: no sign of a lag.
        queued = min(missing, float(young)) if running is not None else 0.0
        self._waiting += queued
        self._running += missing - queued

    def sent(self) -> None:
        """Count a request of ours sent now."""
        self._waiting += 1.0

    def started(self) -> None:
        """Move a request of ours, sent since the scrape, from waiting to running: its first byte came."""
        started = min(self._waiting, 1.0)
        self._waiting -= started
        self._running += started

    def ended(self, *, was_waiting: bool) -> None:
        """Subtract a request of ours; `was_waiting`: it was sent since the scrape and not known to have started."""
        first, second = (self._waiting, self._running) if was_waiting else (self._running, self._waiting)
        if first >= 1.0:
            first -= 1.0
        else:
            first, second = 0.0, max(second - (1.0 - first), 0.0)
        self._waiting, self._running = (first, second) if was_waiting else (second, first)
