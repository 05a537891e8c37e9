"""`extproc explain` against a simulated engine and against nobody."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from extproc import explain as module
from extproc.app import read_config
from extproc.demo.processes import free_ports
from extproc.errors import ConfigError, ExtprocError
from extproc.explain import explain
from extproc.sim.model_server import ModelServerOptions, serve

CHAT = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "word " * 400}]}


@pytest.fixture
def body(tmp_path: Path) -> Path:
    path = tmp_path / "body.json"
    path.write_text(json.dumps(CHAT))
    return path


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    server = await serve(ModelServerOptions(port=0, name="gpu-1"))
    yield f"127.0.0.1:{server.port}"
    await server.stop()


async def run(
    endpoints: list[str], *bodies: Path, as_json: bool = False, scrape: bool = True, path: str = "/v1/chat/completions"
) -> int:
    config = read_config(None, {"pool.endpoints": endpoints, "pool.scrape.enabled": scrape})
    texts = [module._body(one) for one in bodies]
    return await module._explain(config, texts, path, as_json=as_json)


async def test_a_decision_against_live_signals(engine: str, body: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run([engine], body) == 0
    said = capsys.readouterr()
    sentence, head, row = said.out.splitlines()
    assert sentence.startswith(f"{engine} holds nothing of the prompt and has 0 requests in flight")
    assert head.split()[:2] == ["endpoint", "total"]
    assert row.startswith(f"* {engine}")
    assert "never" not in row, "its signals were read"
    assert said.err == ""


async def test_what_went_before_is_found_again(engine: str, body: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run([engine], body, body, as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["matched_bytes"] > 1000
    assert record["candidates"][0]["in_flight"] == 1


async def test_an_endpoint_that_cannot_be_heard(engine: str, body: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    assert await run([engine, dead], body) == 0
    said = capsys.readouterr()
    assert f"no signals from {dead} (" in said.err
    assert "never" in said.out


async def test_an_adapter_goes_where_it_is_listed(body: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = await serve(ModelServerOptions(port=0, loras=("sql",)))
    second = await serve(ModelServerOptions(port=0, loras=("law",)))
    addresses = {"sql": f"127.0.0.1:{first.port}", "law": f"127.0.0.1:{second.port}"}
    try:
        for adapter, address in addresses.items():
            body.write_text(json.dumps({**CHAT, "model": adapter}))
            assert await run([*addresses.values()], body, as_json=True) == 0
            assert json.loads(capsys.readouterr().out)["endpoint"] == address
    finally:
        await first.stop()
        await second.stop()


async def test_a_server_without_metrics_and_models_is_not_waited_for_long(
    body: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_MODELS_WAIT_S", 0.0)
    server = web.Server(lambda _: _not_found())
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        assert await run([address], body) == 0
    finally:
        listener.close()
        await server.shutdown()
    assert f"no signals from {address} (status)" in capsys.readouterr().err


async def _not_found() -> web.Response:
    return web.Response(status=404)


async def test_without_scraping_nobody_is_asked(body: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(["127.0.0.1:1", "127.0.0.1:2"], body, scrape=False) == 0
    assert capsys.readouterr().err == ""


async def test_an_endpoint_that_takes_too_long(
    body: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_EXPLAIN_WAIT_S", 0.0)
    assert await run(["127.0.0.1:1"], body) == 0
    assert "no signals from 127.0.0.1:1 (no answer yet)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("endpoints", "text", "said"),
    [([], json.dumps(CHAT), "refused with HTTP 503 (no_endpoint)"), (["127.0.0.1:1"], "[]", "refused with HTTP 400")],
)
async def test_a_refusal_is_status_1(
    endpoints: list[str], text: str, said: str, body: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body.write_text(text)
    assert await run(endpoints, body, scrape=False) == 1
    assert capsys.readouterr().out.startswith(said)


def test_as_the_command_line_calls_it(
    body: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(body.read_bytes())))
    overrides = {"pool.endpoints": ["127.0.0.1:1"], "pool.scrape.enabled": False}
    known = {"after": [body], "request_path": "/v1/chat/completions", "as_json": False}
    assert explain(None, overrides, body=Path("-"), **known) == 0  # type: ignore[arg-type]
    assert "127.0.0.1:1 holds 1,792 of 2,007 prompt bytes" in capsys.readouterr().out
    with pytest.raises(ExtprocError, match=r"cannot read .*none: No such file"):
        explain(None, overrides, body=body.with_name("none"), **known)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        explain(body.with_name("none"), {}, body=body, **known)  # type: ignore[arg-type]
