"""The experiment's client: every byte is compared, and what does not come is no success."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench import late_close
from bench.late_close import Plan, _envoy_config, _Load, _picker_config, response
from bench.late_engine import expected, request_body
from extproc.config.load import load
from extproc.envoy_config import EnvoyOptions
from extproc.envoy_config.options import EnvoyConfigError


def chunked(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n" % (len(body), body) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("whole", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", 200, b"abc"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", 503, b""),
        (chunked(b"a0\r\n\r\nb"), 200, b"a0\r\n\r\nb"),
    ],
)
def test_a_response_is_read_when_it_is_whole(whole: bytes, status: int, body: bytes) -> None:
    assert response(bytearray(whole)) == (status, body)
    for size in range(len(whole)):
        assert response(bytearray(whole[:size])) is None


@pytest.mark.parametrize(
    ("wrong", "good", "damaged", "failed"),
    [
        (chunked, 10, 0, 0),
        (lambda body: chunked(body[:-1]), 0, 10, 0),
        (lambda _: chunked(b""), 0, 10, 0),
        (lambda body: chunked(body).replace(b"200 OK", b"500 No"), 0, 0, 10),
    ],
)
async def test_what_comes_back_is_judged(wrong: object, good: int, damaged: int, failed: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            number, size = (int(head.lower().split(name)[1].split()[0]) for name in (b"x-probe:", b"content-length:"))
            assert await reader.readexactly(size) == request_body(number)
            writer.write(wrong(expected(number)))  # type: ignore[operator]

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    async with server:
        load = _Load(server.sockets[0].getsockname()[1], Plan(10, "close", first=5))
        await load.run(3)
    assert (load.tally.good, load.tally.damaged, load.tally.failed) == (good, damaged, failed)
    assert bool(load.tally.examples) is not bool(good)


async def test_connections_that_break_and_answers_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_close, "_TIMEOUT_S", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if int(head.split(b"x-probe:")[1].split()[0]) % 2:
            writer.close()
        else:
            await reader.read()
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        load = _Load(server.sockets[0].getsockname()[1], Plan(4, "close"))
        await load.run(2)
    assert load.tally.failed == 4
    assert {line.split(": ")[1].split(" after")[0] for line in load.tally.examples} == {"no end", "connection closed"}


@pytest.mark.parametrize("tls", [True, False])
def test_configurations(tls: bool) -> None:
    plan = Plan(1, "close", tls=tls)
    config = load(_picker_config(plan, ["127.0.0.1:1"], 1, 2, 3))
    assert (config.server.response_phase, config.server.tls.mode) == ("close", "self-signed" if tls else "plaintext")
    try:
        document = json.loads(_envoy_config(plan, EnvoyOptions()))
    except EnvoyConfigError as error:
        pytest.skip(str(error))
    picker = next(found for found in document["static_resources"]["clusters"] if found["name"] == "picker")
    assert ("transport_socket" in picker) is tls
