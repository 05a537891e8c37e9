"""The canonical bytes of a prompt: equal for every JSON spelling, different for different prompts.

Framing: bytes that UTF-8 never contains stand BEFORE what they announce, and nothing tells a length or closes a
message. So a conversation that grows only appends bytes, and so does a last message whose text grows. Canonical JSON
has sorted keys and no white space. How an engine's template renders all this is left to the engine: only equality
and order matter here.

    prompt   := TEXT utf-8 | TOKENS 4-byte-little-endian* | CHAT head* message*
    head     := TEMPLATE json | DOCUMENTS json | TOOL json                     in this order; one per tool
    message  := MESSAGE role CONTENT [part (PART part)*] (EXTRA json)*
    part     := utf-8 | OTHER json | OTHER media-type ":" digest | OPEN id CONTENT [part (PART part)*] CLOSE

A string as content is the same as one text part, as it is for an engine. OPEN and CLOSE frame an Anthropic tool result.

Left out, because they are no part of the prompt or change from turn to turn without changing the cached prefix:
`cache_control` marks (clients move them along), signatures of thinking blocks, ids and states of Responses items,
and Claude Code's billing line, which holds a hash of each request (vLLM drops it, too: AnthropicServingMessages,
vllm/entrypoints/anthropic/serving.py).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import xxhash

from extproc.errors import InvalidRequestError
from extproc.request.decode import given

__all__ = [
    "CHAT",
    "TEXT_PARTS",
    "append_message",
    "append_messages",
    "append_system",
    "append_tools",
    "json_head",
    "prompts_of",
]

TEXT = b"\xf8"
TOKENS = b"\xf9"
CHAT = b"\xfa"
MESSAGE = b"\xff"
CONTENT = b"\xfe"
PART = b"\xfd"
EXTRA = b"\xfc"
TOOL = b"\xfb"
TEMPLATE = b"\xf7"
DOCUMENTS = b"\xf6"
OTHER = b"\xf5"
OPEN = b"\xc1"
CLOSE = b"\xc0"

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""`type` of the content parts whose `text` stands in the prompt as it is."""

_MEDIA_PARTS = frozenset(
    {
        "audio",
        "audio_embeds",
        "audio_url",
        "document",
        "file",
        "image",
        "image_embeds",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "video",
        "video_url",
    }
)
_EXTRAS = ("name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning")
"""Members of a chat message beside role and content that templates render, in the order they are framed."""

_UNKNOWN_ITEM_NOISE = ("id", "status", "cache_control")
_BILLING_LINE = "x-anthropic-billing-header"
_BIG_ENDIAN = sys.byteorder == "big"
_HEADS = {
    role: MESSAGE + role.encode() + CONTENT for role in ("system", "developer", "user", "assistant", "tool", "function")
}
_ENCODER = msgspec.json.Encoder(order="deterministic")
_ANY: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[Any])

_CACHED_TOOLS_BYTES = range(256, 262_144)
"""Tool lists of this size are remembered (32 of them, key and value: 16 MiB at most): agents send the same one with
every request, and it is often longer than the rest."""


def prompts_of(prompt: str | list[Any] | None, field: str) -> tuple[bytes, ...]:
    """Return the canonical bytes of a `prompt` or `input` in any of its four forms; empty prompts are left out.

    Forms: text, list of texts, token ids, list of lists of token ids; None gives no prompt. `field` names it in errors.
    Raises InvalidRequestError for other elements and for ids outside 0 to 2^32 - 1. About 20 ns per token id, beside decoding.
    """
    if prompt is None:
        return ()
    if isinstance(prompt, str):
        return (TEXT + prompt.encode(),) if prompt else ()
    if not prompt:
        return ()
    first = prompt[0]
    if isinstance(first, str):
        return tuple(TEXT + _text(text, f"{field}[{i}]").encode() for i, text in enumerate(prompt) if text != "")
    if isinstance(first, list):
        return tuple(_token_ids(ids, f"{field}[{i}]") for i, ids in enumerate(prompt) if ids != [])
    return (_token_ids(prompt, field),)


def json_head(marker: bytes, value: Any) -> bytes:
    """Return one head of a chat prompt: `marker` and the canonical JSON of `value`."""
    return marker + _ENCODER.encode(value)


def append_tools(out: list[bytes], tools: msgspec.Raw, field: str) -> None:
    """Append one head per element of the JSON list `tools`; an absent (empty) or null one appends nothing.

    Raises InvalidRequestError if it is no list. A list seen before costs one hash of its bytes; a new one about 5 ns per
    byte.
    """
    if given(tools):
        read = _cached_tools if len(tools) in _CACHED_TOOLS_BYTES else _tools
        heads = read(bytes(tools), field)
        if heads:
            out.append(heads)


def append_messages(out: list[bytes], messages: Sequence[dict[str, Any]], field: str) -> None:
    """Append chat messages, Anthropic messages or Responses items, in order.

    A Responses item that is no message (a call, its output, reasoning) is taken whole. Raises InvalidRequestError if
    a role or content has a wrong type. About 0.3 us per plain message.
    """
    for index, message in enumerate(messages):
        head: bytes | None
        try:
            head, content = _HEADS[message["role"]], message["content"]
        except (KeyError, TypeError):  # a member that is missing, or a role of another name or type
            head = content = None
        if head is not None and type(content) is str:
            out += (head, content.encode())
        elif not _append_unusual(out, message, f"{field}[{index}]"):
            continue
        if len(message) > 2:
            for key in _EXTRAS:
                value = message.get(key)
                if value:
                    out.append(EXTRA + _ENCODER.encode([key, value]))


