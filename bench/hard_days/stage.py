"""The processes of a run: engines, pickers and Envoy, and what can be done to each of them.

Everything listens on loopback, on free ports; leaving the context ends all of it. Decides nothing about when a thing is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import yaml

from bench.envoy_stage import Listen, envoy_config
from bench.hard_days.clients import MODEL, PICKER, RETRYING, ROUND_ROBIN
from bench.hard_days.schedule import ENGINES
from extproc.demo.processes import Child, Children, envoy_binary, free_ports
from extproc.errors import ExtprocError

__all__ = ["DESCRIPTORS", "LEASE_S", "Picker", "PickerPorts", "Stage", "Usage"]

DESCRIPTORS: Final = 512
"""The picker's limit (`ulimit -n`): what a service manager may give it, and what idle connections can use up in a short run."""
LEASE_S: Final = 45.0
"""In place of ten minutes: a run must see that what is held without an end is given back."""
_DRAIN_S: Final = 5
"""How long an Envoy that is replaced asks its clients to come back before it stops listening."""
_LISTENERS: Final = {PICKER: "picker", ROUND_ROBIN: "plain", RETRYING: "retrying"}


@dataclass(frozen=True, slots=True)
class PickerPorts:
    """Where one picker listens."""

    grpc: int
    health: int
    metrics: int
    admin: int


@dataclass(frozen=True, slots=True)
class Usage:
    """One process at one moment."""

    at_s: float
    rss_bytes: int
    descriptors: int


@dataclass(eq=False)
class Picker:
    """One place for a picker, and the process that has it now."""

    number: int
    ports: PickerPorts
    config: Path
    child: Child | None = None
    leaving: set[int] = field(default_factory=set)
    """Processes that were told to end."""
    used: dict[str, list[Usage]] = field(default_factory=dict)
    """By the name of a process's log."""

    @property
    def running(self) -> bool:
        """Whether a process has this place, and lives."""
        return self.child is not None and self.child.running


def usage(child: Child, now: float) -> Usage | None:
    """Look at a process; None once it has ended."""
    try:
        descriptors = sum(1 for _ in Path(f"/proc/{child.process.pid}/fd").iterdir())
        return Usage(now, child.rss_bytes(), descriptors)
    except (OSError, IndexError, ValueError):
        return None


