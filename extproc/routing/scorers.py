"""The scorers: each gives every candidate a value in [0, 1], higher is better.

Decides the formula of each scorer. `weighted_sum` applies the weights of what depends on the endpoint alone; scorers that
look at the request (`RequestScorer`) add their weighted values to its totals. The table in docs/strategies.md says the same in
words. Absolute scorers look at one endpoint alone; a pool-relative one compares it with the others. None is min-max
normalised, because then a difference of a single request could change a value from 0 to 1.
"""

# ruff: noqa: ARG002 - all scorers have one signature

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

from extproc.routing.hashing import rendezvous
from extproc.routing.signals import MISSING, shrink_to_mean
from extproc.snapshots import any_snapshot, column, positions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extproc.config.schema import WeightsConfig
    from extproc.types import EndpointSnapshot, InferenceRequest, PrefixMatch

__all__ = [
    "ALL_SCORERS",
    "InFlightScorer",
    "KvCacheScorer",
    "LoraScorer",
    "PrefixScorer",
    "QueueScorer",
    "RequestScorer",
    "RunningScorer",
    "Scale",
    "Scorer",
    "SessionScorer",
    "SignalScorer",
    "weighted_scorers",
    "work_at",
]

PREFIX_OVERHEAD_BYTES: Final = 2048
"""Cost of a request besides its prompt, in prompt bytes (about 500 tokens): a match of 100 bytes out of 120 must not score
like one of 20,000 out of 24,000. About twice the prefill that fits into one decode step of the GPUs we measured."""

QUEUE_HALF: Final = 16.0
"""Waiting requests at which the queue scorer gives one half. Not smaller: a queue of a few requests is gone before the next
scrape, and following it sends all requests to the queue that was shortest at the last one (simulated)."""

RUNNING_HALF: Final = 32.0
"""Running requests at which the running scorer gives one half: an eighth of vLLM's default `max_num_seqs` of 256."""

IN_FLIGHT_SMOOTHING: Final = 12.0
"""Requests added to both sides of the in-flight ratio, so that 1 against 0 is a small difference and 40 against 20 a large one."""

TOKENS_PER_REQUEST: Final = 1000.0
"""Uncached prompt tokens in flight that weigh as much as one request in flight."""
_PER_TOKEN: Final = 1.0 / TOKENS_PER_REQUEST


class Scale(enum.Enum):
    """Whether a score depends on the other candidates."""

    ABSOLUTE = "absolute"
    RELATIVE = "relative"


class Scorer(Protocol):
    """What every scorer offers; how it enters the weighted sum depends on its kind.

    A new one is a `SignalScorer`, if it looks at one endpoint's page alone, or a `RequestScorer`; it takes part in
    decisions once it is in `ALL_SCORERS` and `config.schema.WeightsConfig` has a weight of its name.
    """

    name: str
    """Spelling of the weight in `routing.weights`."""
    scale: Scale

    def score(
        self,
        request: InferenceRequest,
        candidates: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        trust: Sequence[float] | None,
    ) -> Sequence[float]:
        """Return one value in [0, 1] per candidate, in their order; `trust` is `signals.trust_in` of them."""
        ...


class RequestScorer(ABC):
    """Base of scorers that look at the request: they take part only in decisions to which they apply."""

    name: str
    scale: Scale

    def may_apply(self, snapshots: Sequence[EndpointSnapshot]) -> bool:
        """Return False where the scorer applies to no request, as the snapshots are; `memoized` by the weighted sum."""
        return True

    @abstractmethod
    def applies(self, request: InferenceRequest, candidates: Sequence[EndpointSnapshot]) -> bool:
        """Return whether the scorer takes part in the decision on this request."""

    @abstractmethod
    def score(
        self,
        request: InferenceRequest,
        candidates: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        trust: Sequence[float] | None,
    ) -> Sequence[float]:
        """Return one value per candidate (see `Scorer`); of the request it may read `model` and `session_key` alone."""

    def add(
        self,
        totals: list[float],
        weight: float,
        request: InferenceRequest,
        candidates: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        trust: Sequence[float] | None,
    ) -> None:
        """Add the weighted `score` to the totals; overridden where most candidates score 0."""
        for place, score in enumerate(self.score(request, candidates, match, trust)):
            totals[place] += weight * score


