"""A small fleet of model servers under a virtual clock, to see what decisions are worth.

Far simpler than `extproc.sim` on purpose: prompts are chains of segments, not of blocks, so that thousands of requests run in
a second and a formula can be judged in a unit test. The picker is the whole `Router`, with its index, its ledger and what it
learns of tokens: it is given bytes, about four and a half a token but different from text to text, and replicas count in tokens
and add a template. What the fleet keeps is what separates routing policies: a shared step in which
prefill delays decodes, a KV cache with least-recently-used prefixes, waiting for space. Step times have the form that fits vLLM V1:
`max(weights, (prefill + n) / rate) + overhead + a * n + x * context`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from extproc.config.schema import Config, RoutingConfig
from extproc.router import Router
from extproc.types import Endpoint, EndpointMetrics, InferenceRequest, Outcome, RequestKind, Usage

TEMPLATE: Final = ("template", 34)
"""Tokens that stand before every prompt; no byte of them goes past the picker."""

Chain = tuple[tuple[str, int], ...]
"""Segments of a prompt: (name of the prefix that ends here, its own tokens)."""


@dataclass(frozen=True)
class Gpu:
    """Constants of one replica; rates in tokens per second, times in seconds."""

    prefill_rate: float
    weights_s: float
    overhead_s: float
    per_request_s: float
    per_context_token_s: float
    kv_tokens: int
    budget: int = 8192


L4 = Gpu(5800, 31.5e-3, 6e-3, 0.25e-3, 5.5e-7, 80_000, 16_384)
"""Llama 3.1 8B FP8 on one L4, fitted to KubeAI's published benchmark."""
H100X2 = Gpu(15_928, 9.5e-3, 1.5e-3, 0.08e-3, 5.4e-8, 307_328)
"""Qwen3 32B on two H100, fitted to llm-d's published benchmark."""


class Arrival(NamedTuple):
    """One request of a workload."""

    at: float
    chain: Chain
    output_tokens: int
    session: str = ""


