"""Engines that serve only a prepared metrics page, for as little CPU as possible: many ports, one process.

    python -m bench.page_server PAGE.txt LISTENERS

Prints its ports. `/busy` and `/idle` are the page with and without requests under way, `/slow` takes as long as that of a
real vLLM; counters grow, and now and then by a digit. As with vLLM there is another page below each
(`/busy/?name[]=...`), with the named samples only, in a sixth of the time (docs/develop/cost.md). Below `/whole/` names
are ignored.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any, Final

from bench.engine import selected_page
from extproc.loop import run

__all__ = ["Answers", "answer", "template"]

SLOW_S: Final = 0.010
SLOW_SELECTED_S: Final = SLOW_S / 6
_FIRST_COUNT: Final = 9_900
_COUNTER: Final = re.compile(rb"^(vllm:(?:prompt|generation)_tokens_total\{[^}]*\}) .*$", re.MULTILINE)
_LOAD: Final = re.compile(rb"^(vllm:num_requests_(?:running|waiting)\{[^}]*\}) .*$", re.MULTILINE)
_MODELS: Final = b'{"object":"list","data":[{"id":"bench","object":"model","parent":null}]}'


def template(page: bytes, *, busy: bool) -> bytes:
    """Turn a recorded page into a template whose two token counters are still to be filled in, as `%b`."""
    load = b"3.0" if busy else b"0.0"
    page = _LOAD.sub(lambda match: match[1] + b" " + load, page.replace(b"%", b"%%"))
    return _COUNTER.sub(rb"\1 %b", page)


def answer(body: bytes) -> bytes:
    """Put an HTTP head before a body, as long as uvicorn's."""
    return (
        b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 15:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
        b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n\r\n%b" % (len(body), body)
    )


class Answers:
    """The answers of each path. Counters only grow (one that fell would mean an engine that has restarted)."""

    def __init__(self, page: bytes) -> None:
        busy, idle = template(page, busy=True), template(page, busy=False)
        self._templates = {b"/busy": busy, b"/slow": busy, b"/idle": idle}
        self._asked: dict[bytes, tuple[bytes, float]] = {}
        """By path and query: a template, and how long its answer takes, in seconds."""
        self._count = _FIRST_COUNT

    def next(self, path: bytes) -> tuple[bytes, float]:
        """Return the next answer, and how long it takes, in seconds."""
        if path not in self._asked:
            self._asked[path] = self._choose(path)
        text, delay_s = self._asked[path]
        self._count += 1
        count = b"%d.0" % self._count
        return answer(text % (count, count) if b"%b" in text else text), delay_s

    def _choose(self, path: bytes) -> tuple[bytes, float]:
        asked = path.removeprefix(b"/whole")
        name = asked.partition(b"?")[0].removesuffix(b"/")
        whole = self._templates.get(name)
        if whole is None:
            return _MODELS, 0.0
        text = selected_page(whole, path) if asked == path else whole
        delay_s = SLOW_S if text == whole else SLOW_SELECTED_S
        return text, delay_s if name == b"/slow" else 0.0


class _Engine(asyncio.Protocol):
    """Answers each GET by its path."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        text, delay_s = self._answers.next(data.split(b" ", 2)[1])
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._send, text)
        else:
            self._send(text)

    def _send(self, text: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(text)


async def _serve(page: bytes, listeners: int) -> None:
    answers = Answers(page)
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: _Engine(answers), "127.0.0.1", 0) for _ in range(listeners)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    page, listeners = sys.argv[1:]
    run(_serve(Path(page).read_bytes(), int(listeners)))


if __name__ == "__main__":
    main()
