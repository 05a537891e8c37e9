"""What a pool of 1,000 endpoints costs: a decision with and without scrapes in between, and changes of the pool.

Times are CPU time of the process, each call by itself: what counts of a change is how long it holds the loop.

    python -m bench.scale_cost [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from time import process_time
from typing import Any, Final

from msgspec import structs

from bench.core_cost import Timing, aim_of
from extproc.config.schema import Config, RoutingConfig, ScrapeConfig, Seconds
from extproc.edge.observability.telemetry import Telemetry
from extproc.edge.scraping.scraper import Scraper
from extproc.router import Router
from extproc.types import Endpoint, EndpointMetrics, InferenceRequest, Outcome, RequestKind

__all__ = ["ENDPOINTS", "decisions", "lines", "measure", "pool_changes"]

ENDPOINTS: Final = 1000
MODEL: Final = "llama-3.1-8b"
_BATCH: Final = 20
_STRATEGIES: Final = ("weighted", "prefix-hash")
_SPREAD_S: Final = 5.0
"""Ages of signals where each endpoint is scraped at a time of its own: the idle interval."""


def endpoints(count: int, first: int = 0) -> list[Endpoint]:
    """Make `count` endpoints, different ones for another `first`; on this machine, where nobody answers."""
    return [Endpoint(f"127.{i >> 16}.{i >> 8 & 255}.{i & 255}", 8000) for i in range(first, first + count)]


def page(number: int) -> EndpointMetrics:
    """Make what a page says; another number says something else."""
    usage = 0.3 + number % 7 * 0.05
    return EndpointMetrics(waiting=number % 3, running=4.0 + number % 5, kv_cache_usage=usage, cache_tokens=4_000_000)


class _Fleet:
    """A router with a large pool that has been scraped, and a clock."""

    def __init__(self, strategy: str, *, spread_s: float) -> None:
        self.now = 1000.0
        config = structs.replace(Config(), routing=structs.replace(RoutingConfig(), strategy=strategy))
        self.router = Router(config, rng=random.Random(1))
        self.pool = endpoints(ENDPOINTS)
        self.router.set_endpoints(self.pool, now=self.now)
        self._asked = 0
        for place, one in enumerate(self.pool):
            self.router.observe_models(one.id, {MODEL: None}, now=self.now)
            self.router.observe(one.id, page(place), now=self.now - spread_s * place / ENDPOINTS)

    def scrape(self, number: int) -> None:
        """Let one endpoint have been scraped just now."""
        self.router.observe(self.pool[number * 37 % ENDPOINTS].id, page(number), now=self.now)

    def requests(self, count: int) -> list[InferenceRequest]:
        """Make requests whose prompts have a beginning in common."""
        made = []
        for _ in range(count):
            self._asked += 1
            prompt = b"what all prompts begin with " * 40 + b"and what only this one says " * 5 + b"%d" % self._asked
            made.append(InferenceRequest(RequestKind.CHAT, MODEL, (prompt,)))
        return made

    def decide(self, batches: int, *, scrapes: bool) -> Timing:
        """Measure decisions, each after a scrape of one endpoint or none; the scrapes themselves do not count."""
        took: list[float] = []
        number = 0
        for _ in range(batches):
            spent, decided = 0.0, []
            for request in self.requests(_BATCH):
                number += 1
                self.now += 0.001
                if scrapes:
                    self.scrape(number)
                begin = process_time()
                decided.append(self.router.route(request, now=self.now))
                spent += process_time() - begin
            took.append(spent / _BATCH * 1e6)
            for decision in decided:
                self.router.finished(decision, Outcome.OK, now=self.now)
        return Timing.of(took)


def decisions(batches: int) -> dict[str, Any]:
    """Measure a decision for each strategy with a large pool's memory, for signals of one age and of all ages."""
    found: dict[str, Any] = {}
    for strategy in _STRATEGIES:
        for spread_s, ages in ((0.0, "fresh"), (_SPREAD_S, "ages")):
            fleet = _Fleet(strategy, spread_s=spread_s)
            fleet.decide(2, scrapes=True)
            found[f"{strategy} {ages}"] = fleet.decide(batches, scrapes=False)
            found[f"{strategy} {ages}, a scrape before each"] = fleet.decide(batches, scrapes=True)
            if strategy != "weighted":
                break  # looks at no signal
    return found


class _Nobody:
    """Takes what scrapes say, and forgets it."""

    def observe(self, *_: object) -> bool:
        return False

    def observe_failure(self, *_: object) -> None:
        """Forget it."""

    def observe_models(self, *_: object) -> None:
        """Forget it."""


