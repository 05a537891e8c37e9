"""A fleet of which some endpoints answer every request with an error at once, driven through `Router` under a virtual clock.

Engines are queues: so many slots, a time of service that is shorter where the prompt's beginning is cached. What counts
is who gets which request; `routing/fleet.py` has engines by which times to first token can be judged.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from extproc.config.schema import Config, RoutingConfig, StrategyName
from extproc.errors import RequestError
from extproc.router import Router
from extproc.types import Decision, Endpoint, EndpointMetrics, InferenceRequest, Outcome, RequestKind

SLOTS: Final = 16
SERVICE_S: Final = 1.0
"""Mean, of a prompt that is not cached."""
CACHED: Final = 0.6
"""Of the time of service, where the beginning of the prompt is cached."""
REFUSAL_S: Final = 0.003

STATUSES: Final = {
    "503": Outcome.BUSY,
    "429": Outcome.BUSY,
    "404": Outcome.CLIENT_ERROR,
    "401": Outcome.CLIENT_ERROR,
    "500": Outcome.SERVER_ERROR,
    "reset": Outcome.RESET,
    "connect": Outcome.CONNECT_FAILURE,
}
"""What an endpoint may do to every request, and how the ledger hears of it."""


@dataclass(frozen=True)
class Case:
    """One fleet, its traffic and its fault."""

    fault: str
    strategy: StrategyName = "weighted"
    scraped: bool = True
    load: float = 0.4
    """Requests as a share of what all endpoints could serve without any cache."""
    endpoints: int = 4
    broken: int = 1
    prompts: str = "mixed"
    """`mixed`: chats, a hot prefix and unique ones; `unique`; `hot`: all with one beginning."""
    warm_s: float = 15.0
    broken_s: float = 40.0
    healed_s: float = 45.0
    seed: int = 1
    attack: float = 0.0
    """Requests a second of one client, all refused wherever they go."""
    attack_pinned: bool = False
    """They begin with the prompt of somebody else's conversation, so that they go to one endpoint."""
    config: Config | None = None

    def __str__(self) -> str:
        scraped = "scraped" if self.scraped else "unscraped"
        return f"{self.fault}-{self.strategy}-{scraped}-{self.load}-{self.broken}of{self.endpoints}-{self.prompts}"


@dataclass
class Result:
    """What the clients saw, by when they asked."""

    asked: list[tuple[float, int, bool]] = field(default_factory=list)
    """(when, endpoint, whether it failed), attacks left out; endpoint -1: refused by us."""
    latency_s: list[tuple[float, float]] = field(default_factory=list)
    cached: list[tuple[float, bool]] = field(default_factory=list)
    """Conversations' later turns: whether the endpoint had the turn before."""

    def errors(self, start: float, end: float) -> float:
        """Share of the requests of a time that failed."""
        found = [failed for at, _, failed in self.asked if start <= at < end]
        return sum(found) / max(len(found), 1)

    def share(self, endpoints: range, start: float, end: float) -> float:
        """Share of the requests of a time that went to some endpoints."""
        found = [place in endpoints for at, place, _ in self.asked if start <= at < end]
        return sum(found) / max(len(found), 1)

    def mean_latency_s(self, start: float, end: float) -> float:
        found = [latency for at, latency in self.latency_s if start <= at < end]
        return sum(found) / max(len(found), 1)

    def cached_share(self, start: float, end: float) -> float:
        found = [hit for at, hit in self.cached if start <= at < end]
        return sum(found) / max(len(found), 1)


@dataclass(eq=False)
class _Request:
    at: float
    prompt: bytes
    names: tuple[str, ...]
    """What of it may be cached, the longest last."""
    session: str = ""
    attack: bool = False


class _Engine:
    def __init__(self) -> None:
        self.running = 0
        self.waiting: deque[tuple[Decision, _Request]] = deque()
        self.cached: set[str] = set()


def _poisson(rng: random.Random, rate: float, end: float) -> Iterator[float]:
    at = rng.expovariate(rate)
    while at < end:
        yield at
        at += rng.expovariate(rate)


_HOT: Final = b"H" * 6000


def _requests(case: Case, rng: random.Random, rate: float, end: float) -> list[_Request]:
    """Half of `mixed` are turns of conversations, a fifth begin with one hot prefix, the others are unique."""
    made: list[_Request] = []
    conversations: deque[tuple[str, bytes, int]] = deque()
    for number, at in enumerate(_poisson(rng, rate, end)):
        kind = rng.random() if case.prompts == "mixed" else {"unique": 0.9, "hot": 0.6}[case.prompts]
        if kind < 0.5:
            if len(conversations) >= max(8.0, 4 * rate) or (conversations and rng.random() < 0.8):
                name, prompt, turn = conversations.popleft()
            else:
                name, prompt, turn = f"c{number}", b"", 0
            prompt += f"{name}-{turn}".encode() * 150
            made.append(_Request(at, prompt, (f"{name}-{turn - 1}", f"{name}-{turn}"), name))
            if turn < 6:
                conversations.append((name, prompt, turn + 1))
        elif kind < 0.7:
            made.append(_Request(at, _HOT + str(number).encode() * 50, ("hot",)))
        else:
            made.append(_Request(at, str(number).encode() * 400, ()))
    return made


