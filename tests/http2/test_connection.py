from __future__ import annotations

import itertools
from typing import Any

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from extproc.http2.events import (
    DataReceived,
    GoawayReceived,
    RequestEnded,
    RequestReceived,
    StreamRefused,
    StreamReset,
)
from extproc.http2.frames import (
    DEFAULT_WINDOW,
    PREFACE,
    ErrorCode,
    FrameType,
    Setting,
    frame,
    rst_stream,
    settings,
    window_update,
)
from extproc.http2.limits import USUAL_BLOCK_BYTES, Limits
from tests.http2.wire import CALM, REQUEST, Client, cut, kinds, u32

DATA, HEADERS, PRIORITY, CONTINUATION = FrameType.DATA, FrameType.HEADERS, FrameType.PRIORITY, FrameType.CONTINUATION
PING, GOAWAY, SETTINGS, RST = FrameType.PING, FrameType.GOAWAY, FrameType.SETTINGS, FrameType.RST_STREAM
P, S, F = ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR, ErrorCode.FLOW_CONTROL_ERROR


class TestPreface:
    def test_ours_comes_unasked(self) -> None:
        first, second = Client(started=False).heard()
        assert (first.kind, first.flags) == (SETTINGS, 0)
        assert (second.kind, u32(Limits().connection_window - DEFAULT_WINDOW)) == (
            FrameType.WINDOW_UPDATE,
            second.payload,
        )

    @pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", PREFACE[:10] + b"x", b"\x16\x03"])
    def test_anything_else_fails_at_once(self, data: bytes) -> None:
        assert Client(started=False).fails(data)[0] is P

    def test_settings_come_first(self) -> None:
        assert Client(started=False).fails(PREFACE, frame(PING, 0, 0, bytes(8)))[0] is P
        assert Client(started=False).fails(PREFACE, frame(SETTINGS, 1, 0))[0] is P

    def test_it_is_known_when_it_is_complete(self) -> None:
        client = Client(started=False)
        client.say(PREFACE[:5])
        client.say(PREFACE[5:])
        assert not client.connection.preface_received
        client.say(frame(SETTINGS, 0, 0))
        assert client.connection.preface_received
        assert [(heard.kind, heard.flags) for heard in client.heard()[2:]] == [(SETTINGS, 1)]


