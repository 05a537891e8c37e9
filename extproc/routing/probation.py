"""What becomes of a choice that fell on an endpoint on probation: its turn, or another choice without such endpoints.

An endpoint that fails at once has no load, an empty queue and a free cache, so nearly every choice falls on it, whatever
the strategy. So it is given its turn by a draw: all endpoints on probation together get at most as many of these choices
as their number is of all endpoints, times the share that `pool` allows. A sound endpoint that is on probation by
mistake loses nothing by it: the fewer requests it has, the more choices fall on it, up to its fair share.
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
"""Stands among the filters of a decision for endpoints that were passed over because it was not their turn."""

_Removed = tuple[tuple[str, str], ...]


def choose_on_probation(
    strategy: Strategy, context: RoutingContext, choice: Choice, removed: _Removed
) -> tuple[Choice, Sequence[EndpointSnapshot], _Removed]:
    """Let a choice stand, or choose again among the others; return it with its candidates and all that were removed.

    Raises OverloadedError where all the others have reached a limit and it is not the turn of those on probation.
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
        # Nobody is better, so the requests may be what fails.
        return choice, candidates, removed
    everybody = len(candidates) + full
    if context.rng.random() * everybody < share * (len(candidates) - len(sound)):
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
