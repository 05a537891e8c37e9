"""Limits endpoints on probation to their share: a choice that falls on one stands, or is made again without them.

An endpoint that fails at once has no load, an empty queue and a free cache, so that nearly every choice falls on it,
whatever the strategy. A random draw decides whether the choice stands: all endpoints on probation together get at most
their fraction of the pool, times the share that `pool` allows. A sound endpoint that is on probation by mistake still gets
its fair share: the fewer requests it has, the more choices fall on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.errors import OverloadedError
from extproc.routing.filters import LIMITS
from extproc.routing.strategies import RoutingContext
from extproc.snapshots import Snapshots, selected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.routing.strategies import Choice, Strategy
    from extproc.types import EndpointSnapshot

__all__ = ["PROBATION", "choose_on_probation"]

PROBATION: Final = "probation"
"""Filter name, in a decision, of endpoints that were passed over because it was not their turn."""

_Removed = tuple[tuple[str, str], ...]


def choose_on_probation(
    strategy: Strategy, context: RoutingContext, choice: Choice, removed: _Removed
) -> tuple[Choice, Sequence[EndpointSnapshot], _Removed]:
    """Keep a choice or choose again among the others; return the choice, its candidates and all removed endpoints.

    Raises OverloadedError if all others have reached a limit and it is not the turn of those on probation.
    """
    candidates = context.candidates
    chosen = candidates[choice.place]
    share = chosen.probation or 0.0
    for_load = strategy.chosen_for_load(context, choice.place)
    if for_load is None or (share >= 1.0 and not for_load):
        return choice, candidates, removed
    sound = selected(candidates, _sound) if isinstance(candidates, Snapshots) else [*filter(_sound, candidates)]
    full = _sound_but_full(context, removed)
    if not sound and not full:
        # There is no other endpoint, and the requests themselves may be the cause.
        return choice, candidates, removed
    eligible = len(candidates) + full
    if context.rng.random() * eligible < share * (len(candidates) - len(sound)):
        return msgspec.structs.replace(choice, note=f"{choice.note}, its turn on probation"), candidates, removed
    if not sound:
        raise OverloadedError(
            f"{full} endpoints have reached a limit, and requests fail at the other {len(candidates)}; try again later."
        )
    passed = [(snapshot.endpoint.id, PROBATION) for snapshot in candidates if snapshot.probation is not None]
    again = strategy.choose(msgspec.structs.replace(context, candidates=sound))
    return again, sound, (*removed, *passed)


def _sound(snapshot: EndpointSnapshot) -> bool:
    return snapshot.probation is None


def _sound_but_full(context: RoutingContext, removed: _Removed) -> int:
    """Count the endpoints that a limit removed and that are not on probation."""
    full = {endpoint_id for endpoint_id, name in removed if name == LIMITS}
    return sum(snapshot.probation is None for snapshot in context.pool if snapshot.endpoint.id in full)
