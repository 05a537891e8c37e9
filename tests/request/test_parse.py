from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.errors import InvalidRequestError
from extproc.request.parse import _READERS, parse
from extproc.vocabulary import InferenceRequest, RequestKind
from tests.request import bodies
from tests.request.bodies import PATHS


def read(api: str, body: Any, **options: Any) -> InferenceRequest:
    return parse(PATHS[api], json.dumps(body).encode(), **options)


def test_every_field_of_a_chat_request() -> None:
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function"}],
            "functions": [{"name": "f"}],
            "chat_template": "t",
            "documents": [{"text": "d"}],
            "cache_salt": "s",
            "stream": True,
            "max_tokens": 5,
            "max_completion_tokens": 7,
            "user": "u",
            "temperature": 0.5,
        }
    ).encode()
    assert parse(
        "/v1/chat/completions",
        body,
        content_type="application/json; charset=utf-8",
        content_encoding="Identity",
        subset=frozenset({"10.0.0.1"}),
        request_id="r",
        explain=True,
    ) == InferenceRequest(
        kind=RequestKind.CHAT,
        model="m",
        prompts=(b'\xfa\xf7"t"\xf6[{"text":"d"}]\xfb{"type":"function"}\xfb{"name":"f"}\xffuser\xfehi',),
        cache_salt="s",
        stream=True,
        max_tokens=7,
        user="u",
        session_key="u",
        subset=frozenset({"10.0.0.1"}),
        request_id="r",
        body_bytes=len(body),
        complete=True,
        explain=True,
    )


def test_session_key_of_the_header_wins_over_the_user() -> None:
    assert read("chat", {"user": "u"}, session_key="k").session_key == "k"


def test_completions() -> None:
    request = read("completions", {"model": "m", "prompt": ["a", "b"], "max_tokens": 3})
    assert (request.kind, request.prompts, request.max_tokens) == (RequestKind.COMPLETIONS, (b"\xf8a", b"\xf8b"), 3)


def test_responses() -> None:
    body = {"model": "m", "tools": [{"type": "t"}], "instructions": "be", "input": "hi", "max_output_tokens": 3}
    request = read("responses", body)
    assert request.prompts == (b'\xfa\xfb{"type":"t"}\xffsystem\xfebe\xffuser\xfehi',)
    assert request.max_tokens == 3
    assert read("responses", body | {"input": [{"role": "user", "content": "hi"}]}).prompts == request.prompts
    assert read("responses", body | {"input": ""}).prompts == (b'\xfa\xfb{"type":"t"}\xffsystem\xfebe',)


def test_embeddings() -> None:
    assert read("embeddings", {"input": [[1], [2]]}).prompts == (b"\xf9\1\0\0\0", b"\xf9\2\0\0\0")
    assert read("embeddings", {"messages": [{"role": "user", "content": "hi"}]}).prompts == (b"\xfa\xffuser\xfehi",)


def test_anthropic_messages() -> None:
    body = {
        "model": "m",
        "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "metadata": {"user_id": "u"},
    }
    request = read("messages", body)
    assert request.prompts == (b"\xfa\xffsystem\xfebe\xffuser\xfehi",)
    assert (request.max_tokens, request.user, request.session_key) == (3, "u", "u")
    assert read("messages", body | {"user": "v"}).user == "v"
    assert read("messages", body | {"metadata": None}).user == ""


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("completions", {"model": "m", "prompt": None, "prompt_embeds": "AAAA", "max_tokens": 4}),
        ("completions", {"model": "m", "prompt": "after", "prompt_embeds": ["AAAA"], "max_tokens": 4}),
        ("completions", {"model": "m", "prompt": "", "prompt_embeds": None, "max_tokens": 4}),
        ("completions", {"model": "m", "max_tokens": 4}),
        ("chat", {"model": "m", "messages": [], "max_tokens": 4}),
        ("chat", {"model": "m", "messages": None, "tools": None, "stream": None, "max_tokens": 4}),
        ("responses", {"model": "m", "input": "x", "previous_response_id": "r", "max_output_tokens": 4}),
        ("responses", {"model": "m", "input": "x", "conversation": {"id": "c"}, "max_output_tokens": 4}),
        ("responses", {"model": "m", "input": "x", "prompt": {"id": "p"}, "max_output_tokens": 4}),
        ("responses", {"model": "m", "input": None, "max_output_tokens": 4}),
    ],
)
def test_prompt_that_is_not_recognised_is_routed_by_load(api: str, body: dict[str, Any]) -> None:
    request = read(api, body)
    assert (request.model, request.prompts, request.max_tokens) == ("m", (), 4)


