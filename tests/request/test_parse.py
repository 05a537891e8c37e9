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
from extproc.types import InferenceRequest, RequestKind
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
    "body", [b"", b"GIF89a", b"\0\xd8" * 50_001, b"[]", b'{"query": 5}', b'{"a":' + b"[" * 9_000 + b"]" * 9_000 + b"}"]
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
        ("chat", {"messages": "x"}, "messages"),
        ("chat", {"messages": [{}, 5]}, "messages[1]"),
        ("messages", {"messages": {"role": "user"}}, "messages"),
        ("messages", {"model": 5, "messages": ["x"]}, "messages[0]"),
    ],
)
def test_messages_that_no_engine_takes_are_refused_by_name(api: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(api, body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")


HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("api", "field"),
    [
        ("chat", {"model": 5}),
        ("chat", {"cache_salt": ["s"]}),
        ("completions", {"prompt": 5}),
        ("completions", {"prompt": [1, None]}),
        ("completions", {"prompt": [[1], [-1]]}),
        ("responses", {"input": 5}),
        ("responses", {"input": ["x"]}),
        ("responses", {"instructions": 5}),
        ("embeddings", {"input": {}}),
        ("embeddings", {"input": [{"text": "a", "image": "b"}]}),
        ("embeddings", {"messages": "x"}),
        ("messages", {"system": 5}),
    ],
)
def test_shape_that_we_do_not_know_is_no_prompt(api: str, field: dict[str, Any]) -> None:
    body = {"model": "m", "stream": True, "user": "u"}
    prompt = {"completions": {"prompt": "x"}, "responses": {"input": "x"}, "embeddings": {"input": "x"}}
    assert read(api, body | prompt.get(api, {"messages": HI})).prompts
    request = read(api, body | prompt.get(api, {"messages": HI}) | field)
    assert (request.prompts, request.stream, request.user) == ((), True, "u")
    assert request.model == ("" if "model" in field else "m")
    assert request.complete


@pytest.mark.parametrize(
    ("field", "read_as"),
    [
        ({"stream": "on"}, (True, None, "")),
        ({"stream": "Yes"}, (True, None, "")),
        ({"stream": 1}, (True, None, "")),
        ({"stream": "off"}, (False, None, "")),
        ({"stream": 0}, (False, None, "")),
        ({"stream": []}, (False, None, "")),
        ({"stream": "true", "max_tokens": "5"}, (True, 5, "")),
        ({"max_tokens": 5.0}, (False, 5, "")),
        ({"max_tokens": 1.5}, (False, None, "")),
        ({"max_tokens": "many"}, (False, None, "")),
        ({"user": 5}, (False, None, "5")),
        ({"user": [5]}, (False, None, "")),
        ({"metadata": {"user_id": 5}}, (False, None, "5")),
        ({"metadata": {"user_id": True}}, (False, None, "")),
        ({"metadata": {"user_id": 10**200, "x": 1.5}}, (False, None, str(10**200))),
        ({"metadata": {"user_id": 10**400}}, (False, None, "")),
        ({"metadata": 5}, (False, None, "")),
        ({"metadata": None}, (False, None, "")),
    ],
)
def test_odd_values_of_what_is_no_prompt_cost_no_more_than_themselves(field: dict[str, Any], read_as: Any) -> None:
    request = read("messages", {"model": "m", "messages": HI} | field)
    assert (request.stream, request.max_tokens, request.user) == read_as
    assert request.prompts == (b"\xfa\xffuser\xfehi",)
    assert request.model == "m"


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("api", "setting"),
    [
        ("chat", {"reasoning_effort": "low"}),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("chat", {"chat_template": "t"}),
        ("chat", {"documents": [{"text": "d"}]}),
        ("chat", {"tool_choice": "none"}),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("chat", {"add_special_tokens": True}),
        ("chat", {"mm_processor_kwargs": {"max_pixels": 5}}),
        ("chat", {"lora_path": "a"}),
        ("completions", {"add_special_tokens": False}),
        ("completions", {"lora_path": "a"}),
        ("embeddings", {"add_special_tokens": False}),
        ("responses", {"reasoning": {"effort": "high"}}),
        ("responses", {"tool_choice": "none"}),
        ("messages", {"output_config": {"effort": "low"}}),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}),
        ("messages", {"chat_template_kwargs": {"a": 1}}),
        ("messages", {"tool_choice": {"type": "tool", "name": "f"}}),
    ],
)
def test_what_changes_how_the_prompt_begins_is_its_head(api: str, setting: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": "word " * 99, "input": "word " * 99, "messages": HI, "tools": TOOLS}
    if api == "responses":
        del body["prompt"]
    if api == "embeddings":
        del body["messages"]
    usual, other = read(api, body).prompts, read(api, body | setting).prompts
    assert len(usual) == len(other) == 1
    assert usual[0][:6] != other[0][:6]
    # and what comes after it is the same
    assert other[0].endswith(usual[0][-3:])


@pytest.mark.parametrize(
    ("api", "setting"),
    [
        ("chat", {"add_generation_prompt": False, "continue_final_message": True}),
        ("chat", {"chat_template_kwargs": {"add_generation_prompt": False}}),
        ("chat", {"chat_template_kwargs": {}, "reasoning_effort": None, "add_special_tokens": False}),
        ("chat", {"tool_choice": "auto"}),
        ("chat", {"tool_choice": "required", "parallel_tool_calls": False}),
        ("chat", {"response_format": {"type": "json_object"}, "include_reasoning": False, "temperature": 1}),
        ("completions", {"add_special_tokens": True, "suffix": "x", "echo": True}),
        ("embeddings", {"add_special_tokens": False, "encoding_format": "base64", "dimensions": 5}),
        ("responses", {"reasoning": {"summary": "auto"}, "truncation": "disabled", "tool_choice": "auto"}),
        ("messages", {"tool_choice": {"type": "auto"}, "thinking": None, "output_config": {"format": {}}}),
    ],
)
def test_what_changes_only_its_end_or_its_answer_is_not(api: str, setting: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": "x", "input": "x", "messages": HI, "tools": TOOLS}
    if api == "responses":
        del body["prompt"]
    assert read(api, body | setting).prompts == read(api, body).prompts != ()


def test_token_ids_instead_of_messages_promise_no_prefix() -> None:
    body = {"model": "m", "messages": HI, "max_tokens": 5}
    ids = read("chat", body | {"input_ids": [1, 2]})
    assert (ids.prompts, ids.max_tokens) == ((), 5)


def test_long_names_are_kept_as_their_beginning_and_a_digest() -> None:
    body = {"model": "m" * 300, "messages": HI}
    request = read("chat", body, session_key="s" * 300, request_id="r" * 300)
    names = request.model, request.session_key, request.request_id
    assert all(len(name) < 300 and name.startswith(letter * 64) for name, letter in zip(names, "msr", strict=True))
    assert request.model != read("chat", {**body, "model": "m" * 301}).model


def test_a_long_body_that_is_in_no_encoding_is_refused_where_it_must_be_json() -> None:
    body = b"{\x00\x00\x00" + b"\x00\x00\x00\xff" * 20_000
    with pytest.raises(InvalidRequestError, match="UTF-32-LE"):
        parse("/v1/chat/completions", body)
    assert parse("", body).kind is RequestKind.OTHER


def test_token_ids_are_as_they_are() -> None:
    body = {"model": "m", "prompt": [1, 2]}
    assert read("completions", body | {"add_special_tokens": False}).prompts == read("completions", body).prompts != ()
    assert read("completions", body | {"lora_path": "a"}).prompts == ()


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("kind", [[], {}, ["auto"], 5, None])
def test_a_choice_of_tools_of_an_unknown_type_is_part_of_the_head(api: str, kind: Any) -> None:
    body = {"model": "m", "messages": HI, "input": HI, "tools": TOOLS}
    assert read(api, body | {"tool_choice": {"type": kind}}).prompts != read(api, body).prompts != ()


def test_a_choice_of_tools_without_tools_changes_nothing() -> None:
    assert read("chat", {"messages": HI, "tool_choice": "none"}).prompts == (b"\xfa\xffuser\xfehi",)


@pytest.mark.parametrize("api", sorted(PATHS))
def test_a_prompt_that_the_engine_cuts_is_no_promise(api: str) -> None:
    body = (
        {"model": "m", "messages": HI} if api in {"chat", "messages"} else {"model": "m", "input": "x", "prompt": "x"}
    )
    if api == "responses":
        del body["prompt"]
    assert read(api, body).prompts != ()
    request = read(api, body | {"truncate_prompt_tokens": 5})
    assert (request.prompts, request.model) == ((), "m")
    assert read(api, body | {"truncate_prompt_tokens": None}).prompts != ()


@pytest.mark.parametrize("api", sorted(PATHS))
@pytest.mark.parametrize("body", [b"", b"  ", b"x", b"[]", b"5", b"null", b'"x"', b'{"model": "m"', b'{"model": "m"}x'])
def test_what_is_no_object_is_refused(api: str, body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse(PATHS[api], body)


@pytest.mark.parametrize("limit", [-1, 2**31, 10**30])
def test_impossible_limit_is_none(limit: int) -> None:
    assert read("completions", {"max_tokens": limit}).max_tokens is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": ' + b"[" * 5_000 + b"]" * 5_000 + b"}]}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": ' + b'{"a":' * 100_000 + b"}" * 100_000 + b"}",
    ],
)
def test_what_is_nested_too_deeply_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse("/v1/chat/completions", body)
    assert (caught.value.param or "").startswith("messages")


