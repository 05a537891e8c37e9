"""The composition root of `extproc serve`: makes all parts, starts and stops them in order, and applies reloads.

Each part decides for itself what it does. Top to bottom: reading the configuration, `serve`, and `Picker` with its life,
scrapes, endpoints, readiness, reloads and signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import random
import signal
import ssl
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from extproc import __version__
from extproc.config.load import apply_overrides, load, restart_needed
from extproc.config.schema import ENDPOINT_SOURCES, Config, ServerConfig
from extproc.edge.discovery.sources import Discovery, discovery_for
from extproc.edge.native.server import NativeServer
from extproc.edge.observability.collectors import CollectorSources
from extproc.edge.observability.decisions import RecentDecisions
from extproc.edge.observability.log import Log
from extproc.edge.observability.pages import AdminServer, MetricsServer
from extproc.edge.observability.telemetry import Telemetry
from extproc.edge.process.descriptors import Reserve, Shares, raise_limit
from extproc.edge.process.file_watch import FileWatcher
from extproc.edge.process.listen import ConnectionBounds
from extproc.edge.process.tasks import Tasks
from extproc.edge.scraping.failures import ScrapeFailure
from extproc.edge.scraping.scraper import Scraper
from extproc.edge.scraping.source import tls_context
from extproc.edge.services.request_service import RequestService
from extproc.errors import ConfigError, ConfigProblem
from extproc.loop import run
from extproc.protocol.interfaces import Observers
from extproc.protocol.request_buffer import BodyBudget
from extproc.protocol.settings import SessionSettings
from extproc.protocol.shared import SessionShared
from extproc.router import Router
from extproc.types import Endpoint, EndpointMetrics

if TYPE_CHECKING:
    from extproc.edge.grpcio.server import GrpcioServer

__all__ = ["Picker", "parse_config", "read_config", "serve", "tune_gc"]

_log = logging.getLogger(__name__)

_UPKEEP_S = 1.0
"""Time between two checks for expired leases."""
_FIRST_LOOK_S = 2.0
"""Longest time the gRPC port waits for the first look-up of endpoints: a name server that does not answer must not keep it closed."""
_GC_THRESHOLDS = (2_000, 5, 10_000)
"""For `gc.set_threshold`: new objects, collections of the youngest generation, collections of the middle one."""


def read_config(path: Path | None, overrides: Mapping[str, object]) -> Config:
    """Read and check a configuration; `overrides` are keys set on the command line. Raises ConfigError."""
    return parse_config(_read(path) if path is not None else b"", str(path or ""), overrides)


def parse_config(content: bytes, source: str, overrides: Mapping[str, object]) -> Config:
    """Check the content of a configuration file (`source`); `overrides` are as in `read_config`. Raises ConfigError."""
    config = load(content, source=source)
    if "pool.endpoints" in overrides:
        # Endpoints on the command line replace whichever source the file names.
        others = {f"pool.{key}": None for key in ENDPOINT_SOURCES if key != "endpoints"}
        overrides = {**overrides, **others}
    return apply_overrides(config, overrides) if overrides else config


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = ConfigProblem("", f"cannot read the file: {error.strerror}", "check the path")
        raise ConfigError((problem,), source=str(path)) from error


def serve(path: Path | None, overrides: Mapping[str, object]) -> int:
    """Run the picker until SIGTERM or Ctrl-C; return 0. Raises ConfigError where it cannot start as configured."""
    content = _read(path) if path is not None else b""
    config = parse_config(content, str(path or ""), overrides)

    async def main() -> int:
        return await Picker(config, path=path, content=content, overrides=overrides).run()

    return run(main())


def tune_gc() -> None:
    """Make Python's cyclic collector run rarely, and never over the objects made at the start.

    On the native transport a request leaves no cycles, only a dozen objects that outlive it (index, last decisions), and
    the pause of a collection is proportional to those made since the one before: the first threshold bounds it for the
    youngest generation, the first times the second for the middle one. A full collection never runs by itself: it would
    take a second with a large index and find nothing. `python -m bench.soak` measures it, figures are in docs/develop/cost.md.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class _Reload(NamedTuple):
    """A changed configuration that can be used, with what was read from the files it names."""

    config: Config
    scrape_tls: ssl.SSLContext | None
    """None also where nothing has changed that concerns scraping."""


