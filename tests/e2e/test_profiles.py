"""Every profile with a real Envoy, our own picker and model servers: what a user gets from each ready configuration."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from extproc.envoy_config.options import PROFILES
from tests.e2e.stack import DESTINATION, MODEL, Response, Stack, on_both, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

BLIND = {"streamed", "headers-only"}
"""Profiles in which the picker decides before it can see the prompt."""
Prompt = Callable[..., str]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=on_both(*PROFILES))
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running(request.param, tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def echoed(answer: Response) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return what a model server says it was sent, and the headers by lower-case name."""
    assert answer.status == 200, answer.body
    seen = answer.json()
    headers: dict[str, list[str]] = {}
    for name, value in seen["headers"]:
        headers.setdefault(name.lower(), []).append(value)
    return seen, headers


def usage_of(answer: Response, *, stream: bool) -> dict[str, Any]:
    usage = answer.events()[-1]["usage"] if stream else answer.json()["usage"]
    assert isinstance(usage, dict)
    return usage


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("api", ["chat/completions", "completions"])
async def test_a_repeated_prompt_is_answered_from_the_cache_and_accounted_for(
    stack: Stack, prompt: Prompt, api: str, stream: bool
) -> None:
    text = prompt()
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "stream": stream}
    body |= {"messages": [{"role": "user", "content": text}]} if api.startswith("chat") else {"prompt": text}
    if stream:
        body["stream_options"] = {"include_usage": True}
    before = await stack.metrics()
    answers = []
    for _ in range(2):
        answers.append(await stack.post(f"/v1/{api}", body))
        assert answers[-1].status == 200, answers[-1].body
        decisions = await stack.settled()

    usages = [usage_of(answer, stream=stream) for answer in answers]
    told = [decision["usage"] for decision in reversed(decisions[:2])]
    for usage, reported, decision in zip(usages, told, reversed(decisions[:2]), strict=True):
        assert decision["outcome"] == "ok"
        assert reported == {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": 4,
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
    if stack.profile not in BLIND:
        assert answers[0].headers["x-model-server"] == answers[1].headers["x-model-server"]
        assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 0.8 * usages[1]["prompt_tokens"]
        assert decisions[0]["matched_bytes"] > 0.8 * decisions[0]["prompt_bytes"]
    after = await stack.metrics()

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    assert grown("extproc_requests_total") == grown("extproc_requests_total", outcome="ok") == 2
    assert grown("extproc_cached_prediction_error_ratio_count") == 2
    assert grown("extproc_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("extproc_completion_tokens_total") == 8


async def test_a_request_without_body_is_balanced(stack: Stack) -> None:
    answer = await stack.get("/v1/models")
    assert answer.status == 200
    assert [model["id"] for model in answer.json()["data"]] == [MODEL]
    decision = (await stack.settled())[0]
    assert (decision["kind"], decision["outcome"], decision["prompt_bytes"]) == ("other", "ok", 0)


async def test_an_upgrade_request_is_passed_on_unless_bodies_are_buffered(stack: Stack) -> None:
    wanted = {"connection": "Upgrade", "upgrade": "websocket", "x-model-server-echo": "1"}
    answer = await stack.get("/v1/realtime", wanted)
    if stack.profile in {"buffered", "fail-open"}:
        assert answer.status == 403, "refused at once instead of waiting for the end of a body that has none"
    else:
        # A model server that upgrades nothing; Envoy leaves out the body of an answer that is not 101.
        assert answer.status == 200
        decision = (await stack.settled())[0]
        assert stack.server_ids[int(answer.headers["x-model-server"][-1]) - 1] == decision["endpoint"]
    await stack.settled()


@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
async def test_the_body_arrives_byte_for_byte(stack: Stack, prompt: Prompt, chunked: bool) -> None:
    text = prompt(30_000)
    # A spelling that no serialiser would produce again: escapes, white space, repeated and unknown fields.
    odd = (
        b'\r\n{ "x" : 1e2,"x":"\\u00e4\xc3\xa4" ,\t"model":"llama-3.1-8b","prompt":%b }\n ' % json.dumps(text).encode()
    )

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(odd), 7777):
            yield odd[start : start + 7777]

    answer = await stack.request(
        "POST", "/v1/completions?a=b&c", pieces() if chunked else odd, {"x-model-server-echo": "1", "x-own": "kept"}
    )
    seen, headers = echoed(answer)
    assert (seen["method"], seen["path"]) == ("POST", "/v1/completions?a=b&c")
    assert seen["body_bytes"] == len(odd)
    assert seen["sha256"] == hashlib.sha256(odd).hexdigest()
    assert headers["x-own"] == ["kept"]
    assert headers["content-type"] == ["application/json"]
    decision = (await stack.settled())[0]
    assert decision["outcome"] == "ok"
    assert (decision["prompt_bytes"] >= len(text)) is (stack.profile not in BLIND)


async def test_a_forged_destination_is_never_obeyed(stack: Stack, prompt: Prompt) -> None:
    for forged in [*stack.server_ids, "127.0.0.1:1", ""]:
        answer = await stack.chat(prompt(), {DESTINATION: forged, "x-model-server-echo": "1"})
        seen, headers = echoed(answer)
        decision = (await stack.settled())[0]
        assert stack.server_ids[int(seen["server"][-1]) - 1] == decision["endpoint"]
        assert decision["outcome"] == "ok"
        assert headers[DESTINATION] == [",".join([decision["endpoint"], *decision["fallbacks"]])]


MEANT_FOR_A_PICKER = (
    "x-extproc-explain",
    "test-epp-endpoint-selection",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-inference-objective",
    "x-gateway-inference-fairness-id",
    "x-llm-d-inference-objective",
    "x-llm-d-inference-fairness-id",
)


@pytest.mark.parametrize("body", [True, False], ids=["with a body", "without"])
async def test_what_is_meant_for_a_picker_does_not_reach_the_engine(stack: Stack, prompt: Prompt, body: bool) -> None:
    asked = {**dict.fromkeys(MEANT_FOR_A_PICKER, "1"), "x-gateway-own": "kept", "x-model-server-echo": "1"}
    answer = await stack.chat(prompt(), asked) if body else await stack.get("/v1/models", asked)
    _, headers = echoed(answer)
    assert not headers.keys() & set(MEANT_FOR_A_PICKER)
    assert headers["x-gateway-own"] == ["kept"]
    await stack.settled()


async def test_an_explanation_is_given_where_asked_for_and_hidden_from_the_engine(stack: Stack, prompt: Prompt) -> None:
    asked = await stack.chat(prompt(), {"x-extproc-explain": "1", "x-model-server-echo": "1"})
    _, headers = echoed(asked)
    assert "x-extproc-explain" not in headers
    decision = (await stack.settled())[0]
    explanation = asked.headers["x-extproc-explain"]
    assert explanation.startswith(f"weighted: {decision['note']}; {decision['endpoint']} total=")
    plain = await stack.chat(prompt())
    assert "x-extproc-explain" not in plain.headers
    await stack.settled()


async def test_a_brief_explanation_names_neither_addresses_nor_matches(stack: Stack, prompt: Prompt) -> None:
    text = prompt(1000)
    told = []
    try:
        stack.write_config({"explain": {"header": "brief"}})

        async def brief() -> bool:
            answer = await stack.chat("anything", {"x-extproc-explain": "1"})
            return "; one of 2" in answer.headers["x-extproc-explain"]

        await until(brief, "the picker has read the changed file")
        for _ in range(2):
            answer = await stack.chat(text, {"x-extproc-explain": "1"})
            assert answer.status == 200, answer.body
            decision = (await stack.settled())[0]
            told.append(answer.headers["x-extproc-explain"].replace(decision["id"], "ID"))
        if stack.profile not in BLIND:
            assert decision["matched_bytes"] > 0, "the second time there is something to be hidden"
        assert told == ["weighted: decision ID; one of 2"] * 2
    finally:
        stack.write_config()
        await until(stack.heard, "the picker is as it was")


async def test_requests_at_the_same_time_are_spread_and_all_accounted_for(stack: Stack, prompt: Prompt) -> None:
    before = await stack.metrics()
    answers = await asyncio.gather(*(stack.chat(prompt(), max_tokens=8, stream=n % 2 == 1) for n in range(40)))
    assert [answer.status for answer in answers] == [200] * 40
    for number, answer in enumerate(answers):
        tokens = len(answer.events()) if number % 2 else answer.json()["usage"]["completion_tokens"]
        assert tokens >= 8
    assert {answer.headers["x-model-server"] for answer in answers} == {"gpu-1", "gpu-2"}
    await stack.settled()
    after = await stack.metrics()
    assert (
        after.total("extproc_requests_total", outcome="ok") - before.total("extproc_requests_total", outcome="ok") == 40
    )
    assert after.total("extproc_internal_errors_total") == after.total("extproc_protocol_errors_total") == 0
    assert after.total("extproc_leases_expired_total") == 0


async def test_an_empty_pool_is_a_clear_503(stack: Stack, prompt: Prompt) -> None:
    try:
        stack.write_config({"pool": {"endpoints": []}})

        async def empty() -> bool:
            return not await stack.endpoints()

        await until(empty, "the picker has read the changed file")
        if stack.profile == "fail-open":
            # The picker's own 503 until Envoy has seen that it is not ready: then nobody asks it.
            async def passed_by() -> bool:
                return (await stack.chat(prompt())).status == 200

            await until(passed_by, "Envoy takes turns over the endpoints")
            return
        answer = await stack.chat(prompt())
        assert answer.status == 503
        assert answer.headers["retry-after"] == "5"
        assert answer.headers["x-extproc-drop-reason"] == "no_endpoint"
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["type"] == "service_unavailable"
    finally:
        stack.write_config()
        await until(stack.heard, "the picker knows the endpoints again")

        async def asked() -> bool:
            return "x-extproc-explain" in (await stack.chat(prompt(), {"x-extproc-explain": "1"})).headers

        await until(asked, "Envoy asks the picker again")
    assert (await stack.chat(prompt())).status == 200
    await stack.settled()
