"""Where endpoints come from: a static list, a watched file, DNS. Each source tells one listener the whole list.

Decides when a source is believed. A failed look-up keeps what was found last, for as long as it fails: an outage of DNS must
not become an outage of the models. The answer that a name has nothing is believed the third time in a row. Endpoints come
without repeats and in a stable order. Reading a name is `resolve`'s concern, reading the file `watch`'s, what the endpoints
are good for the router's. Kubernetes will be another `Discovery`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from extproc.config.endpoints import EndpointEntry, load_endpoints
from extproc.config.schema import DnsConfig, PoolConfig
from extproc.config.values import parse_endpoint
from extproc.edge.discovery.resolve import Family, NoAddressesError, ResolveError, Resolver, SystemResolver
from extproc.edge.process.file_watch import FileWatcher
from extproc.edge.process.tasks import Tasks
from extproc.errors import ConfigError
from extproc.types import Endpoint

__all__ = [
    "EMPTY_ANSWERS_BELIEVED",
    "Discovery",
    "DnsDiscovery",
    "FileDiscovery",
    "Listeners",
    "OnEndpoints",
    "OnFailure",
    "StaticDiscovery",
    "discovery_for",
]

EMPTY_ANSWERS_BELIEVED: Final = 3
"""So many times in a row a name must have nothing before its endpoints go: some servers say so while they update."""
_NAMES_INTERVAL_S: Final = 5.0
"""Between two look-ups of a host name of the static list or the file."""
_FILE_INTERVAL_S: Final = 1.0

_log = logging.getLogger(__name__)

OnEndpoints = Callable[[list[Endpoint]], None]
"""Receives the whole list whenever it has changed, and once after the first look-up that worked."""
OnFailure = Callable[[str], None]
"""Is told the kind of source (`static`, `file`, `dns`) of each look-up that failed, for a counter."""
_Sleep = Callable[[float], Awaitable[None]]


class Discovery(Protocol):
    """A source of endpoints."""

    first_done: asyncio.Event
    """Set when the first look-up is over, whatever it found."""

    @property
    def trouble(self) -> str:
        """Which look-up does not give endpoints at present, and why; empty: all do."""
        ...

    async def start(self) -> None:
        """Begin; returns at once."""
        ...

    async def close(self) -> None:
        """Stop; the listener is not called afterwards. A second call does nothing."""
        ...


def discovery_for(
    pool: PoolConfig,
    on_endpoints: OnEndpoints,
    *,
    on_failure: OnFailure = lambda _: None,
    resolver: Resolver | None = None,
    tasks: Tasks | None = None,
) -> Discovery:
    """Make the source that the configuration names; none at all is a static list of nothing."""
    resolver = resolver or SystemResolver()
    listeners = Listeners(on_endpoints, on_failure, tasks or Tasks())
    models = frozenset(pool.models) or None
    if pool.file is not None:
        return FileDiscovery(pool.file.path, listeners, resolver, models)
    if pool.dns is not None:
        return DnsDiscovery(pool.dns, listeners, resolver, models)
    return StaticDiscovery(pool.endpoints, listeners, resolver, models)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told what a source finds, on the event loop, and who keeps it running."""

    on_endpoints: OnEndpoints
    on_failure: OnFailure = lambda _: None
    tasks: Tasks = field(default_factory=Tasks)


