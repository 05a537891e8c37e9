"""The strategies by name: each gives every candidate a total and chooses one.

Filters have been applied before (`scheduler`). All but `weighted` are those of other routers, so that users can compare;
sources are named at each. They report the one quantity they look at as a scorer of weight 1. Only round robin and the
hash ring keep state between decisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, assert_never

import msgspec
from xxhash import xxh3_64_intdigest

from extproc.routing.hashing import PER_STEP, HashRing, rendezvous
from extproc.routing.pickers import pick_best, pick_least_loaded
from extproc.routing.scorers import SessionScorer
from extproc.routing.signals import NO_TRUST, confidence
from extproc.routing.weighted_sum import WeightedSum
from extproc.snapshots import column, positions

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from extproc.config.schema import PrefixCacheConfig, PrefixHashConfig, RoutingConfig
    from extproc.types import EndpointSnapshot, InferenceRequest, PrefixMatch

__all__ = ["Choice", "RoutingContext", "Strategy", "build_strategy"]


class RoutingContext(msgspec.Struct, frozen=True, gc=False):
    """What a strategy decides on."""

    request: InferenceRequest
    pool: Sequence[EndpointSnapshot]
    candidates: Sequence[EndpointSnapshot]
    """What remains of the pool after the filters, in its order; never empty."""
    match: PrefixMatch
    rng: random.Random
    now: float


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What a strategy decided."""

    place: int
    """Position of the chosen one among the candidates."""
    note: str
    scorers: tuple[tuple[str, float], ...]
    columns: Callable[[], Sequence[Sequence[float]]]
    """Computes the candidates' scores, one sequence per scorer; rarely called."""
    totals: Sequence[float]


class Strategy(Protocol):
    """What the scheduler needs of a strategy."""

    name: str

    def choose(self, context: RoutingContext) -> Choice:
        """Choose one of the candidates."""
        ...

    def chosen_for_load(self, context: RoutingContext, place: int) -> bool | None:
        """Return whether a candidate was chosen for its load alone; False: also for its prefix, or for a key that names it.

        None: the strategy never looks at load, so that an idle endpoint attracts no requests. Called only for endpoints
        on probation.
        """
        ...


def build_strategy(config: RoutingConfig) -> Strategy:
    """Return the strategy that the configuration names, in its initial state."""
    match config.strategy:
        case "weighted":
            return Weighted(config)
        case "least-load":
            return LeastLoad()
        case "round-robin":
            return RoundRobin()
        case "random":
            return Random()
        case "session":
            return Session()
        case "prefix-hash":
            return PrefixHash(config.prefix_hash)
        case "prefix-cache":
            return PrefixCache(config.prefix_cache)
        case _ as unreachable:
            assert_never(unreachable)


class Weighted:
    """Weighted sum of scorers; near ties go to the less loaded of two at random. Ours; see docs/strategies.md."""

    name = "weighted"

    def __init__(self, config: RoutingConfig) -> None:
        self._sum = WeightedSum(config.weights)
        self._near_tie = config.near_tie
        self._session = SessionScorer() if config.weights.session > 0 else None

    def choose(self, context: RoutingContext) -> Choice:
        """Choose the best total."""
        candidates, match, rng = context.candidates, context.match, context.rng
        totals, scorers, columns, trust = self._sum.of(context.request, candidates, match, context.now)
        if trust is None or match.matched_bytes or max(trust) >= NO_TRUST:
            index, note = pick_best(totals, candidates, self._near_tie, rng)
        else:
            # Promise 2: without signals this is least-load on our own counts, without the leeway of a near tie.
            index, note = pick_least_loaded(totals, candidates, rng)
        return Choice(index, note, scorers, columns, totals)

    def chosen_for_load(self, context: RoutingContext, place: int) -> bool:
        """Return False if it holds more of the prompt than all others, or is the home of the session."""
        if _holds_most(context, place):
            return False
        request, candidates, session = context.request, context.candidates, self._session
        if session is None or not session.applies(request, candidates):
            return True
        return session.score(request, candidates, context.match, None)[place] == 0.0


def _holds_most(context: RoutingContext, place: int) -> bool:
    """Return whether a candidate holds more of the prompt than any other."""
    held = context.match.matched_bytes
    own = held.get(context.candidates[place].endpoint.id, 0)
    others = [held.get(other.endpoint.id, 0) for at, other in enumerate(context.candidates) if at != place]
    return own > max(others, default=0)


