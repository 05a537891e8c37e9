"""`Snapshots`: one snapshot per endpoint, with memoized columns of what readers compute from each.

A decision changes the load of one endpoint (in flight, waiting, running), a scrape everything of one. `Snapshots` keeps
track of which positions changed, so that a column is brought up to date by computing those alone. `pool` builds them,
`routing` reads columns; which values are worth a column is decided by the readers. All functions here also take plain
sequences, of which nothing is memoized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, compress
from typing import Any, Final, NamedTuple, Self, TypeVar

from extproc.types import EndpointSnapshot

__all__ = ["Snapshots", "any_snapshot", "column", "memoized", "positions", "selected", "two_columns"]

T = TypeVar("T")

_MOST_CHANGES: Final = 10_000
"""Beyond that the older half is dropped; columns last read before that are computed from scratch."""


class _History:
    """What successive `Snapshots` share: the changes between them, and what readers have computed."""

    __slots__ = ("changes", "columns", "dropped", "positions", "selections")

    def __init__(self) -> None:
        self.changes: list[int] = []
        """Positions that changed, in order, without the first `dropped` ones."""
        self.dropped = 0
        self.columns: dict[Callable[..., Any], tuple[int, tuple[Any, ...], Any]] = {}
        """By function: version, further arguments and values."""
        self.selections: dict[Callable[[EndpointSnapshot], bool], _Selection] = {}
        self.positions: dict[str, int] | None = None
        """By endpoint id: all versions have the same endpoints."""


class _Selection(NamedTuple):
    """Some of the snapshots, as of one version."""

    version: int
    static: object
    """`Snapshots.static` of the whole."""
    mask: Sequence[bool]
    rank: Sequence[int]
    """The position of each in the selection, counted from 1."""
    snapshots: Snapshots


class Snapshots(tuple[EndpointSnapshot, ...]):  # noqa: SLOT001 - a tuple has no room for slots
    """One snapshot per endpoint, in pool order; immutable but for what is memoized."""

    history: _History
    version: int
    """Number of changes that led here, `history.dropped` included."""
    static: dict[Callable[[Sequence[EndpointSnapshot]], Any], Any]
    """Results of `memoized`, shared with all versions that differ in their load only."""

    def __new__(cls, rows: Iterable[EndpointSnapshot] = ()) -> Self:
        """Start without anything memoized."""
        made = super().__new__(cls, rows)
        made.history = _History()
        made.version = 0
        made.static = {}
        return made

    def changed(self, changes: Mapping[int, EndpointSnapshot]) -> Snapshots:
        """Return the version with other snapshots of the same endpoints at some positions."""
        after = self.with_load(changes)
        after.static = {}
        return after

    def with_load(self, changes: Mapping[int, EndpointSnapshot]) -> Snapshots:
        """Return the version with other snapshots at some positions, which must differ in their load only."""
        rows = list(self)
        for position, snapshot in changes.items():
            rows[position] = snapshot
        history = self.history
        log = history.changes
        if self.version != history.dropped + len(log):
            return Snapshots(rows)  # this version has a successor already
        if len(log) > _MOST_CHANGES:
            half = len(log) // 2
            del log[:half]
            history.dropped += half
        log += changes
        after: Snapshots = _new_tuple(Snapshots, rows)
        after.history = history
        after.version = history.dropped + len(log)
        after.static = self.static
        return after


_new_tuple: Final = tuple.__new__


def memoized(snapshots: Sequence[EndpointSnapshot], compute: Callable[[Sequence[EndpointSnapshot]], T]) -> T:
    """Return `compute` of the snapshots; kept until anything but the load of an endpoint changes.

    `compute` must be the same object in each call and must not read the values of `in_flight`, `in_flight_tokens`,
    `waiting`, `running` and `guessed` (whether they are None it may read). The result must not be changed.
    """
    if not isinstance(snapshots, Snapshots):
        return compute(snapshots)
    found: T | None = snapshots.static.get(compute)
    if found is None:
        found = snapshots.static[compute] = compute(snapshots)
    return found


def column(
    snapshots: Sequence[EndpointSnapshot], of: Callable[..., T], *args: Any, kind: Callable[..., Any] = list
) -> Sequence[T]:
    """Return `of(snapshot, *args)` for each snapshot, in order; must not be changed.

    `of` must be the same object in each call. Computes only what changed since the column was last asked for, or
    everything if `args` are others than then.
    """
    values: Any
    if not isinstance(snapshots, Snapshots):
        values = kind([of(snapshot, *args) for snapshot in snapshots])
        return values  # type: ignore[no-any-return]
    history, version = snapshots.history, snapshots.version
    last = history.columns.get(of)
    changes = _changes_since(last[0], snapshots) if last is not None and last[1] == args else None
    if last is None or changes is None:
        values = kind([of(snapshot, *args) for snapshot in snapshots])
    elif changes:
        # A copy: earlier versions belong to the decisions made on them.
        values = last[2].copy()
        for position in changes:
            values[position] = of(snapshots[position], *args)
    else:
        return last[2]  # type: ignore[no-any-return]
    history.columns[of] = version, args, values
    return values  # type: ignore[no-any-return]


def two_columns(
    snapshots: Sequence[EndpointSnapshot], of: Callable[[EndpointSnapshot], tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Return both values of `of` for each snapshot, as two columns."""
    if not isinstance(snapshots, Snapshots):
        rows = [of(snapshot) for snapshot in snapshots]
        return [one for one, _ in rows], [other for _, other in rows]
    last = snapshots.history.columns.get(of)
    changes = None if last is None else _changes_since(last[0], snapshots)
    if last is None or changes is None:
        rows = [of(snapshot) for snapshot in snapshots]
        first, second = [one for one, _ in rows], [other for _, other in rows]
    elif changes:
        first, second = last[2][0].copy(), last[2][1].copy()
        for position in changes:
            first[position], second[position] = of(snapshots[position])
    else:
        return last[2]  # type: ignore[no-any-return]
    snapshots.history.columns[of] = snapshots.version, (), (first, second)
    return first, second


