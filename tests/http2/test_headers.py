from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.frames import ConnectionLevelError, ErrorCode
from extproc.http2.headers import HeaderReader, encode_fields, request_fault, trailers_fault
from extproc.http2.limits import Limits

METHOD, SCHEME, PATH = (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/")
GOOD = (METHOD, SCHEME, PATH)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (GOOD, ""),
        ((*GOOD, (b":authority", b"x"), (b"te", b"trailers"), (b"a.b_c~", b"any \xff value")), ""),
        ((*GOOD, (b"te", b"Trailers")), ""),
        ((*GOOD, (b"Upper", b"x")), "name"),
        ((*GOOD, (b"", b"x")), "name"),
        ((*GOOD, (b"a b", b"x")), "name"),
        ((*GOOD, (b"a:b", b"x")), "name"),
        ((*GOOD, (b"x", b"a\nb")), "value"),
        ((*GOOD, (b"x", b" a")), "value"),
        ((*GOOD, (b"x", b"a\t")), "value"),
        ((*GOOD, (b"connection", b"close")), "connection"),
        ((*GOOD, (b"te", b"gzip")), "connection"),
        ((*GOOD, (b"x", b"y"), (b":authority", b"z")), "after"),
        ((*GOOD, (b":status", b"200")), "unknown"),
        ((*GOOD, METHOD), "repeated"),
        ((METHOD, SCHEME), "missing"),
        ((METHOD, SCHEME, (b":path", b"")), "missing"),
        (((b":method", b"CONNECT"), (b":authority", b"x")), ""),
        (((b":method", b"CONNECT"), SCHEME), "CONNECT"),
    ],
)
def test_what_a_request_may_say(fields: tuple[tuple[bytes, bytes], ...], fault: str) -> None:
    assert fault in request_fault(fields)
    assert bool(fault) == bool(request_fault(fields))


def test_what_trailers_may_say() -> None:
    assert trailers_fault(((b"x", b"y"),)) == ""
    assert "pseudo" in trailers_fault((PATH,))
    assert "name" in trailers_fault(((b"X", b"y"),))


class TestReader:
    def test_a_repeated_block_is_decoded_once(self) -> None:
        encoder, reader = Encoder(), HeaderReader(Limits())
        blocks = [encoder.encode([*GOOD, (b"x", b"y")]) for _ in range(4)]
        read = [reader.read(block) for block in blocks]
        assert read[1] is read[2] is read[3]
        assert {block.fields for block in read} == {(*GOOD, (b"x", b"y"))}

    def test_what_is_kept_is_forgotten_when_the_table_changes(self) -> None:
        encoder, reader = Encoder(), HeaderReader(Limits())
        reader.read(encoder.encode([*GOOD, (b"x", b"1")]))
        first = reader.read(encoder.encode([*GOOD, (b"x", b"1")]))
        reader.read(encoder.encode([*GOOD, (b"x", b"2")]))
        assert reader.read(b"\x83\x86\x84\xbe").fields == (*GOOD, (b"x", b"2"))
        assert first.fields == (*GOOD, (b"x", b"1"))

    @given(
        st.lists(
            st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.sampled_from([b"1", b"2" * 2000, b"3" * 3000])),
            max_size=30,
        )
    )
    def test_it_always_reads_what_was_written(self, extra: list[tuple[bytes, bytes]]) -> None:
        # Entries of these sizes push each other out of the table.
        encoder, reader = Encoder(), HeaderReader(Limits())
        for field in extra:
            assert reader.read(encoder.encode([*GOOD, field])).fields == (*GOOD, field)

    def test_what_is_kept_is_bounded(self) -> None:
        reader = HeaderReader(Limits())
        for number in range(200):
            reader.read(encode_fields(*GOOD, (b"x", b"%d" % number)))
        assert 0 < len(reader._kept) <= 64
        kept = dict(reader._kept)
        reader.read(encode_fields(*GOOD, (b"x", b"y" * 2000)))
        reader.read(b"\x83\x86\x84" + b"\x90" * 100)  # few bytes, many fields
        assert reader._kept == kept

    @pytest.mark.parametrize(
        "data", [b"\xff", b"\x80", b"\x00\x85abc", b"\x3f\xff\xff\x03", b"\xff" + b"\xff" * 3000 + b"\x01"]
    )
    def test_what_cannot_be_decoded(self, data: bytes) -> None:
        with pytest.raises(ConnectionLevelError) as error:
            HeaderReader(Limits()).read(data)
        assert error.value.code is ErrorCode.COMPRESSION_ERROR

    def test_content_length(self) -> None:
        def length(*values: bytes) -> int | None:
            return (
                HeaderReader(Limits())
                .read(encode_fields(*GOOD, *((b"content-length", value) for value in values)))
                .content_length
            )

        assert [length(), length(b"5"), length(b"5", b"5"), length(b"5", b"6"), length(b"x"), length(b"9" * 30)] == [
            None,
            5,
            5,
            -1,
            -1,
            -1,
        ]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=300)), max_size=5))
def test_what_we_write_is_read_by_the_library(fields: list[tuple[bytes, bytes]]) -> None:
    assert [(bytes(name), bytes(value)) for name, value in Decoder().decode(encode_fields(*fields), raw=True)] == fields
