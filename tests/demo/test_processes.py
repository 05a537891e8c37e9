"""Child processes: started, awaited, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from extproc.demo import processes
from extproc.demo.processes import Child, ChildError, Children, envoy_binary, free_ports, port_is_free

PYTHON = sys.executable
FOREVER = [PYTHON, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    PYTHON,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]
PARENT = """
import asyncio, sys
from pathlib import Path
from extproc.demo.processes import Children
async def main():
    async with Children(Path(sys.argv[1])) as children:
        child = await children.start("child", [sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.process.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # also where it ends while this is read
        return False
    return state != "Z"


async def up(log: Path) -> None:
    async with asyncio.timeout(60):
        while "up" not in (log.read_text() if log.exists() else ""):
            await asyncio.sleep(0.01)


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not port_is_free(taken.getsockname()[1])
    assert port_is_free(free_ports(1)[0])


def test_runs_side_by_side_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTPROC_PORTS", "12345-12400")
    assert all(12345 <= port < 12400 for port in free_ports(3))


CLAIMING = """
from extproc.demo import processes
processes.port_is_free = lambda *_: True
print(*processes.free_ports(8))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="by names of sockets that only Linux has")
def test_two_processes_are_not_given_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice and the listening both would find it free. Without claims one run in 12,870 passes."""
    low = 100_000 * os.getpid()  # no ports at all, so that only the claims tell
    monkeypatch.setenv("EXTPROC_PORTS", f"{low}-{low + 16}")
    monkeypatch.setattr(processes, "port_is_free", lambda *_: True)
    ours = free_ports(8)
    theirs = subprocess.run([PYTHON, "-c", CLAIMING], capture_output=True, text=True, check=True, timeout=60).stdout
    assert sorted(ours + [int(port) for port in theirs.split()]) == list(range(low, low + 16))


def test_only_the_ports_given_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: OrderedDict[int, int | None] = OrderedDict()
    monkeypatch.setattr(processes, "_given", kept)
    monkeypatch.setattr(processes, "_REMEMBERED", 3)
    free_ports(3)
    last = free_ports(3)
    assert kept.keys() == set(last)
    for claim in kept.values():
        if claim is not None:
            os.close(claim)


async def test_children_are_stopped_on_leaving(tmp_path: Path) -> None:
    async with Children(tmp_path / "logs") as children:
        kind, stubborn = await children.start("kind", FOREVER), await children.start("stubborn", STUBBORN)
        await asyncio.gather(up(kind.log), up(stubborn.log))
        assert kind.running
        assert kind.cpu_s() >= 0
        assert kind.rss_bytes() > 1_000_000
        assert await stubborn.stop(grace_s=0.05) == -signal.SIGKILL
    assert kind.process.returncode == -signal.SIGTERM
    assert not alive(kind.process.pid)
    assert kind.tail() == "up"
    kind.send(signal.SIGTERM)
    assert children.children == []


async def test_children_are_stopped_after_a_failure(tmp_path: Path) -> None:
    started: list[Child] = []

    async def broken() -> None:
        async with Children(tmp_path) as children:
            started.append(await children.start("child", FOREVER))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await broken()
    assert not started[0].running


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
async def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(PYTHON, "-c", PARENT, str(tmp_path), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    assert alive(pid)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(60):
        while alive(pid):
            await asyncio.sleep(0.01)


async def test_the_environment_is_added_to(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        code = "import os; print(os.environ['EXTPROC_TEST'], 'PATH' in os.environ)"
        child = await children.start("child", [PYTHON, "-c", code], env={"EXTPROC_TEST": "x"})
        assert await child.process.wait() == 0
        assert child.tail() == "x True"
        child.log.unlink()
        assert child.tail() == ""


async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        with pytest.raises(ChildError, match=r"cannot start child \(/no/such\): No such file"):
            await children.start("child", ["/no/such"])


async def test_waiting_for_one_that_ends_shows_its_last_lines(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = await children.start("child", [PYTHON, "-c", "print('it is broken'); raise SystemExit(3)"])
        await child.process.wait()
        with pytest.raises(ChildError, match="child ended with status 3:\nit is broken"):
            await child.wait_http("http://127.0.0.1:1/")


async def test_waiting_for_one_that_never_gets_ready(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    async with Children(tmp_path) as children:
        child = await children.start("child", FOREVER)
        await up(child.log)
        with pytest.raises(ChildError, match=f"child did not become ready within 0 s .*{port}"):
            await child.wait_http(f"http://127.0.0.1:{port}/", timeout_s=0.1)


async def test_waiting_until_it_answers(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    async with Children(tmp_path) as children:
        argv = [PYTHON, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
        child = await children.start("child", argv)
        await child.wait_http(f"http://127.0.0.1:{port}/")
        with pytest.raises(ChildError):
            await child.wait_http(f"http://127.0.0.1:{port}/no-such-page", timeout_s=0.2)


# Envoy


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_named_envoy_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTPROC_ENVOY", str(executable(tmp_path / "my-envoy")))
    assert envoy_binary() == tmp_path / "my-envoy"


def test_a_named_envoy_that_is_none_is_an_error_not_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTPROC_ENVOY", str(tmp_path))
    with pytest.raises(ChildError, match=r"EXTPROC_ENVOY=.* is not an executable file; `make demo`"):
        envoy_binary()


def test_the_installed_envoy_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXTPROC_ENVOY", raising=False)
    monkeypatch.setattr(processes, "_REPOSITORY", tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join(["", str(tmp_path / "bin")]))
    with pytest.raises(ChildError, match=r"no Envoy binary in \.envoy or on the PATH"):
        envoy_binary()
    on_path = executable(tmp_path / "bin" / "envoy")
    assert envoy_binary() == on_path
    installed = executable(tmp_path / ".envoy" / "envoy" / "_bin" / "envoy")
    assert envoy_binary() == installed
