"""Fetch every endpoint's metrics page (and, rarely, its list of models) and hand what they say to a sink.

One task per endpoint on its own keep-alive connection, so that a slow or dead endpoint delays nobody. When to ask is
`pool.cadence`'s arithmetic, what a page says is `pool.signals`', what it means is the sink's. A page is asked for
uncompressed: 70 kB more on a local network cost less than gzip in the engine process that also streams its tokens.
Redirects are not followed: a scrape goes where the configuration says.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import aiohttp
from yarl import URL

from extproc.config.schema import ScrapeConfig
from extproc.errors import ConfigError, ConfigProblem
from extproc.pool.cadence import base_interval_s, first_delay_s, next_interval_s, smooth
from extproc.pool.signals import has_load, read_metrics, read_models
from extproc.vocabulary import Endpoint, EndpointMetrics

__all__ = ["MAX_PAGE_BYTES", "ScrapeFailure", "ScrapeSink", "Scraper"]

MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
"""A hundred times a vLLM page with all its histograms."""
_POKE_HOLD_S: Final = 1.0
"""How long a poke makes an endpoint busy: the engine's gauges lag behind by up to a step."""
_KEEPALIVE_S: Final = 4.0
"""Shorter than uvicorn's 5 s (vLLM, SGLang): we let go first, instead of writing into a connection that is closing."""
_HEADERS: Final = {"accept": "text/plain;version=0.0.4, */*;q=0.1", "accept-encoding": "identity"}

_log = logging.getLogger(__name__)


class ScrapeFailure(enum.Enum):
    """Why a scrape failed; the value is a metric label."""

    TIMEOUT = "timeout"
    CONNECT = "connect"
    """No connection, or it broke before the page was complete."""
    STATUS = "status"
    """Another status than 200; a redirect too."""
    TLS = "tls"
    PARSE = "parse"
    """A page without any signal of the configured engine."""
    TOO_LARGE = "too_large"


class ScrapeSink(Protocol):
    """Who is told what the scraper finds; called in the event loop, must not block."""

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> object:
        """Take in one page. True means: the engine has restarted (its models are then asked for anew)."""

    def observe_failure(self, endpoint_id: str, reason: ScrapeFailure, now: float) -> None:
        """Note a scrape that failed."""

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:
        """Take in the models and adapters an endpoint lists, name -> parent (None: a base model)."""


