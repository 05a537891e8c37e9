"""Translate between ext_proc's protobuf messages and the session's events and replies.

Bytes in, values out, and back; nothing here knows state. Messages are read by `lean_types`. Replies that every request
pays for are written by hand, field by field, because building their nested messages as objects costs three times as
much; tests hold them equal to what the generated types write.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeAlias, assert_never

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError

from extproc.edge.envoy_wire.header_layouts import HeaderLayouts
from extproc.edge.envoy_wire.lean_types import LeanProcessingRequest
from extproc.edge.envoy_wire.message_parts import MalformedMessageError, body_modes, body_of, headers_of, metadata_of
from extproc.protocol.decision import DecisionMetadata, Headers, Recurring
from extproc.protocol.events import (
    Direction,
    Event,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Unknown,
)
from extproc.protocol.replies import BodyReply, DynamicMetadata, HeadersReply, ImmediateReply, TrailersReply

__all__ = ["WireReply", "decode", "echoed", "encode", "response_piece"]

WireReply = HeadersReply | BodyReply | TrailersReply | ImmediateReply
"""Every reply that is a message; `Finish` is the end of the stream."""

_REQUEST_HEADERS: Final = b"\x12"
_REQUEST_BODY: Final = b"\x22"
_RESPONSE_BODY: Final = b"\x2a"
"""Tags of `ProcessingRequest`: `request_headers` 2, `request_body` 4, `response_body` 5."""
_BODIES: Final = (_REQUEST_BODY, _RESPONSE_BODY)
_OVERWRITE: Final = b"\x18\x02"
"""`HeaderValueOption.append_action` 3: OVERWRITE_IF_EXISTS_OR_ADD."""
_parse: Final = LeanProcessingRequest.FromString
_UNKNOWN: Final = Unknown()
_layouts: Final = HeaderLayouts()


def decode(data: bytes) -> Event:
    """Read one `ProcessingRequest`. Raises MalformedMessageError.

    A message without a request we know, and any message of a gateway that only observes (`observability_mode`: it must not
    be answered), is `Unknown`. Costs 3 us for headers that come again (`HeaderLayouts`), 6 us for others, 1 us for a chunk.
    """
    begin = data[:1]
    if begin == _REQUEST_HEADERS:
        if (event := _layouts.read(data)) is not None:
            return event
    elif begin in _BODIES and (body := body_of(data)) is not None:
        piece, ends, metadata = body
        if begin == _RESPONSE_BODY:
            return ResponseBody(piece, ends)
        if not metadata:
            return RequestBody(piece, ends)
    try:
        message = _parse(data)
        kind = message.WhichOneof("request")
        if kind is None or message.observability_mode:
            return _UNKNOWN
        return _DECODERS[kind](message, data)
    except DecodeError as error:
        raise MalformedMessageError("not a ProcessingRequest") from error


def response_piece(data: bytes) -> bytes | None:
    """Return the data of a `response_body` in which nothing else counts and that is not the last; None: `decode` it.

    What a gateway sends with every token, in 1 us where `decode` takes 2.
    """
    if data[:1] != _RESPONSE_BODY:
        return None
    body = body_of(data)
    if body is None:
        return None
    piece, ends, _ = body
    return None if ends else piece


def echoed(piece: bytes) -> bytes:
    """Write the reply that gives such a piece back; the same as `encode` would write."""
    before, _ = _streamed_frame(False, len(piece), False)
    return before + piece


def _modes(message: Any) -> ProtocolConfig | None:
    return body_modes(message.protocol_config) if message.HasField("protocol_config") else None


def _request_headers(message: Any, data: bytes) -> Event:
    part = message.request_headers
    headers = headers_of(part.headers.headers)
    event = RequestHeaders(
        headers, part.end_of_stream, _modes(message), metadata_of(message.metadata_context), len(data)
    )
    _layouts.learn(data, event)
    return event


def _request_body(message: Any, _data: bytes) -> Event:
    part = message.request_body
    return RequestBody(part.body, part.end_of_stream, metadata_of(message.metadata_context))


def _request_trailers(message: Any, _data: bytes) -> Event:
    return RequestTrailers(metadata_of(message.metadata_context))


def _response_headers(message: Any, _data: bytes) -> Event:
    part = message.response_headers
    headers = headers_of(part.headers.headers)
    return ResponseHeaders(headers, part.end_of_stream, _modes(message), metadata_of(message.metadata_context))


def _response_body(message: Any, _data: bytes) -> Event:
    part = message.response_body
    return ResponseBody(part.body, part.end_of_stream, _modes(message))


def _response_trailers(message: Any, _data: bytes) -> Event:
    return ResponseTrailers(_modes(message))


_DECODERS: Final[dict[str, Callable[[Any, bytes], Event]]] = {
    "request_headers": _request_headers,
    "request_body": _request_body,
    "request_trailers": _request_trailers,
    "response_headers": _response_headers,
    "response_body": _response_body,
    "response_trailers": _response_trailers,
}


def encode(reply: WireReply) -> bytes:
    """Write one `ProcessingResponse`. Costs about 8 us for a decision, 1 us for a streamed body piece."""
    # Not a match: its patterns cost half a microsecond each, and these two every request has.
    if isinstance(reply, BodyReply):
        data = reply.data
        if data is None or not reply.streamed:
            return _encode_body(reply)
        before, after = _streamed_frame(reply.direction is Direction.REQUEST, len(data), reply.end_of_stream)
        return b"".join((before, data, after))
    if isinstance(reply, HeadersReply):
        metadata = reply.dynamic_metadata
        if type(metadata) is DecisionMetadata and reply.direction is Direction.REQUEST:
            text = metadata.decision_id.encode()
            edits = reply.set_headers, reply.remove_headers, reply.clear_route_cache
            begin, between, after = _decision_frame(metadata.recurring, len(text), edits)
            return b"".join((begin, text, between, text, after))
        request = reply.direction is Direction.REQUEST
        write = _headers_part if _recur(reply.set_headers) else _headers_part.__wrapped__
        part = write(request, reply.set_headers, reply.remove_headers, reply.clear_route_cache)
        return part + _metadata(reply.dynamic_metadata)
    match reply:
        case TrailersReply():
            return _encode_trailers(reply)
        case ImmediateReply():
            return _encode_immediate(reply)
        case _:
            assert_never(reply)


_SHORT: Final = tuple(bytes((number,)) for number in range(128))


def _varint(number: int) -> bytes:
    if number < 128:
        return _SHORT[number]
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(tag: bytes, payload: bytes) -> bytes:
    """Write a length-delimited field."""
    return tag + _varint(len(payload)) + payload


@lru_cache(maxsize=4096)
def _streamed_frame(request: bool, size: int, end_of_stream: bool) -> tuple[bytes, bytes]:
    """Return what stands before and after the data of a streamed body reply.

    Fields, all but the last length-delimited: `ProcessingResponse.request_body` 3 or `.response_body` 4,
    `BodyResponse.response` 1, `CommonResponse.body_mutation` 3, `BodyMutation.streamed_response` 3,
    `StreamedBodyResponse.body` 1 and `.end_of_stream` 2 (varint).
    """
    after = b"\x10\x01" if end_of_stream else b""
    before = b"\x0a" + _varint(size) if size else b""
    length = len(before) + size + len(after)
    for tag in (b"\x1a", b"\x1a", b"\x0a", b"\x1a" if request else b"\x22"):
        step = tag + _varint(length)
        before = step + before
        length += len(step)
    return before, after


_LONGEST_KEPT: Final = 256
"""Longest header value whose edits are kept: destinations recur, explanations never do."""


def _recur(set_headers: tuple[tuple[str, str], ...]) -> bool:
    for _, value in set_headers:  # noqa: SIM110 - a generator costs four times as much, on every reply
        if len(value) > _LONGEST_KEPT:
            return False
    return True


def _edits(set_headers: tuple[tuple[str, str], ...], remove_headers: tuple[str, ...], clear_route_cache: bool) -> bytes:
    write = _kept_edits if _recur(set_headers) else _kept_edits.__wrapped__
    return write(set_headers, remove_headers, clear_route_cache)


@lru_cache(maxsize=4096)
def _kept_edits(
    set_headers: tuple[tuple[str, str], ...], remove_headers: tuple[str, ...], clear_route_cache: bool
) -> bytes:
    """Write the edits of a `CommonResponse`: `header_mutation` 2 and `clear_route_cache` 5; few differ in a pool.

    `HeaderMutation.set_headers` 1 holds `HeaderValueOption`s: `header` 1 (`key` 1, `raw_value` 3) and `append_action` 3.
    Values go into `raw_value`: Envoy 1.40 ignores `value`. agentgateway honours an explicit append action, Envoy
    overwrites in any case.
    """
    parts = []
    for name, value in set_headers:
        header = _field(b"\x0a", name.encode()) + _field(b"\x1a", value.encode())
        parts.append(_field(b"\x0a", _field(b"\x0a", header) + _OVERWRITE))
    parts += [_field(b"\x12", name.encode()) for name in remove_headers]
    mutation = _field(b"\x12", b"".join(parts)) if parts else b""
    return mutation + b"\x28\x01" if clear_route_cache else mutation


@lru_cache(maxsize=4096)
def _headers_part(
    request: bool, set_headers: tuple[tuple[str, str], ...], remove_headers: tuple[str, ...], clear_route_cache: bool
) -> bytes:
    """Write `ProcessingResponse.request_headers` 1 or `.response_headers` 2 with its edits (`HeadersResponse.response` 1)."""
    common = _edits(set_headers, remove_headers, clear_route_cache)
    return _field(b"\x0a" if request else b"\x12", _field(b"\x0a", common) if common else b"")


_FLAGS: Final = {True: b"\x20\x01", False: b"\x20\x00"}
"""A `Value` with `bool_value` 4."""


def _metadata(metadata: DynamicMetadata | None) -> bytes:
    """Write `ProcessingResponse.dynamic_metadata` 8: a `Struct` whose values are `Struct`s.

    Field numbers: `Struct.fields` 1, of a map entry `key` 1 and `value` 2, of `Value` 3 text, 4 flag, 5 `Struct`. Costs
    2 us where the names, and the lengths of the texts, are those of a message before.
    """
    if metadata is None:
        return b""
    shape, texts = _shape(metadata)
    parts = list(_metadata_frame(shape))
    for place, text in enumerate(texts):
        parts[place] += text
    return b"".join(parts)


@lru_cache(maxsize=4096)
def _decision_frame(same: Recurring, id_bytes: int, edits: tuple[Headers, tuple[str, ...], bool]) -> tuple[bytes, ...]:
    """Write what stands before, between and after the two places of a decision's id.

    The reply to a request's headers that every decision is; all but the id recurs.
    """
    shape, (destination, *_) = _shape(DecisionMetadata(same, "0" * id_bytes))
    before, begin, between, after = _metadata_frame(shape)
    return _headers_part.__wrapped__(True, *edits) + before + destination + begin, between, after


def _shape(metadata: DynamicMetadata) -> tuple[tuple[str | int | bytes | None, ...], list[bytes]]:
    """Split metadata into what `_metadata_frame` takes and the texts that stand between its pieces."""
    shape: list[str | int | bytes | None] = []
    texts = []
    for namespace, values in metadata.items():
        shape += (namespace, None)
        for key, value in values.items():
            if isinstance(value, str):
                text = value.encode()
                texts.append(text)
                shape += (key, len(text))
            else:
                shape += (key, _FLAGS[value])
    return tuple(shape), texts


_Pieces: TypeAlias = "list[bytes | int]"
"""A message with holes: a number is the length of a text to be put there."""


@lru_cache(maxsize=1024)
def _metadata_frame(shape: tuple[str | int | bytes | None, ...]) -> tuple[bytes, ...]:
    """Write what stands before, between and after the texts of dynamic metadata.

    Ids and destinations differ from request to request, their lengths hardly do: nearly all of the message is the same
    each time. `shape`: names and lengths of texts, or names and flags; each namespace before its names, with None.
    """
    namespaces: _Pieces = []
    entries: _Pieces = []
    # From the end, because a namespace begins with the length of its entries.
    for name, value in reversed(tuple(zip(shape[::2], shape[1::2], strict=True))):
        assert isinstance(name, str)
        assert not isinstance(value, str)
        key = _field(b"\x0a", name.encode())
        if value is None:
            struct = _measured(b"\x12", _measured(b"\x2a", entries))
            namespaces[:0] = _measured(b"\x0a", [key, *struct])
            entries = []
        else:
            inner: _Pieces = [value] if isinstance(value, bytes) else _measured(b"\x1a", [value])
            entries[:0] = _measured(b"\x0a", [key, *_measured(b"\x12", inner)])
    frame = [b""]
    for piece in _measured(b"\x42", namespaces):
        if isinstance(piece, int):
            frame.append(b"")
        else:
            frame[-1] += piece
    return tuple(frame)


def _measured(tag: bytes, pieces: _Pieces) -> _Pieces:
    """Put tag and length before the pieces of a length-delimited field."""
    size = sum([piece if isinstance(piece, int) else len(piece) for piece in pieces])
    return [tag + _varint(size), *pieces]


def _encode_body(reply: BodyReply) -> bytes:
    # `CommonResponse.body_mutation` 3, `BodyMutation.body` 1.
    mutation = b"" if reply.data is None else _field(b"\x1a", _field(b"\x0a", reply.data))
    common = _edits(reply.set_headers, reply.remove_headers, reply.clear_route_cache) + mutation
    tag = b"\x1a" if reply.direction is Direction.REQUEST else b"\x22"
    return _field(tag, _field(b"\x0a", common) if common else b"") + _metadata(reply.dynamic_metadata)


def _encode_trailers(reply: TrailersReply) -> bytes:
    tag = b"\x2a" if reply.direction is Direction.REQUEST else b"\x32"
    return tag + b"\x00" + _metadata(reply.dynamic_metadata)


def _encode_immediate(reply: ImmediateReply) -> bytes:
    message = pb.ProcessingResponse()
    part = message.immediate_response
    part.status.code = reply.status  # an open enum: any status may stand there
    for name, value in reply.headers:
        option = part.headers.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    part.body = reply.body
    part.details = reply.details
    data: bytes = message.SerializeToString()
    return data
