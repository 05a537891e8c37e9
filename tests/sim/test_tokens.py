import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim import tokens


@given(st.text(), st.text())
def test_equal_leading_text_has_equal_leading_tokens(head: str, tail: str) -> None:
    whole, part = tokens.text_tokens(head + tail), tokens.text_tokens(head)
    common = len(head.encode()) // 4 * 4
    assert whole[:common] == part[:common]
    assert len(part) % 4 == 0


def test_counts_are_near_four_bytes_per_token() -> None:
    assert tokens.count(tokens.prompt_tokens("x" * 400)) == 101
    assert tokens.count(tokens.text_tokens("\ud800")) == 1


def test_ids_round_trip() -> None:
    ids = [0, 1, 2**32 - 1]
    assert tokens.to_ids(tokens.prompt_tokens(ids)) == ids


@pytest.mark.parametrize("bad", [-1, 2**32, "x", None, 1.5])
def test_bad_ids(bad: object) -> None:
    with pytest.raises(ValueError):
        tokens.id_tokens([1, bad])  # type: ignore[list-item]


def test_a_chat_prompt_is_a_prefix_of_the_next_turn() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    prompt = tokens.chat_tokens(first, None)
    answer = tokens.output_tokens(prompt, 20)
    turn = [*first, {"role": "assistant", "content": answer.decode()}, {"role": "user", "content": "more"}]
    assert tokens.chat_tokens(turn, None).startswith(prompt + answer)


def test_content_parts_and_tools() -> None:
    text = tokens.chat_tokens([{"role": "user", "content": "ab"}], None)
    parts = tokens.chat_tokens([{"role": "user", "content": [{"type": "text", "text": "ab"}]}], [])
    assert text == parts
    assert tokens.chat_tokens([{"role": "user", "content": ["ab"]}], None) == text
    image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    assert tokens.MEDIA in tokens.chat_tokens([{"role": "user", "content": image}], None)
    assert tokens.chat_tokens([{"role": "user", "content": None}], None) != text
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    respelled = {"function": {"parameters": {}, "name": "f"}, "type": "function"}
    with_tool = tokens.chat_tokens([{"role": "user", "content": "ab"}], [tool])
    assert with_tool != text
    assert with_tool == tokens.chat_tokens([{"content": "ab", "role": "user"}], [respelled])
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    assert tokens.chat_tokens([call], None) != tokens.chat_tokens([{"role": "assistant"}], None)


@given(st.binary(max_size=8), st.integers(0, 10_000), st.integers(0, 3))
def test_output_is_plain_text_of_the_right_length(prompt: bytes, count: int, choice: int) -> None:
    output = tokens.output_tokens(prompt, count, choice)
    assert tokens.count(output) == count
    assert tokens.text_tokens(output.decode()) == output
    assert output == tokens.output_tokens(prompt, count, choice)


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_keys_are_equal_exactly_for_equal_blocks(left: bytes, right: bytes) -> None:
    keys = tokens.block_keys(left, 4), tokens.block_keys(right, 4)
    assert len(keys[0]) == len(left) // 16
    for index, (one, other) in enumerate(zip(*keys, strict=False)):
        end = (index + 1) * 16
        assert (one == other) == (left[:end] == right[:end])


def test_adapter_and_salt_separate_caches() -> None:
    data = bytes(64)
    kinds = [
        tokens.block_keys(data, 4),
        tokens.block_keys(data, 4, lora="x"),
        tokens.block_keys(data, 4, cache_salt="x"),
        tokens.block_keys(data, 4, lora="x", cache_salt="x"),
    ]
    seen = [key for keys in kinds for key in keys]
    assert len(set(seen)) == 16
