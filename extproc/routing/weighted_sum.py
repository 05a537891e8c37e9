"""The weighted sum of a whole pool in one pass, as nearly every request needs it; what `weighted` asks first.

Knows no formula of its own: those are `scorers`' and `signals`'. Where it does not apply it says so, and each scorer is
asked by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.routing.scorers import (
    Always,
    InFlightScorer,
    LoraScorer,
    PrefixScorer,
    SessionScorer,
    SignalScorer,
    adapters_in_use,
    prefix_share,
    work_at,
)
from extproc.routing.signals import FRESH_S, NO_TRUST, neutral_score, scraped, trust_in
from extproc.types import InferenceRequest, Snapshots, places, settled, somebody, two_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.routing.scorers import Scorer
    from extproc.routing.strategies import RoutingContext
    from extproc.types import EndpointSnapshot, PrefixMatch

__all__ = ["AtOnce", "columns_of"]


class AtOnce:
    """The sum that nearly every request needs: prefix, signals and in-flight of a whole pool that tells all its signals.

    What does not depend on the request is worked out per endpoint when its load or its page changes; a request costs
    one pass over the pool, whatever the weights, and a few more where signals are old. Nothing is worked out of the whole
    pool because one endpoint was scraped: what is asked of all (the oldest page, whether all signals are there) is asked
    of columns. The same totals as scorer by scorer, but for the last bit: tempering a weighted sum is the weighted sum
    of what was tempered.
    """

    def __init__(self, pairs: Sequence[tuple[Scorer, float]]) -> None:
        self._signals = [(scorer.of, weight) for scorer, weight in pairs if isinstance(scorer, SignalScorer)]
        weights = {type(scorer): weight for scorer, weight in pairs}
        self._prefix = weights.get(PrefixScorer, 0.0)
        self._in_flight = weights.get(InFlightScorer, 0.0)
        self._lora = LoraScorer() if LoraScorer in weights else None
        self._session = SessionScorer in weights
        always = [(scorer, weight) for scorer, weight in pairs if isinstance(scorer, Always)]
        prefix = [(scorer, weight) for scorer, weight in pairs if isinstance(scorer, PrefixScorer)]
        self.taken = _named(always), _named([*prefix, *always])
        """Scorers and labels of a request without a prompt, and of one with."""
        # Bound once: memory is by function.
        self._told_of, self._row_of, self._lacking = self._told, self._row, self._lacks_a_signal
        self._whole = sum([weight for _, weight in self._signals])

    def sum_up(self, context: RoutingContext) -> tuple[list[float], Sequence[float] | None] | None:
        """Return the candidates' totals and `trust_in` them; None where each scorer has to be asked.

        That is where somebody was filtered out or lacks a signal, an adapter or a session counts, or promise 2 holds.
        """
        candidates, request, match = context.candidates, context.request, context.match
        if not isinstance(candidates, Snapshots):
            return None
        # `settled` would ask once more whether these are Snapshots.
        told, oldest, adapters = candidates.settled.get(self._told_of) or settled(candidates, self._told_of)
        if not told or (self._session and request.session_key):
            return None
        if adapters and self._lora is not None and self._lora.applies(request, candidates):
            return None
        works, signals = two_columns(candidates, self._row_of)
        trust: Sequence[float] | None = None
        if context.now - oldest > FRESH_S:
            trust = trust_in(candidates, context.now)
            if trust is not None and not match.matched_bytes and max(trust) < NO_TRUST:
                return None
        share = self._in_flight * min(works)
        # `strict` would cost as much as the sums.
        if trust is None:
            totals = [share / work + known for work, known in zip(works, signals)]  # noqa: B905
        else:
            # `shrink_to_mean`, written out: the weighted signals are tempered as one score.
            mean = neutral_score(signals, trust, self._whole)
            totals = [
                share / work + (mean + part * (known - mean))
                for work, known, part in zip(works, signals, trust)  # noqa: B905
            ]
        if match.matched_bytes:
            held, per_byte = prefix_share(match)
            per_byte *= self._prefix
            place_of = places(candidates).get
            # Few hold anything of one prompt, however many there are.
            for holder, size in held.items():
                if (place := place_of(holder)) is not None:
                    totals[place] += per_byte * size
        return totals, trust

    def _told(self, snapshots: Sequence[EndpointSnapshot]) -> tuple[bool, float, bool]:
        """Return whether every page has every signal, when the longest ago was scraped, and whether adapters are in use."""
        told = not somebody(snapshots, self._lacking)
        _, oldest = settled(snapshots, scraped)
        return told, oldest, adapters_in_use(snapshots)

    def _lacks_a_signal(self, snapshot: EndpointSnapshot) -> bool:
        return any([of(snapshot) < 0.0 for of, _ in self._signals])  # noqa: C419 - twice as fast as a generator

    def _row(self, snapshot: EndpointSnapshot) -> tuple[float, float]:
        """Return its work and its weighted signals."""
        signals = 0.0
        for of, weight in self._signals:
            signals += weight * of(snapshot)
        return work_at(snapshot), signals


def _named(pairs: Sequence[tuple[Scorer, float]]) -> tuple[tuple[Scorer, ...], tuple[tuple[str, float], ...]]:
    return tuple(scorer for scorer, _ in pairs), tuple((scorer.name, weight) for scorer, weight in pairs)


def columns_of(
    scorers: Sequence[Scorer],
    candidates: Sequence[EndpointSnapshot],
    match: PrefixMatch,
    trust: Sequence[float] | None,
) -> list[Sequence[float]]:
    """Ask scorers that look at nothing of the request but its match."""
    return [scorer.score(_ANY_REQUEST, candidates, match, trust) for scorer in scorers]


_ANY_REQUEST = InferenceRequest()
