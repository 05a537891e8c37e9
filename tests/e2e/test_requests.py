"""What decides where a request goes, through a real Envoy: its prompt, its model, a subset hint, limits, the load."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from tests.e2e.stack import DESTINATION, MODEL, Received, Response, Stack, on_both, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

Prompt = Callable[..., str]
Json = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=on_both("direct", "full-duplex"))
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Three endpoints that answer every path, and have no metrics page."""
    folder = tmp_path_factory.mktemp("recorded")
    async with running(request.param, folder, servers=0, recorders=3) as stack:
        yield stack


@pytest.fixture(autouse=True)
def forget(request: pytest.FixtureRequest) -> None:
    if "stack" in request.fixturenames:
        for upstream in request.getfixturevalue("stack").upstreams:
            upstream.received.clear()
            upstream.answer = upstream._ok


# ------------------------------------------------------------------------------------------------ affinity of every API

IMAGE: Final = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 40).decode()
TOOLS: Final = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


APIS: dict[str, tuple[str, str, Callable[[str], Json]]] = {
    "completions": ("completions", "/v1/completions", lambda text: {"prompt": text}),
    "completions, list": ("completions", "/v1/completions", lambda text: {"prompt": [text, "and " + text]}),
    "completions, ids": ("completions", "/v1/completions", lambda text: {"prompt": [*map(ord, text)]}),
    "completions, lists of ids": (
        "completions",
        "/v1/completions",
        lambda text: {"prompt": [[*map(ord, text)], [1, 2]]},
    ),
    "chat": ("chat", "/v1/chat/completions", lambda text: {"messages": [user(text)]}),
    "chat, parts": (
        "chat",
        "/v1/chat/completions",
        lambda text: {"messages": [user([{"type": "text", "text": text}])]},
    ),
    "chat, image": (
        "chat",
        "/v1/chat/completions",
        lambda text: {"messages": [user([{"type": "image_url", "image_url": {"url": IMAGE}}]), user(text)]},
    ),
    "chat, tools": (
        "chat",
        "/openai/deployments/x/chat/completions",
        lambda text: {"tools": TOOLS, "messages": [user("go"), {"role": "tool", "tool_call_id": "1", "content": text}]},
    ),
    "responses": ("responses", "/v1/responses", lambda text: {"instructions": text, "input": "hello"}),
    "responses, items": ("responses", "/v1/responses", lambda text: {"input": [user(text)]}),
    "embeddings": ("embeddings", "/v1/embeddings", lambda text: {"input": text}),
    "embeddings, list": ("embeddings", "/v1/embeddings", lambda text: {"input": [text, text + "!"]}),
    "messages": ("messages", "/v1/messages", lambda text: {"system": text, "messages": [user("hello")]}),
}


@pytest.mark.parametrize("api", APIS)
async def test_equal_prompts_stay_together(stack: Stack, prompt: Prompt, api: str) -> None:
    kind, path, make = APIS[api]
    fields = {"model": MODEL, **make(prompt())}
    plain = json.dumps(fields).encode()
    # The same prompt in another spelling, with other sampling parameters.
    other = json.dumps({"temperature": 0.5, **dict(reversed(fields.items()))}, indent=1, ensure_ascii=True).encode()
    for body in (plain, other, plain):
        answer = await stack.post(path, body)
        assert answer.status == 200, answer.body
    decisions = (await stack.settled())[:3]
    assert {decision["kind"] for decision in decisions} == {kind}
    assert {decision["model"] for decision in decisions} == {MODEL}
    assert {decision["outcome"] for decision in decisions} == {"ok"}
    assert len({decision["endpoint"] for decision in decisions}) == 1
    assert decisions[2]["matched_bytes"] <= 1024, "at most the tools and the image were known"
    for decision in decisions[:2]:
        assert decision["matched_bytes"] > 0.7 * decision["prompt_bytes"] > 1000
    [chosen] = [upstream for upstream in stack.upstreams if upstream.id == decisions[0]["endpoint"]]
    assert [received.body for received in chosen.received] == [plain, other, plain]


async def test_a_cache_salt_keeps_prompts_apart(stack: Stack, prompt: Prompt) -> None:
    body = {"model": MODEL, "prompt": prompt()}
    for fields in ({}, {"cache_salt": "s"}, {"cache_salt": "s"}, {"cache_salt": "t"}):
        assert (await stack.post("/v1/completions", {**body, **fields})).status == 200
    matched = [decision["matched_bytes"] > 0 for decision in (await stack.settled())[:4]]
    assert matched == [False, True, False, False], "newest first"


