"""Bad input through a real Envoy: what is no request gets an answer that says why, everything else arrives untouched.

In every profile, over both transports. Where the picker decides before it can see the body (`BLIND`), nothing is refused for
what it says: it arrives untouched, and the engine judges it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoy_config.options import PROFILES
from tests.e2e.h2_client import h2_request
from tests.e2e.stack import MODEL, Response, Stack, on_both, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

Prompt = Callable[..., str]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ECHO = {"x-model-server-echo": "1"}
DEEP = 100_000


BLIND = {"streamed", "headers-only"}
"""Decided at the headers."""
COLLECTED = {"buffered", "fail-open"}
"""Envoy itself waits for the whole body before it shows any of it."""
SHOWN_RESPONSE = {"full-duplex", "original-dst"}
"""Without an access log: when a stream breaks off nobody says who did it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=on_both(*PROFILES))
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running(request.param, tmp_path_factory.mktemp("stack")) as stack:
        yield stack


async def arrived(stack: Stack, answer: Response, body: bytes) -> dict[str, Any]:
    """Check that an endpoint was sent exactly `body`, that it was the chosen one, and return the decision."""
    assert answer.status == 200, answer.body
    seen = answer.json()
    assert seen["body_bytes"] == len(body)
    assert seen["sha256"] == hashlib.sha256(body).hexdigest()
    decision = (await stack.settled())[0]
    assert stack.server_ids[int(seen["server"][-1]) - 1] == decision["endpoint"]
    assert decision["outcome"] == "ok"
    return decision


