from __future__ import annotations

import contextlib
from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.envoy_wire.codec import decode, echoed, encode, response_piece
from extproc.edge.envoy_wire.message_parts import MalformedMessageError
from extproc.errors import NoEndpointError
from extproc.protocol.events import (
    BodyMode,
    Direction,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Unknown,
)
from extproc.protocol.replies import BodyReply, DecisionReply, HeadersReply, ImmediateReply, TrailersReply, refusal
from extproc.types import Endpoint
from tests.protocol.dialogue import chosen

OVERWRITE = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
REQUEST, RESPONSE = Direction.REQUEST, Direction.RESPONSE


def header(key: str, *, raw: bytes = b"", value: str = "") -> base_pb2.HeaderValue:
    return base_pb2.HeaderValue(key=key, raw_value=raw, value=value)


def read(data: bytes) -> dict[str, Any]:
    return MessageToDict(pb.ProcessingResponse.FromString(data), preserving_proto_field_name=True)


class TestPieces:
    @pytest.mark.parametrize("size", [1, 127, 128, 5000, 62_000])
    def test_a_token_comes_and_goes_as_by_the_long_way(self, size: int) -> None:
        data = pb.ProcessingRequest(response_body=pb.HttpBody(body=bytes(size))).SerializeToString()
        event, piece = decode(data), response_piece(data)
        assert isinstance(event, ResponseBody)
        assert piece == event.data
        assert echoed(piece) == encode(BodyReply(RESPONSE, piece, False))

    @pytest.mark.parametrize(
        "message",
        [
            pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x", end_of_stream=True)),
            pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x")),
            pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
            pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x"), observability_mode=True),
            pb.ProcessingRequest(),
        ],
    )
    def test_everything_else_takes_that_way(self, message: pb.ProcessingRequest) -> None:
        assert response_piece(message.SerializeToString()) is None


class TestDecode:
    def test_headers_may_come_as_bytes_or_as_text(self) -> None:
        message = pb.ProcessingRequest()
        message.request_headers.headers.headers.extend(
            [
                header("x-raw", raw=b"a\xff"),
                header("x-value", value="b"),
                header("x-empty"),
                header("x-twice", raw=b"1"),
                header("x-twice", raw=b"2"),
            ]
        )
        message.request_headers.end_of_stream = True
        data = message.SerializeToString()
        event = decode(data)
        assert isinstance(event, RequestHeaders)
        assert event.headers == {"x-raw": "a\xff", "x-value": "b", "x-empty": "", "x-twice": "1, 2"}
        assert (event.end_of_stream, event.protocol_config, event.metadata) == (True, None, None)
        assert event.wire_bytes == len(data)

    @pytest.mark.parametrize("mode", BodyMode)
    def test_body_modes_are_envoys(self, mode: BodyMode) -> None:
        name = {"FULL_DUPLEX": "FULL_DUPLEX_STREAMED"}.get(mode.name, mode.name)
        assert processing_mode_pb2.ProcessingMode.BodySendMode.Value(name) == mode.value
        message = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
        message.protocol_config.request_body_mode = mode.value
        event = decode(message.SerializeToString())
        assert isinstance(event, ResponseHeaders)
        assert event.protocol_config == ProtocolConfig(mode, BodyMode.NONE)

    def test_bodies_and_trailers(self) -> None:
        def of(**part: Any) -> Any:
            return decode(pb.ProcessingRequest(**part).SerializeToString())

        assert of(request_body=pb.HttpBody(body=b"x", end_of_stream=True)) == RequestBody(b"x", True)
        assert of(response_body=pb.HttpBody(body=b"y")) == ResponseBody(b"y", False)
        assert of(request_trailers=pb.HttpTrailers()) == RequestTrailers()
        assert of(response_trailers=pb.HttpTrailers()) == ResponseTrailers()

    def test_metadata_comes_with_requests_and_response_headers(self) -> None:
        for kind in ("request_headers", "request_body", "request_trailers", "response_headers"):
            message = pb.ProcessingRequest()
            getattr(message, kind).SetInParent()
            message.metadata_context.filter_metadata["n"].fields["k"].string_value = "v"
            event = decode(message.SerializeToString())
            assert isinstance(event, RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders)
            assert event.metadata is not None
            assert event.metadata.value("n", "k") == "v"

    def test_an_empty_metadata_context_is_none(self) -> None:
        # Envoy sends one with every message.
        message = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x"), metadata_context=base_pb2.Metadata())
        assert decode(message.SerializeToString()) == RequestBody(b"x")

    def test_what_asks_nothing_is_unknown(self) -> None:
        assert decode(b"") == Unknown()
        observed = pb.ProcessingRequest(request_headers=pb.HttpHeaders(), observability_mode=True)
        assert decode(observed.SerializeToString()) == Unknown()

    @pytest.mark.parametrize(
        "data",
        [
            b"\xff",
            b"\x12\x05x",
            b"\x5a\x02\x08\x63\x12\x00",  # an unknown body mode
            b"\x5a\x01\xff\x12\x00",
            b"\x42\x01\xff\x12\x00",  # metadata
            b"\x12\x05\x0a\x03\x0a\x01\xff",  # a header
            b"\x12\x08\x0a\x06\x0a\x04\x0a\x02\xff\xff",  # its name
        ],
    )
    def test_other_bytes_are_the_peers_mistake(self, data: bytes) -> None:
        with pytest.raises(MalformedMessageError):
            decode(data)

    @given(st.binary(max_size=200))
    def test_arbitrary_bytes_raise_nothing_else(self, data: bytes) -> None:
        with contextlib.suppress(MalformedMessageError):
            decode(data)


