"""Wires `extproc serve`: configuration, endpoints, signals, ports, reload, and the way down.

Decides the order in which things start and stop; each thing itself is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extproc import __version__
from extproc.config.load import apply_overrides, load, restart_needed
from extproc.config.schema import Config
from extproc.edge.discovery.sources import Discovery, discovery_for
from extproc.edge.native.server import NativeServer
from extproc.edge.observability.collectors import Sources
from extproc.edge.observability.decisions import RecentDecisions
from extproc.edge.observability.log import Log
from extproc.edge.observability.pages import AdminPages, AdminServer, MetricsServer
from extproc.edge.observability.telemetry import Telemetry
from extproc.edge.process.descriptors import Reserve, Shares, raise_limit
from extproc.edge.process.file_watch import FileWatcher
from extproc.edge.process.listen import Door
from extproc.edge.process.tasks import Tasks
from extproc.edge.scraping.scraper import ScrapeFailure, Scraper
from extproc.edge.services.request_service import RequestService
from extproc.errors import ConfigError, ConfigProblem
from extproc.loop import run
from extproc.protocol.request_buffer import BodyBudget
from extproc.protocol.settings import SessionSettings
from extproc.protocol.shared import SessionShared
from extproc.router import Finished, Router
from extproc.types import Endpoint, EndpointMetrics

if TYPE_CHECKING:
    from extproc.edge.grpcio.server import GrpcioServer

__all__ = ["Picker", "read_config", "serve", "tune_gc"]

_log = logging.getLogger(__name__)

_UPKEEP_S = 1.0
"""How often leases are looked at."""
_FIRST_LOOK_S = 2.0
"""How long the gRPC port waits for the first look-up of endpoints; a name server that does not answer must not keep it closed."""
_COLLECT_AFTER = (2_000, 5, 10_000)
"""Objects made and not freed before the youngest are looked at; how often that, before the survivors are; and then all."""


def read_config(path: Path | None, overrides: Mapping[str, object]) -> Config:
    """Read and check a configuration; `overrides` are keys set on the command line. Raises ConfigError."""
    return _configured(_read(path) if path is not None else b"", str(path or ""), overrides)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = ConfigProblem("", f"cannot read the file: {error.strerror}", "check the path given with --config")
        raise ConfigError((problem,), source=str(path)) from error


def _configured(content: bytes, source: str, overrides: Mapping[str, object]) -> Config:
    config = load(content, source=source)
    if "pool.endpoints" in overrides:
        # Endpoints on the command line replace whichever source the file names.
        overrides = {**overrides, "pool.file": None, "pool.dns": None}
    return apply_overrides(config, overrides) if overrides else config


def _changed(content: bytes, source: str, overrides: Mapping[str, object]) -> Config:
    if not content.strip():
        # Somebody truncated it to write it anew, or lost it: never a wish to do without all endpoints.
        problem = ConfigProblem("", "the file is empty", "write the configuration into it")
        raise ConfigError((problem,), source=source)
    return _configured(content, source, overrides)


def serve(path: Path | None, overrides: Mapping[str, object]) -> int:
    """Run the picker until SIGTERM or Ctrl-C; return 0. Raises ConfigError where it cannot start as asked."""
    content = _read(path) if path is not None else b""
    config = _configured(content, str(path or ""), overrides)
    picker = Picker(config, path=path, content=content, overrides=overrides)
    return run(picker.run())


def tune_gc() -> None:
    """Let Python's cyclic collector look rarely, and never at what lives to the end.

    On the native transport a request leaves no cycles, only a dozen objects that outlive it (the index, the last
    decisions), and a pause is as long as their number since the last one: the first threshold bounds it for the youngest,
    times the second for those that have survived once. Measured with `python -m bench.soak` (CPU time of the collector per
    request, longest pause), for short prompts and a full index, and in brackets for 31 new blocks a request
    (`--engines 0 --own-bytes 8000 --max-blocks 1000000`): 0.04 us, 1.2 ms (2.3 us, 7 ms); as Python comes 0.2 us, 2.7 ms
    (3.8 us, 56 ms, more with every block of the index). A full collection never comes by itself: it would take a second
    with a large index, and on the native transport requests leave nothing for it. (What leaves cycles while it is open
    when the survivors are looked at stays until then: 5 MiB in a million requests, when streams still did.)
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