def _append_unusual(out: list[bytes], message: dict[str, Any], place: str) -> bool:
    """Append what is no plain text of a usual role; False: an item that was taken whole."""
    content = message.get("content")
    role = message.get("role")
    if _is_item(message, role, content):
        item = {key: value for key, value in message.items() if key not in _UNKNOWN_ITEM_NOISE}
        out.append(_HEADS_NONE + EXTRA + _ENCODER.encode(item))
        return False
    append_message(out, role, content, place)
    return True


def append_system(out: list[bytes], system: Any, place: str) -> None:
    """Append Anthropic's `system` or the Responses API's `instructions`, text or blocks; None or empty adds nothing."""
    if isinstance(system, list):
        system = [block for block in system if not _is_billing(block)]
    if system or not (system is None or isinstance(system, str | list)):
        out.append(_HEADS["system"])
        append_content(out, system, place)


def append_message(out: list[bytes], role: Any, content: Any, place: str) -> None:
    """Append one message; `role` is text or None, `content` text, a list of parts or None.

    `place` is the path of the message for errors: InvalidRequestError if one has another type.
    """
    out.append(_head(_text(role, f"{place}.role") if role is not None else ""))
    append_content(out, content, f"{place}.content")


def append_content(out: list[bytes], content: Any, place: str) -> None:
    """Append text or content parts; None appends nothing, other types raise InvalidRequestError."""
    if isinstance(content, list):
        separator = b""
        for index, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") == "redacted_thinking":
                continue  # opaque; engines drop it
            out.append(separator)
            _append_part(out, part, f"{place}[{index}]")
            separator = PART
    elif content is not None:
        out.append(_text(content, place, "a string or a list of parts").encode())


def _append_part(out: list[bytes], part: Any, place: str) -> None:
    if isinstance(part, str):
        out.append(part.encode())
        return
    if not isinstance(part, dict):
        raise _wrong(place, "an object", part)
    kind = part.get("type", "text" if "text" in part else None)
    if not isinstance(kind, str):
        out.append(OTHER + _ENCODER.encode(part))
    elif kind in TEXT_PARTS:
        text = part.get("text")
        if text is not None:
            out.append(_text(text, f"{place}.text").encode())
    elif kind in _MEDIA_PARTS:
        out.append(OTHER + f"{kind}:{_digest(kind, part)}".encode())
    elif kind == "tool_result":
        out.append(OPEN + _text(part.get("tool_use_id", ""), f"{place}.tool_use_id").encode() + CONTENT)
        append_content(out, part.get("content"), f"{place}.content")
        out.append(CLOSE)
    else:
        out.append(OTHER + _ENCODER.encode(_plain(part, "cache_control", "signature")))


def _is_billing(block: Any) -> bool:
    if not isinstance(block, dict):
        return False
    text = block.get("text")
    return isinstance(text, str) and text.startswith(_BILLING_LINE)


def _is_item(message: dict[str, Any], role: Any, content: Any) -> bool:
    """Tell a Responses item that is no message from one that is; messages may leave `type` out."""
    return (role is None or content is None) and message.get("type", "message") != "message"


def _digest(kind: str, part: dict[str, Any]) -> str:
    """Hash the media itself: the URL (which may hold the data) of an image, else the whole part. Below 0.5 ns a byte."""
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if isinstance(url, str) and kind in {"image_url", "input_image"}:
        return xxhash.xxh3_128_hexdigest(url.encode())
    return xxhash.xxh3_128_hexdigest(_ENCODER.encode(_plain(part, "cache_control")))


def _plain(value: dict[str, Any], *noise: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in noise}


def _head(role: str) -> bytes:
    return MESSAGE + role.encode() + CONTENT


_HEADS_NONE = _head("")


def _tools(raw: bytes, field: str) -> bytes:
    if raw[:1] != b"[":
        raise InvalidRequestError(f"{field}: expected a list", param=field)
    tools = _ANY.decode(raw)
    return b"".join(
        TOOL + _ENCODER.encode(_plain(tool, "cache_control") if isinstance(tool, dict) else tool) for tool in tools
    )


_cached_tools = lru_cache(maxsize=32)(_tools)


def _token_ids(ids: Any, place: str) -> bytes:
    """Pack token ids into four bytes each, little endian; InvalidRequestError names the first that does not fit."""
    if not isinstance(ids, list):
        raise _wrong(place, "a list of token ids", ids)
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError) as error:
        bad = next(i for i, value in enumerate(ids) if not (isinstance(value, int) and 0 <= value < 1 << 32))
        raise _wrong(f"{place}[{bad}]", "a token id of 0 to 2^32 - 1", ids[bad]) from error
    if _BIG_ENDIAN:
        packed.byteswap()
    return TOKENS + packed.tobytes()


def _text(value: Any, place: str, wanted: str = "a string") -> str:
    if isinstance(value, str):
        return value
    raise _wrong(place, wanted, value)


_NAMES = {type(None): "null", bool: "bool", int: "int", float: "float", str: "str", list: "array", dict: "object"}


def _wrong(place: str, wanted: str, value: Any) -> InvalidRequestError:
    """Return the error for a field of a wrong type; shows the value's type only, for it may be prompt text."""
    return InvalidRequestError(f"{place}: expected {wanted}, got `{_NAMES[type(value)]}`", param=place)
