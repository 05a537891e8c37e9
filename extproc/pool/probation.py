"""Probation: an endpoint whose requests fail while those of others succeed is limited to a share of the requests.

A request that ends at once adds no load, so an endpoint that refuses everything looks idle by every signal and would
get nearly all requests. One refusal (4xx, 429, an engine's 503) does not show whether the endpoint is broken or one
client's requests are bad, so the first limit costs a sound endpoint nothing: where it is chosen for its load, it gets
at most its fair share; where it is chosen for a prefix or a session, nothing changes. A lower limit, which applies to
every choice, follows where it has had no success for several times its usual interval between two, or where its
failures show that it is broken.

Successes end both. Decides which endpoints are on probation and for which share; `routing.probation` applies it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FAIR", "LEFT_OVER", "REFUSING", "RefusalHistory"]

FAIR: Final = 1.0
"""Share of its fair share, where most of its requests fail; applies only where it is chosen for its load."""
REFUSING: Final = 0.25
"""Where all of its requests fail: enough to notice that it has healed."""
LEFT_OVER: Final = 0.1
"""Where it would be demoted, but the largest permitted number of endpoints is demoted already."""

_STEP: Final = 1 / 6
"""Weight of one failure: four in a row put a sound endpoint on probation."""
_HEALING: Final = 0.75
"""Factor of the level for one success: three end a probation."""
_ON_PROBATION: Final = 0.5

_GAPS: Final = 6.0
"""Multiple of the usual time between two successes: by chance one gap in 400 is as long, for independent requests."""
_SHORTEST_S: Final = 1.0
_LONGEST_S: Final = 15.0
"""Bounds of the time without success that counts as refusing everything."""
_FAILURES: Final = 4
"""Failures since the last success that are required as well."""
_GAP_WEIGHT: Final = 0.1
_FIRST_GAP_S: Final = 2.0
_LAPSES_S: Final = 30.0
"""Time without a failure after which an endpoint is no longer on probation."""


class RefusalHistory:
    """How one endpoint's requests ended. The caller leaves out repeats of one request. Every call is O(1)."""

    __slots__ = ("_failed_at", "_gap_s", "_since", "_succeeded_at", "failures", "level")

    def __init__(self) -> None:
        self.level = 0.0
        """Share of failures among the last requests, 0 to 1."""
        self.failures = 0
        """Since the last success."""
        self._since = 0.0
        """Time of the first of them."""
        self._failed_at = 0.0
        self._succeeded_at = -1.0
        self._gap_s = _FIRST_GAP_S
        """Usual time between two successes."""

    def succeeded(self, now: float) -> bool:
        """Count a success; return True where there were failures to outweigh."""
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
        """Count a failure of any kind, with or without an answer of the endpoint."""
        if not self.failures:
            self._since = now
        self.failures += 1
        self._failed_at = now
        self.level += (1.0 - self.level) * _STEP

    def share(self, now: float) -> float | None:
        """Return the share of its fair share that the endpoint gets at `now`; None: it is not on probation."""
        if self.level <= _ON_PROBATION or now - self._failed_at > _LAPSES_S:
            return None
        if self.failures >= _FAILURES:
            silence_s = min(max(self._gap_s * _GAPS, _SHORTEST_S), _LONGEST_S)
            if self._failed_at - self._since > silence_s:
                return REFUSING
        return FAIR