class _Polled(ABC):
    """What all sources share: look, tell the listener what changed, wait, look again."""

    kind: str
    """Label of the failure counter."""

    def __init__(self, listeners: Listeners, interval_s: float, sleep: _Sleep) -> None:
        self.first_done = asyncio.Event()
        self._listeners = listeners
        self._interval_s = interval_s
        self._sleep = sleep
        self._published: list[Endpoint] | None = None
        self._failing: set[str] = set()
        self._troubles: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str:
        """Which look-up does not give endpoints at present, and why; empty: all do."""
        found = [f"{what}: {why}" for what, why in self._troubles.items()]
        return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "") if found else ""

    async def start(self) -> None:
        """Begin; returns at once."""
        assert self._task is None, "started twice"
        self._task = self._listeners.tasks.start("discovery", self._run, detail=self.kind)

    async def close(self) -> None:
        """Stop; the listener is not called afterwards."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def refresh(self) -> None:
        """Look once and tell the listener if the endpoints have changed."""
        try:
            found = await self._look()
        finally:
            self.first_done.set()
        if found is None:
            return
        first: dict[str, Endpoint] = {}
        for endpoint in found:
            first.setdefault(endpoint.id, endpoint)
        endpoints = list(first.values())
        if endpoints != self._published:
            self._listeners.on_endpoints(list(endpoints))
            self._published = endpoints

    @abstractmethod
    async def _look(self) -> list[Endpoint] | None:
        """Return all endpoints, repeats allowed; None: nothing is known yet, or nothing new."""

    async def _run(self) -> None:
        while True:
            await self.refresh()
            await self._sleep(self._interval_s)

    def _failed(self, what: str, why: str) -> None:
        """Count a failure of one name or file, and log where it begins."""
        self._listeners.on_failure(self.kind)
        self._troubles[what] = why
        if what not in self._failing:
            self._failing.add(what)
            _log.warning(
                "endpoint look-up failed; what was found last stays",
                extra={"source": self.kind, "what": what, "why": why},
            )

    def _worked(self, what: str) -> None:
        """Log where a failure ends."""
        self._troubles.pop(what, None)
        if what in self._failing:
            self._failing.discard(what)
            _log.info("endpoint look-up works again", extra={"source": self.kind, "what": what})


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Memory:
    """What one name was last known to have, and how often in a row it had nothing."""

    __slots__ = ("empty", "found", "known")

    def __init__(self) -> None:
        self.found: Sequence[tuple[str, int]] = ()
        self.known = False
        """There has been an answer to believe."""
        self.empty = 0


class _Remembering(_Polled):
    """A source that looks up names and remembers what each had."""

    def __init__(self, listeners: Listeners, resolver: Resolver, interval_s: float, sleep: _Sleep) -> None:
        super().__init__(listeners, interval_s, sleep)
        self._resolver = resolver
        self._memories: dict[str, _Memory] = {}

    async def _remembered(
        self, what: str, ask: Callable[[], Awaitable[Sequence[tuple[str, int]]]]
    ) -> Sequence[tuple[str, int]]:
        """Resolve `what`; return the last accepted answer where this one fails or is not accepted."""
        memory = self._memories.setdefault(what, _Memory())
        try:
            found = await ask()
        except NoAddressesError as error:
            memory.empty += 1
            if memory.empty < EMPTY_ANSWERS_BELIEVED:
                self._failed(what, str(error))
            elif memory.empty == EMPTY_ANSWERS_BELIEVED:
                self._failing.discard(what)
                memory.found, memory.known = (), True
                self._troubles[what] = str(error)
                _log.warning("a name has no endpoints", extra={"source": self.kind, "what": what, "why": str(error)})
        except ResolveError as error:
            self._failed(what, str(error))
        else:
            if memory.empty >= EMPTY_ANSWERS_BELIEVED:
                _log.info("a name has endpoints again", extra={"source": self.kind, "what": what})
            memory.found, memory.known, memory.empty = found, True, 0
            self._worked(what)
        return memory.found

    async def _host(self, host: str, family: Family) -> Sequence[tuple[str, int]]:
        """Return a host's addresses, with port 0."""

        async def ask() -> Sequence[tuple[str, int]]:
            return [(address, 0) for address in await self._resolver.addresses(host, family)]

        return await self._remembered(host, ask)

    async def _entries(
        self, entries: Sequence[EndpointEntry], models: frozenset[str] | None, *, beside: str = ""
    ) -> list[Endpoint] | None:
        """Turn entries into endpoints, in their order; the addresses of one name in numeric order.

        None: there is none, but only because no name has been answered yet. `beside` is a name that is remembered
        although it is no entry's. Other names that are no longer asked for are forgotten.
        """
        names = list(dict.fromkeys(entry.address for entry in entries if not _is_address(entry.address)))
        for name in set(self._memories) - {*names, beside}:
            del self._memories[name]
            self._failing.discard(name)
            self._troubles.pop(name, None)
        found = await asyncio.gather(*(self._host(name, "address") for name in names))
        addresses = dict(zip(names, found, strict=True))
        endpoints = [
            Endpoint(
                address=address,
                port=entry.port,
                name=entry.name or (entry.address if entry.address in addresses else ""),
                labels=dict(entry.labels),
                models=frozenset(entry.models) or models,
            )
            for entry in entries
            for address, _ in addresses.get(entry.address, ((entry.address, 0),))
        ]
        known = all(self._memories[name].known for name in names)
        return endpoints if endpoints or known else None


