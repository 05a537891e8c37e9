from __future__ import annotations

import random

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.envoy_wire import codec
from extproc.edge.envoy_wire.header_layouts import HeaderLayouts
from extproc.edge.envoy_wire.message_parts import MalformedMessageError, headers_of, metadata_of
from extproc.protocol.events import BodyMode, Event, ProtocolConfig, RequestHeaders

USUAL = {
    ":path": "/v1/chat/completions",
    ":method": "POST",
    "authorization": "Bearer secret-of-a",
    "content-length": "1000",
    "user-agent": "client/1",
    "x-request-id": "c872fb05-6916-4f04-84f6-b9f8abb452a9",
}


def said(headers: dict[str, str] | list[tuple[str, str]], *, end: bool = False, text: bool = False) -> bytes:
    """Write request headers as Envoy does; `text`: as others do."""
    part = pb.HttpHeaders(end_of_stream=end)
    for name, value in headers.items() if isinstance(headers, dict) else headers:
        kind = {"value": value} if text else {"raw_value": value.encode("latin-1")}
        part.headers.headers.append(base_pb2.HeaderValue(key=name, **kind))
    message = pb.ProcessingRequest(request_headers=part, metadata_context=base_pb2.Metadata())
    message.protocol_config.request_body_mode = 4
    data: bytes = message.SerializeToString()
    return data


def generated(data: bytes) -> Event | None:
    """Read a message by the other way; None: it is none."""
    try:
        message = codec._parse(data)
        kind = message.WhichOneof("request")
        if kind is None or message.observability_mode:
            return None
        if kind != "request_headers":
            return codec._DECODERS[kind](message, data)
        part = message.request_headers
        return RequestHeaders(
            headers_of(part.headers.headers),
            part.end_of_stream,
            codec._modes(message),
            metadata_of(message.metadata_context),
            len(data),
        )
    except (DecodeError, MalformedMessageError):
        return None


def taught(*messages: bytes) -> HeaderLayouts:
    """Return layouts that have learned from each of these."""
    layouts = HeaderLayouts()
    for data in messages:
        event = generated(data)
        assert isinstance(event, RequestHeaders)
        layouts._misses = 0
        layouts.learn(data, event)
    return layouts


def test_what_comes_again_is_known_with_other_ids_and_lengths() -> None:
    layouts = taught(said(USUAL))
    for length in (1, 36, 127, 128, 300, 20_000):
        headers = {**USUAL, "x-request-id": "y" * length, "authorization": "Bearer b"}
        data = said(headers)
        found = layouts.read(data)
        assert found == RequestHeaders(headers, False, ProtocolConfig(BodyMode.FULL_DUPLEX), None, len(data))
        assert list(found.headers) == list(headers)


def test_what_differs_besides_is_found_out() -> None:
    other = {**USUAL, "user-agent": "client/2"}
    layouts = taught(said(USUAL))
    assert layouts.read(said(other)) is None
    layouts = taught(said(USUAL), said(other))
    found = layouts.read(said({**USUAL, "user-agent": "a third"}))
    assert found is not None
    assert found.headers["user-agent"] == "a third"


def test_several_kinds_of_clients_are_known_and_not_any_number_of_them() -> None:
    kinds = [said({**USUAL, f"x-{number}": "1"}) for number in range(20)]
    layouts = taught(*kinds)
    known = [layouts.read(data) is not None for data in kinds]
    assert known == [False] * 12 + [True] * 8
    assert len(layouts._layouts) == 8


def test_unusual_messages_are_not_learned() -> None:
    messages = [
        said(USUAL, text=True),
        said([("a", "1"), ("a", "2")]),
        said({"a": "x" * 9000}),
        said({}),
    ]
    layouts = taught(*messages)
    assert [layouts.read(data) for data in messages] == [None] * 4


def test_ends_and_empty_values_are_told_apart() -> None:
    layouts = taught(said(USUAL), said(USUAL, end=True), said({**USUAL, "x-empty": ""}))
    for data in (said(USUAL), said(USUAL, end=True), said({**USUAL, "x-empty": ""})):
        assert layouts.read(data) == generated(data) is not None
    assert layouts.read(said({**USUAL, "x-empty": "no more"})) is None


def test_secrets_are_not_kept() -> None:
    layouts = taught(said(USUAL))
    (layout,) = layouts._layouts
    kept = repr([getattr(layout, name) for name in layout.__slots__])
    assert "client/1" in kept
    assert "secret-of-a" not in kept
    assert "c872fb05" not in kept


def test_of_messages_that_fit_nothing_few_are_learned_from() -> None:
    layouts = HeaderLayouts()
    for number in range(17):
        data = said({f"x-{number}": "1"})
        event = generated(data)
        assert isinstance(event, RequestHeaders)
        assert layouts.read(data) is None
        layouts.learn(data, event)
    assert len(layouts._layouts) == 3


NAMES = st.sampled_from([":path", "a", "b", "x-request-id", "cookie"])
VALUES = st.sampled_from(["", "1", "2", "x" * 126, "y" * 127, "z" * 300, "\xff"])


@given(
    st.lists(st.tuples(st.lists(st.tuples(NAMES, VALUES), max_size=5), st.booleans(), st.booleans()), max_size=6),
    st.integers(0, 1 << 32),
)
def test_what_fits_is_what_the_generated_types_read(
    messages: list[tuple[list[tuple[str, str]], bool, bool]], seed: int
) -> None:
    rng = random.Random(seed)
    written = [said(headers, end=end, text=text) for headers, end, text in messages]
    layouts = HeaderLayouts()
    for data in written * 2:
        broken = bytearray(data)
        for _ in range(rng.randrange(3)):
            place = rng.randrange(len(broken))
            broken[place : place + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
        for told in (data, bytes(broken), data[: rng.randrange(len(data))]):
            expected = generated(told)
            found = layouts.read(told) if told[:1] == b"\x12" else None
            assert found is None or found == expected
            if found is None and isinstance(expected, RequestHeaders) and told[:1] == b"\x12":
                layouts._misses = 0
                layouts.learn(told, expected)


def test_headers_said_again_behind_others_are_not_learned() -> None:
    """The last member of a `oneof` counts: what stands first would be taken for it."""
    data = said(USUAL)
    chunk = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x")).SerializeToString()
    again = pb.HttpHeaders(end_of_stream=False)
    again.headers.headers.append(base_pb2.HeaderValue(key="x-request-id", raw_value=b"good"))
    short = said({"x-request-id": "good"})
    for tail in (chunk + pb.ProcessingRequest(request_headers=again).SerializeToString(), chunk, b"\x18\x01"):
        layouts = HeaderLayouts()
        for message in (data, short):
            event = generated(message + tail)
            if isinstance(event, RequestHeaders):
                for _ in range(8):
                    layouts.learn(message + tail, event)
            assert layouts.read(message + tail) is None