class TestRequests:
    def test_headers_data_end(self) -> None:
        client = Client()
        events = client.say(client.headers(), frame(DATA, 0, 1, b"ab"), frame(DATA, 1, 1, b"c"))
        assert kinds(events) == ["RequestReceived", "DataReceived", "DataReceived", "RequestEnded"]
        assert isinstance(events[0], RequestReceived)
        assert events[0].block.fields[2] == (b":path", b"/a.B/C")
        assert events[1:] == [DataReceived(1, b"ab"), DataReceived(1, b"c"), RequestEnded(1)]

    def test_padding_and_priority_are_taken_off(self) -> None:
        client = Client()
        block = client.block()
        padded = frame(HEADERS, 4 | 8 | 0x20, 1, b"\x03" + u32(0) + b"\x10" + block + bytes(3))
        events = client.say(padded, frame(DATA, 8, 1, b"\x02ab" + bytes(2)))
        assert events[1] == DataReceived(1, b"ab")

    def test_continuation(self) -> None:
        client = Client()
        block = client.block()
        parts = frame(HEADERS, 1, 1, block[:3]), frame(CONTINUATION, 0, 1, block[3:5])
        assert client.say(*parts) == []
        assert client.connection.mid_frame
        assert kinds(client.say(frame(CONTINUATION, 4, 1, block[5:]))) == ["RequestReceived", "RequestEnded"]
        assert not client.connection.mid_frame

    def test_trailers_end_a_request(self) -> None:
        client = Client()
        events = client.say(client.headers(), client.headers(1, [("x", "y")], flags=5))
        assert events[1:] == [RequestEnded(1)]

    def test_content_length_that_is_kept(self) -> None:
        client = Client()
        events = client.say(client.headers(1, [*REQUEST, ("content-length", "3")]), frame(DATA, 1, 1, b"abc"))
        assert events[-1] == RequestEnded(1)

    def test_unknown_frames_are_ignored(self) -> None:
        assert Client().say(frame(0x77, 0xFF, 5, b"?")) == []

    def test_a_frame_that_comes_in_two_reads(self) -> None:
        client = Client()
        data = client.headers() + frame(DATA, 1, 1, b"abc")
        assert kinds(client.say(data[:-2])) == ["RequestReceived"]
        assert kinds(client.say(data[-2:])) == ["DataReceived", "RequestEnded"]

    def test_very_many_fields_are_charged_as_frames_that_carry_nothing(self) -> None:
        fields = [*REQUEST, *((f"x-{n}", "") for n in range(300))]
        client = Client(Limits(idle_frames=10, idle_frames_per_s=0))
        assert client.fails(client.headers(fields=fields))[0] is CALM
        assert kinds(Client().say(client.headers(fields=REQUEST))) == ["RequestReceived"]

    def test_the_reserved_bit_is_ignored(self) -> None:
        client = Client()
        assert kinds(client.say(client.headers(0x80000001))) == ["RequestReceived"]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (frame(DATA, 0, 0, b"x"), P),
        (frame(DATA, 0, 3, b"x"), P),
        (frame(DATA, 0, 2, b"x"), P),
        (frame(DATA, 8, 1, b"\x02a"), P),
        (frame(DATA, 8, 1), P),
        (frame(HEADERS, 4, 0), P),
        (frame(HEADERS, 0x24, 3, b"abc"), S),
        (frame(HEADERS, 4, 3, b"\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, 0, 3) + frame(DATA, 0, 1), P),
        (frame(HEADERS, 0, 3) + frame(CONTINUATION, 4, 5), P),
        (frame(CONTINUATION, 4, 1), P),
        (frame(PRIORITY, 0, 0, bytes(5)), P),
        (frame(RST, 0, 0, bytes(4)), P),
        (frame(RST, 0, 9, bytes(4)), P),
        (frame(RST, 0, 1, bytes(3)), S),
        (frame(SETTINGS, 0, 1), P),
        (frame(SETTINGS, 0, 0, bytes(5)), S),
        (frame(SETTINGS, 1, 0, bytes(6)), S),
        (settings([(Setting.ENABLE_PUSH, 2)]), P),
        (settings([(Setting.INITIAL_WINDOW_SIZE, 2**31)]), F),
        (settings([(Setting.MAX_FRAME_SIZE, 16_383)]), P),
        (settings([(Setting.MAX_FRAME_SIZE, 2**24)]), P),
        (
            window_update(1, 2**31 - 1 - DEFAULT_WINDOW)
            + settings([(Setting.INITIAL_WINDOW_SIZE, DEFAULT_WINDOW + 1)]),
            F,
        ),
        (frame(FrameType.PUSH_PROMISE, 4, 1, bytes(4)), P),
        (frame(PING, 0, 1, bytes(8)), P),
        (frame(PING, 0, 0, bytes(7)), S),
        (frame(GOAWAY, 0, 1, bytes(8)), P),
        (frame(GOAWAY, 0, 0, bytes(7)), S),
        (frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(3)), S),
        (window_update(0, 0), P),
        (window_update(0, 2**31 - 1), F),
        (window_update(9, 1), P),
        (frame(DATA, 0, 1, bytes(16_385)), S),
    ],
)
def test_mistakes_that_end_the_connection(wrong: bytes, code: ErrorCode) -> None:
    client = Client()
    client.say(client.headers())
    assert client.fails(wrong)[0] is code


