"""Router: the whole core behind one object. Endpoints, metrics and requests in, decisions out; no I/O and no clock.

The service, the simulator, the benchmarks and programs that use the library drive this same object. It decides in which
order the packages are called, which state a decision changes, and what is learned from the end of a request; how prompts
become blocks (`prefix`), how endpoints are scored (`routing`) and how signals are kept (`pool`) is decided there.

Not thread-safe: at most one call at a time. No call blocks.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from extproc.config.schema import Config
from extproc.pool.ledger import IdState
from extproc.pool.pool import Pool, PoolChange
from extproc.prefix.blocks import BlockSchedule, hash_blocks, seed
from extproc.prefix.entries import PrefixHandle, PrefixIndexStats
from extproc.prefix.index import PrefixIndex
from extproc.prefix.promises import Promises
from extproc.prefix.text import Text, measure
from extproc.prefix.token_deltas import TokenDeltas
from extproc.prefix.tokens import TokenEstimates
from extproc.routing.scheduler import Scheduler
from extproc.types import (
    Decision,
    Endpoint,
    EndpointMetrics,
    EndpointSnapshot,
    Finished,
    InferenceRequest,
    Outcome,
    PrefixMatch,
    RouteEffect,
    Usage,
)

__all__ = ["Finished", "Router"]

_MAX_PROMPTS: Final = 32
"""Prompts of one request that are hashed; embeddings requests carry up to 2,048, which mostly begin alike."""
_ASSUMED_CACHE_TOKENS: Final = 1_000_000
"""Used where neither engine nor configuration says; too large an assumption costs little, too small a lot (simulated)."""
_BROKEN_BELOW: Final = 0.5
_KEPT_FROM: Final = 0.75
"""Shares of the promised tokens: with less a promise is broken, with more it is kept. Anything in between may come of
large cache blocks, or of texts that have more tokens per byte at their end, and proves nothing."""
_PROMISE_TOKENS: Final = 256
"""Smaller promises, and smaller gaps, are explained by whole blocks and by the template."""
_SLIM_ABOVE: Final = 16
"""Candidates beyond which an open request keeps its Decision without them, to save memory."""
_SWEEP_NODES: Final = 8
"""Nodes of dropped endpoints cleared with each decision, as long as there are any."""
_NO_MATCH: Final = PrefixMatch()
_NOT_TRIED: Final[Mapping[str, Outcome]] = {}

_OK: Final = Outcome.OK
"""By a name of the module: before Python 3.12 looking up a member of an enum is slow."""
_NOT_COMPUTED: Final = frozenset({Outcome.CONNECT_FAILURE, Outcome.BUSY, Outcome.SERVER_ERROR, Outcome.CLIENT_ERROR})
"""Outcomes after which the engine is assumed not to have computed the prompt."""


class _Open(msgspec.Struct):
    """What is kept of a request in flight."""

    decision: Decision
    handle: PrefixHandle | None
    text: Text | None
    """The text whose tokens the engine reports; None: the prompt was not seen whole, or is one of several."""
    user: str


class Router:
    """Chooses endpoints, and learns from how requests end."""

    def __init__(
        self,
        config: Config,
        *,
        rng: random.Random,
        on_released: Callable[[Finished], None] = lambda _: None,
    ) -> None:
        """Start with no endpoint.

        `on_released` is called with every end that the router finds by itself: a lease has run out, an engine has
        restarted or shows fewer requests, an endpoint has left. Every other end is what `finished` returns.
        """
        self._config = config
        self._rng = rng
        self.on_released = on_released
        self._generation = 1
        self._pool = Pool(config.pool, config.in_flight)
        self._scheduler = Scheduler(config.routing)
        self._schedule = BlockSchedule(config.prefix.block_bytes)
        self._index = PrefixIndex(self._schedule, config.prefix.max_blocks)
        self._tokens = TokenEstimates(config.prefix.bytes_per_token)
        self._deltas = TokenDeltas()
        self._promises: dict[str, Promises] = {}
        self._open: dict[str, _Open] = {}
        self._of_others: dict[str, tuple[str, PrefixHandle | None]] = {}

    # Decisions and state

    def route(self, request: InferenceRequest, *, now: float) -> Decision:
        """Choose an endpoint, and count the request as in flight there and the endpoint as holding the prompt's prefix.

        Raises RequestError (NoEndpointError and the others of `routing.scheduler`) with its HTTP status; then nothing
        has changed.
        """
        prompts = request.prompts
        chains: tuple[array[int], ...] = ()
        match = _NO_MATCH
        text: Text | None = None
        prompt_tokens = 0
        if prompts:
            chains = self._chains(request)
            text = measure(prompts)
            match = self._index.match(chains, text.n_bytes)
            prompt_tokens = self._tokens.of(request.model, text, chains[0] if len(prompts) == 1 else None)
        decision = self._scheduler.schedule(
            request,
            self._pool.snapshots(now),
            match,
            rng=self._rng,
            now=now,
            decision_id=f"{self._rng.getrandbits(64):016x}",
            prompt_tokens=prompt_tokens,
            cached_share=None if text is None else text.share,
            generation=self._generation,
        )
        decision_id, endpoint_id = decision.id, decision.endpoint.id
        uncached_tokens = decision.prompt_tokens - decision.predicted_cached_tokens
        self._pool.sent(decision_id, endpoint_id, uncached_tokens, now, request.request_id)
        handle = self._index.add(endpoint_id, chains, now) if chains else None
        kept = decision if len(decision.candidates) <= _SLIM_ABOVE else msgspec.structs.replace(decision, candidates=())
        whole = request.complete and len(prompts) == 1
        self._open[decision_id] = _Open(kept, handle, text if whole else None, request.user or request.session_key)
        if self._index.unswept:
            self._index.sweep(_SWEEP_NODES)
        return decision

    def snapshots(self, now: float) -> tuple[EndpointSnapshot, ...]:
        """Return the state of each endpoint, in the order of discovery."""
        return self._pool.snapshots(now)

    def index_stats(self) -> PrefixIndexStats:
        """Return size and counters of the prefix index."""
        return self._index.stats()

    def known_models(self) -> Mapping[str, str | None]:
        """Return the models and adapters some endpoint is known to serve: name to parent."""
        return self._pool.known_models()

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._config

    @property
    def generation(self) -> int:
        """Number of the configuration in force, from 1."""
        return self._generation

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def is_open(self, decision_id: str) -> bool:
        """Return whether a decision's request is in flight."""
        return decision_id in self._open

    def id_state(self, decision_id: str) -> IdState:
        """Return whether a decision is open, has ended, or is unknown."""
        return self._pool.id_state(decision_id)

    # Endpoints and signals

    def set_endpoints(self, endpoints: Sequence[Endpoint], *, now: float) -> PoolChange:
        """Replace the list of endpoints; requests at those that restarted are released.

        The state of an endpoint that left is kept for two minutes, with its requests in flight and its prefixes: it may
        come back with the next look-up, and its requests continue.
        """
        change = self._pool.set_endpoints(endpoints, now)
        for endpoint_id in change.removed:
            self._deltas.forget(endpoint_id)
        self._drop(change, now)
        for endpoint_id in {*change.added, *change.restarted}.difference(change.returned):
            self._set_capacity(endpoint_id, None)
        return change

    def _drop(self, change: PoolChange, now: float) -> None:
        """Forget the state of processes that are gone, and release their requests."""
        for endpoint_id in (*change.forgotten, *change.restarted):
            self._forget_cache(endpoint_id)
        self._release((entry.decision_id for entry in change.orphaned), Outcome.ENDPOINT_GONE, now)

    def _forget_cache(self, endpoint_id: str) -> None:
        """Forget the cache and the counters of an engine whose process is gone."""
        self._index.drop(endpoint_id)
        self._deltas.forget(endpoint_id)
        self._promises.pop(endpoint_id, None)

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, *, now: float) -> bool:
        """Take in one scrape; return True where it shows that the engine has restarted (its prefixes are forgotten)."""
        change = self._pool.observe(endpoint_id, metrics, now)
        if change.excess:
            self._release((entry.decision_id for entry in change.excess), Outcome.LEASE_EXPIRED, now)
        if change.restarted:
            self._forget_cache(endpoint_id)
            self._release((entry.decision_id for entry in change.orphaned), Outcome.ENDPOINT_GONE, now)
        if endpoint_id in self._pool:
            in_flight = self._pool.in_flight_at(endpoint_id)
            found = self._deltas.observed(endpoint_id, metrics.prompt_tokens_total, metrics.requests_total, in_flight)
            if found is not None:
                self._tokens.learn_sum(
                    found.model, found.plain_bytes, found.prompt_bytes, found.prompt_tokens, requests=found.requests
                )
            self._set_capacity(endpoint_id, metrics.cache_tokens)
        return change.restarted

    def observe_failure(self, endpoint_id: str, *, now: float) -> None:
        """Note a scrape that failed."""
        self._pool.observe_failure(endpoint_id, now)

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], *, now: float) -> None:
        """Take in which models and adapters an endpoint lists: name to parent (None: a base model)."""
        self._pool.observe_models(endpoint_id, models, now)

    def reconfigure(self, config: Config, *, now: float) -> None:
        """Apply another configuration from the next request on.

        Another `prefix.block_bytes` or `max_blocks` empties the prefix index; another `bytes_per_token` discards what was
        learned about tokens.
        """
        old, self._config = self._config, config
        self._generation += 1
        self._pool.reconfigure(config.pool, config.in_flight, now)
        self._scheduler = Scheduler(config.routing)
        if config.prefix.bytes_per_token != old.prefix.bytes_per_token:
            self._tokens = TokenEstimates(config.prefix.bytes_per_token)
        if config.prefix.block_bytes != old.prefix.block_bytes or config.prefix.max_blocks != old.prefix.max_blocks:
            self._schedule = BlockSchedule(config.prefix.block_bytes)
            self._index = PrefixIndex(self._schedule, config.prefix.max_blocks)
            for entry in self._open.values():
                entry.handle = None
            self._of_others = {
                decision_id: (endpoint_id, None) for decision_id, (endpoint_id, _) in self._of_others.items()
            }
        if config.prefix != old.prefix:
            for snapshot in self._pool.snapshots(now):
                metrics = self._pool.metrics(snapshot.endpoint.id)
                self._set_capacity(snapshot.endpoint.id, metrics.cache_tokens if metrics else None)

    # Requests

    def response_headers(self, decision: Decision | str, *, now: float) -> None:
        """Note that the endpoint has begun to answer. Optional, idempotent; with streaming NOT the first token."""
        decision_id = decision if isinstance(decision, str) else decision.id
        entry = self._open.get(decision_id)
        if entry is not None:
            self._pool.prefilled(decision_id)
            if entry.handle is not None:
                self._index.confirm(entry.decision.endpoint.id, entry.handle, now)

    def renew(self, decision: Decision | str, *, now: float) -> bool:
        """Restart a request's lease, because it is still in flight. False if it is not open."""
        return self._pool.renew(decision if isinstance(decision, str) else decision.id, now)

    def unseen(self, decision: Decision | str, *, now: float, guessed: bool = False) -> None:
        """Note that nobody will report a request's end: from 3 s later on, pages that show fewer requests release it.

        `guessed`: nothing is known of how long such requests take, so that limits do not count it.
        """
        self._pool.unseen(decision if isinstance(decision, str) else decision.id, now, guessed=guessed)

    def finished(
        self,
        decision: Decision | str,
        outcome: Outcome,
        *,
        now: float,
        usage: Usage | None = None,
        served_by: str = "",
        tried: Mapping[str, Outcome] = _NOT_TRIED,
    ) -> Finished | None:
        """End a request, and return what is known of it; None if it is not open. Only the first call per request counts.

        `served_by` is the endpoint (`ip:port`) that answered, where the proxy says so; `tried`, how earlier attempts
        ended. If another endpoint answered and `tried` does not name the chosen one, that one could not be reached.
        """
        decision_id = decision if isinstance(decision, str) else decision.id
        entry = self._open.pop(decision_id, None)
        if entry is None:
            return None
        made, handle = entry.decision, entry.handle
        chosen = made.endpoint.id
        other = served_by if served_by != chosen else ""
        self._pool.ended(decision_id, outcome, now, served_by=served_by, tried=tried)
        if handle is not None:
            if outcome is _OK and not other:
                # The engine has the prompt in its cache now.
                self._index.confirm(chosen, handle, now)
            else:
                self._settle_prefix(chosen, handle, outcome, other, now)
        evicted = 0
        if usage is not None and entry.text is not None:
            evicted = self._learn(entry, entry.text, usage, now, elsewhere=bool(other))
        if outcome is _OK or outcome not in _NOT_COMPUTED:
            reported = usage is not None and bool(usage.prompt_tokens)
            self._deltas.ended(served_by or chosen, made.model, entry.text, reported=reported)
        return Finished(made, outcome, usage, now - made.decided_at, evicted, other, tried)

    def effect_of(self, decision: Decision | str) -> RouteEffect | None:
        """Return what another picker needs to know of a decision in flight; None if it is not open."""
        decision_id = decision if isinstance(decision, str) else decision.id
        entry = self._open.get(decision_id)
        if entry is None:
            return None
        made = entry.decision
        uncached = max(0, made.prompt_tokens - made.predicted_cached_tokens)
        chains = entry.handle.chains if entry.handle is not None else ()
        return RouteEffect(decision_id, made.endpoint.id, self._config.prefix.block_bytes, chains, uncached)

    def observe_effect(self, effect: RouteEffect, *, now: float) -> bool:
        """Take in a decision of another picker, or its end; False if it changes nothing here.

        Messages may be duplicated and out of order: an end without its decision still says where a prefix is.
        """
        comparable = effect.block_bytes == self._config.prefix.block_bytes and effect.endpoint_id in self._pool
        chains = [array("Q", chain) for chain in effect.chains if chain] if comparable else []
        if effect.outcome is None:
            if not self._pool.sent(effect.id, effect.endpoint_id, effect.uncached_tokens, now):
                return False
            handle = self._index.add(effect.endpoint_id, chains, now) if chains else None
            self._of_others[effect.id] = (effect.endpoint_id, handle)
            return True
        if effect.id in self._open:
            return False
        endpoint_id, handle = self._of_others.pop(effect.id, (effect.endpoint_id, None))
        # Entered if it was not, so that a decision that arrives after its end is known to have ended.
        self._pool.sent(effect.id, endpoint_id, 0, now)
        if self._pool.ended(effect.id, effect.outcome, now) is None:
            return False
        if effect.outcome is Outcome.OK:
            handle = handle or (self._index.add(endpoint_id, chains, now) if chains else None)
            if handle is not None:
                self._index.confirm(endpoint_id, handle, now)
        elif handle is not None:
            self._index.retract(endpoint_id, handle, keep=effect.outcome not in _NOT_COMPUTED)
        return True

    def expire(self, *, now: float) -> None:
        """Release requests whose lease has run out, and those at endpoints that left; call it about once a second."""
        self._drop(self._pool.forget(now), now)
        expired = [entry.decision_id for entry in self._pool.expire(now)]
        self._release(expired, Outcome.LEASE_EXPIRED, now)

    # Internals

    def _chains(self, request: InferenceRequest) -> tuple[array[int], ...]:
        start = seed(request.model, request.cache_salt)
        schedule = self._schedule
        prompts = request.prompts
        if len(prompts) == 1:
            return (hash_blocks(prompts[0], start, schedule),)
        return tuple([hash_blocks(prompt, start, schedule) for prompt in prompts[:_MAX_PROMPTS]])

    def _set_capacity(self, endpoint_id: str, cache_tokens: int | None) -> None:
        tokens = cache_tokens or self._config.prefix.capacity_tokens or _ASSUMED_CACHE_TOKENS
        self._index.set_capacity(endpoint_id, int(tokens * self._tokens.cache_bytes_per_token))

    def _release(self, decision_ids: Iterable[str], outcome: Outcome, now: float) -> None:
        """Report requests that the pool has released (`on_released`)."""
        for decision_id in decision_ids:
            entry = self._open.pop(decision_id, None)
            endpoint_id, handle = self._of_others.pop(decision_id, ("", None))
            if handle is not None:
                self._index.retract(endpoint_id, handle, keep=True)
            if entry is not None:
                if entry.handle is not None:
                    self._index.retract(entry.decision.endpoint.id, entry.handle, keep=True)
                self.on_released(Finished(entry.decision, outcome, None, now - entry.decision.decided_at))

    def _settle_prefix(self, chosen: str, handle: PrefixHandle, outcome: Outcome, served_by: str, now: float) -> None:
        """Update the index: the prompt is in the cache of the endpoint that computed it, or in none."""
        if not served_by:
            self._index.retract(chosen, handle, keep=outcome not in _NOT_COMPUTED)
            return
        self._index.retract(chosen, handle)
        if outcome is _OK and served_by in self._pool:
            self._index.confirm(served_by, self._index.add(served_by, handle.chains, now), now)

    def _learn(self, entry: _Open, text: Text, usage: Usage, now: float, *, elsewhere: bool) -> int:
        """Learn how many tokens a text has, and correct the index if it had promised too much; return blocks evicted."""
        decision, handle, tokens = entry.decision, entry.handle, usage.prompt_tokens
        if tokens:
            chain = handle.chains[0] if handle is not None else None
            self._tokens.learn(decision.model, text, tokens, now=now, user=entry.user, chain=chain)
        if elsewhere or not tokens or usage.cached_tokens is None or handle is None or handle.used_at is None:
            return 0
        if tokens * decision.matched_bytes < _PROMISE_TOKENS * decision.prompt_bytes // 4:
            return 0  # of most short chats, without another call
        return self._hold_to_promise(decision, handle, handle.used_at, tokens, usage.cached_tokens)

    def _hold_to_promise(
        self, made: Decision, handle: PrefixHandle, used_at: float, tokens: int, cached_tokens: int
    ) -> int:
        """Compare the share of a prompt that was promised with the share that the engine had; return blocks evicted.

        Both are of the same prompt in the engine's own tokens, so it does not matter how well its tokens were estimated.
        """
        promised = tokens * made.predicted_cached_tokens / made.prompt_tokens if made.prompt_tokens else 0.0
        if promised < _PROMISE_TOKENS:
            return 0
        endpoint_id, age_s = made.endpoint.id, made.decided_at - used_at
        if cached_tokens >= promised * _KEPT_FROM:
            promises = self._promises.get(endpoint_id)
            if promises is not None:
                promises.kept(age_s)
            return 0
        if cached_tokens >= promised * _BROKEN_BELOW or promised - cached_tokens < _PROMISE_TOKENS:
            return 0
        promises = self._promises.setdefault(endpoint_id, Promises())
        # The engine has just computed what it lacked of this prompt; in question is what else was last used then.
        chain = handle.chains[0]
        prefix = chain[max(1, self._schedule.blocks_in(made.matched_bytes)) - 1]
        return self._index.correct(endpoint_id, used_at) if promises.broken(age_s, prefix) else 0