class PrefixScorer(RequestScorer):
    """Share of the prompt that need not be computed: matched / (prompt + overhead), in bytes."""

    name = "prefix"
    scale = Scale.ABSOLUTE

    def applies(self, request: InferenceRequest, candidates: Sequence[EndpointSnapshot]) -> bool:
        """Return whether a prompt was recognised."""
        return bool(request.prompts)

    def score(
        self,
        request: InferenceRequest,
        candidates: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        trust: Sequence[float] | None,
    ) -> Sequence[float]:
        """Score 0 where nothing matches; at most prompt / (prompt + overhead)."""
        if not match.matched_bytes:
            return [0.0] * len(candidates)
        held, per_byte = prefix_share(match)
        get = held.get
        return [per_byte * get(snapshot.endpoint.id, 0) for snapshot in candidates]

    def add(
        self,
        totals: list[float],
        weight: float,
        request: InferenceRequest,
        candidates: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        trust: Sequence[float] | None,
    ) -> None:
        """Add to the totals of the few endpoints that hold a part of the prompt."""
        if match.matched_bytes:
            held, per_byte = prefix_share(match)
            per_byte *= weight
            position_of = positions(candidates).get
            for holder, size in held.items():
                if (position := position_of(holder)) is not None:
                    totals[position] += per_byte * size


def prefix_share(match: PrefixMatch) -> tuple[Mapping[str, int], float]:
    """Return the bytes held by endpoint id, without those that hold none, and the score of one byte. `match` is not empty."""
    held, prompt_bytes = match.matched_bytes, match.prompt_bytes
    sizes = held.values()
    if max(sizes) > prompt_bytes or min(sizes) < 0:
        # An index that claims more than the prompt has is wrong, and must not outweigh everything else.
        prompt_bytes = max(prompt_bytes, 0)
        held = {name: min(max(size, 0), prompt_bytes) for name, size in held.items()}
    return held, 1.0 / (prompt_bytes + PREFIX_OVERHEAD_BYTES)


class SignalScorer(ABC):
    """Base of scorers that look at one endpoint's page alone."""

    name: str

    scale = Scale.ABSOLUTE

    @staticmethod
    @abstractmethod
    def of(snapshot: EndpointSnapshot) -> float:
        """Score one endpoint at full confidence, in [0, 1]; `MISSING` where its page does not say."""

    def score(
        self,
        request: InferenceRequest,
        candidates: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        trust: Sequence[float] | None,
    ) -> Sequence[float]:
        """Score each endpoint, drawn to the mean by the age of its signals."""
        return shrink_to_mean(column(candidates, self.of), trust)


class KvCacheScorer(SignalScorer):
    """Free share of the engine's KV cache: 1 - usage."""

    name = "kv-cache"

    @staticmethod
    def of(snapshot: EndpointSnapshot) -> float:
        """Score linearly, clamped."""
        usage = snapshot.kv_cache_usage
        if usage is None:
            return MISSING
        return (1.0 - usage if usage > 0.0 else 1.0) if usage < 1.0 else 0.0


class QueueScorer(SignalScorer):
    """Few requests waiting in the engine: k / (k + waiting)."""

    name = "queue"

    @staticmethod
    def of(snapshot: EndpointSnapshot) -> float:
        """Score 1 for an empty queue, one half at `QUEUE_HALF`."""
        waiting = snapshot.waiting
        if waiting is None:
            return MISSING
        return QUEUE_HALF / (QUEUE_HALF + waiting) if waiting > 0.0 else 1.0


class RunningScorer(SignalScorer):
    """Few requests running in the engine: k / (k + running)."""

    name = "running"

    @staticmethod
    def of(snapshot: EndpointSnapshot) -> float:
        """Score 1 for an idle engine, one half at `RUNNING_HALF`."""
        running = snapshot.running
        if running is None:
            return MISSING
        return RUNNING_HALF / (RUNNING_HALF + running) if running > 0.0 else 1.0