class Picker:
    """One running picker: everything `extproc serve` consists of."""

    def __init__(self, config: Config, *, path: Path | None, content: bytes, overrides: Mapping[str, object]) -> None:
        self._path = path
        self._content = content
        self._overrides = overrides
        self._started_with = config
        self._refused = ""
        self._draining = False
        self._discovered = False
        """The first look-up of endpoints is over, whatever it has found."""
        self._told_ready: bool | None = None
        self._clock = time.monotonic
        self.tasks = Tasks(clock=self._clock)
        self._stop = asyncio.Event()
        self.log = Log(config.log, rng=random.Random())
        self.telemetry = Telemetry()
        self.recent = RecentDecisions(config.admin.decisions)
        self.router = Router(config, rng=random.Random(), on_finished=self._on_finished)
        self.core = RequestService(
            self.router,
            self.telemetry,
            self.recent,
            self.log,
            by_log=self._by_log,
            had_log=self._had_log,
            poke=self._poke,
            clock=self._clock,
        )
        self.budget = BodyBudget(config.server.max_buffered_bytes)
        self.shared = SessionShared(
            self.core, self.budget, SessionSettings.from_config(config), self.telemetry, random.Random()
        )
        self.shares = Shares.of(raise_limit(), config.server.max_connections)
        self._reserve = Reserve(self.shares.reserve)
        doors = self._door("grpc", self.shares.grpc), self._door("health", self.shares.health)
        self.server = _transport(config)(
            config.server, self.shared, self.core.on_log_entry, clock=self._clock, doors=doors
        )
        self.metrics_server = MetricsServer(
            config.server.host,
            config.server.metrics_port,
            self.telemetry.registry,
            self._ready,
            self._door("metrics", self.shares.metrics),
        )
        pages = AdminPages(
            lambda: self.router.snapshots(self._clock()),
            self.recent,
            lambda: self.router.config,
            lambda: self.router.generation,
            self._clock,
        )
        self.admin_server = AdminServer(
            config.admin.host, config.admin.port, pages, self._door("admin", self.shares.admin)
        )
        self._scraper: Scraper | None = None
        self._watcher: FileWatcher | None = None
        self._started = False
        self._hung_up = False
        """SIGHUP came, and has not been followed yet."""
        self._reading: asyncio.Task[None] | None = None
        self._discovery: Discovery | None = None
        self._discovering = asyncio.Lock()
        self._endpoints: Sequence[Endpoint] = ()

    def _door(self, name: str, most: int) -> Door:
        reserve = self._reserve if name in {"grpc", "health"} else None
        return Door(name, most, self.telemetry, reserve=reserve, clock=self._clock)

    async def run(self) -> int:
        """Start, serve until told to stop, drain; return 0."""
        config = self._started_with
        self.log.install()
        self.shares.warn(config.server.max_connections)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        # Not by the loop, which gives the signal its default back when it closes: that would end us on our way down.
        signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(self._on_hangup))
        loop.set_exception_handler(self._on_loop_error)
        self.telemetry.connect(
            Sources(
                lambda: self.router.snapshots(self._clock()),
                self.router.index_stats,
                lambda: self.budget.used_bytes,
                lambda: self.log.dropped,
                lambda: self._scraper.stretch if self._scraper is not None else 1.0,
                lambda endpoint_id: self._scraper is not None and self._scraper.selects(endpoint_id),
                self._task_failures,
                lambda: self._discovery is not None and bool(self._discovery.trouble),
                self._clock,
            )
        )
        try:
            self._scraper = Scraper(
                config.pool.scrape, config.pool.engine, self, self._clock, rng=random.Random(), tasks=self.tasks
            )
            # Ports first: a port in use must stop us before anything is promised to anybody. The gRPC port comes when the
            # endpoints are known: whoever uses the only picker before it is ready would get 503 until then.
            await self.metrics_server.start()
            await self.admin_server.start()
            await self._discover(config)
            await self._first_look()
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
            if self._path is not None:
                self._watcher = FileWatcher(self._path, self._on_change, known=self._content, tasks=self.tasks)
                self._watcher.start()
            self.tasks.start("upkeep", self._upkeep)
            self._started = True
            if self._hung_up:
                self._on_hangup()
            tune_gc()
            await self._stop.wait()
            self._draining = True
            _log.info("draining", extra={"delay_s": float(self.router.config.server.drain_delay)})
            server = self.router.config.server
            # A successor may come while this one serves what is left; `server.stop` shares its own ports.
            self.metrics_server.share()
            self.admin_server.share()
            await self.server.stop(server.drain_delay, server.grace_period)
        finally:
            if self._watcher is not None:
                await self._watcher.close()
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            await self.tasks.close()
            if self._discovery is not None:
                await self._discovery.close()
            if self._scraper is not None:
                await self._scraper.close()
            await self.server.stop(0, 0)
            await self.admin_server.close()
            await self.metrics_server.close()
            self._reserve.close()
            _log.info("stopped", extra={"in_flight": self.router.in_flight})
            self.log.close()
        return 0

    # edge.scrape.ScrapeSink

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> bool:
        """Hand a scrape to the router."""
        self.telemetry.scraped(metrics.scrape_s)
        restarted = self.router.observe(endpoint_id, metrics, now=now)
        if restarted:
            _log.warning("an engine has restarted; its prefixes are forgotten", extra={"endpoint": endpoint_id})
        return restarted

    def observe_failure(self, endpoint_id: str, reason: ScrapeFailure, now: float) -> None:
        """Hand a failed scrape to the router."""
        self.telemetry.scrape_failed(endpoint_id, reason.value)
        self.router.observe_failure(endpoint_id, now=now)

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:
        """Hand a list of models to the router."""
        self.router.observe_models(endpoint_id, models, now=now)
        self.telemetry.set_models(self.router.known_models())

    # Callbacks

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            # Told twice: whoever asks again does not want to wait.
            _log.warning("told to stop a second time: not waiting for open streams", extra={"signal": number.name})
            self.log.close(0.5)
            sys.stdout.flush()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._stop.set()

    def _on_hangup(self) -> None:
        """Have files read again: once the picker has started, and once more where that is under way."""
        self._hung_up = True
        if self._stop.is_set():
            _log.info("SIGHUP: nothing is read again on the way down")
        elif self._started and (self._reading is None or self._reading.done()):
            self._reading = self.tasks.start("config", self._read_again, detail="SIGHUP")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count what no task and no caller took: a defect in a callback or a timer; the loop's own handler logs it."""
        if not isinstance(context.get("exception"), OSError):
            self.telemetry.internal_error("event loop")
        loop.default_exception_handler(context)

    def _on_finished(self, finished: Finished) -> None:
        # The core is made of the router, so the router can not be given the core's own method.
        self.core.on_finished(finished)

    def _by_log(self, peer: str) -> bool:
        return self.server.access_log.logs_of(peer)

    def _had_log(self, peer: str) -> bool:
        return self.server.access_log.has_logged(peer)

    def _poke(self, endpoint_id: str) -> None:
        if self._scraper is not None:
            self._scraper.poke(endpoint_id)

    def _ready(self) -> tuple[bool, str]:
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
        if failing := self._keep_failing():
            # Not a reason to send requests elsewhere: decisions go on, with what was known last.
            names = ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in failing.items())
            said.append(f"with background tasks that keep failing, see the log: {names}")
        if self._refused:
            said.append(f"with the last good configuration; the newest was refused: {self._refused}")
        return True, ", ".join(said)

    def _keep_failing(self) -> Counter[str]:
        return self.tasks.keep_failing() + Counter(log=int(self.log.keeps_failing))

    def _task_failures(self) -> Mapping[str, int]:
        return {**self.tasks.failures, "log": self.log.failures}

    # Endpoints

    async def _discover(self, config: Config) -> None:
        """Begin with the endpoints of `config`; what another source found stays until this one has found something."""
        async with self._discovering:
            await self._replace_discovery(config)

    async def _replace_discovery(self, config: Config) -> None:
        if _sources(config) != _sources(self.router.config):
            return  # Another reload has named other sources meanwhile; its own turn follows.
        old, self._discovery = self._discovery, None
        if old is not None:
            await old.close()
        discovery = discovery_for(
            config.pool, self._on_endpoints, on_failure=self.telemetry.discovery_failed, tasks=self.tasks
        )
        self._discovery = discovery
        await discovery.start()
        self.tasks.start("discovery", partial(self._await_first, discovery), detail="first look-up")

    async def _first_look(self) -> None:
        """Wait until endpoints have been looked up for the first time, found or not, but not for long."""
        discovery = self._discovery
        if discovery is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(discovery.first_done.wait(), _FIRST_LOOK_S)

    async def _await_first(self, discovery: Discovery) -> None:
        await discovery.first_done.wait()
        if not self._discovered:
            self._discovered = True
            self._tell_readiness()

    def _tell_readiness(self) -> None:
        """Be ready while there are endpoints, and say so wherever that changes, or once if there are none from the start."""
        ready = bool(self._endpoints)
        if ready is self._told_ready or not self._discovered or self._stop.is_set():
            return
        self._told_ready = ready
        self.server.health.set_ready(ready)
        if ready:
            _log.info("ready", extra={"endpoints": len(self._endpoints)})
        else:
            _log.warning("no endpoints: not ready, and every request gets 503", extra={"why": self._why_no_endpoints()})

    def _why_no_endpoints(self) -> str:
        """Say which source gives none, why, and what to do about it."""
        pool = self.router.config.pool
        trouble = self._discovery.trouble if self._discovery is not None else ""
        if pool.file is not None:
            return f"pool.file {trouble or f'{pool.file.path}: lists none'}; write endpoints into it"
        if pool.dns is not None:
            return f"pool.dns {trouble or pool.dns.host}; check the name, and that it has addresses"
        if trouble:
            return f"pool.endpoints {trouble}; check the name, or give addresses"
        return "pool.endpoints is empty; set it (or --endpoint), pool.file or pool.dns"

    def _on_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        if len(endpoints) > len(self._endpoints):
            self.shares.warn_of_endpoints(len(endpoints))
        self._endpoints = endpoints
        change = self.router.set_endpoints(endpoints, now=self._clock())
        self.telemetry.set_endpoints([endpoint.id for endpoint in endpoints], self.router.config.routing.strategy)
        self.telemetry.set_models(self.router.known_models())
        if self._scraper is not None:
            self._scraper.set_endpoints(endpoints if self.router.config.pool.scrape.enabled else ())
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
        self._tell_readiness()

    # Configuration

    def _on_change(self, content: bytes) -> None:
        """Validate a changed file, then apply it at once; a bad one changes nothing but what is reported."""
        source = str(self._path)
        try:
            config = _changed(content, source, self._overrides)
            if self._scraper is not None:
                self._scraper.reconfigure(config.pool.scrape, config.pool.engine)
        except ConfigError as error:
            self._refused = str(error.problems[0]) if error.problems else str(error)
            self.telemetry.config_rejected()
            _log.error(
                "the changed configuration was refused; the last good one stays",
                extra={"file": source, "problems": [str(problem) for problem in error.problems]},
            )
            return
        try:
            self._apply(config)
        except Exception:
            self._refused = "a defect of ours, see the log; it may be in force in part"
            self.telemetry.config_rejected()
            raise
        self._refused = ""

    async def _read_again(self) -> None:
        while self._hung_up:
            self._hung_up = False
            await self._read_files()

    async def _read_files(self) -> None:
        """Read all files again that can be changed without a restart, whether or not they look changed: SIGHUP asks for it."""
        said = {"configuration": "no file: there is no --config"}
        if self._watcher is not None:
            told = await self._watcher.read_again(even_if_same=bool(self._refused))
            said["configuration"] = "unchanged"
            if self._watcher.unreadable:
                said["configuration"] = f"cannot be read, the last good one stays: {self._watcher.unreadable}"
            elif told:
                said["configuration"] = "refused, the last good one stays" if self._refused else "applied"
        said["certificates"] = self.server.read_certificates_again()
        config = self.router.config
        if self._scraper is not None and config.pool.scrape.scheme == "https":
            try:
                self._scraper.reconfigure(config.pool.scrape, config.pool.engine, even_if_same=True)
                said["scrape_ca"] = "read"
            except ConfigError as error:
                said["scrape_ca"] = f"refused, the last good one stays: {error}"
        _log.info("SIGHUP: files were read again; endpoints are looked up anew", extra=said)
        await self._discover(config)

    def _apply(self, config: Config) -> None:
        old = self.router.config
        waiting = restart_needed(self._started_with, config)
        self.router.reconfigure(config, now=self._clock())
        self.core.configure(config)
        self.shared.settings = SessionSettings.from_config(config)
        self.budget.limit_bytes = config.server.max_buffered_bytes
        self.log.configure(config.log)
        self.recent.resize(config.admin.decisions)
        self.telemetry.config_loaded(self.router.generation)
        self.telemetry.set_endpoints([endpoint.id for endpoint in self._endpoints], config.routing.strategy)
        if _sources(old) != _sources(config):
            self.tasks.start("discovery", partial(self._discover, config), detail="change of the source")
        elif old.pool.scrape.enabled != config.pool.scrape.enabled and self._scraper is not None:
            self._scraper.set_endpoints(self._endpoints if config.pool.scrape.enabled else ())
        _log.info("the configuration was reloaded", extra={"generation": self.router.generation})
        warn_of_explanations(old, config)
        if waiting:
            _log.warning("some changed keys take effect only after a restart", extra={"keys": waiting})

    # Upkeep

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP_S)
            now = self._clock()
            self.router.expire(now=now)
            self.core.expire(now)


def _transport(config: Config) -> type[NativeServer | GrpcioServer]:
    if config.server.transport == "native":
        return NativeServer
    from extproc.edge.grpcio.server import GrpcioServer  # imports grpc, which the native transport does without

    return GrpcioServer


def warn_of_explanations(old: Config | None, new: Config) -> None:
    """Say what clients are told, where that has just been switched on and the picker serves more than this machine."""
    full = new.explain.header in {True, "full"}
    if full and not (old is not None and old.explain.header in {True, "full"}) and not _on_loopback(new.server.host):
        _log.warning(
            "explain.header tells every client that asks the addresses of the endpoints and how much of its prompt each holds, "
            "and with that what others have asked; set it to brief, or let trusted clients alone send x-extproc-explain"
        )


def _on_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _sources(config: Config) -> tuple[object, ...]:
    """Return what decides where endpoints come from, and what they are said to serve."""
    pool = config.pool
    return (pool.endpoints, pool.file, pool.dns, pool.models)
