"""The lean HTTP client against a server of the test's own that says exactly what the test wants, on both event loops."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.scraping.failures import ScrapeFailedError, ScrapeFailure
from extproc.edge.scraping.http_client import (
    CpuMeter,
    HttpProtocol,
    KeptConnection,
    Origin,
    get_request,
    read_buffer,
)
from tests.edge.scraping.test_scraper import self_signed

BUFFER = read_buffer()
MOST_BYTES = 1000
NEVER = 1e9
PAGE = b"vllm:num_requests_running 3\n"
REQUEST = get_request(Origin("127.0.0.1", 80), "/metrics", {})
GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(PAGE), PAGE)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop of either library: their transports are not the same."""

    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **values: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**values))

    signature = inspect.signature(test)
    factory = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = signature.replace(parameters=[factory, *signature.parameters.values()])  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    loops = pytest.mark.parametrize(
        "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    )
    marked: Callable[..., None] = loops(run)
    return marked


class Server:
    """Counts connections and gives each to the next talk, the last of which serves all that follow."""

    def __init__(self, *talks: Talk) -> None:
        self._talks = talks
        self.connections = 0
        self.origin = Origin("", 0)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = self._talks[min(self.connections, len(self._talks) - 1)]
        self.connections += 1
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(*talks: Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    made = Server(*talks)
    server = await asyncio.start_server(made.connected, "127.0.0.1", 0, ssl=tls)
    made.origin = Origin("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield made
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def connection(origin: Origin, idle_s: float = 60.0) -> AsyncIterator[KeptConnection]:
    meter = CpuMeter()
    meter.start()
    made = KeptConnection(origin, BUFFER, meter, idle_s=idle_s)
    try:
        yield made
    finally:
        await made.close()
        await made.close()


async def get(connection: KeptConnection, timeout_s: float = 20.0) -> bytes:
    return await connection.get(REQUEST, timeout_s=timeout_s, max_bytes=MOST_BYTES)


def says(*pieces: bytes, then_close: bool = False) -> Talk:
    """Answer each request with these pieces, each in a segment of its own."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            assert await reader.readuntil(b"\r\n\r\n") == REQUEST
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if then_close:
                return

    return talk


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


async def is_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def is_no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await reader.read()


def one_answer_then(talk: Talk) -> Talk:
    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(GOOD)
        await talk(reader, writer)

    return both


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        GOOD,
        b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH: %d\r\nContent-Encoding: Identity\r\n\r\n%s" % (len(PAGE), PAGE),
        CHUNKS + chunked(PAGE),
        CHUNKS + chunked(PAGE[:5], PAGE[5:]),
        CHUNKS + b"%x;name=value\r\n%s\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(PAGE), PAGE),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + GOOD,
        b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: %d\r\n\r\n%s" % (len(PAGE), PAGE),
    ],
    ids=["length", "case", "chunk", "chunks", "trailer", "informational", "1.0 kept"],
)
@on_both_loops
async def test_an_answer_that_ends_keeps_the_connection(answer: bytes) -> None:
    middle = len(answer) // 2
    async with serving(says(answer[:middle], answer[middle:])) as server, connection(server.origin) as client:
        assert [await get(client) for _ in range(3)] == [PAGE] * 3
        assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + PAGE,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\n" + PAGE,
        b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\n" + PAGE,
        b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(PAGE), PAGE),
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(PAGE), PAGE),
        CHUNKS.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + chunked(PAGE),
    ],
    ids=["until close", "no chunks", "1.0 until close", "1.0", "closing", "closing chunks"],
)
@on_both_loops
async def test_an_answer_that_closes_is_followed_by_a_new_connection(answer: bytes) -> None:
    middle = len(answer) // 2
    talk = says(answer[:middle], answer[middle:], then_close=True)
    async with serving(talk) as server, connection(server.origin) as client:
        assert [await get(client) for _ in range(3)] == [PAGE] * 3
        assert server.connections == 3


@on_both_loops
async def test_an_empty_page_and_one_of_the_greatest_length() -> None:
    nothing = says(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    async with serving(nothing) as server, connection(server.origin) as client:
        assert await get(client) == b""
    async with serving(says(CHUNKS + chunked(b"x" * MOST_BYTES))) as server, connection(server.origin) as client:
        assert await get(client) == b"x" * MOST_BYTES


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"", ScrapeFailure.CONNECT),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ScrapeFailure.CONNECT),
        (b"HTTP/1.1 200 OK\r\ncontent-le", ScrapeFailure.CONNECT),
        (GOOD[:-1], ScrapeFailure.CONNECT),
        (CHUNKS + b"5\r\nvl", ScrapeFailure.CONNECT),
        (CHUNKS + b"5\r\nvllm:\r\n", ScrapeFailure.CONNECT),
        (CHUNKS + b"vllm", ScrapeFailure.CONNECT),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc", ScrapeFailure.CONNECT),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", ScrapeFailure.CONNECT),
        (b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno", ScrapeFailure.STATUS),
        (b"HTTP/1.1 500 No\r\ncontent-length: 2000\r\n\r\nno", ScrapeFailure.STATUS),
        (b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", ScrapeFailure.STATUS),
        (b"HTTP/1.1 204 No Content\r\n\r\n", ScrapeFailure.STATUS),
        (b"HTTP/1.0 500 No\r\n\r\nuntil close", ScrapeFailure.STATUS),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b", ScrapeFailure.PARSE),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 9\r\n\r\n", ScrapeFailure.PARSE),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n" + b"x" * 1001, ScrapeFailure.TOO_LARGE),
        (CHUNKS + chunked(b"x" * 900, b"x" * 900), ScrapeFailure.TOO_LARGE),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000, ScrapeFailure.TOO_LARGE),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000, ScrapeFailure.TOO_LARGE),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 4000, ScrapeFailure.TOO_LARGE),
        (CHUNKS + b"1;" + b"x" * 70_000, ScrapeFailure.TOO_LARGE),
    ],
)
@on_both_loops
async def test_what_is_no_page(answer: bytes, fault: ScrapeFailure) -> None:
    async with serving(says(answer, then_close=True)) as server, connection(server.origin) as client:
        with pytest.raises(ScrapeFailedError) as caught:
            await get(client)
        assert caught.value.reason is fault
        assert str(caught.value)
        # Nothing of it is taken for the next answer.
        with pytest.raises(ScrapeFailedError):
            await get(client)
        assert server.connections == 2


@on_both_loops
async def test_another_status_keeps_the_connection_if_it_is_complete() -> None:
    async with serving(says(b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno")) as server:
        async with connection(server.origin) as client:
            for _ in range(2):
                with pytest.raises(ScrapeFailedError, match="status 503"):
                    await get(client)
        assert server.connections == 1


@pytest.mark.parametrize("leaves", [hangs_up, resets])
@on_both_loops
async def test_a_kept_connection_that_was_closed_is_replaced_at_once(leaves: Talk) -> None:
    async with serving(one_answer_then(leaves), says(GOOD)) as server, connection(server.origin) as client:
        assert await get(client) == PAGE
        # The server reads the request and goes without a word, as one that had already decided to close.
        assert await get(client) == PAGE
        assert server.connections == 2


@on_both_loops
async def test_it_is_replaced_once_not_for_ever() -> None:
    async with serving(one_answer_then(hangs_up), hangs_up) as server, connection(server.origin) as client:
        assert await get(client) == PAGE
        with pytest.raises(ScrapeFailedError, match="closed before the answer was complete"):
            await get(client)
        assert server.connections == 2


@on_both_loops
async def test_a_kept_connection_that_breaks_within_an_answer_is_a_failure() -> None:
    async with (
        serving(one_answer_then(says(GOOD[:-3], then_close=True)), says(GOOD)) as server,
        connection(server.origin) as client,
    ):
        assert await get(client) == PAGE
        with pytest.raises(ScrapeFailedError):
            await get(client)
        assert server.connections == 1


@on_both_loops
async def test_a_connection_closed_while_nobody_asks() -> None:
    async with serving(says(GOOD, then_close=True), says(GOOD)) as server, connection(server.origin) as client:
        assert await get(client) == PAGE
        assert await get(client) == PAGE
        assert server.connections == 2


@on_both_loops
async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    late, left = asyncio.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(GOOD)
        await late.wait()
        writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await reader.read()
        left.set()

    async with serving(talk, says(GOOD)) as server, connection(server.origin) as client:
        assert await get(client) == PAGE
        late.set()
        await left.wait()
        assert await get(client) == PAGE
        assert server.connections == 2


@pytest.mark.parametrize("surplus", [GOOD, b"x", b"\x00"])
@on_both_loops
async def test_a_surplus_answer_ends_the_connection(surplus: bytes) -> None:
    async with serving(says(GOOD + surplus), says(GOOD)) as server, connection(server.origin) as client:
        assert await get(client) == PAGE
        assert await get(client) == PAGE
        assert server.connections == 2


@pytest.mark.parametrize("start", [b"", GOOD[:-1]])
@on_both_loops
async def test_timeout(start: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await reader.read()

    async with serving(talk, says(GOOD)) as server, connection(server.origin) as client:
        with pytest.raises(ScrapeFailedError) as caught:
            await get(client, timeout_s=0.05)
        assert caught.value.reason is ScrapeFailure.TIMEOUT
        assert await get(client) == PAGE
        assert server.connections == 2


@on_both_loops
async def test_timeout_of_the_connection() -> None:
    async with serving(is_silent) as server:
        # A TLS handshake that is never answered.
        origin = Origin("127.0.0.1", server.origin.port, ssl.create_default_context())
        async with connection(origin) as client:
            with pytest.raises(ScrapeFailedError, match="no connection in time"):
                await get(client, timeout_s=0.05)


@on_both_loops
async def test_whoever_leaves_takes_the_connection_along() -> None:
    asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()

    async with serving(talk, says(GOOD)) as server, connection(server.origin) as client:
        task = asyncio.get_running_loop().create_task(get(client))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await get(client) == PAGE
        assert server.connections == 2


@on_both_loops
async def test_an_idle_connection_is_let_go() -> None:
    left = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(GOOD)
        await reader.read()
        left.set()

    async with serving(talk, says(GOOD)) as server, connection(server.origin, idle_s=0.02) as client:
        assert await get(client) == PAGE
        async with asyncio.timeout(60):
            await left.wait()
        assert await get(client) == PAGE
        assert server.connections == 2


@on_both_loops
async def test_an_answer_may_take_longer_than_a_connection_is_kept() -> None:
    slow = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            if slow.is_set():
                await asyncio.sleep(0.1)
            writer.write(GOOD)

    async with serving(talk) as server, connection(server.origin, idle_s=0.02) as client:
        assert await get(client) == PAGE
        slow.set()
        assert await get(client) == PAGE


@on_both_loops
async def test_tls(tmp_path: Path) -> None:
    context, ca = self_signed(tmp_path)
    trusting = ssl.create_default_context(cafile=str(ca))
    async with serving(says(GOOD), tls=context) as server, serving(is_no_tls) as plain:
        port = server.origin.port
        for origin in (
            Origin("127.0.0.1", port, trusting),
            Origin("localhost", port, trusting, "engine.test"),
        ):
            async with connection(origin) as client:
                assert [await get(client) for _ in range(2)] == [PAGE] * 2
        assert server.connections == 2
        for origin in (
            Origin("127.0.0.1", port, ssl.create_default_context()),
            Origin("127.0.0.1", port, trusting, "other.test"),
            Origin("127.0.0.1", plain.origin.port, trusting),
        ):
            async with connection(origin) as client:
                with pytest.raises(ScrapeFailedError) as caught:
                    await get(client)
                assert caught.value.reason is ScrapeFailure.TLS


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "a..b", "\x00"])
@on_both_loops
async def test_nobody_there(host: str) -> None:
    async with connection(Origin(host, 1)) as client:
        with pytest.raises(ScrapeFailedError) as caught:
            await get(client)
    assert caught.value.reason is ScrapeFailure.CONNECT
    assert str(caught.value)


@on_both_loops
async def test_host_names() -> None:
    async with serving(says(GOOD)) as server, connection(Origin("localhost", server.origin.port)) as client:
        assert await get(client) == PAGE


@on_both_loops
async def test_the_meter_counts_new_connections_and_reading() -> None:
    async with serving(says(GOOD)) as server:
        meter = CpuMeter()
        client = KeptConnection(server.origin, BUFFER, meter, idle_s=60)
        meter.start()
        await get(client)
        meter.stop()
        first = meter.take()
        assert meter.seconds == 0.0
        meter.start()
        await get(client)
        meter.stop()
        assert first > 0.0003
        assert meter.take() > 0.0
        await client.close()


# Without a socket


class Pipe:
    """Stands in for a transport."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


def wired(loop: asyncio.AbstractEventLoop) -> tuple[HttpProtocol, Any]:
    wire, pipe = HttpProtocol(loop, BUFFER, CpuMeter(), 60.0), Pipe()
    wire.connection_made(pipe)  # type: ignore[arg-type]
    return wire, pipe


def read(wire: HttpProtocol, data: bytes) -> None:
    buffer = wire.get_buffer(-1)
    buffer[: len(data)] = data
    wire.buffer_updated(len(data))


@on_both_loops
async def test_a_connection_lost_before_its_first_request() -> None:
    wire, pipe = wired(asyncio.get_running_loop())
    pipe.abort()
    wire.connection_lost(None)
    with pytest.raises(ScrapeFailedError, match="closed before the request was sent"):
        await wire.send(REQUEST, MOST_BYTES, NEVER)
    assert pipe.written == b""


@on_both_loops
async def test_tls_that_breaks_within_an_answer() -> None:
    wire, _ = wired(asyncio.get_running_loop())
    answer = wire.send(REQUEST, MOST_BYTES, NEVER)
    wire.connection_lost(ssl.SSLError("bad record mac"))
    with pytest.raises(ScrapeFailedError, match="bad record mac") as caught:
        await answer
    assert caught.value.reason is ScrapeFailure.TLS


@pytest.mark.parametrize("end", ["answer", "close", "stale"])
@on_both_loops
async def test_nobody_waits_any_more(end: str) -> None:
    wire, _ = wired(asyncio.get_running_loop())
    if end == "stale":
        first = wire.send(REQUEST, MOST_BYTES, NEVER)
        read(wire, GOOD)
        assert await first == PAGE
    answer = wire.send(REQUEST, MOST_BYTES, NEVER)
    answer.cancel()
    if end == "answer":
        read(wire, GOOD)
    else:
        wire.connection_lost(None)
    assert answer.cancelled()


ANSWERS = (
    (GOOD, PAGE),
    (CHUNKS + chunked(PAGE[:7], PAGE[7:]), PAGE),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD, PAGE),
    (b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno", ScrapeFailure.STATUS),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 1200\r\n\r\n" + b"x" * 1200, ScrapeFailure.TOO_LARGE),
)


@given(which=st.sampled_from(ANSWERS), cuts=st.lists(st.integers(0, 1300), max_size=20))
def test_any_cut_gives_the_same(which: tuple[bytes, bytes | ScrapeFailure], cuts: list[int]) -> None:
    data, wanted = which
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    loop = asyncio.new_event_loop()
    try:
        wire, _ = wired(loop)
        answer = wire.send(REQUEST, MOST_BYTES, NEVER)
        for begin, end in itertools.pairwise(places):
            if begin < end and not answer.done():
                read(wire, data[begin:end])
        error = answer.exception()
        found = answer.result() if error is None else error.reason if isinstance(error, ScrapeFailedError) else error
        assert found == wanted
        wire.connection_lost(None)
    finally:
        loop.close()


@given(
    begin=st.sampled_from((b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n", CHUNKS, CHUNKS + b"3\r\nabc\r\n")),
    pieces=st.lists(st.binary(min_size=1, max_size=400), max_size=12),
)
def test_any_bytes_end_in_a_page_or_a_failure(begin: bytes, pieces: list[bytes]) -> None:
    loop = asyncio.new_event_loop()
    try:
        wire, pipe = wired(loop)
        answer = wire.send(REQUEST, MOST_BYTES, NEVER)
        for piece in (begin + b"".join(pieces[:1]) or b"x", *pieces[1:]):
            if not pipe.aborted:
                read(wire, piece)
        if not pipe.aborted:
            wire.eof_received()
        wire.connection_lost(None)
        assert answer.done()
        error = answer.exception()
        assert isinstance(error, ScrapeFailedError) if error is not None else len(answer.result()) <= MOST_BYTES
    finally:
        loop.close()


# The request


def lines(origin: Origin, path: str, **headers: str) -> list[str]:
    return get_request(origin, path, headers).decode().split("\r\n")


def test_a_request() -> None:
    assert lines(Origin("10.0.0.1", 8000), "/metrics", Authorization="Bearer ü") == [
        "GET /metrics HTTP/1.1",
        "host: 10.0.0.1:8000",
        "accept-encoding: identity",
        "authorization: Bearer ü",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (Origin("fd00::1", 8000), "[fd00::1]:8000"),
        (Origin("fe80::1%eth0", 8000), "[fe80::1]:8000"),
        (Origin("engine", 80), "engine"),
        (Origin("engine", 443), "engine:443"),
        (Origin("engine", 443, ssl.create_default_context()), "engine"),
        (Origin("engine", 80, ssl.create_default_context()), "engine:80"),
    ],
)
def test_the_host_header(origin: Origin, host: str) -> None:
    assert f"host: {host}" in lines(origin, "/")


def test_a_header_of_the_caller_replaces_ours() -> None:
    assert lines(Origin("a", 1), "/", HOST="b")[1] == "host: b"


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/metrics?engine=a&x=%20", "/metrics?engine=a&x=%20"),
        ("/a b\r\nhost: c", "/a%20b%0D%0Ahost:%20c"),
        ("/ü#part", "/%C3%BC"),
    ],
)
def test_the_path_is_quoted(path: str, target: str) -> None:
    assert lines(Origin("a", 1), path)[0] == f"GET {target} HTTP/1.1"


@pytest.mark.parametrize(("name", "value"), [("x", "a\r\nb"), ("x", "a\x00"), ("x y", "a"), ("", "a"), ("x:", "a")])
def test_a_header_that_can_not_be_written(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="can not be sent"):
        get_request(Origin("a", 1), "/", {name: value})
