"""What the picker learns from engines through a real Envoy: scrapes, lists of models, and what answers report as used."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.stack import MODEL, Stack, on_both, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

Prompt = Callable[..., str]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=on_both("direct", "full-duplex"))
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two engines at real speed, so that requests stay long enough to be seen in a scrape."""
    args = [["--lora", "sql"], ["--lora", "sql"]]
    config = {"pool": {"scrape": {"busy_interval": 0.05, "idle_interval": 0.2}}}
    folder = tmp_path_factory.mktemp("signals")
    async with running(request.param, folder, speed=1.0, server_args=args, config=config) as stack:
        yield stack


@contextlib.asynccontextmanager
async def long_streams(stack: Stack, bodies: list[dict[str, Any]]) -> AsyncIterator[None]:
    """Hold streamed answers open, sent one after the other, for the length of a block."""
    async with contextlib.AsyncExitStack() as exit_stack:
        for body in bodies:
            long = {"model": MODEL, "max_tokens": 4000, "ignore_eos": True, "stream": True, **body}
            post = stack.http.post(f"{stack.url}/v1/completions", json=long)
            answer = await exit_stack.enter_async_context(post)
            exit_stack.callback(answer.close)
            assert answer.status == 200
        yield


async def test_a_running_request_shows_in_the_signals_and_goes(stack: Stack, prompt: Prompt) -> None:
    async def seen() -> bool:
        found = await stack.endpoints()
        return sum(one["running"] or 0 for one in found) == 3 and any(one["lora_running"] == ["sql"] for one in found)

    async def gone() -> bool:
        return all(one["running"] == 0 and not one["lora_running"] for one in await stack.endpoints())

    async with long_streams(stack, [{"prompt": prompt()}, {"prompt": prompt()}, {"prompt": prompt(), "model": "sql"}]):
        await until(seen, "three requests run, one of them with the adapter")
        assert sum(one["in_flight"] for one in await stack.endpoints()) == 3
        assert all(one["kv_cache_usage"] > 0 for one in await stack.endpoints())
    await stack.settled()
    await until(gone, "nothing runs any more")
    for one in await stack.endpoints():
        assert one["models"] == sorted([MODEL, "sql"])
        assert one["health_score"] == 1
        assert one["scrape_failures"] == 0


async def test_a_conversation_stays_where_its_cache_is_and_is_predicted_well(stack: Stack, prompt: Prompt) -> None:
    messages = [{"role": "system", "content": prompt(600)}]
    before = await stack.metrics()
    servers, cached = set(), []
    for turn in range(6):
        messages.append({"role": "user", "content": prompt(60)})
        answer = await stack.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 8})
        servers.add(answer.headers["x-model-server"])
        usage = answer.json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        messages.append(answer.json()["choices"][0]["message"])
        decision = (await stack.settled())[0]
        if turn:
            assert decision["prompt_tokens"] == pytest.approx(usage["prompt_tokens"], rel=0.2), "learned from the first"
    assert len(servers) == 1
    assert cached[0] < 0.2
    assert min(cached[1:]) > 0.7
    after = await stack.metrics()
    name = "extproc_cached_prediction_error_ratio"
    count, total = (after.total(f"{name}_{part}") - before.total(f"{name}_{part}") for part in ("count", "sum"))
    assert count == 6
    assert total / count < 0.15


async def test_short_chats_teach_nothing_wrong_about_documents(stack: Stack, prompt: Prompt) -> None:
    """A short chat is mostly the template's tokens; documents are recognised all the same, and their tokens estimated."""
    documents = [prompt(1500) for _ in range(6)]
    for turn in range(4):
        for text in documents:
            for _ in range(4):
                await stack.chat("hi")
            await stack.chat(f"{text}\n{turn}")
            found = (await stack.settled())[0]
            if turn:
                assert found["matched_bytes"] > 0.9 * len(text)
                assert found["prompt_tokens"] == pytest.approx(found["usage"]["prompt_tokens"], rel=0.15)


async def test_an_index_that_promised_too_much_is_corrected(stack: Stack, prompt: Prompt) -> None:
    """An engine that gave its cache away, for whatever reason: promises break one after another, and the index follows."""
    older, texts = [prompt(1000) for _ in range(4)], [prompt(1000) for _ in range(24)]
    for text in (*older, *texts):
        await stack.chat(text)
    for engine in stack.server_ids:
        async with stack.http.post(f"http://{engine}/reset_prefix_cache") as answer:
            assert answer.status == 200
    before = (await stack.metrics()).total("extproc_prefix_evicted_blocks_total", cause="correction")
    for text in texts:
        await stack.chat(text)
    mistaken = (await stack.settled())[: len(texts)]
    assert sum(one["predicted_cached_tokens"] > 1000 and one["usage"]["cached_tokens"] < 100 for one in mistaken) >= 8
    assert (await stack.metrics()).total("extproc_prefix_evicted_blocks_total", cause="correction") > before
    await stack.chat(texts[-1])
    right = (await stack.settled())[0]
    assert right["usage"]["cached_tokens"] == pytest.approx(right["predicted_cached_tokens"], rel=0.2)


async def test_an_engine_that_restarts_loses_its_entries(stack: Stack, prompt: Prompt) -> None:
    text = prompt(1000)
    await stack.chat(text)
    first = (await stack.settled())[0]
    home = stack.server_ids.index(first["endpoint"])
    await stack.scraped(home)
    await stack.fault(home, kind="restart")

    async def forgotten() -> bool:
        return "an engine has restarted" in stack.picker.log.read_text()

    await until(forgotten, "the picker has noticed the restart")
    await stack.chat(text)
    again = (await stack.settled())[0]
    assert again["matched_bytes"] == 0
    assert again["usage"]["cached_tokens"] < 100


async def test_model_servers_that_cannot_be_scraped_are_balanced_by_what_is_in_flight(
    stack: Stack, prompt: Prompt
) -> None:
    """Last in the module: the picker starts anew and never gets to see a metrics page."""
    for index in range(2):
        await stack.fault(index, kind="error", path="/metrics")
    await stack.picker.stop()
    await stack.start_picker()
    await stack.picker_healthy()

    async def failing() -> bool:
        return all(found["scrape_failures"] > 0 for found in await stack.endpoints())

    await until(failing, "every scrape fails")
    for count in (2, 4, 6):
        async with long_streams(stack, [{"prompt": prompt()} for _ in range(count)]):
            found = await stack.endpoints()
            assert [one["in_flight"] for one in found] == [count / 2, count / 2]
            assert [one["signal_age_s"] for one in found] == [None, None]
        await stack.settled()
    page = await stack.metrics()
    assert page.total("extproc_scrape_errors_total", reason="status") >= 2
