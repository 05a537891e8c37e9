"""The weighted sum: each candidate's total over all scorers that have a weight.

Knows no formula of a signal or of a request: those are the scorers'. What differs by the kind of scorer is only how its
values enter the sum: in a memoized column together with the other signals, in the one pass over the candidates that
every request needs, or afterwards for requests to which the scorer applies.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from extproc.routing.scorers import InFlightScorer, RequestScorer, SignalScorer, weighted_scorers, work_at
from extproc.routing.signals import FRESH_S, neutral_score, oldest_scrape, shrink_to_mean, trust_in
from extproc.snapshots import any_snapshot, column, memoized, two_columns
from extproc.types import InferenceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.config.schema import WeightsConfig
    from extproc.routing.scorers import Scorer
    from extproc.types import EndpointSnapshot, PrefixMatch

__all__ = ["WeightedSum"]


class WeightedSum:
    """The scorers and weights of one configuration. Per request it costs one pass over the candidates."""

    def __init__(self, weights: WeightsConfig) -> None:
        pairs = weighted_scorers(weights)
        self._signals = [(scorer.of, weight) for scorer, weight in pairs if isinstance(scorer, SignalScorer)]
        self._signals_weight = sum([weight for _, weight in self._signals])
        self._in_flight_weight = sum([weight for scorer, weight in pairs if isinstance(scorer, InFlightScorer)])
        by_request = [(scorer, weight) for scorer, weight in pairs if isinstance(scorer, RequestScorer)]
        self._by_request = [(1 << place, scorer, weight) for place, (scorer, weight) in enumerate(by_request)]
        bits: dict[Scorer, int] = {scorer: bit for bit, scorer, _ in self._by_request}
        self._taken = []
        """Scorers and their labels, by the sum of the bits of those that apply to the request."""
        for applied in range(1 << len(by_request)):
            taken = [pair for pair in pairs if pair[0] not in bits or bits[pair[0]] & applied]
            scorers, labels = [scorer for scorer, _ in taken], [(scorer.name, weight) for scorer, weight in taken]
            self._taken.append((tuple(scorers), tuple(labels)))
        # Bound once: what is memoized is found by function.
        self._facts_of, self._row_of, self._lacks = self._facts, self._row, self._lacks_a_signal

    def of(
        self, request: InferenceRequest, candidates: Sequence[EndpointSnapshot], match: PrefixMatch, now: float
    ) -> tuple[
        list[float],
        tuple[tuple[str, float], ...],
        Callable[[], Sequence[Sequence[float]]],
        Sequence[float] | None,
    ]:
        """Return the candidates' totals, (name, weight) of the scorers that took part, their values, and `trust_in`.

        The values, one sequence per scorer, are computed when they are asked for.
        """
        known, oldest, by_request = memoized(candidates, self._facts_of)
        trust = trust_in(candidates, now) if now - oldest > FRESH_S else None
        work, signals = two_columns(candidates, self._row_of)
        shrink = trust
        if not known:
            signals, shrink = self._signal_by_signal(candidates, trust), None
        # `InFlightScorer.score`, written out; without `strict`, which would double the cost.
        least = self._in_flight_weight * min(work)
        if shrink is None:
            totals = [least / own + signal for own, signal in zip(work, signals)]  # noqa: B905
        else:
            # `shrink_to_mean` of the sum of all signals, which gives the same as each signal by itself.
            mean = neutral_score(signals, shrink, self._signals_weight)
            totals = [
                least / own + (mean + share * (signal - mean))
                for own, signal, share in zip(work, signals, shrink)  # noqa: B905
            ]
        applied = 0
        for bit, scorer, weight in by_request:
            if scorer.applies(request, candidates):
                applied += bit
                scorer.add(totals, weight, request, candidates, match, trust)
        scorers, labels = self._taken[applied]
        return (
            totals,
            labels,
            partial(_columns, scorers, request.model, request.session_key, candidates, match, trust),
            trust,
        )

    def _signal_by_signal(self, candidates: Sequence[EndpointSnapshot], trust: Sequence[float] | None) -> list[float]:
        """Return the sum of signals, some of which are unknown: each is drawn to the mean of the endpoints that have it."""
        totals = [0.0] * len(candidates)
        for of, weight in self._signals:
            scores = shrink_to_mean(column(candidates, of), trust)
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        return totals

    def _facts(
        self, snapshots: Sequence[EndpointSnapshot]
    ) -> tuple[bool, float, Sequence[tuple[int, RequestScorer, float]]]:
        """Return whether every signal is known, when the longest ago was scraped, and which request scorers may apply."""
        known = not any_snapshot(snapshots, self._lacks)
        return (
            known,
            memoized(snapshots, oldest_scrape),
            [one for one in self._by_request if one[1].may_apply(snapshots)],
        )

    def _lacks_a_signal(self, snapshot: EndpointSnapshot) -> bool:
        return any([of(snapshot) < 0.0 for of, _ in self._signals])  # noqa: C419 - faster than a generator

    def _row(self, snapshot: EndpointSnapshot) -> tuple[float, float]:
        """Return an endpoint's work and the sum of its signals."""
        signals = 0.0
        for of, weight in self._signals:
            signals += weight * of(snapshot)
        return work_at(snapshot), signals


def _columns(
    scorers: Sequence[Scorer],
    model: str,
    session_key: str,
    candidates: Sequence[EndpointSnapshot],
    match: PrefixMatch,
    trust: Sequence[float] | None,
) -> list[Sequence[float]]:
    # Not the request itself: a decision that is remembered must not keep prompts.
    request = InferenceRequest(model=model, session_key=session_key)
    return [scorer.score(request, candidates, match, trust) for scorer in scorers]