class _FailedError(Exception):
    """One fetch that gave no page."""

    def __init__(self, reason: ScrapeFailure, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(slots=True, eq=False)
class _Target:
    """One endpoint and where its scraping stands."""

    endpoint: Endpoint
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    scrape_s: float | None = None
    """Smoothed duration of its scrapes."""
    failures: int = 0
    loaded: bool = False
    """The last page showed requests running or waiting."""
    poked_at: float | None = None
    demand_per_s: float = 0.0
    """Scrapes a second it asks for: its part of the whole picker's demand."""
    due_at: float = 0.0
    due_if_busy_at: float = 0.0
    models_due_at: float = float("-inf")


class Scraper:
    """Keeps one scraping task per endpoint. Use within a running event loop; `close` ends everything."""

    def __init__(
        self,
        config: ScrapeConfig,
        engine: str,
        sink: ScrapeSink,
        clock: Callable[[], float] = time.monotonic,
        *,
        rng: random.Random | None = None,
    ) -> None:
        """Raise ConfigError where the CA file can not be used. `clock` only feeds the sink and the intervals."""
        self._config = config
        self._engine = engine
        self._sink = sink
        self._clock = clock
        self._rng = rng or random.Random()
        self._tls = _tls_context(config)
        self._session: aiohttp.ClientSession | None = None
        self._targets: dict[str, _Target] = {}
        self._demand_per_s = 0.0
        self._leaving: set[asyncio.Task[None]] = set()

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Start and stop tasks, so that exactly these are scraped; one whose uid changed begins anew."""
        wanted = {endpoint.id: endpoint for endpoint in endpoints}
        for name, target in list(self._targets.items()):
            if name not in wanted or wanted[name].uid != target.endpoint.uid:
                self._stop(target)
                self._ask_for(target, 0.0)
                del self._targets[name]
            else:
                target.endpoint = wanted[name]
        for name, endpoint in wanted.items():
            if name not in self._targets:
                self._targets[name] = _Target(endpoint)
        self._start_all()

    def reconfigure(self, config: ScrapeConfig, engine: str) -> None:
        """Apply another configuration at once; ConfigError, and no change, where its CA file can not be used."""
        if config == self._config and engine == self._engine:
            return
        tls = _tls_context(config)
        for target in self._targets.values():
            self._stop(target)
            target.models_due_at = float("-inf")
            target.failures = 0
        self._config, self._engine, self._tls = config, engine, tls
        if self._session is not None:
            self._leave(self._session.close())
            self._session = None
        self._start_all()

    def poke(self, endpoint_id: str) -> None:
        """Say that a request was just sent there: an idle endpoint is scraped as a busy one from now on. O(1)."""
        target = self._targets.get(endpoint_id)
        if target is not None:
            target.poked_at = self._clock()
            if target.due_if_busy_at < target.due_at:
                target.due_at = target.due_if_busy_at
                target.wake.set()

    async def close(self) -> None:
        """Stop all tasks and close all connections; idempotent."""
        for target in self._targets.values():
            self._stop(target)
        self._targets.clear()
        self._demand_per_s = 0.0
        if self._session is not None:
            self._leave(self._session.close())
            self._session = None
        while self._leaving:
            await asyncio.gather(*self._leaving, return_exceptions=True)

    def _start_all(self) -> None:
        """Start the tasks that do not run; none where scraping is switched off."""
        if not self._config.enabled:
            return
        loop = asyncio.get_running_loop()
        starting = [target for target in self._targets.values() if target.task is None]
        for target in starting:
            watch = self._watch(target, first_delay_s(len(starting), self._rng))
            target.task = loop.create_task(watch, name=f"scrape {target.endpoint.id}")

    def _stop(self, target: _Target) -> None:
        if target.task is not None:
            target.task.cancel()
            self._leaving.add(target.task)
            target.task.add_done_callback(self._leaving.discard)
            target.task = None

    def _leave(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _watch(self, target: _Target, first_delay: float) -> None:
        """Scrape one endpoint for ever."""
        target.due_at = target.due_if_busy_at = self._clock() + first_delay
        while True:
            await self._rest(target)
            # From here on until the next interval is known a poke only leaves its time.
            target.due_if_busy_at = target.due_at
            started_at = self._clock()
            try:
                await self._turn(target)
            except Exception:  # noqa: BLE001 - a defect of ours must not end the scraping of an endpoint without a word
                if target.failures == 0:
                    _log.exception("scrape broke", extra={"endpoint": target.endpoint.id})
                target.failures += 1
            self._plan(target, started_at)

    async def _rest(self, target: _Target) -> None:
        """Wait until the target is due, which a poke may bring forward."""
        target.wake.clear()
        while (left_s := target.due_at - self._clock()) > 0.0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await target.wake.wait()
            target.wake.clear()

    def _plan(self, target: _Target, started_at: float) -> None:
        """Decide when the target is due again, and when it would be if it turned busy."""
        now = self._clock()
        scrape_s = target.scrape_s or 0.0
        poked = target.poked_at is not None and target.poked_at >= started_at - _POKE_HOLD_S
        busy = target.loaded or poked
        config, failures = self._config, target.failures
        base_s = base_interval_s(config, busy=busy, scrape_s=scrape_s, failures=failures)
        self._ask_for(target, 1.0 / base_s if base_s > 0.0 else 0.0)
        demand_per_s = self._demand_per_s

        def due(*, as_busy: bool) -> float:
            return now + next_interval_s(
                config,
                busy=as_busy,
                scrape_s=scrape_s,
                rng=self._rng,
                failures=failures,
                demand_per_s=demand_per_s,
            )

        target.due_at = due(as_busy=busy)
        # A request does not make a failing endpoint answer: its backoff stays.
        target.due_if_busy_at = target.due_at if busy or failures else min(due(as_busy=True), target.due_at)

    def _ask_for(self, target: _Target, demand_per_s: float) -> None:
        self._demand_per_s = max(self._demand_per_s + demand_per_s - target.demand_per_s, 0.0)
        target.demand_per_s = demand_per_s

    async def _turn(self, target: _Target) -> None:
        """Scrape one endpoint once; ask for its models, if it is time and it can be reached at all."""
        try:
            restarted = await self._scrape(target)
        except _FailedError as error:
            target.failures += 1
            if target.failures == 1:
                _log.warning("scrape fails", extra=_told(target, error))
            self._sink.observe_failure(target.endpoint.id, error.reason, self._clock())
            if error.reason in {ScrapeFailure.CONNECT, ScrapeFailure.TIMEOUT, ScrapeFailure.TLS}:
                return
        else:
            if target.failures:
                _log.info("scrape recovered", extra={"endpoint": target.endpoint.id, "failures": target.failures})
            target.failures = 0
            if restarted:
                target.models_due_at = float("-inf")
        if self._config.models_path and self._clock() >= target.models_due_at:
            # An endpoint that has no such list is asked again as rarely as one that has.
            target.models_due_at = self._clock() + self._config.models_interval
            try:
                await self._look_at_models(target)
            except _FailedError as error:
                _log.debug("models unknown", extra=_told(target, error))

    async def _scrape(self, target: _Target) -> bool:
        """Fetch and read one page and tell the sink; True: the engine has restarted."""
        started_at = self._clock()
        page = await self._fetch(_url(self._config, target.endpoint, self._config.path, self._config.port))
        now = self._clock()
        metrics = read_metrics(page, self._engine, scrape_s=now - started_at)
        if not has_load(metrics):
            raise _FailedError(ScrapeFailure.PARSE, f"no signal of engine {self._engine} in {len(page)} bytes")
        target.scrape_s = smooth(target.scrape_s, now - started_at)
        target.loaded = bool(metrics.waiting or metrics.running)
        return self._sink.observe(target.endpoint.id, metrics, now) is True

    async def _look_at_models(self, target: _Target) -> None:
        """Fetch the list of models and tell the sink."""
        # The port of the configuration is that of the metrics page; models are listed where requests are served.
        body = await self._fetch(_url(self._config, target.endpoint, self._config.models_path, 0))
        models = read_models(body)
        if models is None:
            raise _FailedError(ScrapeFailure.PARSE, "no list of models")
        self._sink.observe_models(target.endpoint.id, models, self._clock())

    async def _fetch(self, url: URL) -> bytes:
        """Get one page; _FailedError says why not."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=self._tls),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={**_HEADERS, **{name.lower(): value for name, value in self._config.headers.items()}},
                timeout=aiohttp.ClientTimeout(total=float(self._config.timeout)),
            )
        server_name = self._config.tls.server_name or None if url.scheme == "https" else None
        try:
            async with self._session.get(url, allow_redirects=False, server_hostname=server_name) as response:
                if response.status != 200:
                    raise _FailedError(ScrapeFailure.STATUS, f"status {response.status}")
                pieces: list[bytes] = []
                total_bytes = 0
                async for piece in response.content.iter_any():
                    total_bytes += len(piece)
                    if total_bytes > MAX_PAGE_BYTES:
                        # Leaving the block closes the connection, so that the rest is not read either.
                        raise _FailedError(ScrapeFailure.TOO_LARGE, f"more than {MAX_PAGE_BYTES} bytes")
                    pieces.append(piece)
                return b"".join(pieces)
        except TimeoutError as error:
            raise _FailedError(ScrapeFailure.TIMEOUT, f"no page within {float(self._config.timeout):g} s") from error
        except aiohttp.ClientSSLError as error:
            raise _FailedError(ScrapeFailure.TLS, str(error)) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: a host or header that can not be written down.
            raise _FailedError(ScrapeFailure.CONNECT, str(error) or type(error).__name__) from error


def _told(target: _Target, error: _FailedError) -> dict[str, str]:
    return {"endpoint": target.endpoint.id, "reason": error.reason.value, "detail": str(error)}


def _url(config: ScrapeConfig, endpoint: Endpoint, path: str, port: int) -> URL:
    """Build the address of a page; `port` 0: the endpoint's own."""
    host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
    return URL(f"{config.scheme}://{host}:{port or endpoint.port}{path}")


def _tls_context(config: ScrapeConfig) -> ssl.SSLContext | bool:
    """Build what verifies the endpoints' certificates; True: the library's default, plain HTTP needs none."""
    if config.scheme != "https":
        return True
    try:
        context = ssl.create_default_context(cafile=config.tls.ca or None)
    except (OSError, ssl.SSLError) as error:
        problem = ConfigProblem(
            "pool.scrape.tls.ca", f"can not be used: {error}", "name a readable PEM file with a CA certificate"
        )
        raise ConfigError((problem,)) from error
    if config.tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
