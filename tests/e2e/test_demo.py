"""The demo as a newcomer runs it, small: its result, its files, and what it leaves behind when it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from extproc.demo.processes import ChildError, envoy_binary

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]
LIMIT_S = 180.0


@pytest.fixture(autouse=True)
def _needs_envoy() -> None:
    try:
        envoy_binary()
    except ChildError as error:
        pytest.skip(str(error))


@contextlib.asynccontextmanager
async def demo(out: Path, *words: str, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = [sys.executable, "-m", "extproc", "demo", "--free-ports", "--out", str(out), *words]
    # Every process of this run carries the mark in its environment, which is how survivors are found.
    marked = {**os.environ, "EXTPROC_TEST_RUN": str(out), **env}
    child = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=marked)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def survivors(out: Path) -> list[str]:
    """Command lines of processes of this run that are still there."""
    mark = f"EXTPROC_TEST_RUN={out}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.alone
async def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with demo(out, "--rows", "2") as child, asyncio.timeout(LIMIT_S):
        said, errors = (text.decode() for text in await child.communicate())
    assert (out / "demo.json").exists(), errors
    report = json.loads((out / "demo.json").read_text())
    met = all(aim["met"] for aim in report["aims"])
    assert child.returncode == (0 if met else 1), errors
    assert (errors == "") is met
    aims = {aim["name"]: aim for aim in report["aims"]}
    assert aims["errors"]["measured"] == 0
    # Shares of tokens, not times: they hold on a busy machine too.
    assert aims["cached share, picker against round robin"]["measured"] >= 2.0
    assert 0.2 <= aims["round robin's own cached share"]["measured"] <= 0.45
    figures = report["figures"]
    assert figures["picker"]["requests"] == figures["round robin"]["requests"]
    assert set(figures["picker"]["per_endpoint"]) == {"gpu-1", "gpu-2", "gpu-3", "gpu-4"}
    for wanted in ("prompt tokens cached", "picker vs round robin", "a new conversation: ", "Picture: "):
        assert wanted in said
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert survivors(out) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_while_it_runs(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    async with demo(out, "--rows", "2") as child, asyncio.timeout(LIMIT_S):
        while not list((out / "demo-logs").glob("*/envoy.log")):
            await asyncio.sleep(0.05)
        assert len(survivors(out)) > 4
        child.send_signal(number)
        _, errors = await child.communicate()
    assert child.returncode == 130, errors
    assert b"everything it started has been stopped" in errors
    assert b"Traceback" not in errors
    assert survivors(out) == []


async def test_keep_stays_up_and_what_it_prints_works(tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with demo(out, "--rows", "2", "--sessions", "4", "--keep") as child, asyncio.timeout(LIMIT_S):
        assert child.stdout is not None
        said = ""
        while "\n  curl " not in said or not said.endswith("\n"):
            line = await child.stdout.readline()
            assert line, said
            said += line.decode()
        words = shlex.split(said[said.index("  curl ") :])
        asked = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        answer, _ = await asked.communicate()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0]
        assert b"x-extproc-explain: weighted" in head
        assert json.loads(body)["usage"]["completion_tokens"] > 0
        async with aiohttp.ClientSession() as http:
            for url in re.findall(r"http://127[^ )]+/(?:debug/\w+|metrics)", said):
                async with http.get(url) as response:
                    assert response.status == 200, url
        child.send_signal(signal.SIGINT)
        _, errors = await child.communicate()
    assert b"Traceback" not in errors
    assert survivors(out) == []


async def test_killed_while_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with demo(out, "--rows", "2") as child, asyncio.timeout(LIMIT_S):
        while not list((out / "demo-logs").glob("*/envoy.log")):
            await asyncio.sleep(0.05)
        child.kill()
        await child.communicate()
        while survivors(out):
            await asyncio.sleep(0.05)


async def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 10000))
        except OSError:
            pytest.skip("port 10000 is in use by something else, which would do, but may not stay")
        taken.listen()
        argv = [sys.executable, "-m", "extproc", "demo", "--out", str(tmp_path)]
        child = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        async with asyncio.timeout(LIMIT_S):
            said, errors = await child.communicate()
    assert child.returncode == 2
    assert b"10000" in errors
    assert b"is in use" in errors
    assert b"--free-ports" in errors
    assert said == b""


async def test_a_missing_envoy(tmp_path: Path) -> None:
    async with demo(tmp_path, EXTPROC_ENVOY=str(tmp_path / "none")) as child, asyncio.timeout(LIMIT_S):
        _, errors = await child.communicate()
    assert child.returncode == 2
    assert errors.startswith(b"extproc demo: EXTPROC_ENVOY=")
    assert b"make demo" in errors