async def test_an_engine_that_refuses_leaves_nothing_in_the_index(stack: Stack, prompt: Prompt) -> None:
    async def not_found(_: web.Request, __: Received) -> web.StreamResponse:
        return web.json_response({"detail": "Not Found"}, status=404)

    for upstream in stack.upstreams:
        upstream.answer = not_found
    body = {"model": MODEL, "input": prompt()}
    for _ in range(2):
        answer = await stack.post("/v1/responses", body)
        assert (answer.status, answer.json()) == (404, {"detail": "Not Found"})
        decision = (await stack.settled())[0]
    assert decision["outcome"] == "client_error"
    assert decision["matched_bytes"] == 0
    assert all(found["health_score"] == 1 for found in await stack.endpoints()), (
        "a 404 is not held against the endpoint"
    )


# ---------------------------------------------------------------------------------------------------- load and limits


@contextlib.asynccontextmanager
async def held(stack: Stack) -> AsyncIterator[asyncio.Event]:
    """Let the endpoints answer only when the event is set (at the latest at the end of the block)."""
    go_on = asyncio.Event()

    async def wait(_: web.Request, __: Received) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response({})

    for upstream in stack.upstreams:
        upstream.answer = wait
    try:
        yield go_on
    finally:
        go_on.set()


async def open_requests(stack: Stack, prompt: Prompt, count: int) -> list[asyncio.Task[Response]]:
    """Send `count` different prompts one after the other; each is under way before the next is sent."""
    tasks = []
    for number in range(count):
        body = {"model": MODEL, "prompt": prompt()}
        tasks.append(asyncio.ensure_future(stack.post("/v1/completions", body)))
        await until(partial(_in_flight_is, stack, number + 1), "the request is under way")
    return tasks


async def _in_flight_is(stack: Stack, wanted: int) -> bool:
    return await stack.in_flight() == wanted


async def test_endpoints_without_signals_are_balanced_by_what_is_in_flight(stack: Stack, prompt: Prompt) -> None:
    assert all(found["signal_age_s"] is None and found["scrape_failures"] for found in await stack.endpoints())
    async with held(stack) as go_on:
        tasks = await open_requests(stack, prompt, 9)
        assert [found["in_flight"] for found in await stack.endpoints()] == [3, 3, 3]
        go_on.set()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 9
    await stack.settled()


async def test_beyond_the_limits_is_a_429(stack: Stack, prompt: Prompt) -> None:
    generation = (await stack.metrics()).total("extproc_config_generation")
    try:
        stack.write_config({"routing": {"limits": {"in_flight": 1}}})
        await until(lambda: _generation_above(stack, generation), "the picker has read the changed file")
        async with held(stack) as go_on:
            tasks = await open_requests(stack, prompt, 3)
            refused = await stack.post("/v1/completions", {"model": MODEL, "prompt": prompt()})
            assert refused.status == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["x-extproc-drop-reason"] == "overloaded"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert await stack.in_flight() == 3
            go_on.set()
            assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 3
        await stack.settled()
        assert (await stack.post("/v1/completions", {"model": MODEL, "prompt": prompt()})).status == 200
    finally:
        stack.write_config()
        await until(lambda: _generation_above(stack, generation + 1), "the picker has read the file again")
    await stack.settled()


async def _generation_above(stack: Stack, generation: float) -> bool:
    return (await stack.metrics()).total("extproc_config_generation") > generation


# ----------------------------------------------------------------------------------------- whatever HTTP may look like


async def test_a_large_answer_arrives_byte_for_byte(stack: Stack) -> None:
    noise = random.Random(1).randbytes(1 << 20) * 20

    async def large(_: web.Request, __: Received) -> web.StreamResponse:
        return web.Response(body=noise, headers={"content-type": "application/json", "x-odd": "a,b ; c"})

    for upstream in stack.upstreams:
        upstream.answer = large
    answer = await stack.post("/v1/embeddings", {"model": MODEL, "input": "x"})
    assert (answer.status, answer.headers["x-odd"]) == (200, "a,b ; c")
    assert answer.body == noise
    assert (await stack.settled())[0]["outcome"] == "ok"


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"])
async def test_every_method_is_passed_on(stack: Stack, method: str) -> None:
    body = b"\x00not JSON" if method in {"PUT", "PATCH"} else None
    answer = await stack.request(method, "/v1/files/7", body)
    assert answer.status == 200
    decision = (await stack.settled())[0]
    [received] = [received for upstream in stack.upstreams for received in upstream.received]
    assert (received.method, received.body) == (method, body or b"")
    assert decision["outcome"] == "ok"


async def test_a_client_that_waits_for_100_continue(stack: Stack, prompt: Prompt) -> None:
    body = json.dumps({"model": MODEL, "prompt": prompt()}).encode()
    answer = await stack.request("POST", "/v1/completions", body, expect100=True)
    assert answer.json() == {"body_bytes": len(body)}
    assert (await stack.settled())[0]["prompt_bytes"] > 1000


