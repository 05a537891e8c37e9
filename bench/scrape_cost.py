"""What scraping costs the picker: cores, pages a second, and how old signals get, with 10 and with 100 endpoints.

The endpoints are a process of their own that serves a recorded page of vLLM, or the few samples of it that are asked for,
as vLLM does; `whole pages` are engines that do not select. This process does what the picker does with a page (fetch, read,
pass to router and metrics) and nothing else; its CPU time is measured. Ages are meaningful only where timers are on time
(`late ms`): on a machine that has other work both processes wait for a core, and pages with them.

    python -m bench.scrape_cost [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from extproc.app import tune_gc
from extproc.config.schema import Config, ScrapeConfig
from extproc.edge.observability.telemetry import Telemetry
from extproc.edge.scraping.failures import ScrapeFailure
from extproc.edge.scraping.scrape_interval import FIRST_SCRAPE_S, smooth_scrape
from extproc.edge.scraping.scraper import Scraper
from extproc.loop import run
from extproc.router import Router
from extproc.types import Endpoint, EndpointMetrics

__all__ = ["SCENARIOS", "Figures", "Scenario", "aims", "lines", "measure"]

_ROOT: Final = Path(__file__).resolve().parents[1]
_PAGE: Final = _ROOT / "tests" / "edge" / "scraping" / "data" / "busy.txt"
_WISHED_AGE_S: Final = float(ScrapeConfig().busy_interval)
_RUN_UP_S: Final = 3.0
_TIMES: Final = 30
"""A busy endpoint's signals are never older than the busy interval or so many times the measured scrape time."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One pool."""

    name: str
    endpoints: int
    path: str
    """What the page server shows there: `/idle`, `/busy`, or `/slow` (busy, and 10 ms per whole page); below `/whole` it
    ignores what it is asked for."""
    cores_aim: float
    budget: float = ScrapeConfig().budget

    @property
    def fresh(self) -> bool:
        """Whether the age of signals has an aim: busy, and not limited by a budget of the scenario's own."""
        return self.path != "/idle" and self.budget == ScrapeConfig().budget


