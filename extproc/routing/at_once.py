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
from extproc.routing.signals import FRESH_S, NO_TRUST, temper, trust_in
from extproc.vocabulary import InferenceRequest, Snapshots, column, settled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.routing.scorers import Scorer
    from extproc.routing.strategies import Situation
    from extproc.vocabulary import EndpointSnapshot, PrefixMatch

__all__ = ["AtOnce", "columns_of"]

_Row = tuple[float, float, str]
"""Of one endpoint: its work, weighted signals and id."""


class AtOnce:
    """The sum that nearly every request needs: prefix, signals and in-flight of a whole pool that tells all its signals.

    What does not depend on the request is worked out per endpoint when its load or its page changes; a request costs
    one pass over the pool, whatever the weights, and a few more where signals are old. The same totals as scorer by
    scorer, but for the last bit: tempering a weighted sum is the weighted sum of what was tempered.
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
        self._told_of, self._row_of = self._told, self._row

    def sum_up(self, situation: Situation) -> tuple[list[float], Sequence[float] | None] | None:
        """Return the candidates' totals and `trust_in` them; None where each scorer has to be asked.

        That is where somebody was filtered out or lacks a signal, an adapter or a session counts, or promise 2 holds.
        """
        candidates, request, match = situation.candidates, situation.request, situation.match
        if not isinstance(candidates, Snapshots):
            return None
        # `settled` would ask once more whether these are Snapshots.
        told, oldest, adapters = candidates.worked.settled.get(self._told_of) or settled(candidates, self._told_of)
        if not told or (self._session and request.session_key):
            return None
        if adapters and self._lora is not None and self._lora.applies(request, candidates):
            return None
        rows = column(candidates, self._row_of)
        trust: Sequence[float] | None = None
        if situation.now - oldest > FRESH_S:
            trust = trust_in(candidates, situation.now)
            if trust is not None:
                if not match.matched_bytes and max(trust) < NO_TRUST:
                    return None
                if self._signals:
                    rows = self._tempered(rows, trust)
        share = self._in_flight * min(rows)[0]
        if not match.matched_bytes:
            return [share / work + signals for work, signals, _ in rows], trust
        held, per_byte = prefix_share(match)
        per_byte *= self._prefix
        get = held.get
        return [share / work + signals + per_byte * get(endpoint_id, 0) for work, signals, endpoint_id in rows], trust

    def _tempered(self, rows: Sequence[_Row], trust: Sequence[float]) -> list[_Row]:
        """Temper the signals, as one score in [0, 1]."""
        whole = sum([weight for _, weight in self._signals])
        scores = temper([signals / whole for _, signals, _ in rows], trust)
        return [(work, whole * score, endpoint_id) for (work, _, endpoint_id), score in zip(rows, scores, strict=True)]

    def _told(self, snapshots: Sequence[EndpointSnapshot]) -> tuple[bool, float, bool]:
        """Return whether every page has every signal, when the longest ago was scraped, and whether adapters are in use."""
        told = all(of(snapshot) >= 0.0 for of, _ in self._signals for snapshot in snapshots)
        oldest = min([_NEVER if snapshot.observed_at is None else snapshot.observed_at for snapshot in snapshots])
        return told, oldest, adapters_in_use(snapshots)

    def _row(self, snapshot: EndpointSnapshot) -> _Row:
        signals = 0.0
        for of, weight in self._signals:
            signals += weight * of(snapshot)
        return work_at(snapshot), signals, snapshot.endpoint.id


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
_NEVER = float("-inf")
