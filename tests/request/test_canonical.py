from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.errors import InvalidRequestError
from extproc.request import canonical
from tests.request import bodies


def chat(*messages: Any) -> bytes:
    out: list[bytes] = []
    canonical.append_messages(out, messages)
    return b"".join(out)


def user(*parts: Any) -> bytes:
    return chat({"role": "user", "content": list(parts)})


def tools(value: Any, **spelling: Any) -> bytes:
    out: list[bytes] = []
    canonical.append_tools(out, msgspec.Raw(json.dumps(value, **spelling).encode()))
    return b"".join(out)


def prompts(value: Any) -> tuple[bytes, ...]:
    return canonical.prompts_of(msgspec.Raw(json.dumps(value).encode()))


def system(value: Any) -> bytes:
    out: list[bytes] = []
    canonical.append_system(out, value)
    return b"".join(out)


# Prompts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (None, ()),
        ("", ()),
        ([], ()),
        ("hé", (b"\xf8h\xc3\xa9",)),
        (["a", "", "b"], (b"\xf8a", b"\xf8b")),
        ([1, 2**32 - 1], (b"\xf9\x01\0\0\0\xff\xff\xff\xff",)),
        ([[1], [], [2]], (b"\xf9\x01\0\0\0", b"\xf9\x02\0\0\0")),
    ],
)
def test_prompt_in_each_form(prompt: Any, expected: tuple[bytes, ...]) -> None:
    assert prompts(prompt) == expected
    indented = json.dumps(prompt, indent=2).encode()
    assert canonical.prompts_of(msgspec.Raw(indented)) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        5,
        True,
        {"prompt_token_ids": [1]},
        ["a", 1],
        [1, "a"],
        [1, -1],
        [2**32],
        [10**30],
        [1.5],
        [{"text": "a", "image": "b"}],
        [None],
        [[1], 2],
        [[1], [2, []]],
    ],
)
def test_prompt_of_another_shape_is_none_that_we_know(prompt: Any) -> None:
    assert prompts(prompt) == ()


def test_prompts_beyond_the_most_are_left_out() -> None:
    assert len(prompts(["a"] * 3000)) == len(prompts([[1]] * 3000)) == 2048


def test_prompt_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        canonical.prompts_of(msgspec.Raw(b'"\xff"'))


def test_token_ids_are_the_same_bytes_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "_BIG_ENDIAN", True)
    assert prompts([1]) == (b"\xf9\0\0\0\x01",)  # swapped, as it would be there


# Messages


def test_plain_messages() -> None:
    assert chat({"role": "system", "content": "be"}, {"role": "user", "content": "é"}) == (
        b"\xffsystem\xfebe\xffuser\xfe\xc3\xa9"
    )


@pytest.mark.parametrize(
    "message",
    [
        {"content": "hi", "role": "user"},
        {"role": "user", "content": ["hi"]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "user", "content": [{"text": "hi"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "user",
            "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "output_text", "text": "hi"}],
        },
        {"role": "user", "content": "hi", "name": None, "tool_calls": [], "timestamp": 5},
        {"role": "user", "content": "hi", "type": "message", "id": "m1", "status": "completed"},
    ],
)
def test_spellings_of_one_message(message: dict[str, Any]) -> None:
    assert chat(message) == b"\xffuser\xfehi"


def test_message_without_content_role_or_known_role() -> None:
    assert chat({"role": "assistant"}, {"content": "x"}, {"role": "narrator", "content": None}, {}) == (
        b"\xffassistant\xfe\xff\xfex\xffnarrator\xfe\xff\xfe"
    )
    assert chat({"role": "narrator", "content": "x"}) == b"\xffnarrator\xfex"


def test_tool_calls_stand_after_the_content_with_sorted_keys() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
    assert chat({"tool_calls": [call], "role": "assistant", "content": ""}) == (
        b'\xffassistant\xfe\xfc["tool_calls",[{"function":{"arguments":"{}","name":"f"},"id":"c","type":"function"}]]'
    )
    assert chat({"role": "tool", "tool_call_id": "c", "content": "4"}) == b'\xfftool\xfe4\xfc["tool_call_id","c"]'


def test_images_count_by_hash_of_their_url_alone() -> None:
    data = "data:image/png;base64," + "A" * 10_000
    as_object = user({"type": "image_url", "image_url": {"url": data, "detail": "low"}})
    assert as_object == user({"image_url": data, "type": "image_url"})
    assert len(as_object) < 80
    assert as_object != user({"type": "image_url", "image_url": {"url": data + "A"}})


def test_other_media_count_by_hash_of_the_part() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "A" * 10_000, "format": "wav"}}
    assert len(user(audio)) < 80
    assert user(audio) == user(audio | {"cache_control": {}})
    assert user(audio) != user({"type": "input_audio", "input_audio": {"data": "B", "format": "wav"}})
    assert user({"type": "image_url", "uuid": "1"}) != user({"type": "image_url", "uuid": "2"})
    assert user({"type": "document", "image_url": "x"}) != user({"type": "document", "image_url": "x", "title": "t"})


def test_unknown_parts_are_taken_whole() -> None:
    assert user({"type": "new", "b": 1, "a": {"d": 1, "c": "é"}, "cache_control": {}}) == (
        b'\xffuser\xfe\xf5{"a":{"c":"\xc3\xa9","d":1},"b":1,"type":"new"}'
    )
    assert user({"type": None}, {"x": 1}) == b'\xffuser\xfe\xf5{"type":null}\xfd\xf5{"x":1}'
    assert user({"type": "text", "text": None}) == b"\xffuser\xfe"


