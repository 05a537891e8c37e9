"""The canonical bytes of a prompt: equal for every JSON spelling, different for different prompts.

Framing: markers are bytes that UTF-8 never contains; each stands BEFORE what it marks, there are no lengths, and messages
are not closed. So a conversation that grows only appends bytes, and so does a last message whose text grows. Canonical
JSON has sorted keys and no white space; numbers with a fraction or an exponent stay as they are written. How an engine's
template renders all this does not matter: only equality and order do.

    prompt   := [EXTRA json] TEXT utf-8 | TOKENS 4-byte-little-endian* | CHAT head* message*
    head     := TEMPLATE json | EXTRA json | DOCUMENTS json | TOOL json        in this order; one per tool
    message  := MESSAGE role CONTENT [part (PART part)*] (EXTRA json)*
    role     := utf-8 | OTHER json
    part     := utf-8 | OTHER json | OTHER media-type ":" digest | OPEN id CONTENT [part (PART part)*] CLOSE

A string as content is the same as one text part, as it is for an engine. OPEN and CLOSE frame an Anthropic tool result.
The EXTRA of a head contains what else changes the beginning of the prompt (`parse`). A value of an unexpected type is
framed as a whole: whether it is valid is for the engine to decide.

Left out, because they are not part of the prompt or change from turn to turn without changing the cached prefix:
`cache_control` marks (clients move them), signatures of thinking blocks, ids and states of Responses items,
and Claude Code's billing line, which contains a hash of each request (vLLM drops it, too: AnthropicServingMessages,
vllm/entrypoints/anthropic/serving.py).
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import xxhash

from extproc.request.decode import ANY, decode_field, given
from extproc.request.parse_cost import WHOLE, affordable

__all__ = [
    "CHAT",
    "DOCUMENTS",
    "EXTRA",
    "TEMPLATE",
    "TEXT_PARTS",
    "TOKENS",
    "append_head",
    "append_message",
    "append_messages",
    "append_system",
    "append_tools",
    "encoded",
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
"""`type` of the content parts whose `text` is part of the prompt."""

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
_EXTRAS = ("name", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning", "tools")
"""Members of a chat message beside role and content that templates render, in the order they are framed."""

_BILLING_LINE = "x-anthropic-billing-header"
_BIG_ENDIAN = sys.byteorder == "big"
_HEADS = {
    role: MESSAGE + role.encode() + CONTENT for role in ("system", "developer", "user", "assistant", "tool", "function")
}
_ENCODER = msgspec.json.Encoder(order="deterministic")
_TEXT: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_TEXT_LIST: msgspec.json.Decoder[list[str]] = msgspec.json.Decoder(list[str])
_IDS: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(list[int])
_IDS_LIST: msgspec.json.Decoder[list[list[int]]] = msgspec.json.Decoder(list[list[int]])

_LIST_OF = re.compile(rb"\[\s*+(.?)", re.DOTALL)
"""A list, and how its first element begins."""

_MOST_PROMPTS = 2048
"""Most prompts of one request that are read: the limit of OpenAI's own API for embeddings."""

_CACHED_TOOLS_BYTES = range(256, 262_144)
"""Tool lists of this size are remembered (32 of them, key and value: 16 MiB at most): agents send the same one with
every request, and it is often longer than the rest."""


def prompts_of(prompt: msgspec.Raw) -> tuple[bytes, ...]:
    """Return the canonical bytes of a `prompt` or `input` in any of its four forms; empty prompts are left out.

    Forms: text, list of texts, token ids, list of lists of token ids. Absent, null and every other shape give no prompt
    (multimodal embeddings, for example). Raises InvalidRequestError where it is not JSON.
    """
    if not given(prompt):
        return ()
    start = _LIST_OF.match(prompt)
    try:
        if start is None:
            text = decode_field(prompt, _TEXT)
            return (TEXT + text.encode(),) if text else ()
        first = start[1]
        if first == b'"':
            texts = decode_field(prompt, _TEXT_LIST)[:_MOST_PROMPTS]
            return tuple([TEXT + text.encode() for text in texts if text])
        if first == b"[":
            lists = decode_field(prompt, _IDS_LIST)[:_MOST_PROMPTS]
            return tuple([_token_ids(ids) for ids in lists if ids])
        ids = decode_field(prompt, _IDS)
        return (_token_ids(ids),) if ids else ()
    except (msgspec.ValidationError, OverflowError):  # of another type, or not a token id
        return ()


def encoded(value: Any) -> bytes:
    """Return `value` as canonical JSON."""
    return _ENCODER.encode(value)


def append_head(out: list[bytes], marker: bytes, value: msgspec.Raw) -> None:
    """Append one head of a chat prompt: `marker` and the canonical JSON of `value`; an absent, null or empty one adds nothing.

    Raises InvalidRequestError where it is not JSON.
    """
    if given(value):
        head = _heads(bytes(value))
        if head:
            out.append(marker + head)


def append_tools(out: list[bytes], tools: msgspec.Raw) -> None:
    """Append one head per element of the JSON list `tools`; an absent (empty) or null one appends nothing.

    Raises InvalidRequestError where it is not JSON. A list seen before costs one hash of its bytes.
    """
    if given(tools):
        read = _cached_tools if len(tools) in _CACHED_TOOLS_BYTES else _tools
        heads = read(bytes(tools))
        if heads:
            out.append(heads)