class TestMistakesOfAStream:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ([*REQUEST, ("content-length", "x")], "content-length"),
            ([*REQUEST, ("content-length", "1"), ("content-length", "2")], "content-length"),
            ([*REQUEST, (":path", "/")], "repeated"),
            ([*REQUEST[1:]], "after|missing"),
        ],
    )
    def test_malformed_requests(self, fields: list[tuple[str, str]], reason: str) -> None:
        client = Client()
        assert client.resets(client.headers(1, fields)) is P
        assert kinds(client.say(client.headers(3))) == ["RequestReceived"]

    def test_content_length_that_is_broken(self) -> None:
        for data in (b"ab", b"abcd"):
            client = Client()
            client.say(client.headers(1, [*REQUEST, ("content-length", "3")]))
            assert client.resets(frame(DATA, 1, 1, data)) is P

    def test_content_length_without_a_body(self) -> None:
        client = Client()
        assert client.resets(client.headers(1, [*REQUEST, ("content-length", "3")], flags=5)) is P

    def test_after_the_end_of_the_request(self) -> None:
        for late in (lambda c: frame(DATA, 0, 1, b"x"), lambda c: c.headers(1)):
            client = Client()
            client.say(client.headers(flags=5))
            assert client.resets(late(client)) is ErrorCode.STREAM_CLOSED

    def test_a_second_header_block_must_end_the_request(self) -> None:
        client = Client()
        assert client.resets(client.headers(), client.headers(1, [("x", "y")])) is P

    def test_trailers_have_no_pseudo_headers(self) -> None:
        client = Client()
        assert client.resets(client.headers(), client.headers(1, [(":path", "/")], flags=5)) is P

    def test_a_stream_that_depends_on_itself(self) -> None:
        client = Client()
        assert client.resets(frame(HEADERS, 0x24, 1, u32(1) + b"\x00" + client.block())) is P
        assert client.resets(client.headers(3), frame(PRIORITY, 0, 3, u32(3) + b"\x00"), stream_id=3) is P
        assert (
            client.resets(
                client.headers(5), frame(HEADERS, 0x25, 5, u32(5) + b"\x00" + client.block([("x", "y")])), stream_id=5
            )
            is P
        )

    def test_priority_of_a_wrong_size(self) -> None:
        client = Client()
        assert client.resets(client.headers(), frame(PRIORITY, 0, 1, bytes(4))) is S
        assert client.say(frame(PRIORITY, 0, 7, bytes(5))) == []

    def test_a_stream_fault_on_a_stream_that_never_was(self) -> None:
        assert Client().resets(frame(PRIORITY, 0, 7, bytes(4)), stream_id=7) is S

    def test_windows_of_streams(self) -> None:
        client = Client()
        assert client.resets(client.headers(), window_update(1, 0)) is P
        assert client.resets(client.headers(3), window_update(3, 2**31 - 1), stream_id=3) is F

    def test_more_than_the_window(self) -> None:
        client = Client(Limits(stream_window=100))
        assert client.resets(client.headers(), frame(DATA, 0, 1, bytes(101))) is F

    def test_more_streams_than_allowed(self) -> None:
        client = Client(Limits(concurrent_streams=1))
        assert client.resets(client.headers(), client.headers(3), stream_id=3) is ErrorCode.REFUSED_STREAM
        assert client.say(client.headers(5)) == [StreamRefused(5, ErrorCode.REFUSED_STREAM, "stream refused")]
        client.heard()
        assert client.say(frame(DATA, 0, 5, b"under way"), client.headers(3, [("x", "y")], flags=5)) == []

    def test_padding_that_reaches_into_the_priority(self) -> None:
        assert Client().fails(frame(HEADERS, 0x2C, 1, b"\x06" + bytes(9)))[0] is P
        assert Client().fails(frame(HEADERS, 0x24, 1, bytes(4)))[0] is S


class TestClosedStreams:
    def test_late_frames_on_a_stream_we_reset_are_ignored(self) -> None:
        client = Client()
        client.say(client.headers())
        client.connection.reset(1, ErrorCode.CANCEL)
        late = frame(DATA, 0, 1, b"x"), frame(DATA, 0, 1), client.headers(1, [("x", "y")], flags=5), window_update(1, 1)
        assert client.say(*late) == []
        assert [heard.kind for heard in client.heard()] == [RST]
        assert client.say(rst_stream(1, 0)) == []
        assert client.resets(frame(DATA, 0, 1, b"x")) is ErrorCode.STREAM_CLOSED

    def test_frames_on_a_stream_that_has_ended(self) -> None:
        client = Client()
        client.say(client.headers(flags=5))
        client.connection.end_stream(1, client.block([(":status", "200")]))
        client.heard()
        assert client.resets(frame(DATA, 0, 1, b"x")) is ErrorCode.STREAM_CLOSED
        client.say(client.headers(3, flags=5))
        client.connection.end_stream(3, b"\x88")
        assert client.fails(client.headers(3))[0] is ErrorCode.STREAM_CLOSED

    def test_identifiers_never_go_back_and_are_odd(self) -> None:
        client = Client()
        client.say(client.headers(5))
        assert client.fails(client.headers(3))[0] is P
        client = Client()
        assert client.fails(client.headers(2))[0] is P

    def test_data_does_not_make_a_stream_that_was_passed_over_one_that_was_reset(self) -> None:
        client = Client()
        client.say(client.headers(5))
        assert client.resets(frame(DATA, 0, 3, b"x"), stream_id=3) is ErrorCode.STREAM_CLOSED
        assert client.fails(client.headers(3))[0] is P

    def test_a_reset_by_the_peer(self) -> None:
        client = Client()
        client.say(client.headers())
        assert client.say(rst_stream(1, 8)) == [StreamReset(1, 8, "")]
        assert client.connection.open_streams == 0
        client.connection.send_headers(1, b"\x88")
        client.connection.send_data(1, b"x")
        client.connection.end_stream(1, b"\x88")
        client.connection.reset(1, ErrorCode.CANCEL)
        client.connection.acknowledge(1, 1 << 20)
        assert client.heard() == []