@pytest.mark.parametrize(
    "options",
    [
        {"content_encoding": "gzip"},
        {"content_encoding": "identity, br"},
        {"content_type": "multipart/form-data; boundary=x"},
        {"content_type": "Multipart/related"},
    ],
)
def test_body_we_do_not_look_into_is_routed_by_load(options: dict[str, Any]) -> None:
    request = parse("/v1/chat/completions", b"\x1f\x8b", session_key="k", **options)
    assert request == InferenceRequest(kind=RequestKind.CHAT, session_key="k", body_bytes=2)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("body", [b"", b"GIF89a", b'{"messages": 5}', b"[" * 100_000])
def test_unknown_path_is_never_parsed(body: bytes, complete: bool) -> None:
    request = parse("/v1/files", body, complete=complete)
    assert request == InferenceRequest(body_bytes=len(body), complete=complete)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    "body", [b"", b"GIF89a", b"[]", b'{"query": 5}', b'{"a":' + b"[" * 9_000 + b"]" * 9_000 + b"}"]
)
def test_missing_path_refuses_nothing_that_may_be_no_inference(body: bytes, complete: bool) -> None:
    assert parse("", body, complete=complete).kind is RequestKind.OTHER


def test_missing_path_is_told_by_the_fields() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    assert parse("", body) == parse("/v1/chat/completions", body)
    assert parse("", body[:-4], complete=False).prompts == (b"\xfa\xffuser\xfehi",)


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        ("chat", {"model": 5}, "model"),
        ("chat", {"messages": "x"}, "messages"),
        ("chat", {"messages": [{}, 5]}, "messages[1]"),
        ("chat", {"messages": [{}, {}, {"role": "user", "content": 5}]}, "messages[2].content"),
        ("chat", {"tools": {}}, "tools"),
        ("chat", {"functions": "f"}, "functions"),
        ("chat", {"max_tokens": 1.5}, "max_tokens"),
        ("chat", {"max_completion_tokens": []}, "max_completion_tokens"),
        ("chat", {"stream": []}, "stream"),
        ("chat", {"cache_salt": 5}, "cache_salt"),
        ("chat", {"user": 5}, "user"),
        ("completions", {"prompt": 5}, "prompt"),
        ("completions", {"prompt": [1, None]}, "prompt[1]"),
        ("completions", {"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ("responses", {"input": 5}, "input"),
        ("responses", {"input": ["x"]}, "input[0]"),
        ("responses", {"instructions": 5}, "instructions"),
        ("responses", {"max_output_tokens": "many"}, "max_output_tokens"),
        ("embeddings", {"input": {}}, "input"),
        ("messages", {"system": 5}, "system"),
        ("messages", {"system": [5]}, "system[0]"),
        ("messages", {"metadata": {"user_id": 5}}, "metadata.user_id"),
    ],
)
def test_wrong_type_is_refused_by_name(api: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(api, body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize("api", sorted(PATHS))
@pytest.mark.parametrize("body", [b"", b"  ", b"x", b"[]", b"5", b"null", b'"x"', b'{"model": "m"', b'{"model": "m"}x'])
def test_what_is_no_object_is_refused(api: str, body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse(PATHS[api], body)


def test_what_the_engines_take_for_numbers_and_booleans_is_taken() -> None:
    request = read("chat", {"stream": "true", "max_tokens": "5"})
    assert (request.stream, request.max_tokens) == (True, 5)
    assert read("chat", {"max_tokens": 5.0}).max_tokens == 5


@pytest.mark.parametrize("limit", [-1, 2**31, 10**30])
def test_impossible_limit_is_none(limit: int) -> None:
    assert read("completions", {"max_tokens": limit}).max_tokens is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": ' + b'{"a":' * 100_000 + b"}" * 100_000 + b"}",
    ],
)
def test_what_is_nested_too_deeply_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse("/v1/chat/completions", body)
    assert (caught.value.param or "").startswith("messages")


def test_deep_nesting_that_only_our_own_recursion_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(body: bytes) -> Any:
        raise RecursionError

    monkeypatch.setitem(
        _READERS, RequestKind.CHAT.value, exhausted
    )  # where it happens depends on the version of Python
    with pytest.raises(InvalidRequestError) as caught:
        parse("/v1/chat/completions", b'{"messages": [{"content": []}]}')
    assert caught.value.param == "messages"


@pytest.mark.parametrize("depth", range(440, 500, 3))
def test_deep_tool_results_never_crash(depth: int) -> None:
    part = b'{"type": "tool_result", "content": ['
    body = b'{"messages": [{"role": "user", "content": [' + part * depth + b"]}" * depth + b"]}]}"
    with contextlib.suppress(InvalidRequestError):
        assert parse("/v1/chat/completions", body).prompts


def test_what_is_wrong_inside_a_skimmed_field_comes_to_light() -> None:
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        parse("/v1/chat/completions", b'{"tools": ["\xff"]}')
    assert parse("/v1/chat/completions", b'{"tools": [1e999]}').prompts == (b'\xfa\xfb"1e999"',)


