"""`extproc explain` against live model servers, and `extproc serve --endpoint` without a file; no Envoy needed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.demo.processes import Children, free_ports
from tests.e2e.stack import DEADLINE_S, EXTPROC, MODEL, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "a long question " * 200}]}


@dataclass
class Servers:
    """Two model servers, a configuration that names them, and one request body."""

    folder: Path
    children: Children
    ids: list[str]
    config: Path
    body: Path

    def file(self, name: str, content: object) -> Path:
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path


@dataclass(frozen=True)
class Ended:
    status: int | None
    out: str
    err: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    folder = tmp_path_factory.mktemp("explain")
    ports = free_ports(2)
    ids = [f"127.0.0.1:{port}" for port in ports]
    async with Children(folder / "logs") as children:
        started = [
            await children.start(
                f"gpu-{port}",
                [*EXTPROC, "model-server", "--port", str(port), "--model", MODEL, "--lora", f"only-{port}"],
            )
            for port in ports
        ]
        for child, server in zip(started, ids, strict=True):
            await child.wait_http(f"http://{server}/health", timeout_s=DEADLINE_S)
        servers = Servers(folder, children, ids, folder / "extproc.yaml", folder / "body.json")
        servers.config.write_text(yaml.safe_dump({"pool": {"endpoints": ids}}))
        servers.body.write_text(json.dumps(BODY))
        yield servers


async def extproc(*argv: object, stdin: bytes = b"") -> Ended:
    """Run one command of the command line to its end."""
    process = await asyncio.create_subprocess_exec(
        *EXTPROC,
        *map(str, argv),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), DEADLINE_S)
    return Ended(process.returncode, out.decode(), err.decode())


async def test_a_decision_in_words(servers: Servers) -> None:
    ended = await extproc("explain", servers.body, "--config", servers.config)
    assert (ended.status, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].startswith(tuple(servers.ids))
    assert "nothing of the prompt" in lines[0]
    table = "\n".join(lines[1:])
    assert all(server in table for server in servers.ids)
    assert table.count("* 127.0.0.1") == 1, "the chosen one is marked"
    assert "never" not in table, "the signals are live"


async def test_after_another_body_the_prefix_is_known(servers: Servers) -> None:
    longer = {**BODY, "messages": [*BODY["messages"], {"role": "user", "content": "and then?"}]}
    body = servers.file("longer.json", longer)
    ended = await extproc("explain", body, "--config", servers.config, "--after", servers.body, "--json")
    assert (ended.status, ended.err) == (0, "")
    decision: dict[str, Any] = json.loads(ended.out)
    assert decision["matched_bytes"] > 0.9 * decision["prompt_bytes"]
    assert decision["kind"] == "chat"
    assert [candidate["endpoint"] for candidate in decision["candidates"]] == servers.ids
    assert all(candidate["signal_age_s"] is not None for candidate in decision["candidates"])


async def test_an_adapter_goes_where_it_is_listed(servers: Servers) -> None:
    for server in servers.ids:
        body = servers.file("adapter.json", {**BODY, "model": f"only-{server.rpartition(':')[2]}"})
        ended = await extproc("explain", body, "--config", servers.config, "--json")
        assert ended.status == 0
        assert json.loads(ended.out)["endpoint"] == server


async def test_a_body_from_standard_input_and_endpoints_from_flags(servers: Servers) -> None:
    argv = ["explain", "-", "--endpoint", servers.ids[1], "--path", "/v1/completions", "--json"]
    ended = await extproc(*argv, stdin=b'{"prompt": "hello"}')
    assert (ended.status, ended.err) == (0, "")
    decision = json.loads(ended.out)
    assert (decision["endpoint"], decision["kind"]) == (servers.ids[1], "completions")


async def test_what_would_be_refused(servers: Servers) -> None:
    bad = servers.file("bad.json", {"model": "m", "messages": "hello"})
    ended = await extproc("explain", bad, "--config", servers.config)
    assert ended.status == 1
    assert "400" in ended.out
    assert "messages" in ended.out
    empty = servers.file("empty.yaml", "pool: {endpoints: []}\n")
    ended = await extproc("explain", servers.body, "--config", empty)
    assert ended.status == 1
    assert "503" in ended.out


async def test_an_endpoint_that_does_not_answer_is_named(servers: Servers) -> None:
    [port] = free_ports(1)
    ended = await extproc("explain", servers.body, "--endpoint", servers.ids[0], "--endpoint", f"127.0.0.1:{port}")
    assert ended.status == 0
    assert "never" in ended.out, "it may be chosen all the same: unknown is not dead"
    assert f"no signals from 127.0.0.1:{port}" in ended.err


@pytest.mark.parametrize("what", ["body", "config", "key"])
async def test_what_cannot_be_read_is_status_2(servers: Servers, what: str) -> None:
    broken = servers.file("broken.yaml", "pool: {endpoint: []}\n")
    missing = servers.folder / "missing"
    body = missing if what == "body" else servers.body
    config = {"body": servers.config, "config": missing, "key": broken}[what]
    ended = await extproc("explain", body, "--config", config)
    assert (ended.status, ended.out) == (2, "")
    assert ("pool.endpoint" if what == "key" else "missing") in ended.err
    assert "Traceback" not in ended.err


async def test_serve_with_endpoints_from_flags(servers: Servers) -> None:
    grpc, health, metrics, admin = free_ports(4)
    flags = ["--host", "127.0.0.1", "--grpc-port", grpc, "--grpc-health-port", health]
    flags += ["--metrics-port", metrics, "--admin-port", admin, "--strategy", "least-load"]
    for server in servers.ids:
        flags += ["--endpoint", server]
    child = await servers.children.start("picker", [*EXTPROC, "serve", *map(str, flags)])
    await child.wait_http(f"http://127.0.0.1:{metrics}/readyz", timeout_s=DEADLINE_S)
    async with aiohttp.ClientSession() as http:

        async def heard() -> bool:
            async with http.get(f"http://127.0.0.1:{admin}/debug/endpoints") as answer:
                found = (await answer.json())["endpoints"]
            assert [one["endpoint"] for one in found] == servers.ids
            return all(one["signal_age_s"] is not None for one in found)

        await until(heard, "both endpoints have been scraped")
        async with http.get(f"http://127.0.0.1:{admin}/debug/config") as answer:
            config = (await answer.json())["config"]
    assert config["routing"]["strategy"] == "least-load"
    await child.kill()  # leaving in order takes `drain_delay`, 5 s by default
