"""Clients that mean harm or know no better. They ask through the picker only: what they do to others must not show there either.

All of it on raw connections, so that nothing tidies up what they send. A body that is sent whole carries a name, and the judge
compares what the engine got of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from hpack import Encoder

from bench.h2_client import H2Client, LoadError
from bench.hard_days.clients import MODEL
from bench.hard_days.journal import DISCARD, NAME
from bench.hard_days.judge import Invariant, Judge
from bench.hard_days.schedule import Fault
from bench.hard_days.stage import Stage

__all__ = ["PATIENCE_S", "Hostile", "garbage", "heavy", "huge", "post"]

PATIENCE_S: Final = 20.0
"""A whole request must have an answer within this time, however bad it is."""
_BODY: Final = 4 << 20
_IDLE: Final = 600
"""More than a picker has descriptors."""


def _of(element: str, head: str, tail: str = "]}") -> bytes:
    """Return a body of 4 MiB: a head, one element again and again, a tail."""
    count = (_BODY - len(head) - len(tail)) // (len(element) + 1)
    return (head + f"{element}," * (count - 1) + element + tail).encode()


def heavy() -> list[Callable[[], bytes]]:
    """Return makers of bodies of 4 MiB that are legal JSON and dear to look at, whatever field they fill."""
    model = json.dumps(MODEL)
    chat = f'{{"model":{model},"max_tokens":1,'
    return [
        lambda: _of("{}", chat + '"messages":['),
        lambda: _of("NaN", chat + '"messages":['),
        lambda: _of("[1]", chat + '"prompt":['),
        lambda: _of("1", chat + '"prompt":['),
        lambda: _of('""', chat + '"prompt":['),
        lambda: _of("{}", chat + '"messages":[{"role":"user","content":"x"}],"tools":['),
        lambda: _of("{}", chat + '"messages":[{"role":"user","content":[', "]}]}"),
        lambda: _of('{"type":"text","text":"x"}', chat + '"messages":[{"role":"user","content":[', "]}]}"),
        lambda: _of('{"role":"user","content":"x"}', chat + '"messages":['),
        lambda: _of("0", chat + '"messages":[{"role":"user","content":"x"}],"extra":['),
        lambda: _of('"a":1', chat + '"messages":[{"role":"user","content":"x"}],"extra":{', "}}"),
        lambda: b"".join((chat.encode(), b'"prompt":"', b"\\u0041" * ((_BODY - 100) // 6), b'"}')),
    ]


def huge() -> list[Callable[[], bytes]]:
    """Return makers of bodies of 4 MiB and more, with one long field each."""
    chat: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    long = "y" * _BODY

    def body(**fields: Any) -> Callable[[], bytes]:
        return lambda: json.dumps({**chat, **fields}).encode()

    return [
        body(messages=[{"role": "user", "content": "x" * (6 << 20)}]),
        body(messages=[{"role": "user", "content": "x" * (20 << 20)}]),
        body(model=long),
        body(user=long),
        body(cache_salt=long),
        body(metadata={"user_id": long}),
        body(messages=[{"role": long, "content": "x"}]),
        body(response_format={"type": long}),
        body(**{long: 1}),
    ]


def garbage(rng: random.Random) -> list[bytes]:
    """Return bodies that are no request."""
    chat = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1})
    return [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe\x00{}",
        rng.randbytes(5000),
        chat[: rng.randrange(1, len(chat))].encode(),
        (chat + "}").encode(),
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"model": 5, "messages": "hello"}',
        b'{"model": {}, "prompt": {"a": []}}',
        b'{"model": "\\ud800", "prompt": "\\udc00\\ud800"}',
        b'{"prompt": 1e999, "max_tokens": -1e999}',
        b'{"messages": [null, 1, "x", [], {"role": null, "content": {}}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text"}, {"type": 5, "text": []}]}], "stream": "on"}',
        b'{"model": "nobody-serves-this", "messages": [{"role": "user", "content": "x"}]}',
        chat.replace("hello", "\\u0000").encode(),
    ]


def post(
    body: bytes, headers: dict[str, str], *, path: str = "/v1/chat/completions", length: int | None = None
) -> bytes:
    """Return an HTTP/1.1 request."""
    lines = [f"POST {path} HTTP/1.1", "host: hard-days", "content-type: application/json"]
    lines += [
        f"content-length: {len(body) if length is None else length}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Hostile:
    """Performs the faults of clients, all against one port."""

    def __init__(self, stage: Stage, judge: Judge, seed: int) -> None:
        self._stage = stage
        self._judge = judge
        self._rng = random.Random(seed)
        self._number = 0
        self._heavy: list[bytes] = []
        self.sent: Counter[str] = Counter()

    async def perform(self, fault: Fault) -> None:
        """Do what a fault says, for as long as it says."""
        name = fault.kind.name
        if name == "idle-sockets":
            await self._idle(fault)
            return
        act, clients, pause_s = {
            "cut-upload": (self._cut_upload, 3, 0.1),
            "cut-answer": (self._cut_answer, 3, 0.1),
            "garbage": (self._garbage, 2, 0.1),
            "huge": (self._huge, 1, 0.5),
            "heavy": (self._heavy_one, 1, 0.7),
            "slow-body": (self._slow_body, 12, 0.2),
            "trailers": (self._trailers, 2, 0.1),
            "all-refused": (self._all_refused, 2, 0.1),
            "no-http": (self._no_http, 2, 0.2),
        }[name]
        until_s = time.monotonic() + fault.seconds
        await asyncio.gather(*(self._again(name, act, until_s, pause_s) for _ in range(clients)))

    async def _again(self, name: str, act: Callable[[float], Any], until_s: float, pause_s: float) -> None:
        while time.monotonic() < until_s:
            self.sent[name] += 1
            with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
                await act(until_s)
            await asyncio.sleep(pause_s)

    # Each of them

    async def _open(self, port: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port or self._port)

    @property
    def _port(self) -> int:
        return self._stage.ports["picker"]

    def _name(self, body: bytes | None = None) -> dict[str, str]:
        """Name a request; one that is sent whole is compared."""
        self._number += 1
        name = f"hostile-{self._number}"
        self._judge.bodies[name] = hashlib.sha256(body).hexdigest() if body is not None else ""
        return {NAME: name}

    async def _whole(self, what: str, body: bytes, headers: dict[str, str], path: str = "/v1/chat/completions") -> None:
        """Send a request whole, and wait for the end of its answer."""
        reader, writer = await self._open()
        sent_s = time.monotonic()
        try:
            writer.write(post(body, {"connection": "close", **headers}, path=path))
            async with asyncio.timeout(PATIENCE_S):
                drained = asyncio.ensure_future(writer.drain())
                answer = await reader.read()
                drained.cancel()
            if not answer.startswith(b"HTTP/1.1 ") and not self._proxy_was_going(sent_s):
                self._judge.broken(Invariant.ANSWERS, sent_s, f"{what}: no answer but {answer[:100]!r}")
            if b" 500 " in answer[:20] and b"x-extproc-drop-reason" in answer:
                self._judge.broken(Invariant.ANSWERS, sent_s, f"{what}: the picker had a defect: {answer[:600]!r}")
        except TimeoutError:
            if self._judge.paused_s(sent_s, time.monotonic()) < PATIENCE_S / 4:
                said = f"{what} of {len(body)} bytes had no answer within {PATIENCE_S:.0f} s"
                self._judge.unanswered[headers[NAME]] = (sent_s, said)
        finally:
            writer.transport.abort()

    def _proxy_was_going(self, since_s: float) -> bool:
        return any(span.touches(since_s, time.monotonic()) for span in self._judge.acts.proxy)

    async def _cut_upload(self, _until_s: float) -> None:
        body = (
            b'{"model": "'
            + MODEL.encode()
            + b'", "prompt": "'
            + b"z" * self._rng.choice((10, 2000, 100_000, 2_000_000))
        )
        _, writer = await self._open()
        writer.write(post(body, self._name(), length=len(body) + 1000))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.drain(), 2)
        await asyncio.sleep(self._rng.choice((0, 0.05, 0.5)))
        _end(writer, reset=self._rng.random() < 0.5)

    async def _cut_answer(self, _: float) -> None:
        body = json.dumps({"model": MODEL, "prompt": "tell me more", "max_tokens": 400, "stream": True}).encode()
        reader, writer = await self._open()
        writer.write(post(body, self._name(body), path="/v1/completions"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                for _line in range(self._rng.randrange(1, 30)):
                    await reader.readline()
        _end(writer, reset=self._rng.random() < 0.5)

    async def _garbage(self, _: float) -> None:
        body = self._rng.choice(garbage(self._rng))
        path = self._rng.choice(
            ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
        )
        await self._whole("garbage", body, self._name(body), path)

    async def _huge(self, _: float) -> None:
        if self._rng.random() < 0.2:
            await self._whole("a long header", b"{}", {**self._name(b"{}"), "x-session-id": "s" * 7_000})
            return
        body = self._rng.choice(huge())()
        await self._whole("a huge body", body, {**self._name(body), DISCARD: "1"})

    async def _heavy_one(self, _: float) -> None:
        body = self._rng.choice(heavy())()
        await self._whole(f"a heavy body ({body[:90].decode()}...)", body, {**self._name(body), DISCARD: "1"})

    async def _slow_body(self, until_s: float) -> None:
        body = json.dumps({"model": MODEL, "prompt": "slowly " * 300, "max_tokens": 2}).encode()
        head = post(b"", self._name(body), path="/v1/completions", length=len(body))
        reader, writer = await self._open()
        writer.write(head)
        for begin in range(0, len(body), 150):
            writer.write(body[begin : begin + 150])
            await asyncio.sleep(0.2)
            if time.monotonic() > until_s or writer.transport.is_closing():
                break
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1000), 5)
        _end(writer, reset=False)

    async def _all_refused(self, _: float) -> None:
        """One client whose requests all fail for its own reasons: that must change nothing for others."""
        body = json.dumps(
            self._rng.choice(
                (
                    {"model": "nobody-serves-this", "prompt": "x", "max_tokens": 1},
                    {"model": MODEL, "prompt": "x", "max_tokens": 1, "temperature": -1},
                    {"model": MODEL, "prompt": "x" * 200_000, "max_tokens": 1},
                )
            )
        ).encode()
        await self._whole("a request that is refused", body, self._name(body), "/v1/completions")

    async def _trailers(self, _until_s: float) -> None:
        """Send a request over HTTP/2 whose body ends in trailers."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: H2Client(_Ended(ended)), "127.0.0.1", self._port
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                await client.settled
                body = json.dumps({"model": MODEL, "prompt": "with trailers " * 20, "max_tokens": 2}).encode()
                fields = [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":path", "/v1/completions"),
                    (":authority", "hard-days"),
                ]
                fields += [("content-type", "application/json"), *self._name(body).items()]
                encoder = Encoder()
                stream_id = client.request(encoder.encode(fields), (body[:100], body[100:]), end=False)
                await asyncio.sleep(self._rng.choice((0, 0.02)))
                client.trailers(stream_id, encoder.encode([("x-checksum", "1")]))
                await ended
        except (LoadError, TimeoutError):
            pass
        finally:
            client.close()

    async def _no_http(self, _: float) -> None:
        """Something else on the ports of Envoy and of the picker."""
        ports = self._stage.pickers[0].ports
        said = self._rng.choice(
            (
                self._rng.randbytes(2000),
                b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self._rng.randbytes(500),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._rng.randbytes(300),
                b"PRI * HTTP/2.0\r\n",
            )
        )
        reader, writer = await self._open(self._rng.choice((self._port, ports.grpc, ports.health, ports.metrics)))
        writer.write(said)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1000), 1)
        _end(writer, reset=self._rng.random() < 0.5)

    async def _idle(self, fault: Fault) -> None:
        """Many connections that say nothing."""
        ports = self._stage.pickers[0].ports
        port = (ports.metrics, ports.health, self._port)[fault.variant]
        self.sent["idle-sockets"] += 1
        writers: list[asyncio.StreamWriter] = []
        until_s = time.monotonic() + fault.seconds
        try:
            while len(writers) < _IDLE and time.monotonic() < until_s:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1):
                        writers.append((await self._open(port))[1])
                    continue
                await asyncio.sleep(0.1)
            await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        finally:
            for writer in writers:
                writer.transport.abort()


class _Ended:
    """Waits for the end of a stream."""

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended = ended

    def headers(self, stream_id: int, block: bytes) -> None:
        """Look at nothing."""

    def data(self, stream_id: int, payload: bytes) -> None:
        """Look at nothing."""

    def ended(self, stream_id: int, *, reset: bool) -> None:  # noqa: ARG002 - StreamSink's names
        """Take the end, whatever it is."""
        if not self._ended.done():
            self._ended.set_result(None)


def _end(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Close a connection, by RST or FIN."""
    raw = writer.get_extra_info("socket")
    if reset and raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