def requests_at(snapshot: EndpointSnapshot, now: float) -> float:
    """Return the requests at an endpoint: in flight, or waiting and running, whichever is more.

    Scraped requests beyond our own (of other clients or pickers) are weighted by the confidence in the scrape.
    """
    in_flight = float(max(snapshot.in_flight, 0))
    if snapshot.waiting is None or snapshot.running is None or snapshot.observed_at is None:
        return in_flight
    others = snapshot.waiting + snapshot.running - in_flight
    return in_flight + others * confidence(now - snapshot.observed_at) if others > 0 else in_flight


class LeastLoad:
    """Fewest requests; ties at random. Source: KubeAI's `LeastLoad`, with scraped counts added."""

    name = "least-load"

    def choose(self, context: RoutingContext) -> Choice:
        """Choose the fewest `requests_at`; the pseudo-score is 1 / (1 + requests)."""
        scores = [1.0 / (1.0 + requests_at(snapshot, context.now)) for snapshot in context.candidates]
        best = max(scores)
        tied = [index for index, score in enumerate(scores) if score == best]
        index = tied[int(context.rng.random() * len(tied))]
        return _single(index, "least load" if len(tied) == 1 else f"least load, {len(tied)} tied", "least-load", scores)

    def chosen_for_load(self, context: RoutingContext, place: int) -> bool:  # noqa: ARG002 - the protocol's signature
        """Return True."""
        return True


class Random:
    """Uniform choice."""

    name = "random"

    def choose(self, context: RoutingContext) -> Choice:
        """Choose the highest draw; the pseudo-score is the draw."""
        draw = context.rng.random
        scores = [draw() for _ in context.candidates]
        return _single(scores.index(max(scores)), "random", self.name, scores)

    def chosen_for_load(self, context: RoutingContext, place: int) -> None:
        """Return None."""