def test_lone_surrogates_are_no_error() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d"}], "tools": ["\\udc00"]}'
    request = parse("/v1/chat/completions", body)
    assert request.prompts == parse("/v1/chat/completions", body.replace(b" ", b"")).prompts != ()


# Bodies that were cut


def test_cut_body_gives_the_prompt_that_was_seen() -> None:
    body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hel'
    request = parse("/v1/chat/completions", body, complete=False)
    assert request.prompts == (b"\xfa\xffuser\xfehel",)
    assert (request.model, request.stream, request.complete, request.body_bytes) == ("m", True, False, len(body))


def test_cut_body_without_its_model_is_routed_by_load() -> None:
    request = parse("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hel', complete=False)
    assert (request.kind, request.model, request.prompts) == (RequestKind.CHAT, "", ())


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"mod', b'{"model": ', b'{"model": 5, "messages": "x', b'{"model": nul, "a']
)
def test_cut_body_is_not_refused_for_what_is_missing_or_wrong(body: bytes) -> None:
    assert parse("/v1/chat/completions", body, complete=False) == InferenceRequest(
        kind=RequestKind.CHAT, body_bytes=len(body), complete=False
    )


@pytest.mark.parametrize("body", [b"[", b"x", b'{"a": [}', b'{"model": "m", "messages": ' + b"[" * 10_000])
def test_cut_body_that_can_not_become_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse("/v1/chat/completions", body, complete=False)


# Properties


@settings(deadline=None)
@given(bodies.bodies, st.integers(0, 2**32), st.booleans())
def test_spelling_does_not_matter(drawn: tuple[str, dict[str, Any]], seed: int, named: bool) -> None:
    api, body = drawn
    path = PATHS[api] if named else ""
    plain, other = json.dumps(body).encode(), bodies.respelled(body, random.Random(seed)).encode()
    one, two = parse(path, plain), parse(path, other)
    assert one.body_bytes == len(plain)
    assert [getattr(one, name) for name in ("kind", "model", "prompts", "stream", "max_tokens", "user")] == [
        getattr(two, name) for name in ("kind", "model", "prompts", "stream", "max_tokens", "user")
    ]


@settings(deadline=None)
@given(bodies.bodies, st.dictionaries(st.sampled_from(["temperature", "top_p", "n", "seed", "x"]), bodies.values))
def test_sampling_does_not_matter(drawn: tuple[str, dict[str, Any]], sampling: dict[str, Any]) -> None:
    api, body = drawn
    assert read(api, body).prompts == read(api, body | sampling).prompts


@settings(deadline=None)
@given(st.sampled_from(sorted(PATHS)), st.binary(max_size=60) | bodies.values.map(lambda v: json.dumps(v).encode()))
def test_arbitrary_bytes_raise_nothing_else(api: str, body: bytes) -> None:
    for complete in (True, False):
        with contextlib.suppress(InvalidRequestError):
            parse(PATHS[api], body, complete=complete)
        assert parse("", body, complete=complete).body_bytes == len(body)


FIELDS = ["model", "messages", "input", "prompt", "tools", "system", "instructions", "documents", "stream", "metadata"]


@settings(deadline=None)
@given(st.sampled_from(sorted(PATHS)), st.dictionaries(st.sampled_from(FIELDS), bodies.values))
def test_arbitrary_fields_raise_nothing_else(api: str, body: dict[str, Any]) -> None:
    assert read(api, body, complete=False).complete is False
    try:
        read(api, body)
    except InvalidRequestError as error:
        assert error.param  # noqa: PT017 - most bodies are fine


ENGINE_ORDER = ["model", "tools", "instructions", "system", "prompt", "messages", "input"]


@settings(deadline=None)
@given(bodies.bodies, st.data())
def test_any_cut_gives_a_prefix(drawn: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    api, fields = drawn
    body = {name: fields[name] for name in ENGINE_ORDER if name in fields} | fields
    text = json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode()
    whole = parse(PATHS[api], text)
    part = parse(PATHS[api], text[: data.draw(st.integers(0, len(text)))], complete=False)
    assert len(part.prompts) <= len(whole.prompts)
    for seen, full in zip(part.prompts, whole.prompts, strict=False):
        assert full.startswith(seen)


@settings(deadline=None)
@given(bodies.bodies, st.integers(0, 2**32), st.data())
def test_any_cut_of_any_spelling_parses(drawn: tuple[str, dict[str, Any]], seed: int, data: st.DataObject) -> None:
    api, body = drawn
    text = bodies.respelled(body, random.Random(seed)).encode()
    request = parse(PATHS[api], text[: data.draw(st.integers(0, len(text)))], complete=False)
    assert request.model in {"", "m", "adapter"}
