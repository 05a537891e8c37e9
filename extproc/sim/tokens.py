"""A substitute for a tokenizer: text to token ids, chat messages to a prompt, tokens to chained block keys.

A token is four bytes of UTF-8, its id those bytes as a little-endian 32-bit number; so tokenising costs nothing, equal text has equal
tokens, and equal leading text has equal leading tokens up to a cut token. Token sequences are `bytes`, four per token, which is also
what a list of token ids packs to. Counts come near a real tokenizer's for English; nothing else about it is real.
"""

from __future__ import annotations

import json
import random
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKEN_BYTES: Final = 4

# Ids of bytes that never occur in UTF-8, so no text can produce them.
BOS: Final = b"\xff\xff\xff\xf0"
HEADER_START: Final = b"\xff\xff\xff\xf1"
HEADER_END: Final = b"\xff\xff\xff\xf2"
END_OF_TURN: Final = b"\xff\xff\xff\xf3"
MEDIA: Final = b"\xff\xff\xff\xf4"

# All pieces have exactly four ASCII bytes that need no JSON escape: a stream of tokens has lines of one length, and an answer that
# comes back as a message of the next turn has the tokens it was generated with.
_SYLLABLES: Final = [f" {c}{v}{e}" for c in "bdfgklmnprstvz" for v in "aeiou" for e in "lnrst"]
_BABBLE_TOKENS: Final = 4096
_BABBLE: Final = "".join(random.Random(4096).choices(_SYLLABLES, k=_BABBLE_TOKENS)).encode()


def count(tokens: bytes) -> int:
    """Count the tokens of a token sequence."""
    return len(tokens) // TOKEN_BYTES


def text_tokens(text: str) -> bytes:
    """Tokenise text; the last token is padded. Lone surrogates, which JSON can carry, are kept as they are."""
    data = text.encode("utf-8", "surrogatepass")
    padding = -len(data) % TOKEN_BYTES
    return data + bytes(padding) if padding else data


def id_tokens(ids: Sequence[int]) -> bytes:
    """Pack token ids; raises ValueError for ids outside 0 to 2**32 - 1 or that are no integers."""
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(f"token ids must be integers from 0 to {2**32 - 1}") from error


def to_ids(tokens: bytes) -> list[int]:
    """Unpack a token sequence to ids."""
    return list(struct.unpack(f"<{count(tokens)}I", tokens))


def prompt_tokens(prompt: str | Sequence[int]) -> bytes:
    """Tokenise a completion prompt: text gets a leading BOS, token ids are taken as they are (as vLLM does)."""
    return BOS + text_tokens(prompt) if isinstance(prompt, str) else id_tokens(prompt)


def chat_tokens(messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> bytes:
    """Render a chat prompt in the manner of Llama 3: tools first, then each message, then the assistant's header.

    Content is text, null, or a list of parts; text parts are joined, other parts count as one media token and their JSON.
    Tool calls follow the content. The spelling of the request's JSON does not matter.
    """
    pieces = [BOS]
    if tools:
        pieces += _turn("tools", text_tokens(_canonical(tools)))
    for message in messages:
        content = _content_tokens(message.get("content"))
        if calls := message.get("tool_calls"):
            content += text_tokens(_canonical(calls))
        pieces += _turn(str(message.get("role", "user")), content)
    pieces += _header("assistant")
    return b"".join(pieces)


def _header(role: str) -> list[bytes]:
    return [HEADER_START, text_tokens(role), HEADER_END]


def _turn(role: str, content: bytes) -> list[bytes]:
    return [*_header(role), content, END_OF_TURN]


def _content_tokens(content: Any) -> bytes:
    if content is None:
        return b""
    if isinstance(content, str):
        return text_tokens(content)
    pieces: list[bytes] = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        pieces.append(text_tokens(text) if isinstance(text, str) else MEDIA + text_tokens(_canonical(part)))
    return b"".join(pieces)


def _canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def output_tokens(prompt: bytes, output: int, choice: int = 0) -> bytes:
    """Give the answer to a prompt: `output` tokens of readable babble, the same for the same prompt and choice number."""
    start = xxhash.xxh3_64_intdigest(prompt, seed=choice) % _BABBLE_TOKENS * TOKEN_BYTES
    end = start + output * TOKEN_BYTES
    repeats = -(-end // len(_BABBLE))
    return (_BABBLE * repeats)[start:end]


def block_keys(tokens: bytes, block_size: int, *, lora: str | None = None, cache_salt: str | None = None) -> list[int]:
    """Chain one 64-bit key per full block of `block_size` tokens; equal keys mean equal tokens, adapter and salt up to there."""
    parent = 0
    if lora is not None or cache_salt is not None:
        parent = xxhash.xxh3_64_intdigest(json.dumps([lora, cache_salt]).encode())
    step = block_size * TOKEN_BYTES
    digest = xxhash.xxh3_64_intdigest
    keys: list[int] = []
    for start, end in pairwise(range(0, len(tokens) + 1, step)):
        parent = digest(tokens[start:end], seed=parent)
        keys.append(parent)
    return keys