class Picker:
    """One running picker: everything `extproc serve` consists of. Made within a running event loop."""

    def __init__(self, config: Config, *, path: Path | None, content: bytes, overrides: Mapping[str, object]) -> None:
        """Make all parts; nothing listens yet. Raises ConfigError where the CA of `pool.scrape.tls` cannot be used.

        `content` is what was read from the file at `path`, which is then watched.
        """
        self._path = path
        self._overrides = overrides
        self._started_with = config
        self._clock = time.monotonic
        self._stop = asyncio.Event()
        self._draining = False
        self._refused = ""
        """Why the newest configuration is not in force; empty: it is."""
        self.tasks = Tasks(clock=self._clock)
        self.log = Log(config.log, rng=random.Random())
        self.telemetry = Telemetry()
        self.recent = RecentDecisions(config.admin.decisions)
        self.observer = Observers(self.telemetry, self.recent, self.log)
        self.router = Router(config, rng=random.Random())
        self.scraper = Scraper(
            config.pool.scrape, config.pool.engine, self, self._clock, rng=random.Random(), tasks=self.tasks
        )
        self.service = RequestService(
            self.router,
            self.observer,
            log_connected=lambda peer: self.server.access_log.logs_of(peer),  # noqa: PLW0108 - the server is made later
            log_seen=lambda peer: self.server.access_log.has_logged(peer),  # noqa: PLW0108
            mark_busy=self.scraper.mark_busy,
            clock=self._clock,
        )
        self.budget = BodyBudget(config.server.max_buffered_bytes)
        self.shared = SessionShared(
            self.service, self.budget, SessionSettings.from_config(config), self.observer, random.Random()
        )

        self.shares = Shares.of(raise_limit(), config.server.max_connections)
        self._reserve = Reserve(self.shares.reserve)
        grpc, health = (
            ConnectionBounds(name, most, self.telemetry, reserve=self._reserve, clock=self._clock)
            for name, most in (("grpc", self.shares.grpc), ("health", self.shares.health))
        )
        metrics, admin = (
            ConnectionBounds(name, most, self.telemetry, clock=self._clock)
            for name, most in (("metrics", self.shares.metrics), ("admin", self.shares.admin))
        )
        self.server = _transport(config)(
            config.server, self.shared, self.service.on_log_entry, clock=self._clock, bounds=(grpc, health)
        )
        self.metrics_server = MetricsServer(
            config.server.host, config.server.metrics_port, self.telemetry.registry, self._ready, metrics
        )
        self.admin_server = AdminServer(
            config.admin.host, config.admin.port, self.router, self.recent, self._clock, admin
        )

        self._watcher: FileWatcher[_Reload | ConfigError] | None = None
        if path is not None:
            self._watcher = FileWatcher(path, self._parse, self._on_change, known=content, tasks=self.tasks)
        self._started = False
        self._read_again = False
        """SIGHUP has arrived and has not been acted on."""
        self._reading: asyncio.Task[None] | None = None
        """Reads files again after SIGHUP."""

        self._discovery: Discovery | None = None
        self._discovering = asyncio.Lock()
        self._discovered = False
        """The first look-up of endpoints is over, whatever it has found."""
        self._endpoints: Sequence[Endpoint] = ()
        self._reported_ready: bool | None = None

    async def run(self) -> int:
        """Start, serve until a signal says to stop, drain; return 0. Raises ConfigError where it cannot start as configured."""
        self.log.install()
        self.shares.warn(self._started_with.server.max_connections)
        self._connect_metrics()
        self._handle_signals(asyncio.get_running_loop())
        try:
            await self._start(self._started_with)
            await self._stop.wait()
            await self._drain(self.router.config.server)
        finally:
            await self._close()
        return 0

    def _connect_metrics(self) -> None:
        self.telemetry.connect(
            CollectorSources(
                lambda: self.router.snapshots(self._clock()),
                self.router.index_stats,
                lambda: self.budget.used_bytes,
                lambda: self.log.dropped,
                lambda: self.scraper.stretch,
                self.scraper.selects,
                lambda: {**self.tasks.failures, "log": self.log.failures},
                lambda: self._discovery is not None and bool(self._discovery.trouble),
                self._clock,
            )
        )

    async def _start(self, config: Config) -> None:
        # HTTP ports first: a port in use must end the start before the gRPC port opens. The gRPC port follows when the endpoints
        # are known: an Envoy that uses its only picker before it is ready would get 503 until then.
        await self.metrics_server.start()
        await self.admin_server.start()
        await self._discover(config)
        assert self._discovery is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._discovery.first_done.wait(), _FIRST_LOOK_S)
        await self.server.start()
        self.telemetry.config_loaded(self.router.generation)
        _log.info(
            "started",
            extra={
                "version": __version__,
                "strategy": config.routing.strategy,
                "transport": config.server.transport,
                "grpc_port": self.server.grpc_port,
                "health_port": self.server.health_port,
                "metrics_port": self.metrics_server.port,
                "admin": f"{config.admin.host}:{self.admin_server.port}",
            },
        )
        warn_of_explanations(None, config)
        if self._watcher is not None:
            self._watcher.start()
        self.tasks.start("upkeep", self._upkeep)
        self.tasks.start("certificates", self.server.follow_certificates)
        self._started = True
        if self._read_again:
            self._on_sighup()
        tune_gc()

    async def _drain(self, server: ServerConfig) -> None:
        self._draining = True
        _log.info("draining", extra={"delay_s": float(server.drain_delay)})
        # A successor may listen beside us while open streams finish; `server.stop` shares its own ports.
        self.metrics_server.share()
        self.admin_server.share()
        await self.server.stop(server.drain_delay, server.grace_period)

    async def _close(self) -> None:
        if self._watcher is not None:
            await self._watcher.close()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        await self.tasks.close()
        if self._discovery is not None:
            await self._discovery.close()
        await self.scraper.close()
        await self.server.stop(0, 0)
        await self.admin_server.close()
        await self.metrics_server.close()
        self._reserve.close()
        _log.info("stopped", extra={"in_flight": self.router.in_flight})
        self.log.close()

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP_S)
            now = self._clock()
            self.router.expire(now=now)
            self.service.expire(now)

    # Scrapes (the scraper's sink)

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> bool:
        """Pass a scrape to the router; True: the engine has restarted."""
        self.telemetry.scraped(metrics.scrape_s)
        restarted = self.router.observe(endpoint_id, metrics, now=now)
        if restarted:
            _log.warning("an engine has restarted; its prefixes are forgotten", extra={"endpoint": endpoint_id})
        return restarted

    def observe_failure(self, endpoint_id: str, reason: ScrapeFailure, now: float) -> None:
        """Pass a failed scrape to the router."""
        self.telemetry.scrape_failed(endpoint_id, reason.value)
        self.router.observe_failure(endpoint_id, now=now)

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:
        """Pass a list of models to the router."""
        self.router.observe_models(endpoint_id, models, now=now)
        self.telemetry.set_models(self.router.known_models())

    # Endpoints

    async def _discover(self, config: Config) -> None:
        """Start the source that `config` names; endpoints of an earlier source stay until this one has found some."""
        async with self._discovering:
            if _sources(config) != _sources(self.router.config):
                return  # A later reload has named other sources; its own call follows.
            if self._discovery is not None:
                await self._discovery.close()
            self._discovery = discovery = discovery_for(
                config.pool, self._on_endpoints, on_failure=self.telemetry.discovery_failed, tasks=self.tasks
            )
            await discovery.start()
            self.tasks.start("discovery", partial(self._await_first, discovery), detail="first look-up")

    async def _await_first(self, discovery: Discovery) -> None:
        await discovery.first_done.wait()
        if not self._discovered:
            self._discovered = True
            self._report_readiness()

    def _on_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        if len(endpoints) > len(self._endpoints):
            self.shares.warn_of_endpoints(len(endpoints))
        self._endpoints = endpoints
        config = self.router.config
        change = self.router.set_endpoints(endpoints, now=self._clock())
        self.telemetry.set_endpoints([endpoint.id for endpoint in endpoints], config.routing.strategy)
        self.telemetry.set_models(self.router.known_models())
        self.scraper.set_endpoints(endpoints if config.pool.scrape.enabled else ())
        if change.added or change.removed or change.restarted:
            _log.info(
                "endpoints changed",
                extra={
                    "added": change.added,
                    "removed": change.removed,
                    "restarted": change.restarted,
                    "total": len(endpoints),
                },
            )
        self._report_readiness()

    # Readiness

    def _ready(self) -> tuple[bool, str]:
        """Return what `/readyz` answers: ready or not, and the reason."""
        if self._draining or self._stop.is_set():
            return False, "draining"
        if not self._endpoints:
            # Also where there have been some: another picker, or a gateway that fails open, can do better than our 503.
            if not self._discovered:
                return False, "waiting for the first look-up of endpoints"
            # The refused configuration may be the one that names some.
            refused = f", and the newest configuration was refused: {self._refused}" if self._refused else ""
            return False, f"no endpoints: {self._why_no_endpoints()}{refused}"
        said = ["ready"]
        if self._discovery is not None and self._discovery.trouble:
            said.append(f"with the endpoints found last; a look-up fails: {self._discovery.trouble}")
        if failing := self.tasks.keep_failing() + Counter(log=int(self.log.keeps_failing)):
            # Not a reason to send requests elsewhere: decisions go on, with what was known last.
            names = ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in failing.items())
            said.append(f"with background tasks that keep failing, see the log: {names}")
        if self._refused:
            said.append(f"with the last good configuration; the newest was refused: {self._refused}")
        return True, ", ".join(said)

    def _report_readiness(self) -> None:
        """Set gRPC health, and log, when readiness changes, and once if there are no endpoints from the start."""
        ready = bool(self._endpoints)
        if ready is self._reported_ready or not self._discovered or self._stop.is_set():
            return
        self._reported_ready = ready
        self.server.health.set_ready(ready)
        if ready:
            _log.info("ready", extra={"endpoints": len(self._endpoints)})
        else:
            _log.warning("no endpoints: not ready, and every request gets 503", extra={"why": self._why_no_endpoints()})

    def _why_no_endpoints(self) -> str:
        return self._discovery.why_empty if self._discovery is not None else "no source has been started"

    # Reloads

    def _parse(self, content: bytes) -> _Reload | ConfigError:
        """Check changed content and read the files it names; in a thread."""
        source = str(self._path)
        if not content.strip():
            # It is being rewritten, or was lost; it does not mean a pool without endpoints.
            problem = ConfigProblem("", "the file is empty", "write the configuration into it")
            return ConfigError((problem,), source=source)
        try:
            config = parse_config(content, source, self._overrides)
            pool, before = config.pool, self.router.config.pool
            same = (pool.scrape, pool.engine) == (before.scrape, before.engine)
            # Its CA may be unreadable for the moment, which is no reason to refuse another change.
            return _Reload(config, None if same else tls_context(pool.scrape))
        except ConfigError as error:
            return error

    def _on_change(self, found: _Reload | ConfigError) -> None:
        """Apply a changed file; a bad one changes nothing but what is reported."""
        if isinstance(found, ConfigError):
            self._refused = str(found.problems[0]) if found.problems else str(found)
            self.telemetry.config_rejected()
            _log.error(
                "the changed configuration was refused; the last good one stays",
                extra={"file": str(self._path), "problems": [str(problem) for problem in found.problems]},
            )
            return
        try:
            self._apply(found)
        except Exception:
            self._refused = "an internal error, see the log; it may be applied in part"
            self.telemetry.config_rejected()
            raise
        self._refused = ""

    def _apply(self, reload: _Reload) -> None:
        config, old = reload.config, self.router.config
        self.scraper.reconfigure(config.pool.scrape, config.pool.engine, reload.scrape_tls)
        self.router.reconfigure(config, now=self._clock())
        self.service.configure(config)
        self.shared.settings = SessionSettings.from_config(config)
        self.budget.limit_bytes = config.server.max_buffered_bytes
        self.log.configure(config.log)
        self.recent.resize(config.admin.decisions)
        self.telemetry.config_loaded(self.router.generation)
        self.telemetry.set_endpoints([endpoint.id for endpoint in self._endpoints], config.routing.strategy)
        if _sources(old) != _sources(config):
            self.tasks.start("discovery", partial(self._discover, config), detail="change of the source")
        elif old.pool.scrape.enabled != config.pool.scrape.enabled:
            self.scraper.set_endpoints(self._endpoints if config.pool.scrape.enabled else ())
        _log.info("the configuration was reloaded", extra={"generation": self.router.generation})
        warn_of_explanations(old, config)
        if waiting := restart_needed(self._started_with, config):
            _log.warning("some changed keys take effect only after a restart", extra={"keys": waiting})

    # Signals

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        # Not by the loop: it restores the default when it closes, and a late SIGHUP would then end the process.
        signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(self._on_sighup))
        loop.set_exception_handler(self._on_loop_error)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            _log.warning("a second signal to stop: not waiting for open streams", extra={"signal": number.name})
            self.log.close(0.5)
            sys.stdout.flush()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._stop.set()

    def _on_sighup(self) -> None:
        """Have files read again: once the picker has started, and once more where a reading is under way."""
        self._read_again = True
        if self._stop.is_set():
            _log.info("SIGHUP: files are not read again, because the picker is stopping")
        elif self._started and (self._reading is None or self._reading.done()):
            self._reading = self.tasks.start("config", self._on_read_again, detail="SIGHUP")

    async def _on_read_again(self) -> None:
        while self._read_again:
            self._read_again = False
            await self._read_files()

    async def _read_files(self) -> None:
        """Read all files again that can change without a restart, changed or not, in threads; start discovery anew."""
        said = {"configuration": "no file: there is no --config"}
        if self._watcher is not None:
            changed = await self._watcher.read_again(even_if_same=bool(self._refused))
            said["configuration"] = "unchanged"
            if self._watcher.unreadable:
                said["configuration"] = f"cannot be read, the last good one stays: {self._watcher.unreadable}"
            elif changed:
                said["configuration"] = "refused, the last good one stays" if self._refused else "applied"
        said["certificates"] = await asyncio.to_thread(self.server.read_certificates_again)
        pool = self.router.config.pool
        if pool.scrape.scheme == "https":
            try:
                tls = await asyncio.to_thread(tls_context, pool.scrape)
            except ConfigError as error:
                said["scrape_ca"] = f"refused, the last good one stays: {error}"
            else:
                said["scrape_ca"] = "read"
                if pool == self.router.config.pool:  # else a reload has read it meanwhile
                    self.scraper.reconfigure(pool.scrape, pool.engine, tls, even_if_same=True)
        _log.info("SIGHUP: files were read again; endpoints are looked up anew", extra=said)
        await self._discover(self.router.config)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count an error in a callback or timer that was not handled; the loop's own handler logs it."""
        if not isinstance(context.get("exception"), OSError):
            self.telemetry.internal_error("event loop")
        loop.default_exception_handler(context)


def _transport(config: Config) -> type[NativeServer | GrpcioServer]:
    if config.server.transport == "native":
        return NativeServer
    from extproc.edge.grpcio.server import GrpcioServer  # imports grpc, which the native transport does without

    return GrpcioServer


def warn_of_explanations(old: Config | None, new: Config) -> None:
    """Warn where full explanations have just been switched on and the picker listens on more than loopback."""
    full = new.explain.header in {True, "full"}
    if full and not (old is not None and old.explain.header in {True, "full"}) and not _on_loopback(new.server.host):
        _log.warning(
            "explain.header shows every client that asks the addresses of the endpoints and how much of its prompt each holds, "
            "and so what other clients have asked; set it to brief, or allow x-extproc-explain from trusted clients only"
        )


def _on_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _sources(config: Config) -> tuple[object, ...]:
    """Return what a change of restarts discovery: the source of endpoints, and the models they are configured with."""
    return (config.pool.source, getattr(config.pool, config.pool.source), config.pool.models)