class StaticDiscovery(_Remembering):
    """The endpoints of the configuration; addresses count at once, host names are looked up again and again."""

    kind = "static"

    def __init__(
        self,
        endpoints: Sequence[str],
        listeners: Listeners,
        resolver: Resolver,
        models: frozenset[str] | None = None,
        *,
        sleep: _Sleep = asyncio.sleep,
    ) -> None:
        super().__init__(listeners, resolver, _NAMES_INTERVAL_S, sleep)
        self._models = models
        self._list = [EndpointEntry(address=host, port=port) for host, port in map(parse_endpoint, endpoints)]

    async def _run(self) -> None:
        if all(_is_address(entry.address) for entry in self._list):
            await self.refresh()  # nothing here will ever change
        else:
            await super()._run()

    async def _look(self) -> list[Endpoint] | None:
        return await self._entries(self._list, self._models)


class FileDiscovery(_Remembering):
    """The endpoints of a watched file. A bad file, or one that vanishes, keeps the last good list."""

    kind = "file"

    def __init__(
        self,
        path: str,
        listeners: Listeners,
        resolver: Resolver,
        models: frozenset[str] | None = None,
        *,
        sleep: _Sleep = asyncio.sleep,
    ) -> None:
        super().__init__(listeners, resolver, _FILE_INTERVAL_S, sleep)
        self._path = path
        self._models = models
        self._watcher = FileWatcher(path, self._parse)
        self._list: tuple[EndpointEntry, ...] | None = None
        self._problem: ConfigError | None = None
        self._looks = 0

    async def _look(self) -> list[Endpoint] | None:
        changed = await asyncio.to_thread(self._watcher.check)
        if self._watcher.unreadable:
            self._failed(self._path, self._watcher.unreadable)
        elif changed and self._problem is not None:
            # Counted once per bad content, not once a second; each new attempt says what is wrong with it.
            self._failing.discard(self._path)
            self._failed(self._path, str(self._problem))
        elif self._problem is None:
            self._worked(self._path)
        if self._list is None:
            return None
        self._looks += 1
        if not changed and self._looks % round(_NAMES_INTERVAL_S / _FILE_INTERVAL_S):
            return None
        return await self._entries(self._list, self._models)

    def _parse(self, content: bytes) -> None:
        """Read new content; runs in the watcher's thread, because a long list takes a while."""
        try:
            self._list = load_endpoints(content, source=self._path)
            self._problem = None
        except ConfigError as error:
            self._problem = error


class DnsDiscovery(_Remembering):
    """The addresses of one DNS name, or the targets of its SRV records."""

    kind = "dns"

    def __init__(
        self,
        config: DnsConfig,
        listeners: Listeners,
        resolver: Resolver,
        models: frozenset[str] | None = None,
        *,
        sleep: _Sleep = asyncio.sleep,
    ) -> None:
        super().__init__(listeners, resolver, config.interval, sleep)
        self._config = config
        self._models = models

    async def _look(self) -> list[Endpoint] | None:
        config = self._config
        if config.type == "SRV":
            targets = await self._remembered(config.host, lambda: self._resolver.services(config.host))
            if not self._memories[config.host].known:
                return None
            entries = [EndpointEntry(address=target, port=port) for target, port in targets]
            return await self._entries(entries, self._models, beside=config.host)
        pairs = await self._host(config.host, config.type)
        if not self._memories[config.host].known:
            return None
        return [Endpoint(address, config.port, config.host, models=self._models) for address, _ in pairs]
