"""Sources of endpoints: a static list, a watched file, DNS. Each reports the whole list to one listener.

Decides when an answer is accepted. A failed look-up keeps the endpoints found last, for as long as it fails: an outage of
DNS must not become an outage of the models. An empty answer for a name is accepted the third time in a row. Endpoints are
reported without repeats and in a stable order. Resolving a name is in `resolve`, watching the file in `process.file_watch`.

A new source is a class here with its key of `pool` as `kind`, listed in `KINDS`; its section of the configuration and its
place in `ENDPOINT_SOURCES` are in `config.schema`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

from extproc.config.endpoints import EndpointEntry, load_endpoints
from extproc.config.schema import ENDPOINT_SOURCES, DnsConfig, FileConfig, PoolConfig
from extproc.config.values import parse_endpoint
from extproc.edge.discovery.resolve import Family, NoAddressesError, ResolveError, Resolver, SystemResolver
from extproc.edge.process.file_watch import FileWatcher
from extproc.edge.process.tasks import Tasks
from extproc.errors import ConfigError
from extproc.types import Endpoint

__all__ = [
    "EMPTY_ANSWERS_ACCEPTED",
    "KINDS",
    "Discovery",
    "DnsDiscovery",
    "FileDiscovery",
    "Listeners",
    "OnEndpoints",
    "OnFailure",
    "StaticDiscovery",
    "discovery_for",
]

EMPTY_ANSWERS_ACCEPTED: Final = 3
"""Empty answers in a row after which the endpoints of a name are removed: some servers give one while they update."""
_NAMES_INTERVAL_S: Final = 5.0
"""Time between two look-ups of a host name of the static list or the file."""
_FILE_INTERVAL_S: Final = 1.0

_log = logging.getLogger(__name__)

OnEndpoints = Callable[[list[Endpoint]], None]
"""Receives the whole list whenever it has changed, and once after the first look-up that worked."""
OnFailure = Callable[[str], None]
"""Called with the kind of source for each look-up that failed, for a counter."""
_Sleep = Callable[[float], Awaitable[None]]


class Discovery(Protocol):
    """A source of endpoints."""

    first_done: asyncio.Event
    """Set when the first look-up is over, whatever it found."""

    @property
    def trouble(self) -> str:
        """Which look-up does not give endpoints at present, and why; empty: all do."""
        ...

    @property
    def why_empty(self) -> str:
        """Where there are no endpoints: the key of the configuration, the reason, and what to do."""
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
    """Make the source that the configuration names; without one it is an empty static list."""
    listeners = Listeners(on_endpoints, on_failure, tasks or Tasks())
    make = KINDS[pool.source]
    return make(getattr(pool, pool.source), listeners, resolver or SystemResolver(), frozenset(pool.models) or None)


@dataclass(frozen=True, slots=True)
class Listeners:
    """What a source calls, on the event loop, and the supervisor of its task."""

    on_endpoints: OnEndpoints
    on_failure: OnFailure = lambda _: None
    tasks: Tasks = field(default_factory=Tasks)


class _Polled(ABC):
    """What all sources share: look, report what changed, wait, look again."""

    kind: str
    """Its key of `pool` (one of `ENDPOINT_SOURCES`), and label of the failure counter."""

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
        """Which look-up gives no endpoints at present, and why; empty: all do."""
        found = [f"{what}: {why}" for what, why in self._troubles.items()]
        return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "") if found else ""

    @property
    @abstractmethod
    def why_empty(self) -> str:
        """Where there are no endpoints: the key of the configuration, the reason, and what to do."""

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
        """Look once and call the listener if the endpoints have changed."""
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
        """Count a failure of one name or file, and log the first of a series."""
        self._listeners.on_failure(self.kind)
        self._troubles[what] = why
        if what not in self._failing:
            self._failing.add(what)
            _log.warning(
                "endpoint look-up failed; the endpoints found last stay",
                extra={"source": self.kind, "what": what, "why": why},
            )

    def _worked(self, what: str) -> None:
        """Log the end of a series of failures."""
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


@dataclass(slots=True)
class _LastAnswer:
    """The last accepted answer for one name."""

    found: Sequence[tuple[str, int]] = ()
    known: bool = False
    """An answer has been accepted."""
    empty: int = 0
    """Empty answers in a row."""


class _Resolving(_Polled):
    """A source that resolves names and keeps the last accepted answer for each."""

    def __init__(
        self,
        listeners: Listeners,
        resolver: Resolver,
        models: frozenset[str] | None,
        interval_s: float,
        sleep: _Sleep,
    ) -> None:
        super().__init__(listeners, interval_s, sleep)
        self._resolver = resolver
        self._models = models
        self._answers: dict[str, _LastAnswer] = {}

    async def _answer(
        self, what: str, ask: Callable[[], Awaitable[Sequence[tuple[str, int]]]]
    ) -> Sequence[tuple[str, int]]:
        """Resolve `what`; return the last accepted answer where this one fails or is not accepted."""
        last = self._answers.setdefault(what, _LastAnswer())
        try:
            found = await ask()
        except NoAddressesError as error:
            last.empty += 1
            if last.empty < EMPTY_ANSWERS_ACCEPTED:
                self._failed(what, str(error))
            elif last.empty == EMPTY_ANSWERS_ACCEPTED:
                self._failing.discard(what)
                last.found, last.known = (), True
                self._troubles[what] = str(error)
                _log.warning("a name has no endpoints", extra={"source": self.kind, "what": what, "why": str(error)})
        except ResolveError as error:
            self._failed(what, str(error))
        else:
            if last.empty >= EMPTY_ANSWERS_ACCEPTED:
                _log.info("a name has endpoints again", extra={"source": self.kind, "what": what})
            last.found, last.known, last.empty = found, True, 0
            self._worked(what)
        return last.found

    async def _host(self, host: str, family: Family) -> Sequence[tuple[str, int]]:
        """Return a host's addresses, with port 0."""

        async def ask() -> Sequence[tuple[str, int]]:
            return [(address, 0) for address in await self._resolver.addresses(host, family)]

        return await self._answer(host, ask)

    async def _entries(self, entries: Sequence[EndpointEntry], *, keep: str = "") -> list[Endpoint] | None:
        """Turn entries into endpoints, in their order; the addresses of one name in numeric order.

        None: there is none, but only because no name has been answered yet. Answers for names that are no longer asked for
        are dropped; `keep` is a further name whose answer is kept.
        """
        names = list(dict.fromkeys(entry.address for entry in entries if not _is_address(entry.address)))
        for name in set(self._answers) - {*names, keep}:
            del self._answers[name]
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
                models=frozenset(entry.models) or self._models,
            )
            for entry in entries
            for address, _ in addresses.get(entry.address, ((entry.address, 0),))
        ]
        known = all(self._answers[name].known for name in names)
        return endpoints if endpoints or known else None