def _changes_since(version: int, snapshots: Snapshots) -> Sequence[int] | None:
    """Return the positions that changed since a version; None where computing everything is cheaper, or necessary."""
    dropped = snapshots.history.dropped
    if version < dropped or not 0 <= snapshots.version - version <= len(snapshots):
        return None
    return snapshots.history.changes[version - dropped : snapshots.version - dropped]


def any_snapshot(snapshots: Sequence[EndpointSnapshot], test: Callable[[EndpointSnapshot], bool]) -> bool:
    """Return whether `test` holds for any of the snapshots; a `column` of bytes, which is searched fast."""
    return True in column(snapshots, test, kind=bytearray)


def selected(snapshots: Snapshots, keep: Callable[[EndpointSnapshot], bool]) -> Snapshots:
    """Return those for which `keep` holds, with a history of their own: their columns last as those of the whole do."""
    history, version, mask = snapshots.history, snapshots.version, column(snapshots, keep, kind=bytearray)
    last = history.selections.get(keep)
    changes = _changes_since(last.version, snapshots) if last is not None and last.mask == mask else None
    rank: Sequence[int]
    if last is None or changes is None:
        rank, kept = list(accumulate(mask)), Snapshots(compress(snapshots, mask))
    elif changes:
        rank = last.rank
        rows = {rank[position] - 1: snapshots[position] for position in changes if mask[position]}
        same = last.static is snapshots.static
        kept = last.snapshots.with_load(rows) if same else last.snapshots.changed(rows)
    else:
        return last.snapshots
    history.selections[keep] = _Selection(version, snapshots.static, mask, rank, kept)
    return kept


def positions(snapshots: Sequence[EndpointSnapshot]) -> Mapping[str, int]:
    """Return the position of each endpoint by its id; the same object for all versions."""
    if not isinstance(snapshots, Snapshots):
        return {snapshot.endpoint.id: position for position, snapshot in enumerate(snapshots)}
    found = snapshots.history.positions
    if found is None:
        found = {snapshot.endpoint.id: position for position, snapshot in enumerate(snapshots)}
        snapshots.history.positions = found
    return found
