"""Sends a chat workload through an HTTP address as its clients would, and records what each of them saw.

One asyncio task per session: a session asks its next question only after the last answer
and a pause, so slow answers lower the request rate, as with people.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import msgspec

from extproc.demo.workload import ChatWorkload, Session

__all__ = ["RequestRecord", "drive"]

_JSON = msgspec.json.Encoder()
_DATA = b"data: "


@dataclass(slots=True)
class RequestRecord:
    """What one client saw of one request. Times in seconds since the start of the run."""

    sent_s: float
    session: int
    turn: int
    status: int = 0
    """HTTP status; 0: no answer."""
    error: str = ""
    """Why the request does not count as answered; empty: it does."""
    first_token_s: float | None = None
    done_s: float | None = None
    token_gaps_s: list[float] = field(default_factory=list)
    """Time between two token events, in seconds."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    endpoint: str = ""
    """Name of the model server that answered."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, in seconds."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _LastChunk(msgspec.Struct):
    usage: _Usage | None = None


_LAST_CHUNK = msgspec.json.Decoder(_LastChunk)


async def drive(
    workload: ChatWorkload,
    url: str,
    *,
    model: str,
    progress: Callable[[int], None] = lambda _done: None,
    timeout_s: float = 60.0,
    headers: dict[str, str] | None = None,
) -> list[RequestRecord]:
    """Send every request of `workload` to `url` (scheme, host, port) and return one record each, in order of sending.

    `progress` is called with the number of requests ended. Never raises for a failed request: its record says why.
    """
    records: list[RequestRecord] = []
    started = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=headers) as http:

        async def serve_stream(number: int, session: Session) -> None:
            await asyncio.sleep(session.start_s)
            for turn, exchange in enumerate(session.turns):
                if turn:
                    await asyncio.sleep(exchange.think_s)
                record = RequestRecord(sent_s=time.monotonic() - started, session=number, turn=turn)
                records.append(record)
                body = _JSON.encode(
                    {
                        "model": model,
                        "messages": session.messages(turn),
                        "max_tokens": exchange.max_tokens,
                        "stream": True,
                        "stream_options": {"include_usage": True},
                    }
                )
                await _ask(http, body, record, started)
                progress(sum(1 for one in records if one.done_s is not None))

        async with asyncio.TaskGroup() as group:
            for number, session in enumerate(workload.sessions):
                group.create_task(serve_stream(number, session))
    return records


async def _ask(http: aiohttp.ClientSession, body: bytes, record: RequestRecord, started: float) -> None:
    try:
        async with http.post(
            "/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        ) as response:
            record.status = response.status
            record.endpoint = response.headers.get("x-model-server", "")
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _read_stream(response, record, started)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.done_s = time.monotonic() - started


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord, started: float) -> None:
    last_s: float | None = None
    tail = b""
    async for chunk in response.content.iter_any():
        now_s = time.monotonic() - started
        if record.first_token_s is None:
            record.first_token_s = now_s
        elif last_s is not None:
            record.token_gaps_s.append(now_s - last_s)
        last_s = now_s
        tail = (tail + chunk)[-4096:]
    if not tail.rstrip().endswith(b"data: [DONE]"):
        record.error = "the stream ended without [DONE]"
        return
    for event in reversed(tail.split(b"\n\n")):
        if event.startswith(_DATA + b"{") and b'"usage"' in event:
            usage = _LAST_CHUNK.decode(event[len(_DATA) :]).usage
            if usage is not None:
                record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
                return
    record.error = "the stream carried no usage"
