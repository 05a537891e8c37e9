from __future__ import annotations

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import ListValue, Value
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.envoy_wire import message_parts
from extproc.edge.envoy_wire.lean_types import LeanProcessingRequest
from extproc.edge.envoy_wire.message_parts import (
    MalformedMessageError,
    StructMetadata,
    body_modes,
    body_of,
    headers_of,
    metadata_of,
    plain_value,
)
from extproc.protocol.events import BodyMode, ProtocolConfig


def entry(key: str, *, raw: bytes = b"", value: str = "") -> bytes:
    data: bytes = base_pb2.HeaderValue(key=key, raw_value=raw, value=value).SerializeToString()
    return data


def body(data: bytes, *, end: bool = False, metadata: bytes | None = None) -> bytes:
    message: bytes = pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=end)).SerializeToString()
    return (
        message
        if metadata is None
        else message
        + b"\x42"
        + pb.ProcessingRequest(metadata_context=base_pb2.Metadata.FromString(metadata)).SerializeToString()[1:]
    )


METADATA = base_pb2.Metadata(filter_metadata={"a": {}, "b" * 200: {}}).SerializeToString()


class TestBodies:
    @pytest.mark.parametrize("size", [0, 1, 5, 127, 128, 300, 16_383, 16_384, 70_000])
    @pytest.mark.parametrize("metadata", [None, b"", METADATA], ids=["none", "empty", "some"])
    @pytest.mark.parametrize("end", [False, True])
    def test_all_that_encoders_write(self, size: int, metadata: bytes | None, end: bool) -> None:
        data = bytes(size)
        for _ in range(2):
            assert body_of(body(data, end=end, metadata=metadata)) == (data, end, metadata or b"")

    @pytest.mark.parametrize(
        "data",
        [
            body(b"x") + b"\x50\x01",  # observability_mode
            body(b"x") + b"\x5a\x02\x08\x04",  # protocol_config
            body(b"x") + body(b"y"),
            b"\x2a\x05\x10\x01\x0a\x01x",
            b"\x2a\x05\x0a\x01x\x10\x00",
            body(b"x", metadata=b"") + b"\x42\x00",
            b"\x2a",
            b"\x2a\x05\x0a\x01x",
            b"\x2a\xff\xff\xff\xff\x0f\x0a\x01x",
        ],
    )
    def test_what_is_unusual_is_left_to_the_generated_types(self, data: bytes) -> None:
        assert body_of(data) is None

    @given(st.binary(max_size=400), st.booleans(), st.booleans(), st.data())
    def test_what_is_read_is_what_the_generated_types_read(
        self, data: bytes, end: bool, metadata: bool, draw: st.DataObject
    ) -> None:
        whole = bytearray(body(data, end=end, metadata=METADATA if metadata else None))
        place = draw.draw(st.integers(0, len(whole) - 1))
        whole[place : place + draw.draw(st.integers(0, 2))] = draw.draw(st.binary(max_size=2))
        found = body_of(bytes(whole)) if whole[:1] == b"\x2a" else None
        if found is not None:
            # As `LeanProcessingRequest` has it: metadata is bytes.
            message = LeanProcessingRequest.FromString(bytes(whole))
            part = message.response_body
            assert found == (part.body, part.end_of_stream, message.metadata_context)
            assert message.WhichOneof("request") == "response_body"
            assert not message.observability_mode
            assert not message.HasField("protocol_config")

    def test_beginnings_are_not_hoarded(self) -> None:
        for number in range(5000):
            body_of(body(b"%d" % number))
        assert len(message_parts._places) <= 4096


class TestHeaders:
    def test_they_may_come_as_bytes_or_as_text(self) -> None:
        found = headers_of([entry("x-raw", raw=b"a\xff"), entry("x-value", value="b"), entry("x-empty")])
        assert found == {"x-raw": "a\xff", "x-value": "b", "x-empty": ""}

    def test_repeated_ones_are_joined_in_order(self) -> None:
        entries = [entry("a", raw=b"1"), entry("b", raw=b"x"), entry("a", raw=b"2"), entry("a", raw=b"3")]
        assert headers_of(entries) == {"a": "1, 2, 3", "b": "x"}

    def test_nothing_is_confused_however_many_there_are(self) -> None:
        for number in range(3000):
            name = f"x-{number % 7}"
            assert headers_of([entry(name, raw=b"%d" % number)]) == {name: str(number)}
        assert headers_of([entry("x-1", raw=b"1")]) == {"x-1": "1"}

    def test_secrets_are_read_and_not_kept(self) -> None:
        headers_of([entry("authorization", raw=b"Bearer 1"), entry("x-kept", raw=b"2")])
        kept = dict(message_parts._known.values())
        assert kept["x-kept"] == "2"
        assert "authorization" not in kept

    @given(st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=300)), max_size=8))
    def test_they_are_what_the_generated_types_read(self, pairs: list[tuple[str, bytes]]) -> None:
        expected: dict[str, str] = {}
        for name, raw in pairs:
            text = raw.decode("latin-1")
            expected[name] = f"{expected[name]}, {text}" if name in expected else text
        assert headers_of([entry(name, raw=raw) for name, raw in pairs]) == expected

    def test_other_bytes_are_no_header(self) -> None:
        with pytest.raises(DecodeError):
            headers_of([b"\xff"])


class TestBodyModes:
    @pytest.mark.parametrize("mode", BodyMode)
    def test_known_ones(self, mode: BodyMode) -> None:
        config = pb.ProtocolConfiguration(request_body_mode=mode.value)
        assert body_modes(config.SerializeToString()) == ProtocolConfig(mode, BodyMode.NONE)

    def test_an_unknown_one_is_the_peers_mistake(self) -> None:
        with pytest.raises(MalformedMessageError):
            body_modes(b"\x08\x63")


class TestMetadata:
    def test_it_is_read_where_somebody_looks(self) -> None:
        message = base_pb2.Metadata()
        fields = message.filter_metadata["envoy.lb.subset_hint"].fields
        fields["list"].list_value.values.extend([Value(string_value="a:1"), Value(number_value=2)])
        fields["text"].string_value = "a:1,b:2"
        fields["flag"].bool_value = True
        fields["null"].null_value = 0
        fields["unset"].SetInParent()
        fields["empty"].list_value.CopyFrom(ListValue())
        fields["struct"].struct_value.fields["k"].string_value = "v"
        metadata = metadata_of(message.SerializeToString())
        assert metadata is not None
        keys = ("list", "text", "flag", "null", "unset", "empty", "struct", "absent")
        found = [metadata.value("envoy.lb.subset_hint", key) for key in keys]
        assert found == [["a:1", 2.0], "a:1,b:2", True, None, None, [], {"k": "v"}, None]
        assert metadata.value("other", "list") is None

    @pytest.mark.parametrize("size", [1, 1000])
    def test_it_may_be_of_any_length(self, size: int) -> None:
        message = base_pb2.Metadata()
        message.filter_metadata["n"].fields["k"].string_value = "v" * size
        for _ in range(2):
            metadata = metadata_of(message.SerializeToString())
            assert isinstance(metadata, StructMetadata)
            assert metadata.value("n", "k") == "v" * size

    def test_an_empty_one_is_none(self) -> None:
        assert metadata_of(b"") is None

    def test_other_bytes_are_none_either(self) -> None:
        with pytest.raises(DecodeError):
            metadata_of(b"\xff")


def test_a_plain_value_of_nothing() -> None:
    assert plain_value(Value()) is None
