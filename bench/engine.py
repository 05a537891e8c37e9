"""Stand-in model servers that cost next to nothing: one process, one port each, HTTP/1.1 on a bare asyncio Protocol.

A chat with `"stream": true` gets 100 events, one per step of its engine; every other POST one small JSON answer. Both end
with `usage`, cached tokens included: each engine remembers which beginnings of bodies it has seen, as a prefix cache
would, so that a picker's prediction meets a word of the engine that depends on where requests went. The metrics page is
as long as a real vLLM's, and as with that `/metrics` is always whole, while `/metrics/?name[]=...` has the named samples
only (vllm/entrypoints/serve/instrumentator/metrics.py mounts Python's Prometheus client below the exact route).

    python -m bench.engine --port 8001 --port 8002 [--step-ms 5] [--kv-tokens 7000000]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import signal
from typing import Any, Final, cast
from urllib.parse import parse_qs

from bench.core_cost import MODEL, metrics_page
from extproc.loop import run
from extproc.sim.metrics import selected

__all__ = ["TOKENS", "EngineConnection", "PrefixCache", "StandIn", "selected_page", "sized_page"]

TOKENS: Final = 100
"""Events of one streamed answer before the one with `usage`."""
_PIECE_BYTES: Final = 128
_KNOWN_PIECES: Final = 1_000_000
"""Beyond, an engine forgets everything: memory stays bounded, and a run of the benchmark stays below."""
_BYTES_PER_TOKEN: Final = 4
_STREAM_MARK: Final = b'"stream": true'
_MARK_WITHIN: Final = 300


class PrefixCache:
    """Which beginnings of bodies were seen, in pieces of 128 bytes, each known by all that came before it."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def cached_bytes(self, body: bytes) -> int:
        """Return how many leading bytes are known, and know all of them from now on."""
        if len(self._known) > _KNOWN_PIECES:
            self._known.clear()
        known, chained, cached, unbroken = self._known, 0, 0, True
        for begin in range(0, len(body) - _PIECE_BYTES + 1, _PIECE_BYTES):
            chained = hash((chained, body[begin : begin + _PIECE_BYTES]))
            unbroken = unbroken and chained in known
            if unbroken:
                cached += _PIECE_BYTES
            else:
                known.add(chained)
        return cached


def usage(body_bytes: int, cached_bytes: int, completion_tokens: int) -> dict[str, Any]:
    """Write the `usage` of an answer as vLLM with `--enable-prompt-tokens-details` does."""
    prompt = max(1, body_bytes // _BYTES_PER_TOKEN)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(cached_bytes // _BYTES_PER_TOKEN, prompt - 1)},
    }


def sized_page(page: bytes, kv_tokens: int | None) -> bytes:
    """Return the metrics page with another size of the KV cache; None: as it is."""
    if kv_tokens is None:
        return page
    return re.sub(rb'kv_cache_size_tokens="\d+"', b'kv_cache_size_tokens="%d"' % kv_tokens, page)


def selected_page(page: bytes, path: bytes) -> bytes:
    """Leave of a page what the query of a path below it names; all of it where that names nothing."""
    place, _, query = path.partition(b"?")
    names = parse_qs(query.decode()).get("name[]") if place.endswith(b"/") else None
    return selected(page, names) if names else page


