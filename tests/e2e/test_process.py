"""What a picker's process withstands: SIGHUP at any time, and more connections than it has file descriptors. No Envoy is needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import yaml

from extproc.demo.processes import Child, Children
from extproc.edge.process.tls import self_signed
from tests.e2e.day import SERVING, assert_clean, channel, events, health
from tests.e2e.stack import EXTPROC, Metrics, Ports, merged, until
from tests.edge.grpcio.harness import Gateway, destination

pytestmark = pytest.mark.e2e

ENDPOINT = "127.0.0.1:1"
BODY = json.dumps({"model": "m", "prompt": "once upon a time"}).encode()


@dataclass
class Picker:
    """A picker of its own, without Envoy."""

    child: Child
    ports: Ports
    file: Path

    def write(self, *changes: Mapping[str, Any]) -> None:
        """Write the configuration."""
        document: dict[str, Any] = {
            "apiVersion": "extproc/v1alpha1",
            "kind": "ExtprocConfig",
            "pool": {"endpoints": [ENDPOINT], "scrape": {"enabled": False}},
            "server": {"host": "127.0.0.1", "drain_delay": 0, "grace_period": 0},
        }
        for change in changes:
            document = merged(document, change)
        self.file.write_text(yaml.safe_dump(document))

    async def decides(self) -> str:
        """Have a request decided on the gRPC port, on a connection of its own; return the destination."""
        async with asyncio.timeout(60), channel(self.ports.grpc) as opened:
            gateway = Gateway(opened)
            await gateway.headers()
            await gateway.body(BODY, end=True)
            chosen = destination(await gateway.hear())
            gateway.call.cancel()
        return chosen


@asynccontextmanager
async def picker(
    folder: Path, transport: str, *changes: Mapping[str, Any], with_file: bool = True, descriptors: int = 0
) -> AsyncIterator[Picker]:
    """Run one until it is ready, with so many descriptors at most, if any are given."""
    async with Children(folder / "logs") as children:
        ports = Ports.free()
        argv = [*EXTPROC, "serve", "--transport", transport, "--host", "127.0.0.1"]
        argv += ["--grpc-port", str(ports.grpc), "--grpc-health-port", str(ports.health)]
        argv += ["--metrics-port", str(ports.metrics), "--admin-port", str(ports.admin)]
        made = Picker(None, ports, folder / "extproc.yaml")  # type: ignore[arg-type]
        made.write(*changes)
        argv += ["--config", str(made.file)] if with_file else ["--endpoint", ENDPOINT]
        if descriptors:
            argv = ["bash", "-c", f'ulimit -n {descriptors} && exec "$@"', "bash", *argv]
        made.child = await children.start("picker", argv)
        await made.child.wait_http(f"http://127.0.0.1:{ports.metrics}/readyz", timeout_s=60)
        yield made
        if made.child.running:
            assert await made.child.stop(60) == 0
        assert_clean(made.child)


# SIGHUP

AGAIN = "SIGHUP: files were read again; endpoints are looked up anew"


async def test_sighup_reads_the_configuration_and_logs_one_line(tmp_path: Path, transport: str) -> None:
    async with picker(tmp_path, transport) as made:
        for number, (change, said) in enumerate(
            [
                ({}, "unchanged"),
                ({"pool": {"endpoints": ["127.0.0.1:2"]}}, "applied"),
                ({"pool": {"endpoints": ["nonsense"]}}, "refused, the last good one stays"),
                ({"pool": {"endpoints": ["127.0.0.1:3"]}}, "applied"),
            ],
            start=1,
        ):
            # The watch finds what is changed within a second, unless it is told at once.
            if change:
                made.write(change)
            made.child.send(signal.SIGHUP)
            await until(partial(told_times, made, number), "the line")
            told = events(made.child, AGAIN)[-1]
            assert told["configuration"] in {said, "unchanged"}
            assert told["certificates"] == "none (plaintext)"
            assert await health(made.ports.health) == SERVING
        await until(lambda: events(made.child, "endpoints changed")[-1]["added"] == ["127.0.0.1:3"], "the last pool")
        assert await made.decides() == "127.0.0.1:3"


def told_times(made: Picker, number: int) -> bool:
    return len(events(made.child, AGAIN)) == number


async def test_sighup_without_a_configuration_file(tmp_path: Path, transport: str) -> None:
    async with picker(tmp_path, transport, with_file=False) as made:
        made.child.send(signal.SIGHUP)
        await until(lambda: events(made.child, AGAIN), "the line")
        assert events(made.child, AGAIN)[0]["configuration"] == "no file: there is no --config"
        assert await made.decides() == ENDPOINT


async def test_sighup_reads_certificates(tmp_path: Path, transport: str) -> None:
    """Also where a file looks as before: same size, same time, same inode."""
    tls = {"mode": "files", "certificate": str(tmp_path / "crt"), "private_key": str(tmp_path / "key")}
    pairs = [self_signed(("localhost",), datetime.now(UTC)) for _ in range(2)]

    def write(number: int) -> None:
        (tmp_path / "crt").write_bytes(pairs[number].certificate)
        (tmp_path / "key").write_bytes(pairs[number].private_key)

    def shown(port: int) -> str:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=30)

    write(0)
    async with picker(tmp_path, transport, {"server": {"tls": tls}}) as made:
        assert (await asyncio.to_thread(shown, made.ports.grpc)).strip() == pairs[0].certificate.decode().strip()
        (tmp_path / "crt").write_bytes(b"nonsense")
        made.child.send(signal.SIGHUP)
        await until(lambda: events(made.child, AGAIN), "the line")
        assert events(made.child, AGAIN)[0]["certificates"].startswith("refused, the last good ones stay: ")
        assert (await asyncio.to_thread(shown, made.ports.grpc)).strip() == pairs[0].certificate.decode().strip()
        write(1)
        made.child.send(signal.SIGHUP)
        await until(lambda: len(events(made.child, AGAIN)) == 2, "the line")
        assert events(made.child, AGAIN)[1]["certificates"] == "read"
        assert (await asyncio.to_thread(shown, made.ports.grpc)).strip() == pairs[1].certificate.decode().strip()
        assert await health(made.ports.health) == SERVING


async def test_sighup_while_it_starts_and_while_it_stops(tmp_path: Path, transport: str) -> None:
    """From a little after Python has begun to the end; many, because nobody knows where each falls."""
    async with Children(tmp_path / "logs") as children:
        ports = Ports.free()
        argv = [*EXTPROC, "serve", "--transport", transport, "--host", "127.0.0.1", "--endpoint", ENDPOINT]
        argv += ["--grpc-port", str(ports.grpc), "--grpc-health-port", str(ports.health)]
        argv += ["--metrics-port", str(ports.metrics), "--admin-port", str(ports.admin)]
        file = tmp_path / "extproc.yaml"
        file.write_text(
            "apiVersion: extproc/v1alpha1\nkind: ExtprocConfig\nserver: {drain_delay: 300ms, grace_period: 0}\n"
        )
        child = await children.start("picker", [*argv, "--config", str(file)])
        await until(lambda: ignores_sighup(child), "the first thing it does")
        stopping = False
        async with asyncio.timeout(60):
            while child.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGHUP)  # `send` would take its end from who waits for it
                if not stopping and events(child, AGAIN) and events(child, "ready"):
                    child.send(signal.SIGTERM)
                    stopping = True
                await asyncio.sleep(0.01)
        assert child.process.returncode == 0, child.tail()
        assert_clean(child)
        assert events(child, "stopped")


def ignores_sighup(child: Child) -> bool:
    """Tell whether a process ignores or catches the signal (Linux)."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{child.process.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    return bool((int(status["SigIgn"], 16) | int(status["SigCgt"], 16)) & 1 << signal.SIGHUP - 1)