class StaticDiscovery(_Resolving):
    """The endpoints of the configuration; addresses are used at once, host names are resolved again and again."""

    kind = "endpoints"

    def __init__(
        self,
        endpoints: Sequence[str],
        listeners: Listeners,
        resolver: Resolver,
        models: frozenset[str] | None = None,
        *,
        sleep: _Sleep = asyncio.sleep,
    ) -> None:
        super().__init__(listeners, resolver, models, _NAMES_INTERVAL_S, sleep)
        self._list = [EndpointEntry(address=host, port=port) for host, port in map(parse_endpoint, endpoints)]

    @property
    def why_empty(self) -> str:
        """The name that does not resolve, or that no source is set."""
        if self.trouble:
            return f"pool.endpoints {self.trouble}; check the name, or give addresses"
        others = " or ".join(f"pool.{key}" for key in ENDPOINT_SOURCES if key != self.kind)
        return f"pool.endpoints is empty; set it (or --endpoint), {others}"

    async def _run(self) -> None:
        if all(_is_address(entry.address) for entry in self._list):
            await self.refresh()  # nothing here will ever change
        else:
            await super()._run()

    async def _look(self) -> list[Endpoint] | None:
        return await self._entries(self._list)


class FileDiscovery(_Resolving):
    """The endpoints of a watched file. A bad file, or one that vanishes, keeps the last good list."""

    kind = "file"

    def __init__(
        self,
        config: FileConfig,
        listeners: Listeners,
        resolver: Resolver,
        models: frozenset[str] | None = None,
        *,
        sleep: _Sleep = asyncio.sleep,
    ) -> None:
        super().__init__(listeners, resolver, models, _FILE_INTERVAL_S, sleep)
        self._path = config.path
        self._watcher = FileWatcher(config.path, self._parse, self._on_content)
        self._list: tuple[EndpointEntry, ...] | None = None
        self._problem: ConfigError | None = None
        self._looks = 0

    @property
    def why_empty(self) -> str:
        """What is wrong with the file, or that it lists no endpoint."""
        return f"pool.file {self.trouble or f'{self._path}: lists none'}; write endpoints into it"

    async def _look(self) -> list[Endpoint] | None:
        changed = await self._watcher.check()
        if self._watcher.unreadable:
            self._failed(self._path, self._watcher.unreadable)
        elif changed and self._problem is not None:
            # Counted and logged once per bad content, not once a second.
            self._failing.discard(self._path)
            self._failed(self._path, str(self._problem))
        elif self._problem is None:
            self._worked(self._path)
        if self._list is None:
            return None
        self._looks += 1
        if not changed and self._looks % round(_NAMES_INTERVAL_S / _FILE_INTERVAL_S):
            return None
        return await self._entries(self._list)

    def _parse(self, content: bytes) -> tuple[EndpointEntry, ...] | ConfigError:
        try:
            return load_endpoints(content, source=self._path)
        except ConfigError as error:
            return error

    def _on_content(self, found: tuple[EndpointEntry, ...] | ConfigError) -> None:
        if isinstance(found, ConfigError):
            self._problem = found
        else:
            self._list, self._problem = found, None


class DnsDiscovery(_Resolving):
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
        super().__init__(listeners, resolver, models, config.interval, sleep)
        self._config = config

    @property
    def why_empty(self) -> str:
        """Why the name gives no endpoints."""
        return f"pool.dns {self.trouble or self._config.host}; check the name, and that it has addresses"

    async def _look(self) -> list[Endpoint] | None:
        config = self._config
        if config.type == "SRV":
            targets = await self._answer(config.host, lambda: self._resolver.services(config.host))
            if not self._answers[config.host].known:
                return None
            entries = [EndpointEntry(address=target, port=port) for target, port in targets]
            return await self._entries(entries, keep=config.host)
        pairs = await self._host(config.host, config.type)
        if not self._answers[config.host].known:
            return None
        return [Endpoint(address, config.port, config.host, models=self._models) for address, _ in pairs]


KINDS: Final[Mapping[str, Callable[[Any, Listeners, Resolver, frozenset[str] | None], Discovery]]] = MappingProxyType(
    {source.kind: source for source in (StaticDiscovery, FileDiscovery, DnsDiscovery)}
)
"""The source of each key of `pool` that names one; called with what that key holds."""
