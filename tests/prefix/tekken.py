"""Engines that count in the tokens of a real tokenizer: Tekken with its chat template, and a cache of token blocks.

Everything goes the way of a real request: a JSON body, `parse`, `Router.route`, the rendered and tokenised prompt in an
LRU cache of 16-token blocks, and the usage back to `Router.finished`. Nothing here knows bytes per token.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import inspect
import json
import json.decoder
import json.encoder
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from mistral_common.protocol.instruct.messages import SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from extproc.config.schema import Config
from extproc.request import parse
from extproc.router import Router
from extproc.types import Decision, Endpoint, EndpointMetrics, Outcome, Usage

ROOT: Final = Path(__file__).parents[2]
BLOCK_TOKENS: Final = 16
DEFAULT_SYSTEM_PROMPT: Final = (
    "You are a careful assistant. Answer in the language of the question, briefly, and say so where you do not know."
)
"""As many templates add one where the client sends none: with the markers 34 tokens or so before any text of a client."""


@cache
def tokenizer() -> Any:
    """Tekken as the wheel ships it; nothing is downloaded."""
    return MistralTokenizer.v3(is_tekken=True)


def chat_tokens(text: str) -> list[int]:
    """Render one user message with the template, and tokenise it."""
    request: Any = ChatCompletionRequest(
        messages=[SystemMessage(content=DEFAULT_SYSTEM_PROMPT), UserMessage(content=text)]
    )
    tokens: list[int] = tokenizer().encode_chat_completion(request).tokens
    return tokens


@lru_cache(maxsize=256)
def document_tokens(document: str) -> int:
    """Count the tokens of a document with the template around it."""
    return len(chat_tokens(document))


class TokenCache:
    """Prefix cache of one engine: whole blocks, least recently used first out, tails before heads."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity = capacity_tokens // BLOCK_TOKENS
        self.blocks: OrderedDict[int, None] = OrderedDict()

    @staticmethod
    def keys(tokens: Sequence[int]) -> list[int]:
        parent, keys = 0, []
        for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = hash((parent, *tokens[at : at + BLOCK_TOKENS]))
            keys.append(parent)
        return keys

    def held(self, tokens: Sequence[int]) -> int:
        """Tokens of this prompt that need not be computed; the last one always is."""
        count = 0
        for key in self.keys(tokens[:-1]):
            if key not in self.blocks:
                break
            count += BLOCK_TOKENS
        return count

    def use(self, tokens: Sequence[int]) -> None:
        for key in reversed(self.keys(tokens)):
            self.blocks.pop(key, None)
            self.blocks[key] = None
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


@dataclass
class Seen:
    """One request of a run."""

    kind: str
    decision: Decision
    prompt_tokens: int
    cached_tokens: int
    holders: frozenset[str]
    """Endpoints whose cache held the document when the request came."""
    document_bytes: int

    @property
    def recognised(self) -> bool:
        """Whether the index knew somebody who holds the document."""
        best = max(
            (one.matched_bytes for one in self.decision.candidates if one.endpoint_id in self.holders), default=0
        )
        return best >= 0.9 * self.document_bytes


@dataclass
class Fleet:
    """A router, and engines that answer at once."""

    replicas: int = 4
    cache_tokens: int = 60_000
    told_tokens: int | None = None
    """What the engines' pages say of their caches; None: the truth."""
    tells_usage: bool = True
    config: Config = field(default_factory=Config)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.router = Router(self.config, rng=random.Random(1))
        endpoints = [Endpoint(f"10.0.0.{number + 1}", 8000) for number in range(self.replicas)]
        self.caches = {one.id: TokenCache(self.cache_tokens) for one in endpoints}
        self.totals = {one.id: [0, 0] for one in endpoints}
        self.router.set_endpoints(endpoints, now=0.0)
        self.scrape()

    def scrape(self) -> None:
        for endpoint_id, (tokens, requests) in self.totals.items():
            page = EndpointMetrics(
                cache_tokens=self.told_tokens or self.cache_tokens,
                block_tokens=BLOCK_TOKENS,
                prompt_tokens_total=float(tokens),
                requests_total=float(requests),
            )
            self.router.observe(endpoint_id, page, now=self.now)

    def ask(self, text: str, *, kind: str = "", document: str = "", user: str = "", cached: int | None = None) -> Seen:
        """Send one chat; `cached` is what the engine says instead of the truth."""
        self.now += 0.25
        body = {"model": "m", "messages": [{"role": "user", "content": text}]} | ({"user": user} if user else {})
        request = parse("/v1/chat/completions", json.dumps(body).encode())
        tokens = chat_tokens(text)
        holders: frozenset[str] = frozenset()
        if document:
            least = 0.9 * (document_tokens(document) - BLOCK_TOKENS)
            holders = frozenset(name for name, one in self.caches.items() if one.held(tokens) >= least)
        decision = self.router.route(request, now=self.now)
        endpoint_id = decision.endpoint.id
        held = self.caches[endpoint_id].held(tokens)
        self.caches[endpoint_id].use(tokens)
        self.totals[endpoint_id][0] += len(tokens)
        self.totals[endpoint_id][1] += 1
        self.router.response_headers(decision, now=self.now + 0.1)
        usage = Usage(len(tokens), 20, held if cached is None else cached) if self.tells_usage else None
        self.router.finished(decision, Outcome.OK, now=self.now + 0.2, usage=usage)
        self.scrape()
        return Seen(kind, decision, len(tokens), held, holders, len(document.encode()))