DEST = "x-gateway-destination-endpoint"


def expected_decision(answers: str, *edits: tuple[str, str], gone: tuple[str, ...] = (), **own: Any) -> Any:
    """Return what a decision for 10.0.0.1:8000 looks like on the wire, with further edits and metadata."""
    expected = pb.ProcessingResponse()
    part = getattr(expected, answers)
    part.SetInParent()
    if answers != "request_trailers":
        for name, value in ((DEST, "10.0.0.1:8000"), *edits):
            part.response.header_mutation.set_headers.add(
                header=header(name, raw=value.encode()), append_action=OVERWRITE
            )
        part.response.header_mutation.remove_headers.extend(gone)
    destination = {DEST: "10.0.0.1:8000", "x-extproc-decision": ID}
    expected.dynamic_metadata.get_or_create_struct("envoy.lb").update(destination)
    expected.dynamic_metadata.get_or_create_struct("extproc").update({"decision": ID, **own})
    return expected


ID = "0123456789abcdef"


class TestDecisions:
    @pytest.mark.parametrize(
        ("answers", "part"),
        [
            (RequestHeaders, "request_headers"),
            (RequestBody, "request_body"),
            (RequestTrailers, "request_trailers"),
        ],
    )
    @pytest.mark.parametrize("retriable", [True, False])
    def test_each_carrier(self, answers: Any, part: str, retriable: bool) -> None:
        expected = expected_decision(part, retry=True) if retriable else expected_decision(part)
        for _ in range(2):
            data = encode(DecisionReply(answers, chosen(decision_id=ID), (), retriable))
            assert pb.ProcessingResponse.FromString(data) == expected

    def test_each_has_its_own_id(self) -> None:
        for number in range(3):
            data = encode(DecisionReply(RequestHeaders, chosen(decision_id=f"{number:016x}")))
            fields = pb.ProcessingResponse.FromString(data).dynamic_metadata.fields
            assert fields["extproc"].struct_value.fields["decision"].string_value == f"{number:016x}"
            assert fields["envoy.lb"].struct_value.fields["x-extproc-decision"].string_value == f"{number:016x}"

    def test_edits_of_the_decision_and_of_the_session(self) -> None:
        made = chosen(decision_id=ID, set_headers=(("x-more", "é" * 200),), remove_headers=("x-gone",))
        data = encode(DecisionReply(RequestHeaders, made, ("x-control",)))
        expected = expected_decision("request_headers", ("x-more", "é" * 200), gone=("x-control", "x-gone"))
        assert pb.ProcessingResponse.FromString(data) == expected

    def test_fallbacks_follow_the_destination(self) -> None:
        made = chosen(decision_id=ID, fallbacks=(Endpoint("10.0.0.2", 80), Endpoint("2600::1", 80)))
        message = pb.ProcessingResponse.FromString(encode(DecisionReply(RequestHeaders, made)))
        (option,) = message.request_headers.response.header_mutation.set_headers
        assert option.header.raw_value == b"10.0.0.1:8000,10.0.0.2:80,[2600::1]:80"

    def test_an_explanation_stands_in_the_metadata(self) -> None:
        data = encode(DecisionReply(RequestHeaders, chosen(decision_id=ID), (), True, "why"))
        assert pb.ProcessingResponse.FromString(data) == expected_decision("request_headers", retry=True, explain="why")

    @pytest.mark.parametrize("body", [b"", b"new"])
    def test_a_buffered_body_that_is_replaced_brings_its_length(self, body: bytes) -> None:
        data = encode(DecisionReply(RequestBody, chosen(decision_id=ID), data=body))
        expected = expected_decision("request_body", ("content-length", str(len(body))))
        expected.request_body.response.body_mutation.body = body
        assert pb.ProcessingResponse.FromString(data) == expected

    def test_without_a_decision_only_headers_are_removed(self) -> None:
        assert read(encode(DecisionReply(RequestHeaders, None))) == {"request_headers": {}}
        removed = {"response": {"header_mutation": {"remove_headers": [DEST]}}}
        assert read(encode(DecisionReply(RequestHeaders, None, (DEST,)))) == {"request_headers": removed}
        assert read(encode(DecisionReply(RequestBody, None, (DEST,)))) == {"request_body": removed}
        assert read(encode(DecisionReply(RequestTrailers, None, (DEST,)))) == {"request_trailers": {}}


