from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.grpc import (
    RESPONSE_HEADERS,
    CallError,
    MessageReader,
    NotGrpcError,
    Status,
    message_frame,
    open_call,
    refusal,
    trailers,
)
from tests.http2.wire import REQUEST, Client

FIELDS = tuple((name.encode(), value.encode()) for name, value in REQUEST)


def opened(**changes: str | None) -> tuple[tuple[bytes, bytes], ...]:
    """Return the fields of a call with changes; `_` stands for `-`, None removes."""
    fields = dict(FIELDS)
    for key, value in changes.items():
        name = (":method" if key == "method" else key.replace("_", "-")).encode()
        fields.pop(name, None)
        if value is not None:
            fields[name] = value.encode()
    return tuple(fields.items())


class TestOpen:
    def test_a_call(self) -> None:
        call = open_call(FIELDS)
        assert (call.path, call.timeout_s, call.encoding) == ("/a.B/C", None, "identity")

    @pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;x=y"])
    def test_content_types(self, kind: str) -> None:
        assert open_call(opened(content_type=kind)).path == "/a.B/C"

    @pytest.mark.parametrize("kind", [None, "application/json", "application/grpc+json", "application/grpc-web"])
    def test_other_content_types_are_no_calls(self, kind: str | None) -> None:
        with pytest.raises(NotGrpcError) as error:
            open_call(opened(content_type=kind))
        assert error.value.http_status == 415

    def test_other_methods_are_no_calls(self) -> None:
        with pytest.raises(NotGrpcError) as error:
            open_call(opened(method="GET"))
        assert error.value.http_status == 405
        assert b"allow" in refusal(error.value)[0]

    def test_te_is_needed(self) -> None:
        with pytest.raises(CallError, match="te: trailers"):
            open_call(opened(te=None))

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("1H", 3600), ("2M", 120), ("3S", 3), ("4m", 0.004), ("5u", 5e-6), ("99999999n", 0.099999999)],
    )
    def test_timeouts(self, text: str, seconds: float) -> None:
        assert open_call(opened(grpc_timeout=text)).timeout_s == pytest.approx(seconds)

    @pytest.mark.parametrize("text", ["", "S", "1", "1x", "-1S", "123456789S", "1.5S"])
    def test_bad_timeouts(self, text: str) -> None:
        with pytest.raises(CallError, match="grpc-timeout"):
            open_call(opened(grpc_timeout=text))


class TestMessages:
    @given(st.lists(st.binary(max_size=50), max_size=6), st.lists(st.integers(1, 60)))
    def test_any_cutting_gives_the_same_messages(self, messages: list[bytes], sizes: list[int]) -> None:
        data = b"".join(map(message_frame, messages))
        reader, found = MessageReader(1000, "identity"), []
        for size in sizes:
            found += reader.feed(data[:size])
            data = data[size:]
        found += reader.feed(data)
        reader.end()
        assert found == messages
        assert reader.held_bytes == 0

    def test_a_message_that_comes_byte_by_byte(self) -> None:
        reader, data = MessageReader(10, "identity"), message_frame(b"ab") + message_frame(b"c")
        assert [reader.feed(data[at : at + 1]) for at in range(len(data))] == [
            *[[]] * 6,
            [b"ab"],
            *[[]] * 5,
            [b"c"],
        ]

    def test_a_message_too_large_is_known_by_its_prefix(self) -> None:
        reader = MessageReader(10, "identity")
        assert reader.feed(message_frame(bytes(10))) == [bytes(10)]
        with pytest.raises(CallError) as error:
            reader.feed(message_frame(bytes(11))[:5])
        assert error.value.status is Status.RESOURCE_EXHAUSTED

    def test_compressed_messages(self) -> None:
        with pytest.raises(CallError) as error:
            MessageReader(10, "gzip").feed(b"\x01" + bytes(4))
        assert (error.value.status, error.value.accept_encoding) == (Status.UNIMPLEMENTED, True)
        with pytest.raises(CallError) as error:
            MessageReader(10, "identity").feed(b"\x01" + bytes(4))
        assert error.value.status is Status.INTERNAL
        assert MessageReader(10, "gzip").feed(bytes(5)) == [b""]

    def test_the_end_within_a_message(self) -> None:
        reader = MessageReader(10, "identity")
        reader.feed(b"\x00")
        with pytest.raises(CallError, match="ends within"):
            reader.end()

    @given(st.lists(st.binary(max_size=30), max_size=5))
    def test_arbitrary_bytes(self, pieces: list[bytes]) -> None:
        reader = MessageReader(100, "gzip")
        try:
            for piece in pieces:
                reader.feed(piece)
                assert reader.held_bytes <= 105
        except CallError:
            pass


class TestAnswers:
    def test_blocks(self) -> None:
        client = Client()
        start = [(":status", "200"), ("content-type", "application/grpc")]
        assert client.fields(RESPONSE_HEADERS) == start
        assert client.fields(trailers(Status.OK, started=True)) == [("grpc-status", "0")]
        only = trailers(Status.UNIMPLEMENTED, "100 % naïve\n", started=False, accept_encoding=True)
        assert client.fields(only) == [
            *start,
            ("grpc-status", "12"),
            ("grpc-message", "100 %25 na%C3%AFve%0A"),
            ("grpc-accept-encoding", "identity"),
        ]

    def test_messages_are_short(self) -> None:
        assert len(trailers(Status.INTERNAL, "x" * 100_000, started=True)) < 1100

    def test_plain_http(self) -> None:
        block, body = refusal(NotGrpcError(415, "no"))
        assert Client().fields(block) == [(":status", "415"), ("content-type", "text/plain"), ("content-length", "3")]
        assert body == b"no\n"