def test_thinking_counts_without_its_signature() -> None:
    assert user({"type": "thinking", "thinking": "t", "signature": "s"}) == (
        b'\xffuser\xfe\xf5{"thinking":"t","type":"thinking"}'
    )


def test_tool_result_frames_its_content() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "text", "text": "4", "cache_control": {}}],
    }
    assert user(result, "and") == b"\xffuser\xfe\xc1c\xfe4\xc0\xfdand"
    assert user(result | {"content": "4"}, "and") == user(result, "and")
    assert user({"type": "tool_result"}) == b"\xffuser\xfe\xc1\xfe\xc0"


def test_responses_items() -> None:
    call = {"type": "function_call", "id": "fc", "status": "completed", "name": "f", "arguments": "{}", "call_id": "c"}
    assert chat(call) == b'\xff\xfe\xfc{"arguments":"{}","call_id":"c","name":"f","type":"function_call"}'
    assert chat({"type": "added", "role": "developer", "tools": []}).startswith(b"\xff\xfe\xfc{")
    assert chat({"type": "message", "content": "x"}) == b"\xff\xfex"


@pytest.mark.parametrize(
    ("message", "framed"),
    [
        ({"role": 5, "content": "x"}, b"\xff\xf55\xfex"),
        ({"role": [], "content": "x"}, b"\xff\xf5[]\xfex"),
        ({"role": "user", "content": 5}, b"\xffuser\xfe\xf55"),
        ({"role": "user", "content": {"a": 1}}, b'\xffuser\xfe\xf5{"a":1}'),
        ({"role": "user", "content": ["x", 5, "y"]}, b'\xffuser\xfex\xfd\xf5[5,"y"]'),
        ({"role": "user", "content": [{"type": "text", "text": True}]}, b"\xffuser\xfe\xf5true"),
        ({"role": "user", "content": [{"text": True}]}, b'\xffuser\xfe\xf5{"text":true}'),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": 1.5, "content": ["", False]}]},
            b"\xffuser\xfe\xc1\xf51.5\xfe\xfd\xf5[false]\xc0",
        ),
    ],
)
def test_unexpected_types_are_framed_as_they_are(message: dict[str, Any], framed: bytes) -> None:
    assert chat(message) == framed


# System and tools


def test_system_is_a_message_without_the_billing_line() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1234"}
    assert system("be") == b"\xffsystem\xfebe"
    assert system([billing, {"type": "text", "text": "be"}, "x"]) == b"\xffsystem\xfebe\xfdx"
    assert system([billing]) == system([]) == system("") == system(None) == b""
    assert system([{"type": "new"}]) == b'\xffsystem\xfe\xf5{"type":"new"}'


@pytest.mark.parametrize("size", [0, 300, 300_000])
def test_tools_are_spelled_canonically_at_any_size(size: int) -> None:
    tool = {"type": "function", "b": {"y": 1, "x": "é" * size}, "cache_control": {"type": "ephemeral"}}
    expected = b'\xfb{"b":{"x":"' + "é".encode() * size + b'","y":1},"type":"function"}\xfb5'
    assert tools([tool, 5]) == tools([tool, 5], ensure_ascii=False, indent=1) == tools([tool, 5]) == expected


def test_absent_tools_add_nothing() -> None:
    out: list[bytes] = []
    canonical.append_tools(out, msgspec.Raw())
    canonical.append_head(out, canonical.TEMPLATE, msgspec.Raw())
    canonical.append_head(out, canonical.TEMPLATE, msgspec.Raw(b'""'))
    assert b"".join(out) == tools(None) == tools([]) == b""


@pytest.mark.parametrize(("value", "framed"), [({}, b""), ("x", b'\xfb"x"'), (5, b"\xfb5"), ({"x": 1}, b'\xfb{"x":1}')])
def test_tools_that_are_no_list_are_one_head(value: Any, framed: bytes) -> None:
    assert tools(value) == framed


def test_what_nobody_would_write_counts_by_the_hash_of_its_spelling() -> None:
    many: list[Any] = [{}] * 60_000
    assert len(tools(many)) < 20
    assert tools(many) != tools([*many, 1])
    out: list[bytes] = []
    canonical.append_head(out, canonical.DOCUMENTS, msgspec.Raw(json.dumps(many).encode()))
    assert len(b"".join(out)) < 20


# Properties


@settings(deadline=None)
@given(bodies.conversations, bodies.messages)
def test_growing_conversation_only_appends(conversation: list[Any], message: Any) -> None:
    grown = chat(*conversation, message)
    assert grown.startswith(chat(*conversation))
    assert len(grown) > len(chat(*conversation))


@settings(deadline=None)
@given(bodies.conversations, bodies.texts, bodies.texts)
def test_growing_text_only_appends(conversation: list[Any], text: str, more: str) -> None:
    start = chat(*conversation, {"role": "user", "content": text})
    assert chat(*conversation, {"role": "user", "content": text + more}).startswith(start)
    assert chat(*conversation, {"role": "user", "content": [text, more]}).startswith(start)


plain = st.lists(
    st.fixed_dictionaries({"role": bodies.texts, "content": bodies.texts, "name": bodies.texts}), max_size=3
)


@settings(deadline=None)
@given(plain, plain)
def test_different_conversations_differ(one: list[Any], two: list[Any]) -> None:
    assert (chat(*one) == chat(*two)) == (one == two)


@settings(deadline=None)
@given(bodies.prompts, bodies.prompts)
def test_different_prompts_differ(one: Any, two: Any) -> None:
    def meaning(prompt: Any) -> Any:
        if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        return [item for item in prompt if item not in ("", [])]

    assert (prompts(one) == prompts(two)) == (meaning(one) == meaning(two))