class TestEncode:
    @pytest.mark.parametrize("size", [3, 3000])
    def test_edits_of_headers(self, size: int) -> None:
        expected = pb.ProcessingResponse()
        mutation = expected.response_headers.response.header_mutation
        mutation.set_headers.add(header=header("x-why", raw=b"x" * size), append_action=OVERWRITE)
        mutation.remove_headers.append("x-gone")
        reply = HeadersReply(RESPONSE, (("x-why", "x" * size),), ("x-gone",))
        assert pb.ProcessingResponse.FromString(encode(reply)) == expected

    @pytest.mark.parametrize(
        ("reply", "expected"),
        [
            (HeadersReply(REQUEST), {"request_headers": {}}),
            (HeadersReply(RESPONSE), {"response_headers": {}}),
            (BodyReply(REQUEST), {"request_body": {}}),
            (BodyReply(RESPONSE), {"response_body": {}}),
            (TrailersReply(REQUEST), {"request_trailers": {}}),
            (TrailersReply(RESPONSE), {"response_trailers": {}}),
        ],
    )
    def test_small_replies(self, reply: HeadersReply | BodyReply | TrailersReply, expected: dict[str, Any]) -> None:
        assert read(encode(reply)) == expected

    @given(
        st.sampled_from(Direction),
        st.sampled_from([0, 1, 100, 127, 128, 16383, 16384, 62_000, 3_000_000]),
        st.booleans(),
    )
    def test_a_streamed_piece_is_what_the_generated_types_write(
        self, direction: Direction, size: int, end_of_stream: bool
    ) -> None:
        data = bytes(size)
        expected = pb.ProcessingResponse()
        part = expected.request_body if direction is REQUEST else expected.response_body
        part.response.body_mutation.streamed_response.body = data
        part.response.body_mutation.streamed_response.end_of_stream = end_of_stream
        assert encode(BodyReply(direction, data, end_of_stream)) == expected.SerializeToString()

    def test_an_answer_of_our_own(self) -> None:
        reply = refusal(NoEndpointError("none"))
        message = pb.ProcessingResponse.FromString(encode(reply)).immediate_response
        assert message.status.code == 503
        assert message.body == reply.body
        assert message.details == "extproc_no_endpoint"
        headers = {option.header.key: option.header.raw_value for option in message.headers.set_headers}
        assert headers == {
            "content-type": b"application/json",
            "x-extproc-drop-reason": b"no_endpoint",
            "retry-after": b"5",
        }

    def test_any_status_can_be_said(self) -> None:
        message = pb.ProcessingResponse.FromString(encode(ImmediateReply(418, (), b"", "")))
        assert message.immediate_response.status.code == 418