class Stage:
    """Eight engines, one picker or two, and an Envoy with three listeners: the picker's profile, round robin, and that with retries."""

    def __init__(self, folder: Path, *, pickers: int, transport: str) -> None:
        self.folder = folder
        self.transport = transport
        self.journal = folder / "journal.jsonl"
        self.endpoints_file = folder / "endpoints.yaml"
        ports = free_ports(ENGINES + 4 * pickers + len(_LISTENERS) + 1)
        self.engine_ports = [ports.pop() for _ in range(ENGINES)]
        self.ports = {way: ports.pop() for way in _LISTENERS}
        self.envoy_admin = ports.pop()
        self.pickers = [
            Picker(number, PickerPorts(*(ports.pop() for _ in range(4))), folder / f"picker-{number + 1}.yaml")
            for number in range(pickers)
        ]
        self.changes: dict[str, Any] = {}
        """What the configuration has beside its own, for as long as a fault lasts."""
        self.refused_configs = 0
        self.envoy: Child
        self.engines: Child
        self.envoy_used: dict[str, list[Usage]] = {}
        self.children = Children(folder / "logs")
        self.http: aiohttp.ClientSession
        self._exit = contextlib.AsyncExitStack()
        self._starts: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        """Start everything, and wait until the picker knows every engine. Raises ExtprocError."""
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.children)
            self.http = await stack.enter_async_context(
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=5), connector=aiohttp.TCPConnector(limit=0, force_close=True)
                )
            )
            self.journal.touch()
            self.write_endpoints(self.endpoint_ids)
            for picker in self.pickers:
                self.write_config(picker)
            argv = [
                sys.executable,
                "-m",
                "bench.hard_days.engines",
                str(self.journal),
                MODEL,
                *map(str, self.engine_ports),
            ]
            self.engines = await self._start("engines", argv)
            await self.engines.wait_http(f"http://127.0.0.1:{self.engine_ports[-1]}/health")
            for picker in self.pickers:
                await self.start_picker(picker)
                await self.until_ready(picker)
            self.envoy, self.envoy_admin = await self.start_envoy(self.envoy_admin)
            await self.until_picker_healthy()
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End everything."""
        await self._exit.aclose()

    async def _start(self, name: str, argv: list[str]) -> Child:
        count = self._starts[name] = self._starts.get(name, 0) + 1
        return await self.children.start(name if count == 1 else f"{name}-{count}", argv)

    # Engines

    @property
    def endpoint_ids(self) -> list[str]:
        """`ip:port` of every engine."""
        return [f"127.0.0.1:{port}" for port in self.engine_ports]

    async def order(self, engine: int, **fault: Any) -> None:
        """Order a fault of an engine. A restart is answered when it is back."""
        url = f"http://127.0.0.1:{self.engine_ports[engine]}/fault"
        async with self.http.post(url, json=fault, timeout=aiohttp.ClientTimeout(total=30)) as answer:
            if answer.status != 200:
                raise ExtprocError(f"engine {engine + 1} refused the fault {fault}: {await answer.text()}")

    def write_endpoints(self, entries: list[Any] | str | bytes | None) -> None:
        """Write the endpoints file at once: entries, or any content; None: no file."""
        if entries is None:
            self.endpoints_file.unlink(missing_ok=True)
            return
        text = yaml.safe_dump(entries) if isinstance(entries, list) else entries
        self._replace(self.endpoints_file, text)

    # Pickers

    def picker_config(self, picker: Picker, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Give the picker's configuration: what is shipped, but for ports, endpoints and the lease."""
        document: dict[str, Any] = {
            "server": {
                "host": "127.0.0.1",
                "grpc_port": picker.ports.grpc,
                "health_port": picker.ports.health,
                "metrics_port": picker.ports.metrics,
            },
            "admin": {"port": picker.ports.admin},
            "pool": {"file": {"path": str(self.endpoints_file)}},
            "in_flight": {"lease": LEASE_S},
            "log": {"decisions": {"sample": 0.05}},
        }
        if self.transport:
            document["server"]["transport"] = self.transport
        for section, keys in changes.items():
            document[section] = {**document.get(section, {}), **keys}
        return document

    def write_config(self, picker: Picker, text: str | bytes | None = None) -> None:
        """Write the configuration with the changes in force, or any other text in its place."""
        self._replace(
            picker.config, text if text is not None else yaml.safe_dump(self.picker_config(picker, self.changes))
        )

    @staticmethod
    def _replace(path: Path, text: str | bytes) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_bytes(text.encode() if isinstance(text, str) else text)
        fresh.replace(path)

    async def start_picker(self, picker: Picker) -> Child:
        """Start a process in a picker's place."""
        limited = ["/bin/sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "picker"]
        argv = [*limited, sys.executable, "-m", "extproc", "serve", "--config", str(picker.config)]
        picker.child = await self._start(f"picker-{picker.number + 1}", argv)
        return picker.child

    async def until_ready(self, picker: Picker, *, timeout_s: float = 30.0) -> None:
        """Wait until the process says that it is ready. Raises ChildError."""
        assert picker.child is not None
        await picker.child.wait_http(f"http://127.0.0.1:{picker.ports.metrics}/readyz", timeout_s=timeout_s)

    async def readiness(self, picker: Picker) -> int:
        """Return the status of /readyz; 0 where nobody answers."""
        try:
            async with self.http.get(f"http://127.0.0.1:{picker.ports.metrics}/readyz") as answer:
                return answer.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0

    async def until_silent(self, picker: Picker, child: Child) -> None:
        """Wait until a process that was told to end takes no connections on the gRPC port any more."""
        while child.running:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", picker.ports.grpc)
            except OSError:
                return
            writer.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.process.wait(), 0.05)

    async def metrics(self, picker: Picker) -> dict[str, float]:
        """Read a picker's metrics, added up by name. Raises aiohttp.ClientError, TimeoutError, OSError."""
        found: dict[str, float] = {}
        async with self.http.get(f"http://127.0.0.1:{picker.ports.metrics}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    # Envoy

    def url(self, way: str) -> str:
        """Return where requests of a way go in."""
        return f"http://127.0.0.1:{self.ports[way]}"

    async def start_envoy(self, admin_port: int) -> tuple[Child, int]:
        """Start an Envoy on the three ports, beside one that may have them already; wait until it is ready."""
        config = self.folder / "envoy.yaml"
        config.write_text(yaml.safe_dump(self._envoy_config(admin_port), sort_keys=False))
        argv = [
            str(envoy_binary()),
            "-c",
            str(config),
            "--concurrency",
            "2",
            "--use-dynamic-base-id",
            "--log-level",
            "warning",
        ]
        child = await self._start("envoy", [*argv, "--drain-time-s", str(_DRAIN_S)])
        await child.wait_http(f"http://127.0.0.1:{admin_port}/ready")
        return child, admin_port

    async def until_picker_healthy(self, timeout_s: float = 15.0) -> None:
        """Wait until Envoy's health checks have found every picker that runs. Raises ExtprocError."""
        wanted = sum(picker.running for picker in self.pickers)
        deadline = time.monotonic() + timeout_s
        url = f"http://127.0.0.1:{self.envoy_admin}/stats?format=json&filter=^cluster.picker-picker.membership_healthy$"
        while time.monotonic() < deadline:
            async with self.http.get(url) as answer:
                stats = (await answer.json(content_type=None))["stats"]
            if stats and stats[0]["value"] >= wanted:
                return
            await asyncio.sleep(0.1)
        raise ExtprocError(f"Envoy did not find {wanted} picker(s) healthy within {timeout_s:.0f} s")

    async def replace_envoy(self, linger_s: float) -> None:
        """Start a new Envoy on the same ports, drain the old one, and end it `linger_s` after it has stopped listening."""
        old, old_admin = self.envoy, self.envoy_admin
        self.envoy, self.envoy_admin = await self.start_envoy(free_ports(1)[0])
        async with self.http.post(f"http://127.0.0.1:{old_admin}/drain_listeners?graceful") as answer:
            await answer.read()
        await asyncio.sleep(_DRAIN_S + linger_s)
        await old.stop()

    def _envoy_config(self, admin_port: int) -> dict[str, Any]:
        first, *more = (picker.ports.grpc for picker in self.pickers)
        listens = [
            Listen(name, self.ports[way], "direct", first, tuple(more))
            if way == PICKER
            else Listen(name, self.ports[way])
            for way, name in _LISTENERS.items()
        ]
        document = envoy_config(listens, self.endpoint_ids, admin_port)
        resources = document["static_resources"]
        by_name = {one["name"]: one for one in resources["listeners"]}
        policies = [
            route["route"]["retry_policy"]
            for route in _routes(by_name[_LISTENERS[PICKER]])
            if "retry_policy" in route.get("route", {})
        ]
        if not policies:
            raise ExtprocError("the profile direct has no retry policy to compare with")
        for route in _routes(by_name[_LISTENERS[RETRYING]]):
            route["route"]["retry_policy"] = policies[0]
        # What the policy reads may be written by the cluster's own filters.
        clusters = {one["name"]: one for one in resources["clusters"]}
        ours, retrying = clusters[f"engines-{_LISTENERS[PICKER]}"], clusters[f"engines-{_LISTENERS[RETRYING]}"]
        retrying["typed_extension_protocol_options"] = ours["typed_extension_protocol_options"]
        return document

    # Everything

    def look(self) -> None:
        """Note what every process uses now."""
        now = time.monotonic()
        for picker in self.pickers:
            if picker.child is not None and (seen := usage(picker.child, now)) is not None:
                picker.used.setdefault(picker.child.name, []).append(seen)
        if (seen := usage(self.envoy, now)) is not None:
            self.envoy_used.setdefault(self.envoy.name, []).append(seen)

    async def kill(self, picker: Picker) -> None:
        """End a picker at once."""
        assert picker.child is not None
        picker.leaving.add(picker.child.process.pid)
        await picker.child.kill()

    def terminate(self, picker: Picker) -> Child:
        """Ask a picker to end; return its process."""
        assert picker.child is not None
        picker.leaving.add(picker.child.process.pid)
        picker.child.send(signal.SIGTERM)
        return picker.child


def _routes(listener: dict[str, Any]) -> list[dict[str, Any]]:
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    routes: list[dict[str, Any]] = manager["route_config"]["virtual_hosts"][0]["routes"]
    return routes
