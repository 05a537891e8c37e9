"""One call from request, snapshots and match to a `Decision`: the entry point of this package.

Calls filters, strategy and probation, and builds the decision. Decides nothing itself but the order of fallbacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.routing.filters import apply_filters
from extproc.routing.pickers import by_total
from extproc.routing.probation import choose_on_probation
from extproc.routing.record import CandidateRecord
from extproc.routing.strategies import RoutingContext, build_strategy
from extproc.types import Decision

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from extproc.config.schema import RoutingConfig
    from extproc.routing.strategies import Choice
    from extproc.types import Endpoint, EndpointSnapshot, InferenceRequest, PrefixMatch

__all__ = ["Scheduler"]


class Scheduler:
    """The filters and the strategy of one configuration.

    Keeps only what strategies keep (a position, a hash ring): no clock, no random numbers of its own, no load.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._strategy = build_strategy(config)

    @property
    def config(self) -> RoutingConfig:
        """The configuration it was built from."""
        return self._config

    def schedule(
        self,
        request: InferenceRequest,
        snapshots: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        *,
        rng: random.Random,
        now: float,
        decision_id: str,
        prompt_tokens: int,
        cached_share: Callable[[int], float] | None = None,
        generation: int = 0,
    ) -> Decision:
        """Choose one of `snapshots` for the request.

        `now` is on the clock of `EndpointSnapshot.observed_at`, in seconds. `prompt_tokens` is the estimate for the whole
        prompt, and `cached_share` gives the share of them that so many leading bytes have; without it, that of the bytes.
        Raises NoEndpointError, SubsetEmptyError (a NoEligibleEndpointError), ModelNotFoundError and OverloadedError.
        """
        candidates, removed = apply_filters(self._config, request, snapshots, now)
        context = RoutingContext(request, snapshots, candidates, match, rng, now)
        choice = self._strategy.choose(context)
        chosen = candidates[choice.place]
        if chosen.probation is not None:
            choice, candidates, removed = choose_on_probation(self._strategy, context, choice, removed)
            chosen = candidates[choice.place]
        endpoint = chosen.endpoint
        prompt_bytes = match.prompt_bytes
        matched_bytes = match.matched_bytes.get(endpoint.id, 0)
        cached_tokens = 0
        if matched_bytes > 0:
            share = matched_bytes / prompt_bytes if cached_share is None else cached_share(matched_bytes)
            cached_tokens = min(prompt_tokens, int(prompt_tokens * share))
        # In the order of the fields, which a test pins: keywords would cost as much as the fields.
        return Decision(
            decision_id,
            endpoint,
            self._fallbacks(choice, candidates) if self._config.fallbacks else (),
            self._strategy.name,
            choice.scorers,
            CandidateRecord(candidates, choice, match, now),
            removed,
            choice.note,
            request.kind,
            request.model,
            prompt_bytes,
            matched_bytes,
            prompt_tokens,
            cached_tokens,
            now,
            request.request_id,
            generation,
            request.explain,
            chosen,
        )

    def _fallbacks(self, choice: Choice, candidates: Sequence[EndpointSnapshot]) -> tuple[Endpoint, ...]:
        places = by_total(choice.totals, candidates, choice.place, self._config.fallbacks)
        return tuple([candidates[place].endpoint for place in places])