async def test_requests_one_behind_the_other_on_one_connection(stack: Stack, prompt: Prompt) -> None:
    bodies = [json.dumps({"model": MODEL, "prompt": prompt(50)}).encode() for _ in range(5)]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.ports.envoy)
    writer.write(b"".join(head % len(body) + body for body in bodies))
    seen = b""
    async with asyncio.timeout(60):
        while seen.count(b'"body_bytes"') < 5:
            seen += await reader.read(65536)
    writer.close()
    assert seen.count(b"HTTP/1.1 200") == 5
    assert len(await stack.settled()) >= 5
    arrived = [received.body for upstream in stack.upstreams for received in upstream.received]
    assert sorted(arrived) == sorted(bodies)


async def test_an_answer_before_the_end_of_the_upload(stack: Stack, prompt: Prompt) -> None:
    """An engine that refuses a huge body early: its answer arrives, and everything is released."""
    refused = asyncio.Event()

    async def refuse(_: web.Request, __: Received) -> web.StreamResponse:
        return web.json_response({"error": "too large"}, status=413)

    for upstream in stack.upstreams:
        upstream.answer, upstream.read_bodies = refuse, False

    async def endless() -> AsyncIterator[bytes]:
        yield json.dumps({"model": MODEL, "prompt": prompt()}).encode()[:-2]
        while not refused.is_set():
            yield b"x" * 100_000
            await asyncio.sleep(0)

    try:
        async with stack.http.post(f"{stack.url}/v1/completions", data=endless()) as answer:
            assert answer.status == 413
            refused.set()
            answer.close()
    finally:
        refused.set()
        for upstream in stack.upstreams:
            upstream.read_bodies = True
    decision = (await stack.settled())[0]
    assert decision["outcome"] == "client_error"
    assert all(one["health_score"] == 1 for one in await stack.endpoints())


async def test_a_client_that_leaves_in_the_middle_of_a_huge_upload(stack: Stack, prompt: Prompt) -> None:
    """Beyond `max_inspect_bytes` it has been decided and is on its way to the endpoint."""
    decided = await stack.decided()
    _, writer = await asyncio.open_connection("127.0.0.1", stack.ports.envoy)
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 20000000\r\n\r\n"
    )
    writer.write(head.encode() + b'{"prompt": "' + prompt().encode() + b"x" * 6_000_000)
    await writer.drain()
    await until(partial(_in_flight_is, stack, 1), "it is decided")
    writer.transport.abort()
    decisions = await stack.settled()
    assert await stack.decided() == decided + 1
    assert decisions[0]["outcome"] == ("aborted" if stack.profile == "full-duplex" else "client_gone")


# ------------------------------------------------------------------------------------------------------------ upgrades


async def test_a_websocket_is_passed_on(stack: Stack) -> None:
    async def talk(request: web.Request, _: Received) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(message.data[::-1])
        return socket

    await stack.get("/first")  # Envoy connects its access log with the first entry
    await stack.settled()
    for upstream in stack.upstreams:
        upstream.received.clear()
        upstream.answer = talk
    noise = bytes(range(256)) * 300
    async with stack.http.ws_connect(
        f"{stack.url}/v1/realtime?model=m", headers={DESTINATION: "127.0.0.1:1"}
    ) as socket:
        for _ in range(3):
            await socket.send_bytes(noise)
            message = await socket.receive(timeout=60)
            assert message.type is aiohttp.WSMsgType.BINARY
            assert message.data == noise[::-1]
        assert await stack.in_flight() == 1
    decision = (await stack.settled())[0]
    [received] = [received for upstream in stack.upstreams for received in upstream.received]
    assert received.headers[DESTINATION].startswith(decision["endpoint"])
    assert decision["kind"] == "other"
    # Without an access log all we see is that the stream broke off before its end.
    assert decision["outcome"] == ("aborted" if stack.profile == "full-duplex" else "ok")


# --------------------------------------------------------------------------------------------------------- subset hint

HINT: Final = """\
function envoy_on_request(handle)
  local wanted = handle:headers():get("x-test-subset")
  if wanted == nil then return end
  handle:headers():remove("x-test-subset")
  local value = wanted
  if wanted:sub(1, 5) == "list:" then
    value = {}
    for item in wanted:sub(6):gmatch("[^ ]+") do value[#value + 1] = item end
  elseif wanted == "empty" then
    value = ""
  end
  handle:streamInfo():dynamicMetadata():set("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", value)
end
"""


def with_subset_hint(text: str) -> str:
    """Put a filter before ours that gives a hint as a gateway does: a list, or text with commas."""
    document = yaml.safe_load(text)
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    kind = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
    hint = {"@type": kind, "default_source_code": {"inline_string": HINT}}
    manager["http_filters"].insert(0, {"name": "hint", "typed_config": hint})
    return yaml.safe_dump(document)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=on_both("direct", "full-duplex", "buffered"))
