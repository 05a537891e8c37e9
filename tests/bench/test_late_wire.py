"""The bad network: nothing is lost, nothing overtakes, and what is late holds back what follows."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.late_wire import Late, _serve_one, at, cut, log_uniform


@pytest.mark.parametrize("anywhere", [True, False])
def test_segments_are_the_stream_cut(anywhere: bool) -> None:
    late = Late(0.0, anywhere, random.Random(1))
    data = random.Random(2).randbytes(10_000)
    pieces = cut(data, late)
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= 1448 for piece in pieces)
    assert len({len(piece) for piece in pieces}) > 3 or not anywhere


def test_delays_have_the_range_and_the_share() -> None:
    late = Late(0.1, True, random.Random(1))
    delays = [late.delay_s() for _ in range(5000)]
    held = [delay for delay in delays if delay]
    assert all(0.2e-3 <= delay <= 200e-3 for delay in held)
    assert (late.segments, late.held_back) == (5000, len(held))
    assert 400 < len(held) < 600
    assert log_uniform(0.0, 1.0, 100.0) == 1.0
    assert log_uniform(0.5, 1.0, 100.0) == pytest.approx(10.0)


def test_every_connection_has_an_address_of_its_own() -> None:
    late = Late(0.0, True, random.Random(1))
    found = [late.source() for _ in range(3000)]
    assert len(set(found)) == 3000
    assert all(address.startswith("127.") and address != "127.0.0.1" for address in found)


async def test_a_time_is_met() -> None:
    loop = asyncio.get_running_loop()
    for delay_s in (0.0, 0.5e-3, 4e-3):
        due = loop.time() + delay_s
        met: asyncio.Future[float] = loop.create_future()
        at(loop, due, lambda met=met: met.set_result(loop.time()))  # type: ignore[misc]
        assert await met >= due


async def test_what_goes_through_comes_out_whole_and_in_order() -> None:
    sent = random.Random(3).randbytes(200_000)
    peers: list[str] = []
    heard: list[bytes] = []

    async def picker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername")[0])
        heard.append(await reader.readexactly(3))
        writer.write(sent)
        writer.close()

    server = await asyncio.start_server(picker, "127.0.0.1", 0)
    late = Late(0.05, True, random.Random(4))
    wire = await _serve_one(server.sockets[0].getsockname()[1], late)
    async with server, wire:
        reader, writer = await asyncio.open_connection(*wire.sockets[0].getsockname()[:2])
        writer.write(b"abc")
        assert await reader.read() == sent
        writer.close()
    assert heard == [b"abc"]
    assert peers != ["127.0.0.1"]
    assert late.held_back > 3