def append_messages(out: list[bytes], messages: Sequence[dict[str, Any]]) -> None:
    """Append chat messages, Anthropic messages or Responses items, in order.

    A Responses item that is not a message (a call, its output, reasoning) is framed as a whole.
    """
    for message in messages:
        head: bytes | None
        try:
            head, content = _HEADS[message["role"]], message["content"]
        except (KeyError, TypeError):  # a missing member, or a role of another name or type
            head = content = None
        if head is not None and type(content) is str:
            out += (head, content.encode())
        elif not _append_unusual(out, message):
            continue
        if len(message) > 2:
            for key in _EXTRAS:
                value = message.get(key)
                if value:
                    out.append(EXTRA + _ENCODER.encode([key, value]))


def _append_unusual(out: list[bytes], message: dict[str, Any]) -> bool:
    """Append a message that is not plain text of a usual role; False: an item that was framed as a whole."""
    content = message.get("content")
    role = message.get("role")
    if (role is None or content is None) and message.get("type", "message") != "message":
        if "id" in message or "status" in message or "cache_control" in message:
            message = _plain(message, "id", "status", "cache_control")
        out.append(_HEADS_NONE + EXTRA + _ENCODER.encode(message))
        return False
    append_message(out, role, content)
    return True


def append_system(out: list[bytes], system: Any) -> None:
    """Append Anthropic's `system` or the Responses API's `instructions`, text or blocks; None or empty adds nothing."""
    if type(system) is list:
        system = [block for block in system if not _is_billing(block)]
    if system:
        append_message(out, "system", system)


def append_message(out: list[bytes], role: Any, content: Any) -> None:
    """Append one message; `role` is text or None, `content` text, a list of parts or None. Other values are framed as a whole."""
    if role is None:
        out.append(_HEADS_NONE)
    elif type(role) is str:
        out.append(MESSAGE + role.encode() + CONTENT)
    else:
        out.append(MESSAGE + OTHER + _ENCODER.encode(role) + CONTENT)
    _append_content(out, content)


def _append_content(out: list[bytes], content: Any) -> None:
    """Append text or content parts; None appends nothing."""
    if type(content) is list:
        separator = b""
        for index, part in enumerate(content):
            if type(part) is str:
                out += (separator, part.encode())
            elif type(part) is dict:
                kind = part.get("type")
                if kind == "redacted_thinking":
                    continue  # opaque; engines drop it
                out.append(separator)
                _append_part(out, part, kind)
            else:  # with all that follow: there may be many
                out.append(separator + OTHER + _ENCODER.encode(content[index:]))
                break
            separator = PART
    elif type(content) is str:
        out.append(content.encode())
    elif content is not None:
        out.append(OTHER + _ENCODER.encode(content))


def _append_part(out: list[bytes], part: dict[str, Any], kind: Any) -> None:
    if type(kind) is str:
        if kind in TEXT_PARTS:
            text = part.get("text")
            if type(text) is str:
                out.append(text.encode())
            elif text is not None:
                out.append(OTHER + _ENCODER.encode(text))
            return
        if kind in _MEDIA_PARTS:
            out.append(OTHER + kind.encode() + b":" + _digest(kind, part))
            return
        if kind == "tool_result":
            use = part.get("tool_use_id", "")
            out += (OPEN, use.encode() if type(use) is str else OTHER + _ENCODER.encode(use), CONTENT)
            _append_content(out, part.get("content"))
            out.append(CLOSE)
            return
        part = _plain(part, "cache_control", "signature")
    elif kind is None and "type" not in part and type(text := part.get("text")) is str:
        out.append(text.encode())
        return
    out.append(OTHER + _ENCODER.encode(part))


def _is_billing(block: Any) -> bool:
    if type(block) is not dict:
        return False
    text = block.get("text")
    return type(text) is str and text.startswith(_BILLING_LINE)


def _digest(kind: str, part: dict[str, Any]) -> bytes:
    """Hash the media itself: the URL (which may contain the data) of an image, else the whole part."""
    url = part.get("image_url")
    if type(url) is dict:
        url = url.get("url")
    if type(url) is str and kind in {"image_url", "input_image"}:
        return xxhash.xxh3_128_hexdigest(url.encode()).encode()
    return xxhash.xxh3_128_hexdigest(_ENCODER.encode(_plain(part, "cache_control"))).encode()


def _plain(value: dict[str, Any], *noise: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in noise}


_HEADS_NONE = MESSAGE + CONTENT


def _heads(raw: bytes) -> bytes:
    """Write one JSON value canonically; empty for an empty one."""
    if affordable(raw, WHOLE) < len(raw):
        return xxhash.xxh3_128_digest(raw)
    value = decode_field(raw, ANY)
    return _ENCODER.encode(value) if value else b""


def _tools(raw: bytes) -> bytes:
    """Return one head per tool. What is no list is one head, and so is a list of more values than anybody would write."""
    if affordable(raw, WHOLE) < len(raw):
        return TOOL + xxhash.xxh3_128_digest(raw)
    tools = decode_field(raw, ANY)
    if type(tools) is not list:
        return TOOL + _ENCODER.encode(tools) if tools else b""
    if not tools:
        return b""
    plain = [
        _plain(tool, "cache_control") if type(tool) is dict and "cache_control" in tool else tool for tool in tools
    ]
    # Encoded JSON has no line breaks of its own.
    return TOOL + _ENCODER.encode_lines(plain)[:-1].replace(b"\n", TOOL)


_cached_tools = lru_cache(maxsize=32)(_tools)


def _token_ids(ids: list[int]) -> bytes:
    """Pack token ids into four bytes each, little endian; OverflowError if one does not fit."""
    packed = array("I", ids)
    if _BIG_ENDIAN:
        packed.byteswap()
    return TOKENS + packed.tobytes()