_CHANGES: Final[dict[str, Callable[[list[Endpoint], int], list[Endpoint]]]] = {
    "one added": lambda pool, number: [*pool, *endpoints(1, 5000 + number)],
    "one removed": lambda pool, number: pool[: number % 900] + pool[number % 900 + 1 :],
    "all replaced": lambda _, number: endpoints(ENDPOINTS, 10_000 + 1000 * number),
    "all new": lambda _, number: endpoints(ENDPOINTS, 1_000_000 + 1000 * number),
}


class _Holds:
    """How long each step holds the loop, in milliseconds of CPU, by kind of change and step."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[float]]] = {}

    def note(self, kind: str, step: str, do: Callable[[], object]) -> None:
        begin = process_time()
        do()
        self.found.setdefault(kind, {}).setdefault(step, []).append((process_time() - begin) * 1e3)


async def pool_changes(rounds: int) -> dict[str, dict[str, Timing]]:
    """Measure, for each kind of change, what the loop has to do at once, in milliseconds of CPU."""
    holds = _Holds()
    for kind in _CHANGES:
        for number in range(rounds):
            for strategy in _STRATEGIES:
                _change_the_router(holds, kind, strategy, number)
            await _change_the_edge(holds, kind, number)
    return {kind: {step: Timing.of(took) for step, took in steps.items()} for kind, steps in holds.found.items()}


def _change_the_router(holds: _Holds, kind: str, strategy: str, number: int) -> None:
    fleet = _Fleet(strategy, spread_s=0.0)
    requests = fleet.requests(_UNTIL_COMPLETE)
    for request in requests:
        fleet.router.finished(fleet.router.route(request, now=fleet.now), Outcome.OK, now=fleet.now)
    if kind == "all new":
        fleet.router.set_endpoints([], now=fleet.now)
    changed = _CHANGES[kind](fleet.pool, number)
    holds.note(kind, f"{strategy}: router", lambda: fleet.router.set_endpoints(changed, now=fleet.now))
    holds.note(kind, f"{strategy}: the next decision", lambda: fleet.router.route(requests[0], now=fleet.now))


async def _change_the_edge(holds: _Holds, kind: str, number: int) -> None:
    telemetry, pool = Telemetry(), endpoints(ENDPOINTS)
    changed = _CHANGES[kind](pool, number)
    # With next to no budget the first pages are asked for in hours.
    idle = ScrapeConfig(busy_interval=Seconds(3600), idle_interval=Seconds(3600), models_path="", budget=1e-9)
    scraper = Scraper(idle, "vllm", _Nobody(), rng=random.Random(1))
    if kind != "all new":
        telemetry.set_endpoints([one.id for one in pool])
        scraper.set_endpoints(pool)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
    holds.note(kind, "telemetry", lambda: telemetry.set_endpoints([one.id for one in changed]))
    holds.note(kind, "scraper", lambda: scraper.set_endpoints(changed))
    longest_s = 0.0
    for _ in range(_TURNS):
        begin = process_time()
        await asyncio.sleep(0)
        longest_s = max(longest_s, process_time() - begin)
    holds.found[kind].setdefault("scraper: the longest turn after that", []).append(longest_s * 1e3)
    await scraper.close()


_UNTIL_COMPLETE: Final = 800
"""Decisions after which the ring of a new pool is complete."""
_TURNS: Final = 50
"""Of the loop, in which what was begun comes to rest."""


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Run every case and return `{"figures": ..., "aims": [...]}`; the aims hold medians."""
    decided = decisions(10 if quick else 40)
    changes = asyncio.run(pool_changes(3 if quick else 7))
    slowest = max((one for one in decided.values()), key=lambda one: one.median_us)
    longest = max((one for steps in changes.values() for one in steps.values()), key=lambda one: one.median_us)
    aims = (
        (f"decision, {ENDPOINTS:,} endpoints, a scrape before it or not, us", 300, slowest),
        (f"longest hold of the loop as {ENDPOINTS:,} endpoints change, ms", 20, longest),
    )
    return {
        "figures": {"decisions_us": decided, "changes_ms": changes},
        "aims": [aim_of(name, aim, timing) for name, aim, timing in aims],
    }


def lines(figures: dict[str, Any]) -> list[str]:
    """Say the figures in words."""
    shown = [f"{name}: {one.median_us:.0f} us (min {one.min_us:.0f})" for name, one in figures["decisions_us"].items()]
    for kind, steps in figures["changes_ms"].items():
        shown += [f"{kind}, {step}: {one.median_us:.1f} ms (min {one.min_us:.1f})" for step, one in steps.items()]
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    measured = measure(quick=parser.parse_args().quick)
    print("\n".join(lines(measured["figures"])))
    for aim in measured["aims"]:
        print(f"{'met ' if aim['met'] else 'MISS'} {aim['name']}: {aim['measured']} (aim {aim['aim']})")


if __name__ == "__main__":
    main()