def run(case: Case, watch: Callable[[Router, float], None] | None = None) -> Result:
    """Run a case: `warm_s` all well, `broken_s` with its fault, `healed_s` after it; the first endpoints break."""
    rng = random.Random(case.seed)
    config = case.config or Config(routing=RoutingConfig(strategy=case.strategy))
    router = Router(config, rng=random.Random(case.seed + 1))
    endpoints = [Endpoint(f"10.0.{number // 250}.{number % 250 + 1}", 8000) for number in range(case.endpoints)]
    places = {endpoint.id: place for place, endpoint in enumerate(endpoints)}
    router.set_endpoints(endpoints, now=0.0)
    engines = [_Engine() for _ in endpoints]
    break_at, heal_at = case.warm_s, case.warm_s + case.broken_s
    end = heal_at + case.healed_s
    rate = case.load * SLOTS / SERVICE_S * case.endpoints
    result = Result()
    events: list[tuple[float, int, str, Any]] = []
    count = 0

    def push(at: float, what: str, payload: Any) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (at, count, what, payload))

    for request in _requests(case, rng, rate, end):
        push(request.at, "ask", request)
    if case.attack:
        victim = b"V" * 6000
        push(1.0, "ask", _Request(1.0, victim, ()))
        for number, at in enumerate(_poisson(rng, case.attack, heal_at - break_at)):
            prompt = victim if case.attack_pinned else f"a{number}".encode() * 300
            push(break_at + at, "ask", _Request(break_at + at, prompt, (), attack=True))
    if case.scraped:
        for place in range(case.endpoints):
            push(rng.random() * 0.5, "scrape", place)
    for second in range(math.ceil(end)):
        push(float(second), "tick", None)

    def broken(place: int, now: float) -> bool:
        return place < case.broken and break_at <= now < heal_at

    def serve(place: int, now: float) -> None:
        engine = engines[place]
        while engine.waiting and engine.running < SLOTS:
            decision, request = engine.waiting.popleft()
            engine.running += 1
            hit = bool(request.names) and not engine.cached.isdisjoint(request.names)
            if request.session and not request.names[0].endswith("--1"):
                result.cached.append((request.at, hit))
            engine.cached.update(request.names)
            mean = SERVICE_S * (CACHED if hit else 1.0)
            duration = rng.lognormvariate(math.log(mean) - 0.125, 0.5)
            push(now + 0.2 * duration, "first", decision)
            push(now + duration, "done", (place, decision, request))

    while events:
        now, _, what, payload = heapq.heappop(events)
        if now > end + 20:
            break
        if what == "ask":
            request = payload
            ask = InferenceRequest(
                kind=RequestKind.CHAT,
                model="m",
                prompts=(request.prompt,),
                session_key=request.session,
                request_id=f"r{count}-{now}",
            )
            try:
                decision = router.route(ask, now=now)
            except RequestError:
                if not request.attack:
                    result.asked.append((request.at, -1, True))
                continue
            place = places[decision.endpoint.id]
            failed = broken(place, now)
            if not request.attack:
                result.asked.append((request.at, place, failed))
            if failed or request.attack:
                push(now + REFUSAL_S, "refused", (decision, STATUSES[case.fault] if failed else Outcome.CLIENT_ERROR))
            else:
                engines[place].waiting.append((decision, request))
                serve(place, now)
        elif what == "refused":
            decision, outcome = payload
            router.finished(decision, outcome, now=now)
        elif what == "first":
            router.response_headers(payload, now=now)
        elif what == "done":
            place, decision, request = payload
            engines[place].running -= 1
            router.finished(decision, Outcome.OK, now=now)
            if not request.attack:
                result.latency_s.append((request.at, now - request.at))
            serve(place, now)
        elif what == "scrape":
            place = payload
            running, waiting = engines[place].running, len(engines[place].waiting)
            page = EndpointMetrics(
                waiting=float(waiting), running=float(running), kv_cache_usage=min(1.0, 0.9 * running / SLOTS)
            )
            if STATUSES[case.fault] is Outcome.CONNECT_FAILURE and broken(place, now):
                router.observe_failure(endpoints[place].id, now=now)
            else:
                router.observe(endpoints[place].id, page, now=now)
            push(now + 0.5, "scrape", place)
        else:
            router.expire(now=now)
            if watch is not None:
                watch(router, now)
    return result
