"""Engines that serve nothing but their metrics page, ready-made, for as little CPU as Python can: many ports, one process.

    python -m bench.page_server PAGE.txt LISTENERS

Prints its ports. `/busy` and `/idle` are the page with and without requests under way, `/slow` takes as long to come as
that of a real vLLM (10 ms); numbers and the length of the page change from one answer to the next.
"""

from __future__ import annotations

import asyncio
import re
import sys
from itertools import cycle
from pathlib import Path
from typing import Any, Final

__all__ = ["answer", "variants"]

SLOW_S: Final = 0.010
_VARIANTS: Final = 16
_COUNTER: Final = re.compile(rb"^(vllm:(?:prompt|generation)_tokens_total\{[^}]*\}) .*$", re.MULTILINE)
_LOAD: Final = re.compile(rb"^(vllm:num_requests_(?:running|waiting)\{[^}]*\}) .*$", re.MULTILINE)
_MODELS: Final = b'{"object":"list","data":[{"id":"bench","object":"model","parent":null}]}'


def variants(page: bytes, *, busy: bool) -> list[bytes]:
    """Make pages that differ as those of one engine do: counters grow, and gain digits."""
    load = b"3.0" if busy else b"0.0"
    page = _LOAD.sub(lambda match: match[1] + b" " + load, page)
    return [
        _COUNTER.sub(lambda match, number=number: b"%s %d.0" % (match[1], 2**number), page)  # type: ignore[misc]
        for number in range(_VARIANTS)
    ]


def answer(body: bytes) -> bytes:
    """Put a head before a body, as long as uvicorn's."""
    return (
        b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 15:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
        b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n\r\n%s" % (len(body), body)
    )


class _Engine(asyncio.Protocol):
    """Answers each GET by its path."""

    def __init__(self, answers: dict[bytes, Any]) -> None:
        self._answers = answers
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        path = data.split(b" ", 2)[1]
        said = next(self._answers.get(path, self._answers[b"/v1/models"]))
        if path == b"/slow":
            asyncio.get_running_loop().call_later(SLOW_S, self._say, said)
        else:
            self._say(said)

    def _say(self, said: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(said)


async def _serve(page: bytes, listeners: int) -> None:
    busy = [answer(one) for one in variants(page, busy=True)]
    answers = {
        b"/busy": cycle(busy),
        b"/slow": cycle(busy),
        b"/idle": cycle([answer(one) for one in variants(page, busy=False)]),
        b"/v1/models": cycle([answer(_MODELS)]),
    }
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: _Engine(answers), "127.0.0.1", 0) for _ in range(listeners)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    page, listeners = sys.argv[1:]
    serving = _serve(Path(page).read_bytes(), int(listeners))
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)


if __name__ == "__main__":
    main()
