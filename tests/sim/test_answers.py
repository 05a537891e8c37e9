import json
from typing import Any

import pytest

from extproc.sim.answers import Answer, StreamedAnswer
from extproc.sim.completions import ApiError, Generation, Kind, ServedModels, parse
from extproc.sim.engine import TokenEvent

SERVED = ServedModels("tiny", (), 1000)


def generation(kind: Kind, **fields: Any) -> Generation:
    base = {"prompt": "Hello"} if kind is Kind.COMPLETION else {"messages": [{"role": "user", "content": "hi"}]}
    return parse(json.dumps(base | fields).encode(), kind, SERVED)


def play(answer: Answer, count: int, cached: int = 0) -> None:
    """Generate every choice's `count` tokens, choice after choice in each step."""
    for number in range(1, count + 1):
        for choice in answer.choices:
            choice.on_token(TokenEvent("id", number, cached, 0.0, 0, number == count))


class Stream:
    """A streamed answer and what it wrote."""

    def __init__(self, kind: Kind, **fields: Any) -> None:
        self.written = b""
        self.answer = StreamedAnswer(generation(kind, stream=True, **fields), "the-id", 7, self.write)

    def write(self, data: bytes) -> None:
        self.written += data

    def chunks(self) -> list[dict[str, Any]]:
        lines = self.written.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_whole_completion_has_the_recorded_fields() -> None:
    answer = Answer(generation(Kind.COMPLETION, max_tokens=2), "cmpl-1", 7)
    play(answer, 2, cached=1)
    assert answer.done.done()
    body = json.loads(answer.body())
    text = body["choices"][0].pop("text")
    assert len(text) == 8
    assert body == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "routed_experts": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0-73596e2c",
        "usage": {
            "prompt_tokens": 3,
            "total_tokens": 5,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1, "created_cache_tokens": None, "multimodal_tokens": None},
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


async def test_whole_chat_answer_has_the_recorded_fields() -> None:
    answer = Answer(generation(Kind.CHAT, max_tokens=1), "chatcmpl-1", 7)
    play(answer, 1)
    body = json.loads(answer.body())
    assert list(body) == (
        "id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids prompt_text "
        "kv_transfer_params ec_transfer_params metrics"
    ).split(" ")
    choice = body["choices"][0]
    assert list(choice) == "index message logprobs finish_reason stop_reason token_ids routed_experts".split(" ")
    assert list(choice["message"]) == "role content refusal annotations audio function_call reasoning".split(" ")
    assert body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "created_cache_tokens": 0,
        "multimodal_tokens": None,
    }


async def test_token_ids_on_request() -> None:
    for kind in Kind:
        answer = Answer(generation(kind, max_tokens=3, return_token_ids=True), "x", 7)
        play(answer, 3)
        body = json.loads(answer.body())
        prompt = body["choices"][0] if kind is Kind.COMPLETION else body
        assert len(prompt["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
        assert len(body["choices"][0]["token_ids"]) == 3


async def test_several_prompts_and_answers() -> None:
    answer = Answer(generation(Kind.COMPLETION, prompt=["Hello", "other"], n=2, max_tokens=1), "x", 7)
    play(answer, 1, cached=2)
    body = json.loads(answer.body())
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in body["choices"]}) == 4
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 4)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_streamed_completion() -> None:
    stream = Stream(Kind.COMPLETION, max_tokens=2)
    play(stream.answer, 2)
    assert stream.answer.done.done()
    first, last = stream.chunks()
    first["choices"][0].pop("text")
    assert first == {
        "id": "the-id",
        "object": "text_completion",
        "created": 7,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        ],
    }
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["system_fingerprint"] == "vllm-0.32.0-73596e2c"


async def test_streamed_chat_with_usage() -> None:
    stream = Stream(Kind.CHAT, max_tokens=2, stream_options={"include_usage": True})
    play(stream.answer, 2, cached=3)
    role, first, last, usage = stream.chunks()
    assert role == {
        "id": "the-id",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "tiny",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
        "prompt_token_ids": None,
        "prompt_text": None,
    }
    assert list(first["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]
    assert list(last["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    assert "system_fingerprint" not in last
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 11,
        "total_tokens": 13,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3, "created_cache_tokens": 0},
    }
    assert usage["system_fingerprint"] == "vllm-0.32.0-73596e2c"


async def test_streamed_usage_of_completions_has_cached_tokens_only() -> None:
    stream = Stream(
        Kind.COMPLETION, max_tokens=1, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    play(stream.answer, 1)
    token, usage = stream.chunks()
    assert token["usage"] == {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("kind", Kind)
async def test_a_stream_says_what_the_whole_answer_says(kind: Kind) -> None:
    stream, whole = Stream(kind, max_tokens=9), Answer(generation(kind, max_tokens=9), "x", 7)
    play(stream.answer, 9)
    play(whole, 9)
    choice = json.loads(whole.body())["choices"][0]
    choices = [chunk["choices"][0] for chunk in stream.chunks()]
    if kind is Kind.CHAT:
        assert "".join(piece["delta"]["content"] for piece in choices) == choice["message"]["content"]
    else:
        assert "".join(piece["text"] for piece in choices) == choice["text"]


async def test_streamed_token_ids_of_a_chat_prompt() -> None:
    stream = Stream(Kind.CHAT, max_tokens=1, return_token_ids=True)
    play(stream.answer, 1)
    assert len(stream.chunks()[0]["prompt_token_ids"]) == 11


async def test_a_lost_engine_ends_a_stream_with_an_error_event() -> None:
    stream = Stream(Kind.COMPLETION, max_tokens=2, n=2)
    for choice in stream.answer.choices:
        choice.on_dropped()
    (chunk,) = stream.chunks()
    assert chunk["error"]["code"] == 500
    assert stream.answer.done.done()


async def test_a_lost_engine_fails_a_whole_answer() -> None:
    answer = Answer(generation(Kind.COMPLETION, n=2), "x", 7)
    for choice in answer.choices:
        choice.on_dropped()
    with pytest.raises(ApiError) as caught:
        await answer.done
    assert caught.value.status == 500


async def test_a_stream_can_be_cut() -> None:
    written: list[bytes] = []
    cuts: list[bool] = []
    answer = StreamedAnswer(
        generation(Kind.COMPLETION, max_tokens=4),
        "x",
        7,
        written.append,
        cut=lambda: cuts.append(True),
        cut_after_tokens=2,
    )
    play(answer, 3)
    assert (len(written), cuts) == (2, [True])