SCENARIOS: Final = (
    Scenario("10 endpoints, idle", 10, "/idle", 0.05),
    Scenario("10 endpoints, busy", 10, "/busy", 0.05),
    Scenario("10 endpoints, busy, 10 ms a page", 10, "/slow", 0.05),
    Scenario("100 endpoints, idle", 100, "/idle", 0.4),
    Scenario("100 endpoints, busy", 100, "/busy", 0.4),
    Scenario("10, busy, whole pages", 10, "/whole/busy", 0.05),
    Scenario("10, busy, whole pages of 10 ms", 10, "/whole/slow", 0.05),
    Scenario("100, busy, whole pages", 100, "/whole/busy", 0.4),
    Scenario("100, busy, whole pages, budget 0.03", 100, "/whole/busy", 0.03, budget=0.03),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one scenario took."""

    cores: float
    pages_per_s: float
    page_cpu_us: float
    scrape_ms: float
    """Mean time from asking to the complete page."""
    oldest_ms: float
    """Greatest age that the signals of any endpoint reached, as the picker counts it."""
    oldest_share: float
    """The same as a share of what is allowed: 250 ms, or 30 times the measured scrape time, smoothed or this one's, if that is more."""
    stretch: float
    late_ms: float
    """How late timers of this process were at worst: no core was free."""
    failures: int
    """Scrapes that failed: none, unless the machine has more to do than it can."""


class _Sink:
    """Does what the picker does with a page, and records how old the one before had become."""

    def __init__(self, config: Config, endpoints: Sequence[Endpoint]) -> None:
        self.router = Router(config, rng=random.Random(1))
        self.telemetry = Telemetry()
        self.router.set_endpoints(endpoints, now=time.monotonic())
        self.all_heard = asyncio.Event()
        self._silent = {endpoint.id for endpoint in endpoints}
        self._seen: dict[str, tuple[float, float]] = {}
        """When each endpoint was heard last, and the smoothed time its scrapes take."""
        self.reset()

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.pages = self.failures = 0
        self.scrapes_s = self.oldest_s = self.oldest_share = 0.0

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> bool:
        self.telemetry.scraped(metrics.scrape_s)
        restarted = self.router.observe(endpoint_id, metrics, now=now)
        self.pages += 1
        self._silent.discard(endpoint_id)
        if not self._silent:
            self.all_heard.set()
        self.scrapes_s += metrics.scrape_s
        before = self._seen.get(endpoint_id)
        if before is not None:
            age_s = now - before[0]
            self.oldest_s = max(self.oldest_s, age_s)
            allowed_s = max(_WISHED_AGE_S, _TIMES * max(metrics.scrape_s, before[1]))
            self.oldest_share = max(self.oldest_share, age_s / allowed_s)
        self._seen[endpoint_id] = (now, smooth_scrape(before[1] if before else FIRST_SCRAPE_S, metrics.scrape_s))
        return restarted

    def observe_failure(self, endpoint_id: str, _reason: ScrapeFailure, now: float) -> None:
        self.failures += 1
        self.router.observe_failure(endpoint_id, now=now)

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:
        self.router.observe_models(endpoint_id, models, now=now)


async def _run(scenario: Scenario, ports: Sequence[int], seconds: float) -> Figures:
    scrape = ScrapeConfig(path=scenario.path, budget=scenario.budget)
    endpoints = [Endpoint("127.0.0.1", port) for port in ports[: scenario.endpoints]]
    sink = _Sink(Config(), endpoints)
    scraper = Scraper(scrape, "vllm", sink, rng=random.Random(1))
    scraper.set_endpoints(endpoints)
    try:
        # Until intervals have found their measure: all heard, and some times over where they are short.
        await asyncio.sleep(_RUN_UP_S)
        await asyncio.wait_for(sink.all_heard.wait(), 10 * _RUN_UP_S)
        sink.reset()
        begin, begin_cpu = time.monotonic(), time.process_time()
        late_s = await _late_s(seconds)
        took_s, cpu_s = time.monotonic() - begin, time.process_time() - begin_cpu
        stretch = scraper.stretch
    finally:
        await scraper.close()
    return Figures(
        cores=cpu_s / took_s,
        pages_per_s=sink.pages / took_s,
        page_cpu_us=cpu_s / max(sink.pages, 1) * 1e6,
        scrape_ms=sink.scrapes_s / max(sink.pages, 1) * 1e3,
        oldest_ms=sink.oldest_s * 1e3,
        oldest_share=sink.oldest_share,
        stretch=stretch,
        late_ms=late_s * 1e3,
        failures=sink.failures,
    )


async def _late_s(seconds: float) -> float:
    """Wait; return how late timers came at worst, of ten a second."""
    worst_s = 0.0
    for _ in range(round(seconds * 10)):
        due = time.monotonic() + 0.1
        await asyncio.sleep(0.1)
        worst_s = max(worst_s, time.monotonic() - due)
    return worst_s


def aims(found: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """Compare the figures with their aims."""
    rows = []
    for scenario in SCENARIOS:
        figures = found[scenario.name]
        rows.append(_aim(f"scraping {scenario.name}, cores", scenario.cores_aim, figures.cores))
        if scenario.fresh:
            rows.append(_aim(f"scraping {scenario.name}, oldest / allowed", 1.0, round(figures.oldest_share, 2)))
    return rows


def _aim(name: str, aim: float, measured: float) -> dict[str, Any]:
    measured = round(measured, 3)
    return {"name": name, "aim": aim, "measured": measured, "met": measured <= aim}


def lines(found: Mapping[str, Figures]) -> list[str]:
    """Format the figures, one line per pool."""
    text = [
        f"{'scraping a vLLM (69 kB)':36} {'cores':>6} {'pages/s':>8} {'us/page':>8} {'scrape ms':>10} {'oldest ms':>10} {'late ms':>8} {'stretch':>8} {'failed':>7}"
    ]
    for name, one in found.items():
        text.append(
            f"{name:36} {one.cores:6.3f} {one.pages_per_s:8.1f} {one.page_cpu_us:8.0f} {one.scrape_ms:10.2f}"
            f" {one.oldest_ms:10.0f} {one.late_ms:8.1f} {one.stretch:8.2f} {one.failures:7}"
        )
    return text


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Run all pools and return `{"figures": {name: Figures}, "aims": [...]}`; about 2 minutes, 70 s when `quick`."""
    most = max(scenario.endpoints for scenario in SCENARIOS)
    argv = [sys.executable, "-m", "bench.page_server", str(_PAGE), str(most)]
    found: dict[str, Figures] = {}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as server:
        try:
            assert server.stdout is not None
            ports = [int(word) for word in server.stdout.readline().split()]
            for scenario in SCENARIOS:
                # As the picker does: no page is read while the garbage collector traverses the whole heap.
                tune_gc()
                # Idle pools are scraped every five seconds, so a shorter time says little.
                seconds = 10.0 if scenario.path == "/idle" else 4.0 if quick else 10.0
                found[scenario.name] = run(_run(scenario, ports, seconds))
        finally:
            server.terminate()
    return {"figures": found, "aims": aims(found)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scrape_cost")
    parser.add_argument("--quick", action="store_true", help="four seconds per busy pool instead of ten")
    measured = measure(quick=parser.parse_args().quick)
    print("\n".join(lines(measured["figures"])))
    print(json.dumps(measured["aims"], indent=1))


if __name__ == "__main__":
    main()
