"""The processes of the benchmark: the engines, the servers that are compared, and one Envoy with a listener for each.

Every server gets the same ten engines; each picker scrapes them all the time, whether it is being asked or not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from bench.bodies import write_one
from bench.envoy_stage import PLAIN, Listen, envoy_config
from bench.peers import Peer
from extproc.config.load import load
from extproc.demo.processes import Child, ChildError, Children, envoy_binary, free_ports
from extproc.errors import ConfigError

__all__ = [
    "ENGINES",
    "Contender",
    "Stage",
    "can_close",
    "children_of",
    "cpu_s",
    "picker_config",
    "raise_stage",
    "start_engines",
    "start_picker",
]

ENGINES: Final = 10
_ROOT: Final = Path(__file__).resolve().parent.parent
_ENVOY: Final = ("--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning")
_PEER_READY_S: Final = 30.0


def cpu_s(child: Child) -> float:
    """Return the CPU time a child has used, all threads, in seconds: to the nanosecond, where `/proc` has hundredths."""
    return _cpu_of(child.process.pid)


def _cpu_of(pid: int) -> float:
    # Linux's `clock_getcpuclockid(3)` makes the clock's number of the process id like this; Python does not offer the call.
    return time.clock_gettime((~pid << 3) | 2)


def children_of(group: int) -> list[int]:
    """Return the processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@dataclass(frozen=True, slots=True)
class Contender:
    """One server that is compared."""

    name: str
    child: Child
    port: int
    profile: str = "direct"
    """The one it is compared in where bodies are short; streams are compared in each profile that makes a difference."""
    stranger: bool = False
    """Started by a command we do not know: whatever it has started in turn counts, and ends with it."""

    def cpu_s(self) -> float:
        """Return the CPU time used so far, in seconds."""
        if not self.stranger:
            return cpu_s(self.child)
        used = 0.0
        for pid in children_of(self.child.process.pid):
            try:
                used += _cpu_of(pid)
            except OSError:  # it has just ended
                continue
        return used

    def rss_bytes(self) -> int:
        """Return the resident memory."""
        if not self.stranger:
            return self.child.rss_bytes()
        page = os.sysconf("SC_PAGE_SIZE")
        pids = children_of(self.child.process.pid)
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids)


class Stage:
    """Everything that runs: who is compared, and where each is reached."""

    def __init__(self, folder: Path, contenders: Sequence[Contender], envoy: Child, ports: dict[str, int]) -> None:
        self.folder = folder
        self.contenders = {one.name: one for one in contenders}
        self.envoy = envoy
        self._ports = ports

    def url(self, listener: str) -> str:
        """Return where chats go in at a listener (`NAME-PROFILE`, or `no-filter`)."""
        return f"http://127.0.0.1:{self._ports[listener]}/v1/chat/completions"

    def port(self, listener: str) -> int:
        """Return a listener's port."""
        return self._ports[listener]

    async def messages(self, listener: str) -> tuple[int, int]:
        """Return how many ext_proc messages Envoy has sent and received so far for one listener."""
        url = f"http://127.0.0.1:{self._ports['admin']}/stats?format=json&filter=^http.{listener}.ext_proc.stream_msgs"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            stats = (await response.json(content_type=None))["stats"]
        values = {one["name"].rpartition(".")[2]: one["value"] for one in stats if "name" in one}
        return values.get("stream_msgs_sent", 0), values.get("stream_msgs_received", 0)


def picker_config(
    endpoints: Sequence[str],
    transport: str,
    ports: tuple[int, int, int],
    *,
    response_phase: str = "keep",
    scraped: bool = True,
) -> str:
    """Return the default configuration but for transport, ports and endpoints: default strategy, scraping, metrics, log.

    `ports`: gRPC, health, metrics.
    """
    server = dict(zip(("grpc_port", "health_port", "metrics_port"), ports, strict=True))
    return yaml.safe_dump(
        {
            "apiVersion": "extproc/v1alpha1",
            "kind": "ExtprocConfig",
            "server": {
                "host": "127.0.0.1",
                "transport": transport,
                "response_phase": response_phase,
                **server,
                "drain_delay": 0,
                "grace_period": 2,
            },
            "admin": {"port": 0},
            "pool": {"endpoints": list(endpoints), "scrape": {"enabled": scraped}},
        },
        sort_keys=False,
    )


def can_close() -> bool:
    """Tell whether this picker knows `response_phase: close`."""
    try:
        load(b"server: {transport: native, response_phase: close}", source="bench")
    except ConfigError:
        return False
    return True


async def start_engines(children: Children, *, kv_tokens: int | None = None) -> list[str]:
    """Start the engines; return their addresses. Raises ChildError."""
    ports = free_ports(ENGINES)
    argv = [sys.executable, "-m", "bench.engine"]
    argv += [text for port in ports for text in ("--port", str(port))]
    if kv_tokens is not None:
        argv += ["--kv-tokens", str(kv_tokens)]
    engines = await children.start("engines", argv, env={"PYTHONPATH": str(_ROOT)})
    await engines.wait_http(f"http://127.0.0.1:{ports[-1]}/metrics")
    return [f"127.0.0.1:{port}" for port in ports]


async def start_picker(
    children: Children,
    folder: Path,
    name: str,
    endpoints: Sequence[str],
    *,
    transport: str,
    response_phase: str = "keep",
    scraped: bool = True,
) -> tuple[Contender, int]:
    """Start the picker and wait until it is ready; return it and its metrics port. Raises ChildError."""
    grpc_port, health_port, metrics_port = free_ports(3)
    path = folder / f"bench-{name}.yaml"
    ports = (grpc_port, health_port, metrics_port)
    path.write_text(picker_config(endpoints, transport, ports, response_phase=response_phase, scraped=scraped))
    child = await children.start(name, [sys.executable, "-m", "extproc", "serve", "--config", str(path)])
    await child.wait_http(f"http://127.0.0.1:{metrics_port}/readyz")
    return Contender(name, child, grpc_port), metrics_port