class InFlightScorer:
    """Few requests and tokens of our own in flight, relative to the least loaded candidate: (least + c) / (own + c)."""

    name = "in-flight"
    scale = Scale.RELATIVE

    def score(
        self,
        request: InferenceRequest,
        candidates: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        trust: Sequence[float] | None,
    ) -> Sequence[float]:
        """Score 1 for the least loaded; twice its work (beyond the smoothing) scores one half, at any level of load.

        Work is counted in requests: those in flight, and their uncached prompt tokens by `TOKENS_PER_REQUEST`.
        """
        work = column(candidates, work_at)
        least = min(work)
        return [least / own for own in work]


def work_at(snapshot: EndpointSnapshot) -> float:
    """Return our own work in flight at an endpoint, in requests, smoothing included; at least `IN_FLIGHT_SMOOTHING`."""
    work = IN_FLIGHT_SMOOTHING + snapshot.in_flight + _PER_TOKEN * snapshot.in_flight_tokens
    # The ledger never goes below zero; a snapshot from elsewhere may.
    return max(IN_FLIGHT_SMOOTHING, work)


class LoraScorer(RequestScorer):
    """The adapter is loaded, or there is room for it: loaded 1.0, a free slot 0.8, being loaded 0.6, full 0."""

    name = "lora"
    scale = Scale.ABSOLUTE

    def may_apply(self, snapshots: Sequence[EndpointSnapshot]) -> bool:
        """Return whether any endpoint reports any adapter."""
        return any_snapshot(snapshots, uses_adapters)

    def applies(self, request: InferenceRequest, candidates: Sequence[EndpointSnapshot]) -> bool:
        """Return whether a candidate reports the model as an adapter in use: base models need no slot."""
        model = request.model
        return bool(model) and any([model in s.lora_running or model in s.lora_waiting for s in candidates])  # noqa: C419 - faster than a generator

    def score(
        self,
        request: InferenceRequest,
        candidates: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        trust: Sequence[float] | None,
    ) -> Sequence[float]:
        """Score as llm-d's `lora-affinity-scorer`; endpoints that say nothing of adapters are neutral."""
        model = request.model
        scores: list[float] = []
        for snapshot in candidates:
            running, waiting, slots = snapshot.lora_running, snapshot.lora_waiting, snapshot.lora_max
            if model in running:
                scores.append(1.0)
            elif slots is not None and len(running | waiting) < slots:
                scores.append(0.8)
            elif model in waiting:
                scores.append(0.6)
            else:
                scores.append(MISSING if slots is None else 0.0)
        return shrink_to_mean(scores, trust)


def uses_adapters(snapshot: EndpointSnapshot) -> bool:
    """Return whether an endpoint reports any adapter."""
    return bool(snapshot.lora_running or snapshot.lora_waiting)


class SessionScorer(RequestScorer):
    """The one endpoint that the session key names scores 1, the others 0 (rendezvous hashing)."""

    name = "session"
    scale = Scale.RELATIVE

    def applies(self, request: InferenceRequest, candidates: Sequence[EndpointSnapshot]) -> bool:
        """Return whether the request has a session key."""
        return bool(request.session_key)

    def score(
        self,
        request: InferenceRequest,
        candidates: Sequence[EndpointSnapshot],
        match: PrefixMatch,
        trust: Sequence[float] | None,
    ) -> Sequence[float]:
        """Hash the key with every candidate; the largest value wins, so a lost endpoint moves only its own sessions."""
        values = rendezvous(request.session_key, [snapshot.endpoint.id for snapshot in candidates])
        best = max(values)
        return [1.0 if value == best else 0.0 for value in values]


ALL_SCORERS: Final[tuple[Scorer, ...]] = (
    PrefixScorer(),
    KvCacheScorer(),
    QueueScorer(),
    RunningScorer(),
    InFlightScorer(),
    LoraScorer(),
    SessionScorer(),
)
"""In the order in which decisions list them."""


def weighted_scorers(weights: WeightsConfig) -> tuple[tuple[Scorer, float], ...]:
    """Pair each scorer with its weight, leaving out those switched off by 0."""
    pairs = [(scorer, float(getattr(weights, scorer.name.replace("-", "_")))) for scorer in ALL_SCORERS]
    return tuple((scorer, weight) for scorer, weight in pairs if weight > 0)