def test_deep_nesting_that_only_our_own_recursion_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:  # where it happens depends on the version of Python
        def read(self, body: bytes) -> Any:
            raise RecursionError

    monkeypatch.setitem(_READERS, RequestKind.CHAT.value, Exhausted())
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
    assert parse("/v1/chat/completions", b'{"tools": [1e999]}').prompts == (b"\xfa\xfb1e999",)


def test_lone_surrogates_are_no_error() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d"}], "tools": ["\\udc00"]}'
    request = parse("/v1/chat/completions", body)
    assert request.prompts == parse("/v1/chat/completions", body.replace(b" ", b"")).prompts != ()


# Bodies with more elements than are read at once


MESSAGE = b'{"role":"user","content":"x"},'


def test_so_many_elements_are_read_like_a_body_that_was_cut() -> None:
    body = b'{"model":"m","messages":[' + MESSAGE * 100_000 + b'{}],"stream":true}'
    request = parse("/v1/chat/completions", body)
    assert (request.model, request.stream, request.complete, request.body_bytes) == ("m", False, False, len(body))
    assert 1000 < request.prompts[0].count(b"\xff") < 20_000
    assert (b"\xfa" + b"\xffuser\xfex" * 100_000).startswith(request.prompts[0])


@pytest.mark.parametrize("tail", [b',"n":NaN}', b',"n":"\\ud800"}', b',"stream":[]}', b',"n":!}', b"}}}"])
def test_whatever_is_wrong_after_that_is_for_the_engine_to_say(tail: bytes) -> None:
    body = b'{"model":"m","messages":[' + MESSAGE * 100_000 + b"{}]" + tail
    assert parse("/v1/chat/completions", body).prompts[0].startswith(b"\xfa\xffuser\xfex")