async def hinted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("hinted")
    async with running(request.param, folder, servers=0, recorders=3, edit=with_subset_hint) as stack:
        yield stack


@pytest.mark.parametrize("form", ["{}", "{},", " {} ", "list:{}", "list:{} 10.9.9.9:80", "list:{},10.9.9.9:80"])
async def test_a_hint_that_names_one_endpoint_leaves_only_that_one(hinted: Stack, prompt: Prompt, form: str) -> None:
    for upstream in hinted.upstreams:
        upstream.received.clear()
    chosen = hinted.upstreams[1]
    for _ in range(4):
        answer = await hinted.chat(prompt(), {"x-test-subset": form.format(chosen.id)})
        assert answer.status == 200, answer.body
    assert [len(upstream.received) for upstream in hinted.upstreams] == [0, 4, 0]
    decision = (await hinted.settled())[0]
    assert decision["fallbacks"] == [], "no way around the hint"
    assert {found["filter"] for found in decision["filtered"]} == {"subset"}


async def test_a_bare_address_stands_for_all_its_ports(hinted: Stack, prompt: Prompt) -> None:
    assert (await hinted.chat(prompt(), {"x-test-subset": "127.0.0.1"})).status == 200
    assert len((await hinted.settled())[0]["candidates"]) == 3


@pytest.mark.parametrize("hint", ["empty", "list:", "10.9.9.9:80", "list:10.9.9.9:80 10.9.9.8:80"])
async def test_a_hint_that_leaves_nobody_is_a_503(hinted: Stack, prompt: Prompt, hint: str) -> None:
    answer = await hinted.chat(prompt(), {"x-test-subset": hint})
    assert answer.status == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.headers["x-extproc-drop-reason"] == "subset_empty"
    assert answer.json()["error"]["type"] == "service_unavailable"
    await hinted.settled()


async def test_a_client_cannot_give_a_hint(hinted: Stack, prompt: Prompt) -> None:
    forged = {f"{DESTINATION}-subset": "10.9.9.9:80", "test-epp-endpoint-selection": "10.9.9.9:80"}
    assert (await hinted.chat(prompt(), forged)).status == 200
    decision = (await hinted.settled())[0]
    assert len(decision["candidates"]) == 3
    [received] = [seen for upstream in hinted.upstreams for seen in upstream.received[-1:] if seen.headers.get("x-request-id") == decision["request_id"]]  # fmt: skip
    assert not forged.keys() & received.headers.keys()


# ------------------------------------------------------------------------------------------------------- LoRA adapters


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapters(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Three model servers: the first has `sql`, the second `sql` and `law`, the third no adapter."""
    args = [["--lora", "sql"], ["--lora", "sql", "--lora", "law"], []]
    folder = tmp_path_factory.mktemp("adapters")
    async with running(("direct", "native"), folder, servers=3, server_args=args) as stack:
        yield stack


async def test_an_adapter_is_asked_for_where_it_is(adapters: Stack, prompt: Prompt) -> None:
    for model, homes in ((MODEL, {"gpu-1", "gpu-2", "gpu-3"}), ("sql", {"gpu-1", "gpu-2"}), ("law", {"gpu-2"})):
        answers = await asyncio.gather(*(adapters.chat(prompt(20), model=model) for _ in range(12)))
        assert [answer.status for answer in answers] == [200] * 12
        assert {answer.headers["x-model-server"] for answer in answers} == homes
        decision = (await adapters.settled())[0]
        assert {found["filter"] for found in decision["filtered"]} == ({"model"} if len(homes) < 3 else set())
    page = await adapters.metrics()
    assert page.by("extproc_model_decisions_total", "model") == {MODEL: 12, "sql": 12, "law": 12}


async def test_an_adapter_has_a_cache_of_its_own(adapters: Stack, prompt: Prompt) -> None:
    text = prompt()
    for model in ("law", MODEL, "law"):
        assert (await adapters.chat(text, model=model)).status == 200
    again, other, _ = (await adapters.settled())[:3]
    assert again["matched_bytes"] > 1000
    assert other["matched_bytes"] == 0


async def test_a_model_nobody_has_is_left_to_the_engine(adapters: Stack, prompt: Prompt) -> None:
    answer = await adapters.chat(prompt(), model="no-such-model")
    assert answer.status == 404
    assert "x-model-server" in answer.headers
    assert answer.json()["error"]["type"] == "NotFoundError"
    await adapters.settled()
    page = await adapters.metrics()
    assert page.total("extproc_model_decisions_total", model="other") == 1
    assert page.total("extproc_requests_total", outcome="client_error") == 1
