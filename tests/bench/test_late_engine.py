"""Engines whose answers are known in advance."""

from __future__ import annotations

import asyncio
import zlib

import pytest

from bench.late_engine import _chunk, _dechunked, _Engine, expected, pieces, plan, request_body


def test_answers_differ_by_number_and_by_what_was_asked() -> None:
    assert len({expected(number) for number in range(500)}) == 500
    assert b"".join(pieces(7, zlib.crc32(request_body(7)))) == expected(7)
    assert b"".join(pieces(7, zlib.crc32(request_body(7) + b" "))) != expected(7)


def test_shapes_are_as_promised() -> None:
    shapes = [plan(number) for number in range(2000)]
    assert all(0.1e-3 <= shape.first_s <= 50e-3 for shape in shapes)
    assert {len(shape.fills) for shape in shapes} == {1, 2, 3, 4, 5, 6}
    assert min(shape.first_s for shape in shapes) < 0.2e-3
    assert max(shape.first_s for shape in shapes) > 40e-3


def test_chunks() -> None:
    data = _chunk(b"abc") + _chunk(b"") + _chunk(b"0\r\n\r\n")
    assert _dechunked(_chunk(b"abc") + _chunk(b"0\r\n\r\n") + b"0\r\n\r\n") == b"abc0\r\n\r\n"
    for size in range(len(_chunk(b"abc")) + 5):
        assert _dechunked((_chunk(b"abc") + b"0\r\n\r\n")[:size]) is None
    assert _dechunked(data[: len(_chunk(b"abc"))]) is None


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_request_gets_its_answer_however_it_comes(chunked: bool) -> None:
    loop = asyncio.get_running_loop()
    number = next(number for number in range(100) if plan(number).first_s < 1e-3 and len(plan(number).fills) > 1)
    body = request_body(number)
    if chunked:
        said = b"transfer-encoding: chunked\r\n\r\n" + _chunk(body[:9]) + _chunk(body[9:]) + b"0\r\n\r\n"
    else:
        said = b"content-length: %d\r\n\r\n" % len(body) + body
    server = await loop.create_server(lambda: _Engine(loop), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        data = b"POST / HTTP/1.1\r\nx-probe: %d\r\n" % number + said
        for start in range(0, len(data), 50):
            writer.write(data[start : start + 50])
            await asyncio.sleep(0)
        head = await reader.readuntil(b"\r\n\r\n")
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert _dechunked(answer) == expected(number)