class TestConnectionFrames:
    def test_ping(self) -> None:
        client = Client()
        assert client.say(frame(PING, 0, 0, b"12345678")) == []
        (pong,) = client.heard()
        assert (pong.kind, pong.flags, pong.payload) == (PING, 1, b"12345678")
        assert client.say(frame(PING, 1, 0, b"abcdefgh")) == []
        assert client.heard() == []

    def test_settings_are_acknowledged(self) -> None:
        client = Client()
        client.say(settings([(Setting.ENABLE_PUSH, 0), (Setting.MAX_FRAME_SIZE, 20_000), (99, 1)]))
        (ack,) = client.heard()
        assert (ack.kind, ack.flags, ack.payload) == (SETTINGS, 1, b"")
        assert client.say(frame(SETTINGS, 1, 0)) == []

    def test_goaway(self) -> None:
        client = Client()
        events = client.say(client.headers(), frame(GOAWAY, 0, 0, u32(0) + u32(2) + b"why"))
        assert events[1] == GoawayReceived(2, b"why")
        assert client.connection.open_streams == 1

    def test_connection_credit_returns_on_receipt_and_a_streams_own_when_acknowledged(self) -> None:
        client = Client(Limits(connection_window=80_000, stream_window=70_000))
        client.say(client.headers())
        client.say(*[frame(DATA, 0, 1, bytes(10_000)) for _ in range(4)])
        (update,) = client.heard()
        assert (update.stream_id, update.payload) == (0, u32(40_000))
        client.connection.acknowledge(1, 30_000)
        assert client.heard() == []
        client.connection.acknowledge(1, 10_000)
        (update,) = client.heard()
        assert (update.stream_id, update.payload) == (1, u32(40_000))

    def test_padding_is_acknowledged_without_us(self) -> None:
        client = Client(Limits(stream_window=200))
        client.say(client.headers(), frame(DATA, 8, 1, b"\x63" + bytes(100)))
        assert [(heard.stream_id, heard.payload) for heard in client.heard()] == [(1, u32(100))]

    def test_more_than_the_connection_window(self) -> None:
        client = Client(Limits(connection_window=DEFAULT_WINDOW, stream_window=2**20))
        client.say(client.headers())
        client.connection._receive_window = 10
        assert client.fails(frame(DATA, 0, 1, bytes(11)))[0] is F


SMALL = Limits(
    idle_frames=50,
    idle_frames_per_s=1,
    resets=50,
    resets_per_s=1,
    header_block_bytes=500,
    continuations=5,
    header_list_bytes=2000,
)


