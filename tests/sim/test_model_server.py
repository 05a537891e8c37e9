import argparse
import asyncio
import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDictProxy

from extproc.sim.model_server import ModelServer, ModelServerOptions, add_arguments, main, serve
from extproc.sim.presets import PRESETS

FAST = ModelServerOptions(port=0, name="east", model="tiny", loras=("alpha", "beta"), speed=2000.0)
SLOW = dataclasses.replace(FAST, speed=0.001)
"""One step takes tens of seconds: what is sent stays in the engine."""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Client:
    """A server and a client session towards it."""

    def __init__(self, server: ModelServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], CIMultiDictProxy[str]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data, headers={"content-type": "application/json"} | named) as answer:
            text = await answer.read()
            return answer.status, json.loads(text or b"{}"), answer.headers

    async def get(self, path: str) -> tuple[int, str, CIMultiDictProxy[str]]:
        async with self.session.get(path) as answer:
            return answer.status, await answer.text(), answer.headers

    async def metric(self, name: str) -> float:
        _, page, _ = await self.get("/metrics")
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        assert found
        return float(found[1])

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the server run until the condition holds; this is the limit."""
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)


Start = Callable[[ModelServerOptions], Awaitable[Client]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    clients: list[Client] = []

    async def make(options: ModelServerOptions) -> Client:
        server = ModelServer(options)
        await server.listen()
        client = Client(server, aiohttp.ClientSession(f"http://127.0.0.1:{server.port}"))
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.session.close()
        await client.server.stop()


@pytest.fixture
async def client(start: Start) -> Client:
    return await start(FAST)


async def test_completion(client: Client) -> None:
    status, body, headers = await client.post(
        "/v1/completions", {"model": "tiny", "prompt": "x" * 400, "max_tokens": 5}
    )
    assert status == 200
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert headers["Content-Type"] == "application/json"
    assert headers["x-model-server"] == "east"
    assert headers["server"] == "uvicorn"
    _, again, _ = await client.post("/v1/completions", {"model": "tiny", "prompt": "x" * 400, "max_tokens": 5})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert again["choices"] == body["choices"]
    assert again["id"] != body["id"]
    assert await client.metric("vllm:prefix_cache_hits_total") == 96
    assert await client.metric("vllm:prompt_tokens_total") == 202


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"], [1, 2, 3], [[1, 2], [3]]])
async def test_every_form_of_a_prompt(client: Client, prompt: Any) -> None:
    status, body, _ = await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert status == 200
    assert body["usage"]["completion_tokens"] == 2 * len(body["choices"])


async def test_chat(client: Client) -> None:
    status, body, _ = await client.post(
        "/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, x_request_id="my-1"
    )
    assert status == 200
    assert body["id"] == "chatcmpl-my-1"
    assert body["choices"][0]["message"]["role"] == "assistant"


async def test_a_conversation_hits_its_own_answers(client: Client) -> None:
    messages = [{"role": "user", "content": "x" * 400}]
    _, first, _ = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 64})
    messages += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    _, second, _ = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    total = first["usage"]["total_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (total - 1) // 16 * 16


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_stream(client: Client, path: str) -> None:
    body = CHAT | {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
    async with client.session.post(path, json=body) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = (await answer.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    last = json.loads(lines[-3].removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # The connection is still good: the hand-made framing was right.
    assert (await client.get("/health"))[0] == 200


async def test_stream_to_a_client_of_http_1_0(client: Client) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    text = await reader.read()
    writer.close()
    assert text.endswith(b"data: [DONE]\n\n")
    assert text.count(b"data: ") == 3
    assert b"chunked" not in text


async def test_adapters_and_salts_have_caches_of_their_own(client: Client) -> None:
    kinds: list[dict[str, str]] = [{}, {"model": "alpha"}, {"model": "beta"}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    for expected in (0, 96):
        for kind in kinds:
            _, body, _ = await client.post("/v1/completions", {"prompt": "x" * 400, "max_tokens": 1} | kind)
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    _, page, _ = await client.get("/metrics")
    assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}' in page


async def test_models(client: Client) -> None:
    _, text, _ = await client.get("/v1/models")
    body = json.loads(text)
    assert body["object"] == "list"
    base, alpha, _ = body["data"]
    assert list(base) == "id object created owned_by root parent max_model_len permission".split(" ")
    assert (base["id"], base["parent"], base["max_model_len"]) == ("tiny", None, 16_384)
    assert (alpha["id"], alpha["parent"], alpha["max_model_len"]) == ("alpha", "tiny", None)


async def test_small_endpoints(client: Client) -> None:
    for path in ("/health", "/ping"):
        assert (await client.get(path))[:2] == (200, "")
    assert (await client.get("/version"))[1] == '{"version":"0.32.0"}'
    assert (await client.get("/load"))[1] == '{"server_load":0}'
    status, _, headers = await client.get("/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=1.0.0; charset=utf-8")
    _, body, _ = await client.post("/tokenize", {"prompt": "Hello world"})
    assert (body["count"], len(body["tokens"]), body["max_model_len"]) == (4, 4, 16_384)
    _, body, _ = await client.post("/tokenize", CHAT)
    assert body["count"] == 11
    assert (await client.post("/tokenize", {}))[0] == 400


async def test_metrics_below_the_exact_path_are_selected(client: Client) -> None:
    """Two pages, as vLLM has them: at the exact path the query says nothing."""
    _, whole, _ = await client.get("/metrics")
    _, again, _ = await client.get("/metrics?name[]=vllm:num_requests_running")
    assert len(again) == len(whole)
    status, text, _ = await client.get("/metrics/?name[]=vllm:num_requests_running&name%5B%5D=vllm:prompt_tokens_total")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert status == 200
    assert [line.partition("{")[0] for line in lines] == ["vllm:num_requests_running", "vllm:prompt_tokens_total"]
    assert len((await client.get("/metrics/"))[1]) == len(whole)
    assert (await client.get("/metrics/?name[]=x"))[:2] == (200, "")


async def test_reset_prefix_cache(client: Client) -> None:
    for _ in range(2):
        _, body, _ = await client.post("/v1/completions", {"prompt": "x" * 400, "max_tokens": 1})
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await client.post("/reset_prefix_cache", {}))[1] == {"success": True}


async def test_errors(client: Client) -> None:
    assert (await client.get("/nope"))[:2] == (404, '{"detail":"Not Found"}')
    assert (await client.post("/v1/nope", {}))[:2] == (404, {"detail": "Not Found"})
    status, text, headers = await client.get("/v1/completions")
    assert (status, text, headers["allow"]) == (405, '{"detail":"Method Not Allowed"}', "POST")
    status, body, headers = await client.post("/v1/completions", {"model": "nope", "prompt": "x"})
    assert (status, body["error"]["type"]) == (404, "NotFoundError")
    assert headers["x-model-server"] == "east"
    assert (await client.post("/v1/completions", b"{"))[0] == 400
    status, body, _ = await client.post("/v1/completions", {"prompt": "x" * 70_000, "stream": True})
    assert (status, body["error"]["param"]) == (400, "input_tokens")
    status, body, _ = await client.post("/v1/completions", b"{}", content_type="text/plain")
    assert body["error"] == {
        "message": "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("TEXT", "TEXT named_metrics.num_requests_waiting=0.0, named_metrics.kv_cache_usage_perc=0.0"),
        ("JSON", 'JSON {"named_metrics": {"num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}}'),
        ("nope", None),
    ],
)
async def test_orca_load_report(client: Client, form: str, expected: str | None) -> None:
    body = {"prompt": "Hello", "max_tokens": 2}
    _, _, headers = await client.post("/v1/completions", body, endpoint_load_metrics_format=form)
    assert headers.get("endpoint-load-metrics") == expected


async def test_echo_of_a_large_chunked_body(client: Client) -> None:
    piece = bytes(range(256)) * 4096

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield piece

    headers = {"x-model-server-echo": "1", "X-Twice": "a"}
    async with client.session.post("/any/where?x=1", data=pieces(), headers=headers) as answer:
        seen = await answer.json()
    assert (seen["server"], seen["method"], seen["path"]) == ("east", "POST", "/any/where?x=1")
    assert seen["body_bytes"] == 64 * len(piece) == 64 * 2**20
    assert seen["sha256"] == hashlib.sha256(piece * 64).hexdigest()
    assert ["X-Twice", "a"] in seen["headers"]


async def test_a_compressed_body_is_left_as_it_is(client: Client) -> None:
    """As uvicorn does: an engine that gets a compressed body cannot read it."""
    body = gzip.compress(b'{"prompt": "Hello", "max_tokens": 2}')
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    async with client.session.post("/v1/completions", data=body, headers=headers) as answer:
        assert answer.status == 400
    async with client.session.post("/", data=body, headers=headers | {"x-model-server-echo": "1"}) as answer:
        assert (await answer.json())["sha256"] == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_request(start: Start, stream: bool) -> None:
    client = await start(SLOW)
    task = asyncio.ensure_future(client.post("/v1/completions", {"prompt": "x", "stream": stream}))
    await client.until(lambda: client.server.engine.num_running == 1)
    assert (await client.get("/load"))[1] == '{"server_load":1}'
    task.cancel()
    await client.until(lambda: client.server.engine.num_running == 0)
    assert client.server.engine.kv_cache_usage == 0


async def test_a_full_queue_is_503(start: Start) -> None:
    constants = dataclasses.replace(PRESETS["l4-llama-3.1-8b-fp8"], max_num_seqs=1)
    client = await start(dataclasses.replace(SLOW, constants=constants, max_num_queued_requests=1))
    tasks = [asyncio.ensure_future(client.post("/v1/completions", {"prompt": "x"})) for _ in range(2)]
    await client.until(lambda: client.server.engine.num_running + client.server.engine.num_waiting == 2)
    status, body, _ = await client.post("/v1/completions", {"prompt": "x"})
    assert (status, body["error"]["type"]) == (503, "Service Unavailable")
    assert await client.metric("vllm:admission_rejections_total") == 1
    for task in tasks:
        task.cancel()


async def test_stop_ends_streams_as_vllm_does(start: Start) -> None:
    client = await start(SLOW)
    async with client.session.post("/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        whole = asyncio.ensure_future(client.post("/v1/completions", {"prompt": "x"}))
        engine = client.server.engine
        await client.until(lambda: engine.num_running + engine.num_waiting == 2)
        await client.server.stop()
        text = await answer.text()
    assert '"code": 500}' in text
    assert text.endswith("data: [DONE]\n\n")
    assert (await whole)[0] == 500


class Leaving(ModelServer):
    """Its clients leave just before the answer begins, or just before it ends."""

    before_the_answer = True

    def _headers(self, request: Any) -> dict[str, str]:
        if self.before_the_answer:
            request.transport.abort()
        return super()._headers(request)

    async def _run(self, answer: Any) -> None:
        await super()._run(answer)
        for connection in self._http.connections:
            assert connection.transport is not None
            connection.transport.abort()


@pytest.mark.parametrize("before_the_answer", [True, False])
async def test_a_client_that_has_just_gone_is_no_defect(
    before_the_answer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Leaving(FAST)
    server.before_the_answer = before_the_answer
    await server.listen()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        with pytest.raises(aiohttp.ClientError):
            await Client(server, session).post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True})
    await server.stop()
    assert [record.message for record in caplog.records] == []


async def test_fault_error_with_count(client: Client) -> None:
    order = {"kind": "error", "status": 502, "count": 2}
    assert (await client.post("/fault", order))[:2] == (200, {"fault": "error"})
    for expected in (502, 502, 200):
        status, body, headers = await client.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert status == expected
        assert headers["x-model-server"] == "east"
        assert ("error" in body) == (expected == 502)
    assert (await client.post("/fault", {"kind": "boom"}))[0] == 400


async def test_fault_on_metrics_only(client: Client) -> None:
    await client.post("/fault", {"kind": "error", "path": "/metrics"})
    assert (await client.get("/metrics"))[0] == 500
    assert (await client.get("/v1/models"))[0] == 200
    await client.post("/fault", {"kind": "none"})
    assert (await client.get("/metrics"))[0] == 200


async def test_fault_slow_delays_and_then_answers(client: Client) -> None:
    await client.post("/fault", {"kind": "slow", "seconds": 0.01, "count": 1})
    assert (await client.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200


async def test_fault_reset(client: Client) -> None:
    await client.post("/fault", {"kind": "reset", "count": 1})
    reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    assert (await client.get("/v1/models"))[0] == 200


async def test_fault_reset_in_the_middle_of_a_stream(client: Client) -> None:
    await client.post("/fault", {"kind": "reset", "count": 1, "after_tokens": 2})
    received: list[bytes] = []

    async def read() -> None:
        body = {"prompt": "x", "max_tokens": 9, "stream": True}
        async with client.session.post("/v1/completions", json=body) as answer:
            async for chunk in answer.content.iter_any():
                received.append(chunk)  # noqa: PERF401 - what came before the reset must be kept

    with pytest.raises(aiohttp.ClientError):
        await read()
    assert b"".join(received).count(b"data: ") <= 2
    await client.until(lambda: client.server.engine.num_running == 0)


async def test_fault_close_ends_the_connection_without_the_end_of_the_body(client: Client) -> None:
    for after, head in ((0, b""), (2, b"HTTP/1.1 200")):
        await client.post("/fault", {"kind": "close", "count": 1, "after_tokens": after})
        reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
        body = b'{"prompt": "x", "max_tokens": 9, "stream": true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        received = await reader.read()
        assert received.startswith(head)
        assert received.count(b"data: ") == after
        assert not received.endswith(b"0\r\n\r\n")
        writer.close()
    await client.until(lambda: client.server.engine.num_running == 0)


async def test_fault_trickle_passes_on_every_token_later(client: Client) -> None:
    await client.post("/fault", {"kind": "trickle", "seconds": 0.01})
    body = {"prompt": "x", "max_tokens": 9, "stream": True}
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with client.session.post("/v1/completions", json=body) as answer:
        slow = await answer.read()
    assert loop.time() - began >= 0.09
    assert slow.count(b"data: ") == 10
    assert slow.endswith(b"data: [DONE]\n\n")
    status, whole, _ = await client.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert (status, len(whole["choices"])) == (200, 1)
    await client.post("/fault", {"kind": "trickle", "seconds": 60})
    async with client.session.post("/v1/completions", json=body) as answer:
        await answer.content.readany()
    await client.until(lambda: not client.server._in_flight)


async def test_fault_answer_says_whatever_was_ordered(client: Client) -> None:
    await client.post("/fault", {"kind": "answer", "body": "<html>", "path": "/metrics"})
    assert (await client.get("/metrics"))[:2] == (200, "<html>")
    assert (await client.get("/v1/models"))[0] == 200


async def test_fault_hang_until_the_client_leaves_or_the_server_stops(start: Start) -> None:
    client = await start(FAST)
    await client.post("/fault", {"kind": "hang"})
    tasks = [asyncio.ensure_future(client.post("/v1/completions", {"prompt": "x"})) for _ in range(2)]
    assert (await client.get("/health"))[0] == 200
    await asyncio.wait(tasks, timeout=0.01)
    assert not any(task.done() for task in tasks)
    tasks[0].cancel()
    await client.server.stop()
    assert (await asyncio.gather(*tasks, return_exceptions=True))[1] is not None


async def test_fault_restart(start: Start) -> None:
    clock = iter(range(1_000_000_000, 2_000_000_000))
    server = ModelServer(SLOW, unix_clock=lambda: float(next(clock)))
    await server.listen()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        client = Client(server, session)
        started = await client.metric("process_start_time_seconds")
        port = server.port
        async with session.post("/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            await client.until(lambda: server.engine.num_running == 1)
            assert (await client.post("/fault", {"kind": "restart", "seconds": 0.01}))[0] == 200
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        assert server.port == port
        assert server.engine.num_running == 0
        assert await client.metric("process_start_time_seconds") > started
        assert await client.metric("vllm:num_requests_running") == 0
    await server.stop()


async def test_a_chunked_request_may_end_with_trailers(client: Client) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
    head = (
        b"POST /echo HTTP/1.1\r\nhost: x\r\nx-model-server-echo: 1\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n"
    )
    writer.write(head + b"connection: close\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nx-sum: 7\r\n\r\n")
    text = await reader.read()
    writer.close()
    assert text.startswith(b"HTTP/1.1 200")
    assert json.loads(text.split(b"\r\n\r\n", 1)[1])["sha256"] == hashlib.sha256(b"abcde").hexdigest()


async def test_connections_that_end_before_their_answer_leave_nothing_behind(client: Client) -> None:
    body = {"prompt": "x" * 400, "max_tokens": 200, "stream": True}
    for _ in range(20):
        async with client.session.post("/v1/completions", json=body) as answer:
            await answer.content.readany()
            answer.close()
    engine = client.server.engine
    await client.until(lambda: not engine.num_running and not engine.num_waiting)
    assert engine.pool.num_free == engine.pool.num_blocks


ROOT = Path(__file__).parents[2]
PROGRAM = """
import argparse, sys
from extproc.sim.model_server import add_arguments, main
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(main(parser.parse_args()))
"""


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


async def test_serve_and_stop() -> None:
    server = await serve(ModelServerOptions(port=0, name="a"))
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/health") as answer:
            assert (answer.status, answer.headers["x-model-server"]) == (200, "a")
        await server.stop()
        await server.stop()
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"http://127.0.0.1:{server.port}/health")


async def test_url_of_an_ipv6_address() -> None:
    with contextlib.suppress(OSError):  # not every machine has IPv6
        server = await serve(ModelServerOptions(port=0, host="::1"))
        assert server.url == f"http://[::1]:{server.port}"
        await server.stop()


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(arguments("--port", str(port))) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"extproc model-server: cannot listen on 127.0.0.1:{port}: ")
    assert text.count("\n") == 1


def test_bad_values_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--speed", "0")) == 2
    assert capsys.readouterr().err == "extproc model-server: speed must be positive\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_cleanly(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, "--port", "0", "--name", "b"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process,
        contextlib.ExitStack() as on_failure,
    ):
        on_failure.callback(process.kill)  # else leaving would wait for ever
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("model server b: meta-llama/Llama-3.1-8B-Instruct on http://127.0.0.1:")
        with urllib.request.urlopen(f"{line.split()[-1]}/health") as answer:
            assert answer.status == 200
        # With uvloop where it is there: its transports are not asyncio's.
        for order in (b'{"kind":"reset","count":1}', b'{"kind":"reset","count":1,"after_tokens":1}'):
            with urllib.request.urlopen(f"{line.split()[-1]}/fault", order):
                pass
            body = urllib.request.Request(
                f"{line.split()[-1]}/v1/completions",
                b'{"prompt":"x","stream":true,"max_tokens":5}',
                {"content-type": "application/json"},
            )
            # While the request is still being sent, urllib wraps it.
            with pytest.raises(OSError, match="reset by peer"), urllib.request.urlopen(body) as answer:
                answer.read()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
