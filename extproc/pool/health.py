"""Passive health: each endpoint's health score, worked out from how its requests ended.

Badness is a number from 0 to 1; the health score is 1 minus badness. A failure adds half of what is missing to 1, a
success halves the badness, and so does every `half_life` that passes. So one failure never demotes at the default
threshold, two in a row do, and an endpoint that fails one request in a hundred keeps its score. Decides the score and
which endpoints are demoted; how demotion affects a decision is decided in `routing.filters`.

Clients must not be able to demote endpoints. So 4xx and busy (429, an engine's 503) never lower the score (nor raise
it, or bad requests could heal a broken endpoint; see `probation`), and outcomes that the client caused, or whose cause
is unknown, do not count. A request that fails repeatedly under one request id counts once, wherever it fails, because
the request itself may be what breaks engines; a connection that could not be made is never the request's fault and
counts once per endpoint. At most a configured share of the endpoints is demoted.

Failed scrapes alone never demote: an endpoint without a metrics page may serve well. But where scrapes that used to
work fail too, a failed request weighs more (`FAILURE_STEP_UNSCRAPABLE`), so that the first one demotes.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from extproc.config.schema import HealthConfig
from extproc.types import Outcome

__all__ = [
    "FAILURE_STEP",
    "FAILURE_STEP_UNSCRAPABLE",
    "HEALTHY",
    "Health",
    "SeenFailures",
    "Verdict",
    "demoted",
    "verdict",
]

FAILURE_STEP: Final = 0.5
FAILURE_STEP_UNSCRAPABLE: Final = 0.75
SUCCESS_STEP: Final = 0.5
_NEGLIGIBLE = 1e-3
"""Badness below which an endpoint counts as healthy, so that healing ends."""


class Verdict(enum.Enum):
    """What one outcome means for the endpoint's health."""

    GOOD = "good"
    BAD = "bad"
    """It failed, and the request may be the cause."""
    UNREACHABLE = "unreachable"
    """It failed, and the request cannot be the cause."""
    REFUSED = "refused"
    """It refused the request; whether endpoint or request is the cause shows only over several of them (`probation`)."""
    NOTHING = "nothing"


def verdict(outcome: Outcome) -> Verdict:
    """Judge one outcome."""
    match outcome:
        case Outcome.OK:
            return Verdict.GOOD
        case Outcome.SERVER_ERROR | Outcome.RESET | Outcome.TIMEOUT:
            return Verdict.BAD
        case Outcome.CONNECT_FAILURE:
            return Verdict.UNREACHABLE
        case Outcome.CLIENT_ERROR | Outcome.BUSY:
            return Verdict.REFUSED
        case Outcome.CLIENT_GONE | Outcome.ABORTED | Outcome.LEASE_EXPIRED | Outcome.ENDPOINT_GONE:
            return Verdict.NOTHING
        case _:
            assert_never(outcome)


@dataclass(frozen=True, slots=True)
class Health:
    """One endpoint's badness at one moment."""

    badness: float = 0.0
    """0 (healthy) to 1."""
    at: float = 0.0

    def badness_at(self, now: float, half_life_s: float) -> float:
        """Compute the badness at `now`; it halves every `half_life_s` (0: heals at once)."""
        if self.badness == 0.0 or half_life_s <= 0.0:
            return 0.0
        badness = self.badness * 0.5 ** (max(now - self.at, 0.0) / half_life_s)
        return badness if badness >= _NEGLIGIBLE else 0.0

    def score(self, now: float, half_life_s: float) -> float:
        """Compute the health score at `now`, 0 (every recent request failed) to 1 (none did)."""
        return 1.0 - self.badness_at(now, half_life_s)

    def failed(self, now: float, half_life_s: float, *, step: float = FAILURE_STEP) -> Health:
        """Take account of a failure."""
        badness = self.badness_at(now, half_life_s)
        return Health(badness + (1.0 - badness) * step, now)

    def succeeded(self, now: float, half_life_s: float) -> Health:
        """Take account of a success; the same object where there is nothing to heal."""
        if self.badness == 0.0:
            return self
        badness = self.badness_at(now, half_life_s) * (1.0 - SUCCESS_STEP)
        return Health(badness, now) if badness >= _NEGLIGIBLE else HEALTHY


HEALTHY: Final = Health()


def demoted(scores: Mapping[str, float], endpoints: int, config: HealthConfig) -> frozenset[str]:
    """Choose the endpoints to demote: those below `demote_below`, worst first, at most `max_demoted_share` of all.

    `scores` may leave out endpoints whose score is 1; `endpoints` is the size of the pool. Never the whole pool (so none
    of a single endpoint), because demotion would then distinguish nothing.
    """
    allowed = min(int(endpoints * config.max_demoted_share), endpoints - 1)
    below = sorted((score, name) for name, score in scores.items() if score < config.demote_below)
    return frozenset(name for _, name in below[: max(allowed, 0)])


class SeenFailures:
    """Requests that have been counted as failures, so that repeats are not; bounded, the oldest are forgotten first."""

    def __init__(self, remembered: int = 4096) -> None:
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._remembered = remembered

    def first(self, request_id: str, kind: Verdict, endpoint_id: str) -> bool:
        """Return whether a failure counts, and remember it. Requests without an id cannot be told apart: each counts."""
        if not request_id:
            return True
        key = (request_id, endpoint_id if kind is Verdict.UNREACHABLE else "")
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return True