@lru_cache(maxsize=4096)
def _text(name: str, tokens: int) -> bytes:
    """Write a segment: letters and spaces that no other name has, 3.8 to 5.2 bytes a token."""
    rng = random.Random(name)
    n_bytes = round(tokens * rng.uniform(3.8, 5.2))
    words = [rng.choice(_SYLLABLES) + rng.choice(_SYLLABLES) for _ in range(40)]
    head = f"{name} ".encode()
    return (head + b"".join(rng.choices(words, k=n_bytes // 5 + 1)))[:n_bytes]


_SYLLABLES: Final = [f"{a}{b}{c}".encode() for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "s ", "l ")]


@dataclass(slots=True, eq=False)
class _Sequence:
    arrival: Arrival
    chain: Chain
    """With the template."""
    decision: str
    """Id; empty where the request is not the picker's."""
    cached: int = 0
    left: int = 0
    """Prompt tokens still to prefill."""
    generated: int = 0
    context: int = 0


class LruPrefixes:
    """Which prefixes fit into so many tokens, the least recently used tails going first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free: OrderedDict[str, int] = OrderedDict()
        self.free_tokens = 0
        self.used: dict[str, list[int]] = {}
        self.used_tokens = 0

    def match(self, chain: Chain) -> int:
        tokens = 0
        for name, size in chain:
            if name not in self.used and name not in self.free:
                break
            tokens += size
        return tokens

    def claim(self, chain: Chain) -> None:
        for name, size in chain:
            if name in self.used:
                self.used[name][0] += 1
                continue
            if name in self.free:
                self.free_tokens -= self.free.pop(name)
            self.used[name] = [1, size]
            self.used_tokens += size
        self.shrink()

    def release(self, chain: Chain) -> None:
        for name, size in reversed(chain):
            self.used[name][0] -= 1
            if not self.used[name][0]:
                del self.used[name]
                self.used_tokens -= size
                self.free[name] = size
                self.free_tokens += size
        self.shrink()

    def shrink(self) -> None:
        while self.free and self.used_tokens + self.free_tokens > self.capacity:
            self.free_tokens -= self.free.popitem(last=False)[1]


class Replica:
    """One engine: continuous batching, chunked prefill, prefix cache."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.cache = LruPrefixes(gpu.kv_tokens)
        self.waiting: deque[_Sequence] = deque()
        self.running: list[_Sequence] = []
        self.prefill_tokens = 0
        self.prompt_tokens = 0
        self.stepping = False

    def begin_step(self) -> float | None:
        gpu, cache = self.gpu, self.cache
        while self.waiting:
            sequence = self.waiting[0]
            chain = sequence.chain
            size = sum(tokens for _, tokens in chain)
            matched = min(cache.match(chain), size - 1)
            if self.running and cache.used_tokens + size - matched > gpu.kv_tokens:
                break
            self.waiting.popleft()
            cache.claim(chain)
            sequence.left = size - matched
            sequence.cached = matched
            sequence.context = size
            self.prefill_tokens += sequence.left
            self.prompt_tokens += size
            self.running.append(sequence)
        if not self.running:
            return None
        decoding = context = prefill = 0
        budget = gpu.budget
        for sequence in self.running:
            if sequence.left:
                part = min(sequence.left, budget - prefill)
                sequence.left -= part
                prefill += part
            else:
                decoding += 1
                context += sequence.context
        return (
            max(gpu.weights_s, (prefill + decoding) / gpu.prefill_rate)
            + gpu.overhead_s
            + gpu.per_request_s * decoding
            + gpu.per_context_token_s * context
        )

    def end_step(self) -> Iterator[_Sequence]:
        """Yield each sequence that has its first or its last token now."""
        keep = []
        for sequence in self.running:
            if sequence.left:
                keep.append(sequence)
                continue
            sequence.generated += 1
            sequence.context += 1
            self.cache.used_tokens += 1
            done = sequence.generated >= sequence.arrival.output_tokens
            if done:
                self.cache.used_tokens -= sequence.generated
                self.cache.release(sequence.chain)
            else:
                keep.append(sequence)
            if done or sequence.generated == 1:
                yield sequence
        self.running = keep


@dataclass
class Result:
    """What the clients saw."""

    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    per_replica: list[int] = field(default_factory=list)
    cached_share: float = 0.0

    @property
    def mean_ms(self) -> float:
        return 1000 * sum(self.ttft_s) / len(self.ttft_s)

    @property
    def p99_ms(self) -> float:
        return 1000 * sorted(self.ttft_s)[math.ceil(0.99 * len(self.ttft_s)) - 1]

    @property
    def latency_mean_ms(self) -> float:
        return 1000 * sum(self.latency_s) / len(self.latency_s)


def run(
    routing: RoutingConfig,
    arrivals: list[Arrival],
    *,
    replicas: int = 8,
    gpu: Gpu = L4,
    scrape_s: float | None = 0.5,
    seed: int = 0,
    warm_s: float = 20.0,
    foreign: Sequence[Arrival] = (),
) -> Result:
    """Drive `arrivals` through a router; `scrape_s` None: never scraped. Arrivals before `warm_s` do not count.

    `foreign` requests come from elsewhere, to the first two replicas, so that only a scrape can show them.
    """
    rng = random.Random(seed)
    router = Router(Config(routing=routing), rng=rng)
    engines = [Replica(gpu) for _ in range(replicas)]
    endpoints = [Endpoint(f"10.0.0.{number + 1}", 8000) for number in range(replicas)]
    places = {endpoint.id: place for place, endpoint in enumerate(endpoints)}
    router.set_endpoints(endpoints, now=0.0)
    result = Result(per_replica=[0] * replicas)
    events: list[tuple[float, int, int, object]] = []
    number = 0
    for arrival in arrivals:
        events.append((arrival.at, number, -1, arrival))
        number += 1
    for arrival in foreign:
        events.append((arrival.at, number, number % 2, arrival))
        number += 1
    if scrape_s is not None:
        for place in range(replicas):
            events.append((rng.random() * scrape_s, number, place, "scrape"))
            number += 1
    heapq.heapify(events)
    open_requests = len(arrivals)

    def step(place: int, now: float) -> None:
        nonlocal number
        duration = engines[place].begin_step()
        engines[place].stepping = duration is not None
        if duration is not None:
            number += 1
            heapq.heappush(events, (now + duration, number, place, "step"))

    while open_requests:
        now, _, place, what = heapq.heappop(events)
        if isinstance(what, Arrival):
            decision_id = ""
            if place < 0:
                prompt = b"".join([_text(name, tokens) for name, tokens in what.chain])
                decision = router.route(
                    InferenceRequest(
                        kind=RequestKind.CHAT,
                        model="m",
                        prompts=(prompt,),
                        session_key=what.session,
                        body_bytes=len(prompt),
                    ),
                    now=now,
                )
                decision_id, place = decision.id, places[decision.endpoint.id]
                result.per_replica[place] += 1
            engines[place].waiting.append(_Sequence(what, (TEMPLATE, *what.chain), decision_id))
            if not engines[place].stepping:
                step(place, now)
        elif what == "step":
            for sequence in engines[place].end_step():
                arrival = sequence.arrival
                if not sequence.decision:
                    continue
                if sequence.generated == 1:
                    router.response_headers(sequence.decision, now=now)
                    if arrival.at >= warm_s:
                        result.ttft_s.append(now - arrival.at)
                if sequence.generated >= arrival.output_tokens:
                    size = sum(tokens for _, tokens in sequence.chain)
                    usage = Usage(size, sequence.generated, sequence.cached)
                    router.finished(sequence.decision, Outcome.OK, now=now, usage=usage)
                    open_requests -= 1
                    if arrival.at >= warm_s:
                        result.latency_s.append(now - arrival.at)
            step(place, now)
        else:
            engine = engines[place]
            page = EndpointMetrics(
                waiting=float(len(engine.waiting)),
                running=float(len(engine.running)),
                kv_cache_usage=min(1.0, engine.cache.used_tokens / gpu.kv_tokens),
                cache_tokens=gpu.kv_tokens,
            )
            router.observe(endpoints[place].id, page, now=now)
            number += 1
            assert scrape_s is not None
            heapq.heappush(events, (now + scrape_s, number, place, "scrape"))
    result.cached_share = 1 - sum(e.prefill_tokens for e in engines) / sum(e.prompt_tokens for e in engines)
    return result


def _output(rng: random.Random, mean: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - 0.32, 0.8)))


