"""Probation: an endpoint whose requests fail while those of others do not gets its turn of the requests, no more.

What ends at once leaves no load, so an endpoint that refuses everything looks idle by every signal there is, and would
get nearly all requests. Whether it is broken or one client's requests are bad can not be told from one answer
(4xx, 429, an engine's 503), so the first measure is one that costs a sound endpoint nothing: where it is chosen for its
load, it is given no more than its fair share, and what it is chosen for besides (a prefix, a session) stays. Only where
it has had no success for several times as long as it usually takes from one to the next, or its failures are of the
kind that says it is broken, is it held to less than that, whatever it is chosen for.

Both end with successes there. Decides who is on probation and for which share; the choice is `routing`'s.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FAIR", "LEFT_OVER", "REFUSING", "Record"]

FAIR: Final = 1.0
"""Share of its fair share, where it fails more often than not: as much as any other, where it is chosen for its load."""
REFUSING: Final = 0.25
"""Where everything fails: enough to see it heal."""
LEFT_OVER: Final = 0.1
"""Where it would have been demoted, if as many endpoints were not demoted already as may be."""

_STEP: Final = 1 / 6
"""Weight of one failure: four in a row put a sound endpoint on probation."""
_HEALING: Final = 0.75
"""What one success leaves of the level: three end a probation."""
_ON_PROBATION: Final = 0.5

_GAPS: Final = 6.0
"""Times the usual time between two successes: by chance one in 400 is as long, where requests come independently."""
_SHORTEST_S: Final = 1.0
_LONGEST_S: Final = 15.0
"""Bounds of how long there has to have been no success."""
_FAILURES: Final = 4
"""Failures that there must have been since the last success."""
_GAP_WEIGHT: Final = 0.1
_FIRST_GAP_S: Final = 2.0
_LAPSES_S: Final = 30.0
"""Without a failure for as long nothing is held against an endpoint: the next request tells."""


class Record:
    """How one endpoint's requests ended. Repeats of one request are the caller's to leave out. Every call is O(1)."""

    __slots__ = ("_failed_at", "_gap_s", "_since", "_succeeded_at", "failures", "level")

    def __init__(self) -> None:
        self.level = 0.0
        """Share of failures among the last ends, 0 to 1."""
        self.failures = 0
        """Since the last success."""
        self._since = 0.0
        """When the first of them came."""
        self._failed_at = 0.0
        self._succeeded_at = -1.0
        self._gap_s = _FIRST_GAP_S
        """Usual time between two successes."""

    def succeeded(self, now: float) -> bool:
        """Take account of a success; True where there was anything to heal."""
        gap_s = now - self._succeeded_at if self._succeeded_at >= 0.0 else _FIRST_GAP_S
        self._succeeded_at = now
        self._gap_s += (min(gap_s, _LONGEST_S) - self._gap_s) * _GAP_WEIGHT
        if self.level == 0.0:
            return False
        self.failures = 0
        self.level *= _HEALING
        if self.level < _STEP / 2:
            self.level = 0.0
        return True

    def failed(self, now: float) -> None:
        """Take account of a failure of any kind that the endpoint answered with, or did not answer."""
        if not self.failures:
            self._since = now
        self.failures += 1
        self._failed_at = now
        self.level += (1.0 - self.level) * _STEP

    def share(self, now: float) -> float | None:
        """Return for which share of its fair share the endpoint is on probation at `now`; None: it is not."""
        if self.level <= _ON_PROBATION or now - self._failed_at > _LAPSES_S:
            return None
        if self.failures >= _FAILURES:
            silence_s = min(max(self._gap_s * _GAPS, _SHORTEST_S), _LONGEST_S)
            if self._failed_at - self._since > silence_s:
                return REFUSING
        return FAIR