async def _start_bare(children: Children, endpoints: Sequence[str]) -> Contender:
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "bench.bare_server", "--port", str(port), "--endpoints", ",".join(endpoints)]
    child = await children.start("bare", argv, env={"PYTHONPATH": str(_ROOT)})
    await _wait_port(child, port)
    return Contender("bare", child, port)


async def _start_peer(children: Children, peer: Peer, endpoints: Sequence[str], strangers: list[Child]) -> Contender:
    port, health_port, metrics_port = free_ports(3)
    port = peer.port or port
    argv = peer.argv(port=port, health_port=health_port, metrics_port=metrics_port, endpoints=endpoints)
    child = await children.start(peer.name, argv)
    strangers.append(child)
    await _wait_port(child, port)
    return Contender(peer.name, child, port, peer.profile, stranger=True)


async def _wait_port(child: Child, port: int) -> None:
    """Wait until something listens on a port. Raises ChildError where the child ends first, or never does."""
    deadline = time.monotonic() + _PEER_READY_S
    while time.monotonic() < deadline:
        if not child.running:
            raise ChildError(f"{child.name} ended with status {child.process.returncode}:\n{child.tail()}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise ChildError(
        f"{child.name} does not listen on 127.0.0.1:{port} after {_PEER_READY_S:.0f} s "
        f"(its command is given the port as {{port}}):\n{child.tail()}"
    )


def _listens(contenders: Sequence[Contender], *, streams: bool, ports: list[int]) -> list[Listen]:
    """Return the listeners: one without a picker, one per contender, and for streams one more in full duplex both ways."""
    listens = [Listen(PLAIN, ports.pop())]
    for one in contenders:
        profiles = [one.profile]
        if streams and not one.stranger:
            profiles.append("full-duplex")
        listens += [
            Listen(f"{one.name}-{profile}", ports.pop(), profile, one.port, health_checked=not one.stranger)
            for profile in profiles
        ]
    return listens


@asynccontextmanager
async def raise_stage(
    folder: Path,
    *,
    transports: Sequence[str],
    peers: Sequence[Peer] = (),
    streams: bool = False,
    unscraped: bool = False,
) -> AsyncIterator[Stage]:
    """Start everything and wait until each answers through Envoy; end all of it with the context. Raises ChildError.

    `unscraped` adds the picker on native, with `response_phase: close` where it can, as it would be without scraping.
    """
    started: list[Contender] = []
    strangers: list[Child] = []
    try:
        async with Children(folder / "bench-logs") as children:
            endpoints = await start_engines(children)
            started.append(await _start_bare(children, endpoints))
            for transport in transports:
                picker, _ = await start_picker(children, folder, transport, endpoints, transport=transport)
                started.append(picker)
            if streams and "native" in transports and can_close():
                picker, _ = await start_picker(
                    children, folder, "native-close", endpoints, transport="native", response_phase="close"
                )
                started.append(picker)
            if unscraped:
                phase = "close" if can_close() else "keep"
                picker, _ = await start_picker(
                    children, folder, "unscraped", endpoints, transport="native", response_phase=phase, scraped=False
                )
                started.append(picker)
            for peer in peers:
                stranger = await _start_peer(children, peer, endpoints, strangers)
                started.append(stranger)
            yield await _before_envoy(children, folder, started, endpoints, streams=streams)
    finally:
        for child in strangers:
            _end_group(child.process.pid)


def _end_group(group: int) -> None:
    """Kill what a peer's command has started and not ended; the command itself has been stopped."""
    for pid in children_of(group):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


async def _before_envoy(
    children: Children, folder: Path, contenders: list[Contender], endpoints: Sequence[str], *, streams: bool
) -> Stage:
    ports = free_ports(2 * len(contenders) + 2)
    admin = ports.pop()
    listens = _listens(contenders, streams=streams, ports=ports)
    path = folder / "bench-envoy.json"
    path.write_text(json.dumps(envoy_config(listens, endpoints, admin), indent=1))
    envoy = await children.start("envoy", [str(envoy_binary()), "-c", str(path), *_ENVOY])
    await envoy.wait_http(f"http://127.0.0.1:{admin}/ready")
    stage = Stage(folder, contenders, envoy, {one.name: one.port for one in listens} | {"admin": admin})
    body = write_one(folder / "bench-body-check.json", 1000, random.Random(1)).read_bytes()
    for one in contenders:
        for listen in listens:
            if listen.picker_port == one.port:
                await _check(stage, one, listen, body)
    return stage


async def _check(stage: Stage, contender: Contender, listen: Listen, body: bytes) -> None:
    """See one request through. Raises ChildError with what came instead."""
    problem: Any = "no answer"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http:
        for _ in range(40):  # Envoy's health check may still be on its way
            try:
                headers = {"content-type": "application/json"}
                async with http.post(stage.url(listen.name), data=body, headers=headers) as response:
                    text = await response.text()
                    if response.status == 200 and '"usage"' in text:
                        return
                    problem = f"status {response.status}: {text[:300]}"
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = repr(error)
            if not contender.child.running:
                break
            await asyncio.sleep(0.1)
    raise ChildError(
        f"{contender.name}: a chat through Envoy (profile {listen.profile}) is not answered: {problem}\n"
        f"{contender.child.tail()}\n{stage.envoy.tail()}"
    )
