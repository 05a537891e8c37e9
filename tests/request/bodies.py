"""Request bodies for properties: what clients send, and how differently the same JSON can be spelled."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import strategies as st

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=4)
text_parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "output_text"]), "text": texts})
image_parts = st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": texts})})
other_parts = st.fixed_dictionaries({"type": st.sampled_from(["tool_use", "thinking", "new"]), "input": values})
results = st.fixed_dictionaries(
    {"type": st.just("tool_result"), "tool_use_id": texts, "content": texts | st.lists(text_parts, max_size=2)}
)
contents = texts | st.lists(text_parts | image_parts | other_parts | results | texts, max_size=3) | st.none()
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "narrator"]), "content": contents},
    optional={
        "tool_calls": st.lists(st.dictionaries(texts, values, max_size=2), max_size=2),
        "tool_call_id": texts,
        "name": texts,
        "unread": values,
    },
)
conversations = st.lists(messages, max_size=4)
tools = st.lists(st.dictionaries(texts, values, max_size=3), max_size=3)
prompts = texts | st.lists(texts, max_size=3) | token_ids | st.lists(token_ids, max_size=3)
sampling = {"temperature": values, "logit_bias": values, "stop": values, "seed": values}
head = {"model": st.sampled_from(["m", "adapter"])}


def _body(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(head | required, optional=optional | sampling)


bodies: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.one_of(
    st.tuples(st.just("completions"), _body({"prompt": prompts}, {"max_tokens": st.integers(1, 99)})),
    st.tuples(st.just("chat"), _body({"tools": tools, "messages": conversations}, {"stream": st.booleans()})),
    st.tuples(
        st.just("responses"),
        _body({"tools": tools, "instructions": texts, "input": texts | conversations}, {"user": texts}),
    ),
    st.tuples(st.just("embeddings"), _body({"input": prompts}, {"user": texts})),
    st.tuples(
        st.just("messages"),
        _body(
            {"tools": tools, "system": texts | st.lists(text_parts, max_size=2), "messages": conversations},
            {"max_tokens": st.integers(1, 99)},
        ),
    ),
)


def respelled(value: Any, rng: random.Random) -> str:
    """Spell `value` as JSON in some other way: key order, white space, escapes."""

    def white() -> str:
        return rng.choice(["", "", " ", "\n\t", "\r "])

    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        inner = ",".join(f"{white()}{respelled(k, rng)}{white()}:{respelled(v, rng)}" for k, v in items)
        return f"{white()}{{{inner}{white()}}}{white()}"
    if isinstance(value, list):
        return f"{white()}[{','.join(respelled(item, rng) for item in value)}{white()}]{white()}"
    if isinstance(value, str):
        return '"' + "".join(_respelled_character(character, rng) for character in value) + '"'
    return f"{white()}{json.dumps(value)}{white()}"


def _respelled_character(character: str, rng: random.Random) -> str:
    plain = json.dumps(character, ensure_ascii=False)[1:-1]
    units = character.encode("utf-16-be")
    escaped = "".join(f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2))
    return rng.choice([plain, plain, escaped])
