"""How far a scraped signal is to be believed at its age, and what stands in for one that is unknown.

One rule for all scorers of scraped signals: confidence falls with age, and a score is drawn towards the neutral value,
the mean of what is known, by what confidence lacks. So a pool that can not be scraped at all is scored alike, and
what remains decides (the ledger of our own decisions); an endpoint that was never scraped is average, not ideal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.vocabulary import EndpointSnapshot

__all__ = ["FRESH_S", "HALF_TRUST_S", "TRUSTED_S", "UNKNOWN", "confidence", "temper"]

FRESH_S: Final = 1.0
"""Age up to which a signal is believed in full: a few scrapes of a busy endpoint (`scrape.busy_interval` is 0.25 s)."""

HALF_TRUST_S: Final = 10.0
"""Age beyond `FRESH_S` at which a signal counts half: two scrapes of an idle endpoint (`scrape.idle_interval` is 5 s)."""

TRUSTED_S: Final = FRESH_S + HALF_TRUST_S
"""Beyond this age a signal no longer refuses a request (limits): refusing on old news would be worse than no limit."""

UNKNOWN: Final = 0.5
"""Score of every endpoint where nobody's signal is known; any constant would do, it decides nothing."""


def confidence(age_s: float | None) -> float:
    """Say how far a signal of this age is believed, 0 to 1: 1 / (1 + ((age - FRESH_S) / HALF_TRUST_S)^2).

    1 up to `FRESH_S`, then falling smoothly: 0.86 at 5 s, 0.5 at 11 s, 0.03 at a minute. None (never scraped) is 0.
    """
    if age_s is None:
        return 0.0
    if age_s > FRESH_S:
        lag = (age_s - FRESH_S) / HALF_TRUST_S
        return 1.0 / (1.0 + lag * lag)
    return 1.0


def temper(scores: list[float | None], candidates: Sequence[EndpointSnapshot], now: float) -> list[float]:
    """Replace unknown scores by the neutral value and draw stale ones towards it.

    `scores` are in [0, 1] or None, one per candidate; the result is in [0, 1]. Neutral is the mean of the known scores,
    each weighted by its confidence. Cost: about 0.15 us per candidate, a third of it where all is known and fresh.
    """
    seen = [_NEVER if snapshot.observed_at is None else snapshot.observed_at for snapshot in candidates]
    if now - min(seen) <= FRESH_S and None not in scores:
        return cast("list[float]", scores)
    trust: list[float] = []
    total = weight = 0.0
    for score, at in zip(scores, seen, strict=True):
        if score is None:
            trust.append(0.0)
            continue
        # `confidence`, written out: this loop runs for every candidate of most decisions.
        lag = (now - at - FRESH_S) / HALF_TRUST_S
        share = 1.0 / (1.0 + lag * lag) if lag > 0.0 else 1.0
        trust.append(share)
        total += share * score
        weight += share
    neutral = min(1.0, total / weight) if weight > _NO_WEIGHT else UNKNOWN
    return [
        neutral if score is None else neutral + share * (score - neutral)
        for score, share in zip(scores, trust, strict=True)
    ]


_NEVER: Final = -1e308
"""Stands for the time of a scrape that never was: its age is beyond all trust."""

_NO_WEIGHT: Final = 1e-300
"""Below this the mean's division would lose its meaning."""
