"""Confidence in scraped signals by their age, and the value used for unknown ones.

One rule for all scorers of scraped signals: confidence falls with age, and a score is drawn towards the mean of the known
ones by what confidence lacks. So all endpoints of a pool that cannot be scraped score alike, and our own requests in
flight decide; an endpoint that was never scraped is average, not ideal.
"""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING, Final

from extproc.snapshots import Snapshots, column, memoized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.types import EndpointSnapshot

__all__ = [
    "FRESH_S",
    "HALF_TRUST_S",
    "MISSING",
    "NO_TRUST",
    "TRUSTED_S",
    "UNKNOWN",
    "confidence",
    "neutral_score",
    "oldest_scrape",
    "shrink_to_mean",
    "trust_in",
]

FRESH_S: Final = 1.0
"""Age up to which confidence is 1: a few scrapes of a busy endpoint (`scrape.busy_interval` is 0.25 s)."""

HALF_TRUST_S: Final = 10.0
"""Age beyond `FRESH_S` at which a signal counts half: two scrapes of an idle endpoint (`scrape.idle_interval` is 5 s)."""

_STEP_S: Final = 0.25
"""Steps of age; confidence changes by 1.6 % at most within one."""

TRUSTED_S: Final = FRESH_S + HALF_TRUST_S
"""Beyond this age a signal no longer refuses a request (limits): refusing on an old signal is worse than no limit."""

NO_TRUST: Final = 0.05
"""Confidence in the newest scrape of the pool (45 s old) below which scraped signals decide nothing at all."""

UNKNOWN: Final = 0.5
"""Score of every endpoint if the signal is known of none; any constant would do."""

MISSING: Final = -1.0
"""Stands for an unknown score. Not None, so that `min` finds it."""


def confidence(age_s: float | None) -> float:
    """Return the confidence in a signal of this age, 0 to 1: 1 / (1 + ((age - FRESH_S) / HALF_TRUST_S)^2).

    1 up to `FRESH_S`, then falling smoothly: 0.86 at 5 s, 0.5 at 11 s, 0.03 at a minute. None (never scraped) is 0.
    """
    if age_s is None:
        return 0.0
    if age_s > FRESH_S:
        lag = age_s - FRESH_S
        return _HALF_SQUARED / (_HALF_SQUARED + lag * lag)
    return 1.0


def trust_in(candidates: Sequence[EndpointSnapshot], now: float) -> Sequence[float] | None:
    """Return the confidence in each candidate's signals, in [0, 1]; None if all are fresh.

    Called once per decision, for all scorers. In a whole pool ages are rounded down by up to `_STEP_S`, so that successive
    decisions share the column: idle endpoints are scraped too rarely to be fresh.
    """
    if now - memoized(candidates, oldest_scrape) <= FRESH_S:
        return None
    if isinstance(candidates, Snapshots):
        return column(candidates, _trust, now // _STEP_S * _STEP_S)
    return [_trust(snapshot, now) for snapshot in candidates]


def _trust(snapshot: EndpointSnapshot, now: float) -> float:
    # `confidence`, written out to save the call.
    observed_at = snapshot.observed_at
    if observed_at is None:
        return 0.0
    lag = now - observed_at - FRESH_S
    return _HALF_SQUARED / (_HALF_SQUARED + lag * lag) if lag > 0.0 else 1.0


def shrink_to_mean(scores: Sequence[float], trust: Sequence[float] | None) -> Sequence[float]:
    """Draw scores towards the mean by what confidence lacks, and replace unknown ones (`MISSING`) by the mean.

    `scores` are in [0, 1] or `MISSING`, one per candidate; the result is in [0, 1]. `trust` is `trust_in` of the candidates.
    """
    if min(scores) < 0.0:
        trust = [1.0] * len(scores) if trust is None else trust
        trust = [share if score >= 0.0 else 0.0 for score, share in zip(scores, trust, strict=True)]
    elif trust is None:
        return scores
    neutral = neutral_score(scores, trust)
    # `MISSING` has no share.
    return [neutral + share * (score - neutral) for score, share in zip(scores, trust)]  # noqa: B905 - `strict` would double the cost


def neutral_score(scores: Sequence[float], trust: Sequence[float], most: float = 1.0) -> float:
    """Return the mean of the known scores, in [0, most], each weighted by its confidence."""
    weight = sum(trust)
    return min(most, sum(map(mul, trust, scores)) / weight) if weight > _NO_WEIGHT else UNKNOWN * most


def oldest_scrape(snapshots: Sequence[EndpointSnapshot]) -> float:
    """Return the time of the oldest of the endpoints' last scrapes; `_NEVER` where one was never scraped."""
    return min(column(snapshots, _scraped_at))


def _scraped_at(snapshot: EndpointSnapshot) -> float:
    return _NEVER if snapshot.observed_at is None else snapshot.observed_at


_NEVER: Final = -1e308
"""Stands for the time of the scrape of an endpoint that was never scraped."""

_HALF_SQUARED: Final = HALF_TRUST_S * HALF_TRUST_S

_NO_WEIGHT: Final = 1e-300
"""Below this the division would be meaningless."""
