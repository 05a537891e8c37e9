"""The candidates of one decision, built when they are first read.

Most decisions are logged with the chosen endpoint alone and never read again. What the candidates are built from does not
change: snapshots are immutable, scores are computed from them and the match, and totals and match belong to this decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, overload

from extproc.types import Candidate

if TYPE_CHECKING:
    from extproc.routing.strategies import Choice
    from extproc.types import EndpointSnapshot, PrefixMatch

__all__ = ["CandidateRecord"]


class CandidateRecord(Sequence[Candidate]):
    """The candidates in pool order; equal to any sequence of equal candidates."""

    __slots__ = ("_candidates", "_choice", "_match", "_now", "_rows")

    def __init__(self, candidates: Sequence[EndpointSnapshot], choice: Choice, match: PrefixMatch, now: float) -> None:
        self._candidates = candidates
        self._choice = choice
        self._match = match
        self._now = now
        self._rows: tuple[Candidate, ...] | None = None

    def _all(self) -> tuple[Candidate, ...]:
        """Build all rows at once, column by column, which is faster than one by one."""
        if self._rows is None:
            candidates, choice, now = self._candidates, self._choice, self._now
            ids = [snapshot.endpoint.id for snapshot in candidates]
            columns = choice.columns()
            held = self._match.matched_bytes
            rows = zip(
                ids,
                choice.totals,
                zip(*columns, strict=True) if columns else repeat((), len(ids)),
                [held.get(endpoint_id, 0) for endpoint_id in ids] if held else repeat(0, len(ids)),
                [snapshot.in_flight for snapshot in candidates],
                [snapshot.waiting for snapshot in candidates],
                [snapshot.kv_cache_usage for snapshot in candidates],
                [None if snapshot.observed_at is None else now - snapshot.observed_at for snapshot in candidates],
                strict=True,
            )
            self._rows = tuple(map(tuple.__new__, repeat(Candidate), rows))
        return self._rows

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, place: int | slice) -> Candidate | Sequence[Candidate]:
        return self._all()[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CandidateRecord):
            return self._all() == other._all()
        return self._all() == other

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())
