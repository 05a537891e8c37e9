import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim import tokens
from extproc.sim.completions import DEFAULT_OUTPUT_TOKENS, ApiError, Generation, Kind, ServedModels, parse

SERVED = ServedModels("tiny", ("alpha", "beta"), 100)


def completion(**fields: Any) -> Generation:
    return parse(json.dumps({"model": "tiny", "prompt": "Hello"} | fields).encode(), Kind.COMPLETION, SERVED)


def chat(**fields: Any) -> Generation:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse(json.dumps(body).encode(), Kind.CHAT, SERVED)


def error(kind: Kind, body: bytes) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse(body, kind, SERVED)
    answer = json.loads(caught.value.body())["error"]
    assert isinstance(answer, dict)
    assert answer["code"] == caught.value.status
    return answer


@pytest.mark.parametrize(
    ("prompt", "count"), [("Hello", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2), (["a", [1]], 2)]
)
def test_all_forms_of_a_prompt(prompt: Any, count: int) -> None:
    assert len(completion(prompt=prompt).prompts) == count


def test_token_ids_are_taken_as_they_are() -> None:
    assert completion(prompt=[5, 6]).prompts == (tokens.id_tokens([5, 6]),)


def test_defaults() -> None:
    generation = parse(b'{"prompt":"x"}', Kind.COMPLETION, SERVED)
    assert (generation.model, generation.lora, generation.choices, generation.stream) == ("tiny", None, 1, False)
    assert generation.output_tokens == (100 - 2,)
    assert generation.finish_reason == "stop"
    roomy = ServedModels("tiny", (), 10_000)
    assert parse(b'{"prompt":"x"}', Kind.COMPLETION, roomy).output_tokens == (DEFAULT_OUTPUT_TOKENS,)


def test_what_is_read() -> None:
    generation = completion(
        model="beta",
        max_tokens=7,
        n=2,
        stream=True,
        cache_salt="tenant",
        return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert (generation.model, generation.lora, generation.output_tokens, generation.choices) == (
        "beta",
        "beta",
        (7,),
        2,
    )
    assert generation.finish_reason == "length"
    assert generation.cache_salt == "tenant"
    assert generation.stream
    assert generation.include_usage
    assert generation.continuous_usage
    assert generation.return_token_ids
    assert chat(max_tokens=3, max_completion_tokens=4).output_tokens == (4,)


def test_recorded_errors() -> None:
    assert error(Kind.COMPLETION, b'{"model":"nope","prompt":"x"}') == {
        "message": "The model `nope` does not exist. Valid aliases: tiny, alpha, beta.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert error(Kind.COMPLETION, b'{"model":"tiny","prompt":') == {
        "message": "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.25', 'msg': 'JSON decode error', "
        "'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}",
        "type": "Bad Request",
        "param": "body.25",
        "code": 400,
    }
    assert error(Kind.COMPLETION, b'{"model":"tiny","prompt":"x","max_tokens":-1}') == {
        "message": "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)",
        "type": "BadRequestError",
        "param": "max_tokens",
        "code": 400,
    }
    assert error(Kind.COMPLETION, b'{"model":"tiny","max_tokens":3}') == {
        "message": "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
        "type": "BadRequestError",
        "param": "prompt",
        "code": 400,
    }
    assert error(Kind.COMPLETION, b'{"model":"tiny","prompt":"x","temperature":-3}') == {
        "message": "temperature must be non-negative, got -3.0. (parameter=temperature, value=-3.0)",
        "type": "BadRequestError",
        "param": "temperature",
        "code": 400,
    }
    too_long = error(Kind.COMPLETION, json.dumps({"prompt": "x" * 500}).encode())
    assert too_long == {
        "message": "This model's maximum context length is 100 tokens. However, your prompt contains at least 101 input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        "(parameter=input_tokens, value=101)",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    }


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.COMPLETION, b"[]"),
        (Kind.COMPLETION, b""),
        (Kind.COMPLETION, b"\xff"),
        (Kind.COMPLETION, b"[" * 100_000),
        (Kind.COMPLETION, b'{"prompt":{}}'),
        (Kind.COMPLETION, b'{"prompt":{"a":1}}'),
        (Kind.COMPLETION, b'{"prompt":[]}'),
        (Kind.COMPLETION, b'{"prompt":["a",""]}'),
        (Kind.COMPLETION, b'{"prompt":[1,-1]}'),
        (Kind.COMPLETION, b'{"prompt":"x","max_tokens":"3"}'),
        (Kind.COMPLETION, b'{"prompt":"x","max_tokens":true}'),
        (Kind.COMPLETION, b'{"prompt":"x","max_tokens":99}'),
        (Kind.COMPLETION, b'{"prompt":"x","n":0}'),
        (Kind.CHAT, b"{}"),
        (Kind.CHAT, b'{"messages":"x"}'),
        (Kind.CHAT, b'{"messages":["x"]}'),
        (Kind.CHAT, b'{"messages":[]}'),
    ],
)
def test_bad_requests(kind: Kind, body: bytes) -> None:
    assert error(kind, body)["code"] == 400


@given(st.sampled_from(Kind), st.binary(max_size=60))
def test_any_bytes_raise_nothing_but_api_errors(kind: Kind, body: bytes) -> None:
    with contextlib.suppress(ApiError):
        parse(body, kind, SERVED)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = [
    "model",
    "prompt",
    "messages",
    "tools",
    "max_tokens",
    "n",
    "temperature",
    "stream",
    "stream_options",
    "cache_salt",
]


@given(st.sampled_from(Kind), st.dictionaries(st.sampled_from(_FIELDS), _JSON))
def test_any_object_raises_nothing_but_api_errors(kind: Kind, fields: dict[str, Any]) -> None:
    with contextlib.suppress(ApiError):
        parse(json.dumps(fields).encode(), kind, SERVED)