@pytest.mark.parametrize("spoilt", [b"NaN", b'"\\ud800"'])
def test_what_has_to_be_spelled_again_is_read_as_far_as_that_is_affordable(spoilt: bytes) -> None:
    text = b"the quick brown fox " * 200_000
    body = b'{"model":"m","tools":[' + spoilt + b'],"messages":[{"role":"user","content":"' + text + b'"}]}'
    request = parse("/v1/chat/completions", body)
    assert (request.model, request.complete) == ("m", False)
    seen = request.prompts[0].partition(b"\xff")[2]
    assert (b"user\xfe" + text).startswith(seen)
    assert len(seen) > 500_000


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        ("/v1/completions", {"prompt": [99_999] * 690_000}, 1),
        ("/v1/embeddings", {"input": ["words " * 300] * 2048}, 2048),
        ("/v1/embeddings", {"input": [[99_999] * 300] * 2048}, 2048),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 'said, and \n said "again" ' * 8}] * 10_000}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": json.dumps([{"a": 1, "b": "c" * 60}] * 99)}] * 300}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": [{"type": "image_url", "image_url": {"url": "A" * 10**6}}] * 3}]}, 1),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "d" * 60} for i in range(40)}}}}] * 120, "messages": HI * 8000}, 1),
    ],
)  # fmt: skip
def test_real_bodies_are_read_whole(path: str, body: dict[str, Any], prompts: int) -> None:
    text = json.dumps({"model": "m"} | body, separators=(",", ":")).encode()
    assert 700_000 < len(text) < 4 << 20
    request = parse(path, text)
    assert (request.complete, len(request.prompts)) == (True, prompts)


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


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("text", ["hel", "hel" * 50_000])
def test_cut_body_in_another_encoding_is_read_as_far(encoding: str, text: str) -> None:
    body = ('{"model": "m", "messages": [{"role": "user", "content": "' + text + "\N{GRINNING FACE}").encode(encoding)
    for length in (0, 1, 2, 3):
        request = parse("/v1/chat/completions", body[: len(body) - length], complete=False)
        assert request.prompts[0].startswith(b"\xfa\xffuser\xfe" + text.encode())
        assert request.body_bytes == len(body) - length


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


def test_numbers_that_take_long_to_read_are_heads_as_they_are_written() -> None:
    def head(number: str) -> bytes:
        body = f'{{"model": "m", "reasoning_effort": {number}, "messages": [{{"role": "user", "content": "hi"}}]}}'
        (prompt,) = parse("/v1/chat/completions", body.encode()).prompts
        return prompt.partition(b"\xff")[0]

    assert head("1e308") == b'\xfa\xfc{"reasoning_effort":1e308}'
    assert len({head(number) for number in ("1.5", "1.25", '"1.5"', "1", "1e0")}) == 5


def test_lone_surrogates_in_another_encoding_are_read_as_far_as_is_affordable() -> None:
    text = '{"model": "m", "messages": [{"role": "user", "content": "' + "hello \ud800" * 100_000 + '"}]}'
    request = parse("/v1/chat/completions", text.encode("utf-16", "surrogatepass"))
    assert request.model == "m"
    assert not request.complete
    assert request.prompts[0].startswith(b"\xfa\xffuser\xfehello ")
    assert len(request.prompts[0]) > 10_000


def test_a_large_setting_beside_token_ids_is_known_by_its_digest() -> None:
    def prompts(adapter: str) -> tuple[bytes, ...]:
        return parse("/v1/completions", f'{{"model": "m", "prompt": "hi", "lora_path": {adapter}}}'.encode()).prompts

    large, other = "[" + "1," * 10_000 + "1]", "[" + "1," * 10_000 + "2]"
    assert prompts(large) == prompts(large) != prompts(other)
    assert len(prompts(large)[0]) < 100