def _response(content_type: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (content_type, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(choices: list[Any], **more: Any) -> bytes:
    value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL, "choices": choices, **more}
    return _chunk(b"data: %b\n\n" % json.dumps(value).encode())


_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOKEN: Final = _event([{"index": 0, "delta": {"content": " token"}, "finish_reason": None}])
_DONE: Final = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class StandIn:
    """One engine: its cache, and the streams it advances by one token each step."""

    def __init__(self, page: bytes, step_s: float) -> None:
        self._page = page
        self._pages = {b"/metrics": _response(b"text/plain", page)}
        """By path and query, each written once."""
        models = {"object": "list", "data": [{"id": MODEL, "object": "model", "parent": None}]}
        self.models = _response(b"application/json", json.dumps(models).encode())
        self.cache = PrefixCache()
        self._step_s = step_s
        self._streams: dict[EngineConnection, tuple[int, bytes]] = {}

    def answer(self, connection: EngineConnection, path: bytes, body: bytes) -> None:
        """Answer one request."""
        if path.startswith(b"/metrics"):
            connection.write(self.metrics(path))
        elif path == b"/v1/models":
            connection.write(self.models)
        elif body.find(_STREAM_MARK, 0, _MARK_WITHIN) >= 0:
            words = usage(len(body), self.cache.cached_bytes(body), TOKENS)
            connection.write(_STREAM_HEAD)
            if not self._streams:
                asyncio.get_running_loop().call_later(self._step_s, self._step)
            self._streams[connection] = (TOKENS, _event([], usage=words) + _DONE)
        else:
            words = usage(len(body), self.cache.cached_bytes(body), 1)
            value = {"id": "chatcmpl-1", "object": "chat.completion", "model": MODEL, "choices": [], "usage": words}
            connection.write(_response(b"application/json", json.dumps(value).encode()))

    def metrics(self, path: bytes) -> bytes:
        """Give the answer with the metrics page of this path."""
        if path not in self._pages:
            self._pages[path] = _response(b"text/plain", selected_page(self._page, path))
        return self._pages[path]

    def gone(self, connection: EngineConnection) -> None:
        """Forget a connection that has ended."""
        self._streams.pop(connection, None)

    def _step(self) -> None:
        # All streams of one engine advance together, as with continuous batching; engines have steps of their own.
        for connection, (left, end) in list(self._streams.items()):
            if left:
                connection.write(_TOKEN)
                self._streams[connection] = (left - 1, end)
            else:
                del self._streams[connection]
                connection.write(end)
        if self._streams:
            asyncio.get_running_loop().call_later(self._step_s, self._step)


class EngineConnection(asyncio.Protocol):
    """Reads one request after the other; Envoy does not pipeline."""

    def __init__(self, engine: StandIn) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's are of no such class

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Let go of a stream under way."""
        self._transport = None
        self._engine.gone(self)

    def write(self, data: bytes) -> None:
        """Send, if anybody is there."""
        if self._transport is not None:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Answer what is complete."""
        self._buffer += data
        while (found := read_request(self._buffer)) is not None:
            path, body, end = found
            del self._buffer[:end]
            self._engine.answer(self, path, body)


def read_request(buffer: bytearray) -> tuple[bytes, bytes, int] | None:
    """Return path, body and length of the first request of the buffer; None: it is not complete."""
    head_end = buffer.find(b"\r\n\r\n")
    if head_end < 0:
        return None
    head = bytes(buffer[:head_end]).lower()
    path = bytes(buffer[:head_end]).split(b" ", 2)[1]
    begin = head_end + 4
    if b"\r\ntransfer-encoding: chunked" in head:
        return _chunked(buffer, path, begin)
    place = head.find(b"\r\ncontent-length:")
    length = int(head[place + 17 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
    end = begin + length
    return (path, bytes(buffer[begin:end]), end) if len(buffer) >= end else None


def _chunked(buffer: bytearray, path: bytes, position: int) -> tuple[bytes, bytes, int] | None:
    parts: list[bytes] = []
    while (line_end := buffer.find(b"\r\n", position)) >= 0:
        size = int(buffer[position:line_end], 16)
        begin = line_end + 2
        if size == 0:
            # Trailers may stand before the empty line that ends all.
            end = begin + 2 if buffer[begin : begin + 2] == b"\r\n" else buffer.find(b"\r\n\r\n", begin) + 4
            complete = end >= begin + 2 and len(buffer) >= end
            return (path, b"".join(parts), end) if complete else None
        position = begin + size + 2
        if len(buffer) < position:
            return None
        parts.append(bytes(buffer[begin : begin + size]))
    return None


async def serve(ports: list[int], page: bytes, step_s: float) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    servers = []
    for port in ports:
        engine = StandIn(page, step_s)
        servers.append(await loop.create_server(lambda e=engine: EngineConnection(e), "127.0.0.1", port))  # type: ignore[misc]
    # Nothing here makes cycles, and a pause would stand in every latency.
    gc.collect()
    gc.disable()
    await stopped.wait()
    for server in servers:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, action="append", required=True)
    parser.add_argument("--step-ms", type=float, default=5.0, help="time between two tokens (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=int, help="size of the KV cache each engine claims to have")
    args = parser.parse_args()
    run(serve(args.port, sized_page(metrics_page(), args.kv_tokens), args.step_ms / 1000))


if __name__ == "__main__":
    main()