# Texts.


@cache
def _sentences() -> list[str]:
    """Read sentences of a text that does not change with the project."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return [" ".join(one.split()) + "." for one in re.split(r"[.;]\s", text) if len(one) > 40]


@cache
def _lines_of_code() -> list[str]:
    sources = [inspect.getsource(module) for module in (argparse, dataclasses, json.decoder, json.encoder, random)]
    return [line for source in sources for line in source.splitlines() if line.strip()]


_GERMAN: Final = (
    "Die Verwaltung hat den Antrag geprüft und festgestellt, dass mehrere Unterlagen fehlen",
    "Bitte reichen Sie die vollständigen Nachweise innerhalb von vierzehn Tagen beim zuständigen Amt ein",
    "Nach Ablauf dieser Frist wird über den Widerspruch anhand der vorliegenden Akten entschieden",
    "Für Rückfragen steht Ihnen die Sachbearbeiterin während der üblichen Öffnungszeiten zur Verfügung",
    "Der Stromverbrauch der Rechenzentren ist im vergangenen Jahr erheblich gestiegen",
    "Wer den Vertrag kündigen möchte, muss dies spätestens drei Monate vor Jahresende schriftlich erklären",
)
_CHINESE: Final = (
    "请求到达网关之后，调度器会先检查每个节点的缓存状态。",
    "如果某个节点已经保存了相同的前缀，就优先把请求发送给它。",
    "当显存不足时，最久没有使用的数据块会被释放。",
    "用户可以在配置文件中修改超时时间和重试次数。",
    "这份报告总结了去年各个部门的支出情况，并提出了改进建议。",
    "实验结果表明，新的方法在长文本上的效果明显更好。",
)


def prose(rng: random.Random, n_bytes: int) -> str:
    return _filled(lambda: rng.choice(_sentences()) + " ", n_bytes)


def code(rng: random.Random, n_bytes: int) -> str:
    lines = _lines_of_code()
    return _filled(lambda: "\n".join(lines[(at := rng.randrange(len(lines) - 20)) : at + 20]) + "\n", n_bytes)


def german(rng: random.Random, n_bytes: int) -> str:
    return _filled(lambda: rng.choice(_GERMAN) + ". ", n_bytes)


def chinese(rng: random.Random, n_bytes: int) -> str:
    return _filled(lambda: rng.choice(_CHINESE), n_bytes)


def rows(rng: random.Random, n_bytes: int) -> str:
    def one() -> str:
        row = {
            "id": rng.randrange(10**6),
            "name": rng.choice(["alpha", "beta", "gamma"]),
            "score": round(rng.random(), 4),
        }
        return json.dumps(row) + "\n"

    return _filled(one, n_bytes)


def base64_text(rng: random.Random, n_bytes: int) -> str:
    return base64.b64encode(rng.randbytes(n_bytes * 3 // 4)).decode()


def emoji(rng: random.Random, n_bytes: int) -> str:
    return "".join(rng.choices("😀🎉🤖🚀🐍🔥💡✅", k=n_bytes // 4))


def gibberish(rng: random.Random, n_bytes: int) -> str:
    """Looks like words to whoever counts letters, and takes twice as many tokens."""
    return _filled(lambda: "".join(rng.choices("bcdfghjklmnpqrstvwxz", k=rng.randrange(3, 9))) + " ", n_bytes)


def spaces(rng: random.Random, n_bytes: int) -> str:
    return " " * n_bytes


DENSE: Final = (code, german, chinese, rows, base64_text)


def _filled(piece: Callable[[], str], n_bytes: int) -> str:
    pieces, size = [], 0
    while size < n_bytes:
        pieces.append(piece())
        size += len(pieces[-1].encode())
    return "".join(pieces)


QUESTIONS: Final = (
    "Thanks! What does that mean?",
    "Hello, can you help me with something?",
    "Summarise the second paragraph in one sentence.",
    "Which of the two would you rather choose, and why?",
)


def requests_of(
    rng: random.Random,
    count: int,
    *,
    short: float,
    documents: Sequence[tuple[str, str]],
) -> Iterator[tuple[str, str, str]]:
    """Give (kind, text, document): `short` of them questions alone, the others questions to one of the documents."""
    for number in range(count):
        question = f"{rng.choice(QUESTIONS)} ({number})"
        if rng.random() < short:
            yield "short", question, ""
        else:
            kind, document = rng.choice(documents)
            yield kind, f"{document}\n\n{question}", document
