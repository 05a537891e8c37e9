"""One endpoint's load between two scrapes: what the page said, corrected by what we sent and saw end since.

A scrape gives waiting W and running R of everybody's requests. From then on each request we send adds one to the
waiting, and each end takes one away: from where it was counted if it was sent since the scrape, else from the running.
The gauges lag (an engine sets them at its steps: vLLM with 40 requests in flight still read 0 and 0 after 50 ms), so
where W + R is less than our own requests in flight, the missing ones are added: as waiting those sent within
`GAUGE_LAG_S` before the scrape, the rest as running (they may be running while their answer drains to a slow client).
Hence waiting + running is never less than our own in flight, and neither is ever negative.
"""

from __future__ import annotations

from typing import Final

__all__ = ["GAUGE_LAG_S", "Load"]

GAUGE_LAG_S: Final = 1.0
"""How long a request may be under way before a scrape must show it: network, tokenizing, and one engine step, which
with a full chunk of prefill takes some 0.5 s on slow accelerators."""


class Load:
    """Waiting and running requests of one endpoint, as believed now; None until a page has said so."""

    __slots__ = ("_knows_running", "_knows_waiting", "_running", "_waiting")

    def __init__(self) -> None:
        self._waiting = 0.0
        self._running = 0.0
        self._knows_waiting = False
        self._knows_running = False

    def believed(self) -> tuple[float | None, float | None]:
        """Return requests queued there and requests in the batch there; None: unknown."""
        return self._waiting if self._knows_waiting else None, self._running if self._knows_running else None

    def scraped(self, waiting: float | None, running: float | None, *, in_flight: int, young: int) -> None:
        """Start from a page; `in_flight` of ours were under way, of which `young` were sent within the gauges' lag.

        An engine that tells only one of the two (Triton): the other is kept as what is left of our own in flight, so
        that ends are not taken from the wrong one, but never shown.
        """
        self._knows_waiting = waiting is not None
        self._knows_running = running is not None
        self._waiting = waiting or 0.0
        self._running = running or 0.0
        missing = max(in_flight - self._waiting - self._running, 0.0)
        # Where running is not told, requests that run are bound to be missing: that says nothing of a lag.
        unseen = min(missing, float(young)) if running is not None else 0.0
        self._waiting += unseen
        self._running += missing - unseen

    def sent(self) -> None:
        """Count a request of ours sent now."""
        self._waiting += 1.0

    def started(self) -> None:
        """Move a request of ours, sent since the scrape, from waiting to running: its first byte came."""
        moved = min(self._waiting, 1.0)
        self._waiting -= moved
        self._running += moved

    def ended(self, *, was_waiting: bool) -> None:
        """Take away a request of ours; `was_waiting`: it was sent since the scrape and not known to have started."""
        first, second = (self._waiting, self._running) if was_waiting else (self._running, self._waiting)
        if first >= 1.0:
            first -= 1.0
        else:
            first, second = 0.0, max(second - (1.0 - first), 0.0)
        self._waiting, self._running = (first, second) if was_waiting else (second, first)