def _poisson(rng: random.Random, rate: float, duration_s: float) -> Iterator[float]:
    at = rng.expovariate(rate)
    while at < duration_s:
        yield at
        at += rng.expovariate(rate)


def hot(seed: int, rate: float = 30.0, duration_s: float = 120.0, share: float = 0.4) -> list[Arrival]:
    """4,000-token prompts; `share` of them have one prefix in common, the rest one of 60."""
    rng = random.Random(seed)
    arrivals = []
    for number, at in enumerate(_poisson(rng, rate, duration_s)):
        prefix = "hot" if rng.random() < share else f"cold-{rng.randrange(60)}"
        arrivals.append(Arrival(at, ((prefix, 3800), (f"q{number}", 200)), _output(rng, 100), prefix))
    return arrivals


def chat(seed: int, sessions_per_s: float = 3.5, duration_s: float = 150.0, tenants: int = 4) -> list[Arrival]:
    """Conversations of some seven turns; each tenant has a system prompt of 1,000 tokens."""
    rng = random.Random(seed)
    arrivals = []
    for number, start in enumerate(_poisson(rng, sessions_per_s, duration_s)):
        tenant = min(tenants - 1, int(rng.paretovariate(1.2)) - 1)
        chain: Chain = ((f"system-{tenant}", 1000),)
        at = start
        for turn in range(1 + int(rng.expovariate(1 / 6.5))):
            if at >= duration_s:
                break
            chain += ((f"s{number}-{turn}", max(5, round(rng.lognormvariate(4.3, 0.7)))),)
            output = _output(rng, 150)
            arrivals.append(Arrival(at, chain, output, f"s{number}"))
            chain += ((f"s{number}-{turn}a", output),)
            at += output * 0.05 + rng.lognormvariate(1.8, 0.8)
    return sorted(arrivals)


def fresh(seed: int, rate: float = 36.0, duration_s: float = 120.0) -> list[Arrival]:
    """Nothing is ever asked twice; prompts of 600 tokens on average, of very different length."""
    rng = random.Random(seed)
    return [
        Arrival(at, ((f"p{number}", max(10, round(rng.lognormvariate(5.9, 1.0)))),), _output(rng, 120), f"p{number}")
        for number, at in enumerate(_poisson(rng, rate, duration_s))
    ]


def documents(seed: int, rate: float = 14.0, duration_s: float = 150.0) -> list[Arrival]:
    """Questions to long documents (6,000 to 14,000 tokens, asked some six times) among short requests without reuse."""
    rng = random.Random(seed)
    arrivals = []
    for number, at in enumerate(_poisson(rng, rate, duration_s)):
        if rng.random() < 0.3:
            document = int(at / 10) * 8 + rng.randrange(8)
            size = 6000 + 1000 * (document * 7 % 9)
            arrivals.append(Arrival(at, ((f"doc{document}", size), (f"q{number}", 60)), _output(rng, 150)))
        else:
            arrivals.append(
                Arrival(at, ((f"q{number}", max(10, round(rng.lognormvariate(4.6, 0.8)))),), _output(rng, 150))
            )
    return arrivals


def groups(seed: int, rate: float = 25.0, duration_s: float = 120.0) -> list[Arrival]:
    """150 groups with a prefix of 6,000 tokens each and questions of 1,200 (llm-d's published benchmark)."""
    rng = random.Random(seed)
    return [
        Arrival(at, ((f"g{(group := rng.randrange(150))}", 6000), (f"q{number}", 1200)), _output(rng, 245), f"g{group}")
        for number, at in enumerate(_poisson(rng, rate, duration_s))
    ]


def growing(seed: int, sessions_per_s: float = 2.6, duration_s: float = 60.0, tenants: int = 8) -> list[Arrival]:
    """Seven quick turns per conversation, each 640 tokens longer, answers of 12 tokens: prefill is the work (the demo's kind)."""
    rng = random.Random(seed)
    arrivals = []
    for number, start in enumerate(_poisson(rng, sessions_per_s, duration_s)):
        chain: Chain = ((f"system-{rng.randrange(tenants)}", 300),)
        at = start
        for turn in range(7):
            chain += ((f"s{number}-{turn}", round(640 * (0.5 + rng.random()))),)
            arrivals.append(Arrival(at, chain, 12, f"s{number}"))
            chain += ((f"s{number}-{turn}a", 12),)
            at += 1.0 + 0.8 * (0.5 + rng.random())
    return sorted(arrivals)
