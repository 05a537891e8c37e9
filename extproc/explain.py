"""`extproc explain`: where one request body would go, and why, with the current metrics of the endpoints.

Runs discovery and scrapes every endpoint once, then uses the same Router as `extproc serve`. Sends no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from extproc.app import read_config
from extproc.config.schema import Config
from extproc.edge.discovery.sources import discovery_for
from extproc.edge.scraping.failures import ScrapeFailure
from extproc.edge.scraping.scraper import Scraper
from extproc.errors import ExtprocError, RequestError
from extproc.request import parse
from extproc.router import Router
from extproc.routing.explain import as_dict, sentence
from extproc.types import Decision, Endpoint, EndpointMetrics

__all__ = ["explain"]

_EXPLAIN_WAIT_S = 3.0
"""How long it waits for the first signals of all endpoints."""
_MODELS_WAIT_S = 1.0
"""How long it then waits for the lists of models, which are asked for right after; some servers have none."""


def explain(
    path: Path | None,
    overrides: Mapping[str, object],
    *,
    body: Path,
    after: Sequence[Path],
    request_path: str,
    as_json: bool,
) -> int:
    """Print the decision for one request body against the live signals; 0, or 1 where the request is refused."""
    config = read_config(path, overrides)
    bodies = [_body(one) for one in (*after, body)]
    return asyncio.run(_explain(config, bodies, request_path, as_json=as_json))


def _body(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise ExtprocError(f"cannot read {path}: {error.strerror}") from error


class _Survey:
    """Feeds a router from discovery and scrapes, and notes which endpoints have answered or failed."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.endpoints: Sequence[Endpoint] = ()
        self.failures: dict[str, str] = {}
        self.done: set[str] = set()
        self.unlisted: set[str] = set()
        """Endpoints whose list of models has not arrived yet."""
        self.changed = asyncio.Event()

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = endpoints
        self.router.set_endpoints(endpoints, now=time.monotonic())

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> bool:
        self.done.add(endpoint_id)
        self.unlisted.add(endpoint_id)
        self.changed.set()
        return self.router.observe(endpoint_id, metrics, now=now)

    def observe_failure(self, endpoint_id: str, reason: ScrapeFailure, now: float) -> None:
        self.failures[endpoint_id] = reason.value
        if not reason.unreachable:
            self.unlisted.add(endpoint_id)
        self.done.add(endpoint_id)
        self.changed.set()
        self.router.observe_failure(endpoint_id, now=now)

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:
        self.unlisted.discard(endpoint_id)
        self.changed.set()
        self.router.observe_models(endpoint_id, models, now=now)


async def _explain(config: Config, bodies: Sequence[bytes], request_path: str, *, as_json: bool) -> int:
    router = Router(config, rng=random.Random(0))
    survey = _Survey(router)
    discovery = discovery_for(config.pool, survey.set_endpoints)
    scraper = Scraper(config.pool.scrape, config.pool.engine, survey)
    try:
        await discovery.start()
        await discovery.first_done.wait()
        if config.pool.scrape.enabled:
            scraper.set_endpoints(survey.endpoints)
            await _wait_for_signals(survey)
            if config.pool.scrape.models_path and not config.pool.models:
                await _wait_for_models(survey)
        decision: Decision | None = None
        for body in bodies:
            decision = router.route(parse(request_path, body), now=time.monotonic())
        assert decision is not None
    except RequestError as error:
        print(f"refused with HTTP {error.status} ({error.reason}): {error.message}")
        return 1
    finally:
        await scraper.close()
        await discovery.close()
    if as_json:
        print(json.dumps(as_dict(decision), indent=2))
    else:
        print(sentence(decision))
        print(_rows(decision))
    for endpoint_id, reason in sorted(survey.failures.items()):
        print(f"extproc explain: no signals from {endpoint_id} ({reason})", file=sys.stderr)
    return 0


async def _wait_for_signals(survey: _Survey) -> None:
    wanted = {endpoint.id for endpoint in survey.endpoints}
    try:
        async with asyncio.timeout(_EXPLAIN_WAIT_S):
            while not wanted <= survey.done:
                survey.changed.clear()
                await survey.changed.wait()
    except TimeoutError:
        for endpoint_id in wanted - survey.done:
            survey.failures[endpoint_id] = "no answer yet"


async def _wait_for_models(survey: _Survey) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MODELS_WAIT_S):
            while survey.unlisted:
                survey.changed.clear()
                await survey.changed.wait()


def _rows(decision: Decision) -> str:
    """Return the candidates as a table: total and each scorer's value, weights in the head."""
    heads = [
        "endpoint",
        "total",
        *(f"{name} x{weight:g}" for name, weight in decision.scorers),
        "in flight",
        "waiting",
        "signal age",
    ]
    rows = [
        [
            ("* " if candidate.endpoint_id == decision.endpoint.id else "  ") + candidate.endpoint_id,
            f"{candidate.total:.3f}",
            *(f"{score:.3f}" for score in candidate.scores),
            str(candidate.in_flight),
            "unknown" if candidate.waiting is None else f"{candidate.waiting:.0f}",
            "never" if candidate.signal_age_s is None else f"{candidate.signal_age_s:.1f} s",
        ]
        for candidate in decision.candidates
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [heads, *rows]
    )
