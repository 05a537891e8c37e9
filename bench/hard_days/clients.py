"""Honest clients: what they ask, through the picker and through round robin by turns, and what each of them got.

An open loop: a turn sends one request of the same kind each way, at random moments of the turn, whether earlier ones have been answered or not. A client
knows what the engine must say (the simulated engine's answers follow from the prompt), so it sees every byte that is missing, doubled or somebody else's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import aiohttp

from bench.hard_days.journal import NAME
from extproc.sim import tokens

__all__ = [
    "MODEL",
    "PATIENCE_S",
    "PICKER",
    "RETRYING",
    "ROUND_ROBIN",
    "WAYS",
    "ClientRequest",
    "Load",
    "Outcome",
    "Record",
    "asks",
    "read_answer",
]

MODEL: Final = "llama-3.1-8b"
PICKER: Final = "picker"
ROUND_ROBIN: Final = "round robin"
RETRYING: Final = "round robin with retries"
WAYS: Final = (PICKER, ROUND_ROBIN, RETRYING)
"""The third repeats a request as the profile of the picker does, so that what retries are good for is not the picker's merit."""
PATIENCE_S: Final = 15.0
"""How long a client waits for the end of its answer."""
_TENANTS: Final = 12
_WORDS: Final = (
    "the of and to in is that for as with on by at from river stone engine paper light number answer window".split()
)


class Outcome(Enum):
    """What a client got."""

    WHOLE = "whole"
    REFUSED = "refused"
    """An error with a status, complete."""
    CUT = "cut off"
    """The connection said that the answer is not complete."""
    TIMEOUT = "timeout"
    FLAWED = "flawed"
    """Neither whole nor an honest error; `Record.flaw` says how."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request: what is sent, and the text that must come back."""

    path: str
    body: bytes
    text: str
    stream: bool
    chunked: bool = False


@dataclass(slots=True)
class Record:
    """One request of an honest client. Times of the monotonic clock."""

    name: str
    way: str
    turn: int
    sent_s: float
    sha256: str = ""
    """Of the body; empty for what cannot be compared."""
    done_s: float = 0.0
    status: int = 0
    outcome: Outcome = Outcome.TIMEOUT
    cause: str = ""
    """In short, for the table of errors: `503 picker_unavailable`."""
    flaw: str = ""
    begun: bool = False
    """Whether the head of an answer came."""
    engine: str = ""

    @property
    def failed(self) -> bool:
        """Whether the client saw an error."""
        return self.outcome is not Outcome.WHOLE


# What is asked


class _Texts:
    """Prompts: tenants with a long beginning in common, and documents that are asked about again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.tenants = [self.words(500) for _ in range(_TENANTS)]
        self.documents = [self.words(3000) for _ in range(4)]

    def words(self, count: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=count))


def asks(seed: int) -> Callable[[int], list[ClientRequest]]:
    """Return a maker of requests: each call draws so many of one kind and length. A seed always gives the same."""
    rng = random.Random(seed)
    texts = _Texts(rng)

    def make(count: int) -> list[ClientRequest]:
        share, stream = rng.random(), rng.random() < 0.6
        output = rng.choice((8, 16, 32, 64, 128))
        words, times = rng.randrange(5, 60), rng.randrange(1, 8)
        tenant, document = rng.choice(texts.tenants), rng.choice(texts.documents)
        found = []
        for _ in range(count):
            own = f"{rng.randrange(10**9):09d} {texts.words(words)} "
            if share < 0.65:
                found.append(_chat([_says("system", tenant), _says("user", own)], output, stream))
            elif share < 0.75:
                found.append(_chat([_says("user", f"{document}\n{own}")], output, stream, chunked=True))
            else:
                found.append(_completion(own * times, output, stream))
        return found

    return make


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _chat(messages: list[dict[str, str]], count: int, stream: bool, *, chunked: bool = False) -> ClientRequest:
    prompt = tokens.chat_tokens(messages, None)
    body = {"model": MODEL, "messages": messages, "max_tokens": count, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return _ask("/v1/chat/completions", body, prompt, count, stream, chunked)


def _completion(prompt: str, count: int, stream: bool) -> ClientRequest:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "stream": stream}
    return _ask("/v1/completions", body, tokens.prompt_tokens(prompt), count, stream, chunked=False)


def _ask(path: str, body: dict[str, Any], prompt: bytes, count: int, stream: bool, chunked: bool) -> ClientRequest:
    return ClientRequest(path, json.dumps(body).encode(), tokens.output_tokens(prompt, count).decode(), stream, chunked)


# What came back


def read_answer(record: Record, ask: ClientRequest, headers: dict[str, str], body: bytes) -> None:
    """Judge a complete answer: whole, an honest error, or flawed; `record` is filled in."""
    if record.status == 200:
        record.flaw = _stream_flaw(body, ask.text) if ask.stream else _whole_flaw(body, ask.text)
        error = _engine_error(body) if record.flaw and ask.stream else ""
        if error:
            record.outcome, record.flaw, record.cause = Outcome.REFUSED, "", f"200 with {error}"
        else:
            record.outcome = Outcome.FLAWED if record.flaw else Outcome.WHOLE
            record.cause = "200 flawed" if record.flaw else "200"
        return
    record.outcome = Outcome.REFUSED
    error_type, record.flaw = _error_of(record.status, headers, body)
    record.cause = f"{record.status} {error_type}".strip()
    if record.flaw:
        record.outcome = Outcome.FLAWED


def _error_of(status: int, headers: dict[str, str], body: bytes) -> tuple[str, str]:
    """Return an error's name, and what is wrong with it."""
    if status < 400:
        return "", f"status {status}, which nobody has asked for"
    try:
        error = json.loads(body)["error"]
        named = str(error["type"])
        said = str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", f"status {status} without an error object: {body[:200]!r}"
    reason = headers.get("x-extproc-drop-reason", "")
    ours = bool(reason) or named in {"picker_unavailable", "engine_unavailable"}
    if not said.strip():
        return named, f"status {status} with an empty message"
    if ours and status in {429, 503} and not headers.get("retry-after"):
        return named, f"status {status} {named} without retry-after"
    return reason or named, ""