BAD = {
    "not JSON": (CHAT, b"{ this is not JSON", None),
    "text": (CHAT, b"hello", None),
    "an array": (CHAT, b"[1]", None),
    "null": (COMPLETIONS, b"null", None),
    "a number": (COMPLETIONS, b"17", None),
    "cut off": (CHAT, b'{"model": "llama-3.1-8b", "messages": [{"role": "us', None),
    "not UTF-8": (COMPLETIONS, b'{"prompt": "\xff\xfe"}', None),
    "empty": (CHAT, b"", None),
    "messages is text": (CHAT, b'{"model": "m", "messages": "hello"}', "messages"),
    "a message is text": (CHAT, b'{"model": "m", "messages": ["hello"]}', "messages"),
    "deep messages": (CHAT, b'{"model": "m", "messages": %b%b}' % (b"[" * DEEP, b"]" * DEEP), "messages"),
    "deep prompt": (COMPLETIONS, b'{"prompt": %b%b}' % (b"[" * DEEP, b"]" * DEEP), "prompt"),
    "deep unknown field": (COMPLETIONS, b'{"prompt": "a", "x": %b1%b}' % (b'{"a":' * DEEP, b"}" * DEEP), None),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_is_no_request_is_refused(stack: Stack, case: str) -> None:
    path, body, field = BAD[case]
    if stack.profile in BLIND and body:  # that there is none is told with the headers
        decision = await arrived(stack, await stack.post(path, body, ECHO), body)
        assert decision["prompt_bytes"] == 0
        return
    before = await stack.metrics()
    decided = await stack.decided()
    answer = await stack.post(path, body, ECHO)
    assert answer.status == 400, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-extproc-drop-reason"] == "invalid_request"
    assert "retry-after" not in answer.headers
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert error["message"]
    if field is not None:
        assert error["param"] is not None
        assert error["param"].startswith(field)
    await stack.settled()
    assert await stack.decided() == decided, "nothing was decided, hence nothing sent"
    after = await stack.metrics()
    name = "extproc_immediate_responses_total"
    assert after.total(name, status="400") - before.total(name, status="400") == 1


def unknown_fields(prompt: str) -> bytes:
    return json.dumps({"model": MODEL, "prompt_embeds": prompt, "brand_new": [{"a": None}]}).encode()


GOOD: dict[str, tuple[str, Callable[[str], bytes], dict[str, str]]] = {
    "compressed": (CHAT, lambda text: gzip.compress(text.encode()), {"content-encoding": "gzip"}),
    "empty prompt": (COMPLETIONS, lambda _: b'{"model": "llama-3.1-8b", "prompt": ""}', {}),
    "empty messages": (CHAT, lambda _: b'{"model": "llama-3.1-8b", "messages": []}', {}),
    "no prompt": (CHAT, unknown_fields, {}),
    "another path": ("/generate", lambda text: b"\x00\xff" + text.encode(), {}),
    "audio": (
        "/v1/audio/transcriptions",
        lambda text: text.encode(),
        {"content-type": "multipart/form-data; boundary=x"},
    ),
    "model is a number": (CHAT, lambda _: b'{"model": 7, "messages": []}', {}),
    "content is a number": (CHAT, lambda _: b'{"messages": [{"role": "user", "content": 7}]}', {}),
    "prompt is an object": (COMPLETIONS, lambda _: b'{"prompt": {"a": 1}}', {}),
    "stream is text": (CHAT, lambda _: b'{"messages": [], "stream": "on"}', {}),
    "max_tokens is text": (COMPLETIONS, lambda _: b'{"prompt": "a", "max_tokens": "four"}', {}),
    "images to embed": (
        "/v1/embeddings",
        lambda text: json.dumps({"input": [{"text": text, "image": "x"}]}).encode(),
        {},
    ),
    "a user's number": ("/v1/messages", lambda _: b'{"messages": [], "metadata": {"user_id": 7}}', {}),
    "a million messages": (CHAT, lambda _: b'{"messages": [' + b"{}," * 1_000_000 + b"{}]}", {}),
    "a long name": (CHAT, lambda _: b'{"model": "%b", "messages": []}' % (b"m" * 3_000_000), {}),
    "a BOM": (COMPLETIONS, lambda text: b"\xef\xbb\xbf" + json.dumps({"prompt": text}).encode(), {}),
}


@pytest.mark.parametrize("case", GOOD)
async def test_what_we_merely_do_not_know_is_passed_on(stack: Stack, prompt: Prompt, case: str) -> None:
    path, make, headers = GOOD[case]
    body = make(prompt())
    decision = await arrived(stack, await stack.post(path, body, ECHO | headers), body)
    assert len(decision["candidates"]) == 2


async def test_a_huge_body(stack: Stack, prompt: Prompt) -> None:
    """20 MB: decided on the first 4 MiB in full duplex, on all of it when buffered, on nothing of it elsewhere."""
    start = json.dumps({"model": MODEL, "prompt": prompt()}).encode()[:-2]
    body = start + b"x" * 20_000_000 + b'"}'
    for _ in range(2):
        decision = await arrived(stack, await stack.post(COMPLETIONS, body, ECHO), body)
        assert decision["prompt_bytes"] == 0 if stack.profile in BLIND else decision["prompt_bytes"] > 4_000_000
    if stack.profile not in BLIND:
        assert decision["matched_bytes"] > 100_000, "the second time it is known, as far as the engine's cache reaches"
    assert stack.picker.rss_bytes() < 500_000_000


async def test_a_body_one_byte_at_a_time(stack: Stack, prompt: Prompt) -> None:
    body = json.dumps({"model": MODEL, "prompt": prompt(60)}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for position in range(len(body)):
            yield body[position : position + 1]
            await asyncio.sleep(0)

    decision = await arrived(stack, await stack.request("POST", COMPLETIONS, pieces(), ECHO), body)
    if stack.profile in BLIND:
        return
    whole = await arrived(stack, await stack.post(COMPLETIONS, body, ECHO), body)
    assert whole["endpoint"] == decision["endpoint"]
    assert whole["prompt_bytes"] == decision["prompt_bytes"]
    assert whole["matched_bytes"] > 0, "however it was cut, it is the same prompt"


@pytest.mark.parametrize("size", [1, 400, 300_000])
async def test_a_body_that_is_ended_by_trailers(stack: Stack, size: int) -> None:
    # Envoy opens its access log with its first flush; without one a stream that ends like this looks broken off.
    await stack.chat("the first request")
    await stack.settled()
    body = json.dumps({"model": MODEL, "prompt": random.Random(size).randbytes(size // 2).hex()}).encode()
    headers = [*ECHO.items(), ("te", "trailers")]
    answer = await asyncio.wait_for(h2_request(stack.ports.envoy, COMPLETIONS, body, headers, trailers=True), 60)
    decision = await arrived(stack, Response(answer.status, answer.headers, answer.body), body)
    assert bool(decision["fallbacks"]) is (stack.profile != "original-dst")


async def test_a_large_header(stack: Stack, prompt: Prompt) -> None:
    body = json.dumps({"model": MODEL, "prompt": prompt()}).encode()
    answer = await stack.post(COMPLETIONS, body, ECHO | {"x-large": "y" * 7_000, "x-odd": "\xe4\xf6 \x7f"[:2]})
    await arrived(stack, answer, body)


async def streams_open(stack: Stack) -> float:
    return (await stack.metrics()).total("extproc_streams_open")


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_in_mid_upload(stack: Stack, how: str) -> None:
    decided = await stack.decided()
    _, writer = await asyncio.open_connection("127.0.0.1", stack.ports.envoy)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 900000\r\n\r\n"
    writer.write(head.encode() + b'{"messages": [{"role": "user", "content": "' + b"x" * 300_000)
    await writer.drain()

    async def under_way() -> bool:
        page = await stack.metrics()
        held = page.total("extproc_buffered_bytes") > 200_000
        if stack.profile == "headers-only":  # there is nothing more to say on its stream
            return page.total("extproc_streams_open") == 0 and await stack.in_flight() == 1
        return page.total("extproc_streams_open") == 1 and (held or stack.profile in BLIND | COLLECTED)

    await until(under_way, "the picker has the first part of the body")
    if how == "reset":
        writer.transport.abort()
    else:
        writer.close()
    await until(lambda: _none_open(stack), "the stream has ended")
    await _settled_without_a_request(stack, decided)


async def _settled_without_a_request(stack: Stack, decided: int) -> None:
    """Nothing is held; nothing was decided, or only at the headers and then given up by the client."""
    decisions = await stack.settled()
    if stack.profile in BLIND:
        assert await stack.decided() == decided + 1
        assert decisions[0]["outcome"] == "client_gone"
    else:
        assert await stack.decided() == decided


async def _none_open(stack: Stack) -> bool:
    return await streams_open(stack) == 0


async def test_a_client_that_leaves_in_mid_response(stack: Stack, prompt: Prompt) -> None:
    body = {"model": MODEL, "prompt": prompt(), "max_tokens": 10_000, "ignore_eos": True, "stream": True}
    async with stack.http.post(stack.url + COMPLETIONS, json=body) as answer:
        assert answer.status == 200
        assert await answer.content.readline()
        assert await stack.in_flight() == 1
        answer.close()
    decision = (await stack.settled())[0]
    # Without an access log nobody says who broke off.
    assert decision["outcome"] == ("aborted" if stack.profile in SHOWN_RESPONSE else "client_gone")
    await until(lambda: _engines_idle(stack), "the engine has dropped it too")
    again = await stack.chat(prompt())
    assert again.status == 200
    await stack.settled()


async def _engines_idle(stack: Stack) -> bool:
    return all(found["running"] == 0 for found in await stack.endpoints())


async def test_clients_that_leave_at_any_moment(stack: Stack, prompt: Prompt) -> None:
    """Also between our decision and its arrival at Envoy, which then does not know the decision's name."""
    body = json.dumps({"model": MODEL, "prompt": prompt(), "max_tokens": 4}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    wait = random.Random(1)
    for _ in range(150):
        _, writer = await asyncio.open_connection("127.0.0.1", stack.ports.envoy)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        await asyncio.sleep(wait.random() * 0.006)
        writer.transport.abort()
    await until(lambda: _none_open(stack), "every stream has ended")
    decisions = await stack.settled()
    assert {decision["outcome"] for decision in decisions[:20]} <= {"client_gone", "aborted", "ok"}


async def test_a_client_that_sends_nothing_it_promised(stack: Stack) -> None:
    """Headers alone, then silence, then gone: nothing is decided, nothing stays."""
    decided = await stack.decided()
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        _, writer = await asyncio.open_connection("127.0.0.1", stack.ports.envoy)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n".encode())
        await writer.drain()
        await until(lambda: _known(stack), "the picker knows of it")
        writer.close()
    await until(lambda: _none_open(stack), "the stream has ended")
    await _settled_without_a_request(stack, decided)


async def _known(stack: Stack) -> bool:
    return await streams_open(stack) == 1 or await stack.in_flight() == 1


async def test_nothing_of_this_was_a_defect(stack: Stack) -> None:
    """Last in the module on purpose: whatever was sent above, no handler of ours failed and no message was illegal."""
    page = await stack.metrics()
    for name in ("internal_errors", "protocol_errors", "leases_expired", "decision_deadlines_passed"):
        assert page.total(f"extproc_{name}_total") == 0, name
    assert stack.picker.running
    assert "Traceback" not in stack.picker.log.read_text()