def huffman(number: int, size_bytes: int) -> bytes:
    """Encode a request whose last field takes some `size_bytes` in Huffman code; no two are the same."""
    value = f"{number:05}" + "a" * (size_bytes * 8 // 5 - 5)  # an `a` takes five bits
    fields = [hpack.NeverIndexedHeaderTuple(name, said) for name, said in (*REQUEST, ("x", value))]
    data: bytes = hpack.Encoder().encode(fields, huffman=True)
    assert abs(len(data) - size_bytes) < 100
    return data


def frames_of(stream_id: int, block: bytes, flags: int = 4) -> bytes:
    """Cut a header block into frames."""
    pieces = [block[start : start + 16_000] for start in range(0, len(block), 16_000)]
    last = len(pieces) - 1
    return b"".join(
        frame(
            CONTINUATION if n else HEADERS,
            (flags & 1 if not n else 0) | (flags & 4 if n == last else 0),
            stream_id,
            piece,
        )
        for n, piece in enumerate(pieces)
    )


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the blocks that the library has decoded."""
    sizes: list[int] = []
    decode = hpack.Decoder.decode

    def counted(self: Any, data: bytes, raw: bool = False) -> Any:
        sizes.append(len(data))
        return decode(self, data, raw)

    monkeypatch.setattr(hpack.Decoder, "decode", counted)
    return sizes


class TestAttacks:
    """Each ends with ENHANCE_YOUR_CALM, after a bounded number of frames."""

    @pytest.mark.parametrize(
        "nuisance",
        [
            frame(PING, 0, 0, bytes(8)),
            frame(PING, 1, 0, bytes(8)),
            settings([(Setting.INITIAL_WINDOW_SIZE, 5)]),
            frame(SETTINGS, 1, 0),
            window_update(0, 1),
            window_update(1, 1),
            frame(DATA, 0, 1),
            frame(DATA, 8, 1, b"\x00"),
            frame(PRIORITY, 0, 1, bytes(5)),
            frame(0x42, 0, 0),
            frame(GOAWAY, 0, 0, bytes(8)),
            rst_stream(1, 8) + rst_stream(1, 8),
        ],
    )
    def test_floods_of_frames_that_carry_nothing(self, nuisance: bytes) -> None:
        client = Client(SMALL)
        client.say(client.headers())
        client.say(nuisance * 20)
        assert not client.connection.finished
        assert client.fails(nuisance * 60)[0] is CALM

    def test_time_forgives(self) -> None:
        client = Client(SMALL)
        for _ in range(10):
            client.say(frame(PING, 0, 0, bytes(8)) * 40)
            client.now += 45
            client.heard()
        assert not client.connection.finished

    def test_rapid_reset(self) -> None:
        client = Client(SMALL)
        code, _ = client.fails(*[client.headers(2 * n + 1) + rst_stream(2 * n + 1, 8) for n in range(60)])
        assert code is CALM

    def test_clients_that_give_up_after_a_while_are_no_attack(self) -> None:
        client = Client(Limits(resets=50, resets_per_s=0.0))
        for n in range(500):
            client.say(client.headers(2 * n + 1))
            client.now += 1.0
            client.say(rst_stream(2 * n + 1, 8))
        assert not client.connection.finished
        code, _ = client.fails(*[client.headers(2 * n + 1) + rst_stream(2 * n + 1, 8) for n in range(500, 560)])
        assert code is CALM

    def test_moving_many_windows_costs_more_and_what_leaves_then_earns_nothing(self) -> None:
        client = Client(Limits(idle_frames=1000, idle_frames_per_s=0.0))
        client.say(settings([(Setting.INITIAL_WINDOW_SIZE, 0)]))
        for n in range(200):
            client.say(client.headers(2 * n + 1))
            client.connection.send_headers(2 * n + 1, b"\x88")
            client.connection.send_data(2 * n + 1, bytes(1000))
        client.heard()
        moves = [settings([(Setting.INITIAL_WINDOW_SIZE, n)]) for n in range(1, 1000)]
        assert client.fails(*moves)[0] is CALM
        # 1 + 200 / 10 each, whatever has left in between.
        assert client.connection.outbound.initial_window < 1000 // 21 + 5

    def test_bodies_of_the_last_read_are_not_kept(self) -> None:
        client = Client()
        client.say(client.headers(), frame(DATA, 0, 1, bytes(10_000)))
        assert client.connection._events == []

    def test_streams_we_are_made_to_reset(self) -> None:
        client = Client(SMALL)
        code, _ = client.fails(*[client.headers(2 * n + 1) + window_update(2 * n + 1, 0) for n in range(60)])
        assert code is CALM

    def test_half_of_all_streams_may_be_cancelled_for_ever(self) -> None:
        client = Client(SMALL)
        for n in range(500):
            one, two = 4 * n + 1, 4 * n + 3
            client.say(client.headers(one, flags=5), client.headers(two))
            client.connection.end_stream(one, b"\x88")
            client.say(rst_stream(two, 8))
            client.heard()
        assert not client.connection.finished

    def test_continuation_flood(self) -> None:
        client = Client(SMALL)
        assert client.fails(frame(HEADERS, 0, 1), frame(CONTINUATION, 0, 1) * 6)[0] is CALM
        assert Client(SMALL).fails(frame(HEADERS, 0, 1), frame(CONTINUATION, 0, 1, bytes(300)) * 2)[0] is CALM
        assert Client(SMALL).fails(frame(HEADERS, 4, 1, bytes(501)))[0] is CALM

    def test_a_header_bomb(self) -> None:
        client = Client(SMALL)
        bomb = client.block([("x", "y" * 100)]) + b"\xbe" * 100
        assert client.fails(frame(HEADERS, 4, 1, bomb)) == (CALM, "header list too large")

    @pytest.mark.parametrize("kind", ["requests", "trailers", "late"])
    def test_long_blocks_are_charged_by_their_bytes(self, kind: str, decoded: list[int]) -> None:
        """31 kB in Huffman code take 7 ms, as one block of one field."""
        client, limits = Client(), Limits()
        for n in range(10):
            client.say(client.headers(2 * n + 1))
        if kind == "late":
            for n in range(10):
                client.connection.reset(2 * n + 1, ErrorCode.CANCEL)
        client.heard()
        decoded.clear()
        first = 101 if kind == "requests" else 1
        blocks = [frames_of(first + 2 * n, huffman(n, 30_000), 5 if kind == "trailers" else 4) for n in range(10)]
        assert client.fails(*blocks) == (CALM, "too many bytes of header blocks")
        assert len(decoded) == 8
        assert sum(decoded) <= limits.decoded_bytes + 8 * USUAL_BLOCK_BYTES

    @pytest.mark.long
    def test_time_and_answers_forgive_long_blocks(self, decoded: list[int]) -> None:
        client = Client()
        for n in range(20):
            client.say(frames_of(2 * n + 1, huffman(n, 30_000)))
            client.now += 0.5
            client.heard()
        for n in range(20, 1000):
            # Whoever answers has done far more than decode its headers.
            client.say(frames_of(2 * n + 1, huffman(n, 1500)))
            client.connection.end_stream(2 * n + 1, b"\x88")
            client.heard()
        assert not client.connection.finished
        assert len(decoded) == 1000

    @pytest.mark.long
    def test_a_burst_of_usual_requests_is_free(self) -> None:
        """Ten thousand at once that differ in every header block, none of them answered yet."""
        client = Client()
        for n in range(Limits().concurrent_streams):
            client.say(frames_of(2 * n + 1, huffman(n, 350)))
        assert not client.connection.finished
        assert client.connection.open_streams == Limits().concurrent_streams

    def test_a_block_that_is_known_costs_nothing(self, decoded: list[int]) -> None:
        client = Client(Limits(decoded_bytes=1000, decoded_bytes_per_s=0.0))
        block = huffman(0, 700)
        for n in range(1000):
            client.say(frames_of(2 * n + 1, block))
        assert not client.connection.finished
        assert len(decoded) == 1

    def test_two_hundred_half_sent_bodies_leave_the_connection_open_for_others(self) -> None:
        client = Client()
        for n in range(200):
            client.say(client.headers(2 * n + 1), *[frame(DATA, 0, 2 * n + 1, bytes(16_000))] * 16)
        events = client.say(client.headers(1001), frame(DATA, 1, 1001, b"x"))
        assert kinds(events) == ["RequestReceived", "DataReceived", "RequestEnded"]


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    """Bytes of a client: mostly right frames, and now and then a wrong one."""
    client = Client(started=False)
    out = [PREFACE, frame(SETTINGS, 0, 0)]
    ids = st.sampled_from((1, 3, 5, 7, 0, 2))
    for _ in range(draw(st.integers(1, 12))):
        stream_id = draw(ids)
        out.append(
            draw(
                st.sampled_from(
                    (
                        client.headers(stream_id),
                        client.headers(stream_id, flags=5),
                        frame(DATA, 0, stream_id, b"abc"),
                        frame(DATA, 1, stream_id, b"d"),
                        window_update(stream_id, 7),
                        rst_stream(stream_id, 8),
                        frame(PING, 0, 0, bytes(8)),
                        frame(0x33, 1, stream_id, b"?"),
                    )
                )
            )
        )
    return b"".join(out) + draw(st.binary(max_size=20))


@given(conversations(), st.lists(st.integers(0, 400), max_size=8))
def test_any_cutting_gives_the_same_events_and_answers(data: bytes, cuts: list[int]) -> None:
    whole, pieces = Client(started=False), Client(started=False)
    expected = [(type(event).__name__, astuple(event)[0]) for event in whole.say(data)]
    found = []
    edges = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    for start, end in itertools.pairwise(edges):
        found += [(type(event).__name__, astuple(event)[0]) for event in pieces.say(data[start:end])]
    assert found == expected
    assert pieces.connection.output() == whole.connection.output()


@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_never_raise_and_are_never_hoarded(data: bytes, prefaced: bool) -> None:
    client = Client(started=prefaced)
    client.say(data)
    cut(client.connection.output())
    assert len(client.connection._rest) < 9 + Limits().frame_bytes


@given(st.binary(max_size=120))
def test_arbitrary_header_blocks_never_raise(data: bytes) -> None:
    client = Client()
    client.say(frame(HEADERS, 5, 1, data))
    cut(client.connection.output())
