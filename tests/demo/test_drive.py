"""The workload's clients: what they send, what they record, and that a failure is a record and no exception."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from extproc.demo.drive import RequestRecord, drive
from extproc.demo.processes import free_ports
from extproc.demo.workload import ChatSpec, ChatWorkload, make_chat

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
USAGE = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}}'


def workload(sessions: int = 2, turns: int = 2) -> ChatWorkload:
    spec = ChatSpec(sessions=sessions, turns=turns, system_tokens=5, user_tokens=5, reply_tokens=4, arrival_s=0, think_s=0)  # fmt: skip
    return make_chat(spec)


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def stream(request: web.Request, *events: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-model-server": "gpu-7"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + event + b"\n\n")
        await asyncio.sleep(0)
    return response


async def one(handler: Handler) -> RequestRecord:
    async with serving(handler) as url:
        (record,) = await drive(workload(1, 1), url, model="m")
    return record


async def test_every_request_is_sent_in_order_of_its_session() -> None:
    bodies: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        assert request.headers["x-extra"] == "1"
        return await stream(request, b'{"choices": []}', USAGE, b"[DONE]")

    done: list[int] = []
    async with serving(handler) as url:
        records = await drive(workload(), url, model="m", progress=done.append, headers={"x-extra": "1"})
    assert sorted((record.session, record.turn) for record in records) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert done == [1, 2, 3, 4]
    assert all(body["stream"] and body["model"] == "m" for body in bodies)
    assert sorted(len(body["messages"]) for body in bodies) == [2, 2, 4, 4]  # type: ignore[arg-type]
    for record in records:
        assert (record.error, record.status, record.endpoint) == ("", 200, "gpu-7")
        assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (9, 2, 4)
        assert record.ttft_s is not None
        assert record.ttft_s >= 0
        assert record.done_s is not None


async def test_usage_without_details_has_nothing_cached() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, b'{"usage": {"prompt_tokens": 9}}', b"[DONE]")

    record = await one(handler)
    assert (record.error, record.prompt_tokens, record.cached_tokens) == ("", 9, 0)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((b'{"choices": []}',), "the stream ended without [DONE]"),
        ((b'{"choices": []}', b"[DONE]"), "the stream carried no usage"),
        ((b'{"usage": null}', b"[DONE]"), "the stream carried no usage"),
    ],
)
async def test_a_stream_that_is_not_whole_is_an_error(events: tuple[bytes, ...], error: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, *events)

    assert (await one(handler)).error == error


async def test_a_refusal_is_an_error_with_its_text() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="no endpoint")

    record = await one(handler)
    assert (record.status, record.error, record.ttft_s) == (503, "HTTP 503: no endpoint", None)


async def test_nobody_there_is_an_error_and_no_exception() -> None:
    (record,) = await drive(workload(1, 1), f"http://127.0.0.1:{free_ports(1)[0]}", model="m")
    assert record.status == 0
    assert "Connect" in record.error
    assert record.done_s is not None


async def test_an_answer_that_never_comes_is_an_error() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(handler) as url:
        (record,) = await drive(workload(1, 1), url, model="m", timeout_s=0.05)
    assert record.error.startswith("TimeoutError") or "Timeout" in record.error