def _whole_flaw(body: bytes, text: str) -> str:
    try:
        choice = json.loads(body)["choices"][0]
        said = choice["message"]["content"] if "message" in choice else choice["text"]
    except (ValueError, KeyError, IndexError, TypeError):
        return f"200, and the body is no complete answer: {body[-200:]!r}"
    return "" if said == text else f"200 with another text: {said[:60]!r} instead of {text[:60]!r}"


def _stream_flaw(body: bytes, text: str) -> str:
    if not body.endswith(b"data: [DONE]\n\n"):
        return f"the stream ended without [DONE] and without a sign: {body[-120:]!r}"
    said = _said(body)
    if said is None:
        return f"an event of the stream cannot be read: {body[-200:]!r}"
    if said != text:
        return f"the stream has another text, {len(said)} bytes instead of {len(text)}: {said[:60]!r}"
    return ""


def _engine_error(body: bytes) -> str:
    """Return the error that an engine has put into its stream (vLLM's way to say that it died), if there is one."""
    for event in body.split(b"\n\n"):
        if event.startswith(b'data: {"error"'):
            return str(json.loads(event[6:])["error"].get("type", "error"))
    return ""


def part_flaw(record: Record, ask: ClientRequest, body: bytes) -> str:
    """Say what is wrong with the part of a stream that came: as far as it goes, it must be the right text."""
    if record.status != 200 or not ask.stream:
        return ""
    said = _said(body.rpartition(b"\n\n")[0])
    if said is None:
        return f"an event of a broken stream cannot be read: {body[-200:]!r}"
    return "" if ask.text.startswith(said) else f"a broken stream has another text: {said[:60]!r}"


def _said(body: bytes) -> str | None:
    """Return the text of a stream's events; None where one cannot be read."""
    said = []
    try:
        for event in body.split(b"\n\n"):
            if event.startswith(b"data: {") and not event.startswith(b'data: {"error"'):
                choices = json.loads(event[6:])["choices"]
                said += [one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices]
    except (ValueError, KeyError, TypeError):
        return None
    return "".join(said)


# Asking


class Load:
    """The honest clients. `urls`: where each way begins; every record is given to `keep` when it is complete."""

    def __init__(self, urls: dict[str, str], seed: int, rate: float, keep: Callable[[Record], None]) -> None:
        """`rate`: turns per second, each a request every way."""
        self._urls = urls
        self._make = asks(seed)
        self._rng = random.Random(seed)
        self._turn_s = 1.0 / rate
        self._keep = keep
        self._tasks: set[asyncio.Task[None]] = set()
        self.turns = 0

    async def run(self, until_s: float) -> None:
        """Send turns until the monotonic clock says `until_s`; then wait for what is open."""
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            next_s = time.monotonic()
            while next_s < until_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                ways = self._rng.sample(WAYS, len(WAYS))
                for place, (way, ask) in enumerate(zip(ways, self._make(len(ways)), strict=True)):
                    task = loop.create_task(self._one(http, way, ask, self.turns, place * self._turn_s / len(WAYS)))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                self.turns += 1
                # A machine that was away does not send all that it has missed at once.
                next_s = max(next_s + self._turn_s, time.monotonic() - 1.0)
            await asyncio.gather(*self._tasks)

    async def _one(self, http: aiohttp.ClientSession, way: str, ask: ClientRequest, turn: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        name = f"{turn}-{WAYS.index(way)}"
        record = Record(name, way, turn, time.monotonic(), hashlib.sha256(ask.body).hexdigest())
        headers = {"content-type": "application/json", NAME: name}
        received = bytearray()
        try:
            data = _pieces(ask.body) if ask.chunked else ask.body
            async with http.post(self._urls[way] + ask.path, data=data, headers=headers) as answer:
                record.status, record.begun = answer.status, True
                record.engine = answer.headers.get("x-model-server", "")
                async for piece in answer.content.iter_any():
                    received += piece
                read_answer(record, ask, {key.lower(): value for key, value in answer.headers.items()}, bytes(received))
        except TimeoutError:
            record.outcome, record.cause = Outcome.TIMEOUT, "timeout"
            record.flaw = part_flaw(record, ask, bytes(received))
        except (aiohttp.ClientError, OSError) as error:
            where = "in the answer" if record.begun else "before the answer"
            record.outcome, record.cause = Outcome.CUT, f"cut off {where} ({type(error).__name__})"
            record.flaw = part_flaw(record, ask, bytes(received))
        record.done_s = time.monotonic()
        self._keep(record)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(body), 9000):
        yield body[begin : begin + 9000]