# More connections than descriptors

IDLE = 300
DESCRIPTORS = 256


async def served(made: Picker, *, patient: bool) -> None:
    """Hold all ports to be served; a patient one asks again for as long as idle peers may stay."""
    checks: dict[str, Callable[[], Awaitable[bool]]] = {
        "grpc": lambda: decided(made),
        "health": lambda: is_serving(made),
        "metrics": lambda: answers(made.ports.metrics, "/metrics"),
        "admin": lambda: answers(made.ports.admin, "/debug/config"),
    }
    for name, check in checks.items():
        async with asyncio.timeout(60):
            while not await check():
                assert patient, name
                await asyncio.sleep(0.5)


async def decided(made: Picker) -> bool:
    try:
        return await made.decides() == ENDPOINT
    except grpc.aio.AioRpcError:
        return False


async def is_serving(made: Picker) -> bool:
    return await health(made.ports.health) == SERVING


async def answers(port: int, path: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.parametrize("crowded", ["metrics", "grpc", "health", "admin"])
async def test_idle_peers_on_one_port_keep_nobody_out(tmp_path: Path, transport: str, crowded: str) -> None:
    async with picker(tmp_path, transport, descriptors=DESCRIPTORS) as made, contextlib.AsyncExitStack() as stack:
        port = getattr(made.ports, crowded)
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        # gRPC's own port closes the newest until those that say nothing have had their ten seconds.
        theirs = transport == "grpcio" and crowded in {"grpc", "health"}
        await served(made, patient=theirs)
        assert len(os.listdir(f"/proc/{made.child.process.pid}/fd")) < DESCRIPTORS  # noqa: PTH208
        page = await metrics_page(made.ports.metrics)
        assert page.total("extproc_accept_failures_total") == 0
        assert (page.total("extproc_connections_dropped_total", listener=crowded, reason="crowded") > 0) is not theirs
        assert (await warning(made))["descriptors"] == DESCRIPTORS


async def warning(made: Picker) -> dict[str, Any]:
    start = "few file descriptors: the gRPC port"
    await until(lambda: any(told["event"].startswith(start) for told in events(made.child)), "the warning")
    return next(told for told in events(made.child) if told["event"].startswith(start))


async def metrics_page(port: int) -> Metrics:
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/metrics") as answer:
        return Metrics(await answer.text())