class RoundRobin:
    """Each in turn, in pool order; an endpoint that is filtered out loses its turn, no other does."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last = -1

    def choose(self, context: RoutingContext) -> Choice:
        """Choose the first candidate after the last choice; the pseudo-score falls with the distance."""
        pool, candidates = context.pool, context.candidates
        if len(pool) == len(candidates):
            places = list(range(len(pool)))
        else:
            positions = {snapshot.endpoint.id: place for place, snapshot in enumerate(pool)}
            places = [positions[snapshot.endpoint.id] for snapshot in candidates]
        size = len(pool)
        first = self._last + 1
        scores = [1.0 - ((place - first) % size) / size for place in places]
        index = scores.index(max(scores))
        self._last = places[index]
        return _single(index, "its turn", self.name, scores)

    def chosen_for_load(self, context: RoutingContext, place: int) -> None:
        """Return None."""


class Session:
    """The endpoint that the session key hashes to (rendezvous hashing); without a key least load."""

    name = "session"

    def __init__(self) -> None:
        self._fallback = LeastLoad()

    def choose(self, context: RoutingContext) -> Choice:
        """Choose the largest hash; the pseudo-score is the hash as a fraction of 2^64."""
        key = context.request.session_key
        if not key:
            return msgspec.structs.replace(self._fallback.choose(context), note="no session key, least load")
        values = rendezvous(key, [snapshot.endpoint.id for snapshot in context.candidates])
        scores = [value / 2**64 for value in values]
        return _single(values.index(max(values)), "session", self.name, scores)

    def chosen_for_load(self, context: RoutingContext, place: int) -> bool | None:  # noqa: ARG002 - the protocol's signature
        """Return True without a session key, else None."""
        return None if context.request.session_key else True


class PrefixHash:
    """Consistent hashing with bounded loads over model and leading prompt bytes; without a prompt least load.

    Source: KubeAI's `PrefixHash` (internal/loadbalancer, `balance_chwbl.go`): an endpoint takes the request if
    its load is at most `load_factor` * (total + 1) / n, or if nothing is in flight at all; else the next on the ring.
    Deliberately different: the whole prompt from its first byte counts, not only the first user message.
    """

    name = "prefix-hash"

    def __init__(self, config: PrefixHashConfig) -> None:
        self._config = config
        self._fallback = LeastLoad()
        self._ring = HashRing((), config.replicas)
        self._known: Mapping[str, int] = {}

    def choose(self, context: RoutingContext) -> Choice:
        """Walk the ring; the pseudo-score is 1 for the home, less for later ones, 0 for those over the bound or not reached."""
        request, pool, candidates = context.request, context.pool, context.candidates
        if not request.prompts:
            return msgspec.structs.replace(self._fallback.choose(context), note="no prompt, least load")
        self._follow(positions(pool))
        place_of = positions(candidates).get
        counts = column(candidates, _in_flight)
        total = sum(counts)
        bound = self._config.load_factor * (total + 1) / len(candidates) if total else 0.0
        scores = [0.0] * len(candidates)
        chosen, full, rank = -1, 0, 0
        for endpoint_id in self._ring.walk(self._key(request)):
            place = place_of(endpoint_id)
            if place is None:
                continue
            if counts[place] <= bound:
                scores[place] = 1.0 - rank / len(candidates)
                if chosen < 0:
                    chosen, full = place, rank
            rank += 1
            # The rest of the circle is walked only as far as fallbacks may come from.
            if chosen >= 0 and rank > full + _FALLBACKS_AT_MOST:
                break
        if chosen < 0:
            # An endpoint is always at or below the mean, and the factor is at least 1; but some may not be on the ring yet.
            return msgspec.structs.replace(self._fallback.choose(context), note="ring incomplete, least load")
        note = "home on the ring" if full == 0 else f"next on the ring, {full} before it above the load bound"
        return _single(chosen, note, self.name, scores)

    def _follow(self, known: Mapping[str, int]) -> None:
        """Update the ring to the pool; after large changes by some endpoints with each decision."""
        if known is not self._known:
            if known.keys() != self._known.keys():
                self._ring.follow(known)
            self._known = known
        if not self._ring.complete:
            self._ring.advance(PER_STEP)

    def chosen_for_load(self, context: RoutingContext, place: int) -> bool:
        """Return False for the home on the ring; the others take what it is too busy for."""
        if not context.request.prompts:
            return True
        ids = {snapshot.endpoint.id for snapshot in context.candidates}
        home = next((name for name in self._ring.walk(self._key(context.request)) if name in ids), None)
        return context.candidates[place].endpoint.id != home

    def _key(self, request: InferenceRequest) -> int:
        model = xxh3_64_intdigest(request.model.encode("utf-8", "surrogatepass"))
        return xxh3_64_intdigest(request.prompts[0][: self._config.prefix_bytes], model)


def _in_flight(snapshot: EndpointSnapshot) -> int:
    return max(snapshot.in_flight, 0)


_FALLBACKS_AT_MOST = 8
"""`routing.fallbacks` allows no more."""


class PrefixCache:
    """Longest match unless the pool is out of balance or the match too short, then least in flight.

    Source: SGLang's router, policy `cache_aware` (`balance_abs_threshold`, `balance_rel_threshold`, `cache_threshold`).
    """

    name = "prefix-cache"

    def __init__(self, config: PrefixCacheConfig) -> None:
        self._config = config

    def choose(self, context: RoutingContext) -> Choice:
        """Choose; the pseudo-score is the matched share where the match decides, else 1 / (1 + in flight)."""
        config, match, candidates, rng = self._config, context.match, context.candidates, context.rng
        counts = [max(snapshot.in_flight, 0) for snapshot in candidates]
        most, least = max(counts), min(counts)
        if most - least > config.balance_abs and most > config.balance_rel * least:
            return self._least(counts, candidates, rng, f"out of balance ({least} to {most} in flight), least load")
        size = match.prompt_bytes
        held = match.matched_bytes
        if size > 0 and held:
            shares = [min(max(held.get(snapshot.endpoint.id, 0) / size, 0.0), 1.0) for snapshot in candidates]
            if max(shares) >= config.min_match and max(shares) > 0:
                index, _ = pick_least_loaded(shares, candidates, rng)
                return _single(index, "longest prefix", self.name, shares)
        return self._least(counts, candidates, rng, "no match long enough, least load")

    def chosen_for_load(self, context: RoutingContext, place: int) -> bool:
        """Return False if it holds more of the prompt than all others."""
        return not _holds_most(context, place)

    @staticmethod
    def _least(counts: Sequence[int], candidates: Sequence[EndpointSnapshot], rng: random.Random, note: str) -> Choice:
        scores = [1.0 / (1.0 + count) for count in counts]
        index, _ = pick_least_loaded(scores, candidates, rng)
        return _single(index, note, "least-load", scores)


def _single(index: int, note: str, name: str, scores: Sequence[float]) -> Choice:
    return Choice(index, note, ((name, 1.0),), lambda: (scores,), scores)
