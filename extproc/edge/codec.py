"""Translate between ext_proc's protobuf messages and the session's events and replies.

Bytes in, values out, and back; nothing here knows state. Reading is done by the generated Envoy types (`xds-protos`, upb).
Replies that every request pays for are written by hand, field by field, because building their nested messages as
objects costs three times as much; tests hold them equal to what the generated types write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, assert_never

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from extproc.errors import ProtocolError
from extproc.protocol.events import (
    BodyMode,
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

__all__ = ["MalformedMessageError", "StructMetadata", "WireReply", "decode", "encode", "plain_value"]

WireReply = HeadersReply | BodyReply | TrailersReply | ImmediateReply
"""Every reply that is a message; `Finish` is the end of the stream."""

_OVERWRITE: Final = b"\x18\x02"
"""`HeaderValueOption.append_action` 3: OVERWRITE_IF_EXISTS_OR_ADD."""
_parse: Final = pb.ProcessingRequest.FromString
_UNKNOWN: Final = Unknown()


class MalformedMessageError(ProtocolError):
    """Bytes that are no `ProcessingRequest`, or one with a body mode that does not exist."""


class StructMetadata:
    """Dynamic metadata as it came; converted only where somebody looks."""

    __slots__ = ("_filter_metadata",)

    def __init__(self, filter_metadata: Any) -> None:
        self._filter_metadata = filter_metadata

    def value(self, namespace: str, key: str) -> object | None:
        """Return the value at (namespace, key) as plain Python, or None."""
        if namespace not in self._filter_metadata:
            return None
        fields = self._filter_metadata[namespace].fields
        return plain_value(fields[key]) if key in fields else None


def plain_value(value: Value) -> object | None:
    """Convert a protobuf `Value`: text, number, bool, list, dict or None."""
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [plain_value(item) for item in value.list_value.values]
    if kind == "struct_value":
        return {key: plain_value(item) for key, item in value.struct_value.fields.items()}
    if kind is None or kind == "null_value":
        return None
    plain: object = getattr(value, kind)
    return plain


def decode(data: bytes) -> Event:
    """Read one `ProcessingRequest`. Raises MalformedMessageError. Costs about 20 us for headers, 3 us for a body chunk.

    A message without a request we know, and any message of a gateway that only observes (`observability_mode`: it must
    not be answered), is `Unknown`.
    """
    try:
        message = _parse(data)
    except DecodeError as error:
        raise MalformedMessageError("not a ProcessingRequest") from error
    kind = message.WhichOneof("request")
    if kind is None or message.observability_mode:
        return _UNKNOWN
    return _DECODERS[kind](message, data)


def _headers(entries: Iterable[Any]) -> dict[str, str]:
    """Return headers by name; repeated ones joined by `, ` as RFC 9110 section 5.2 allows.

    Envoy fills `raw_value`, NGINX Gateway Fabric and agentgateway's pseudo-headers `value`. Latin-1 maps every byte, so
    that no header can fail to decode.
    """
    found: dict[str, str] = {}
    for entry in entries:
        key = entry.key
        raw = entry.raw_value
        value = raw.decode("latin-1") if raw else entry.value
        found[key] = f"{found[key]}, {value}" if key in found else value
    return found


@lru_cache(maxsize=64)
def _config(request_mode: int, response_mode: int) -> ProtocolConfig:
    try:
        return ProtocolConfig(BodyMode(request_mode), BodyMode(response_mode))
    except ValueError as error:
        raise MalformedMessageError(f"unknown body mode {request_mode} or {response_mode}") from error


def _config_of(message: Any) -> ProtocolConfig | None:
    if not message.HasField("protocol_config"):
        return None
    config = message.protocol_config
    return _config(config.request_body_mode, config.response_body_mode)


def _metadata_of(message: Any) -> StructMetadata | None:
    return StructMetadata(message.metadata_context.filter_metadata) if message.HasField("metadata_context") else None


def _request_headers(message: Any, data: bytes) -> Event:
    part = message.request_headers
    headers = _headers(part.headers.headers)
    return RequestHeaders(headers, part.end_of_stream, _config_of(message), _metadata_of(message), len(data))


def _request_body(message: Any, _data: bytes) -> Event:
    part = message.request_body
    return RequestBody(part.body, part.end_of_stream, _metadata_of(message))


def _request_trailers(message: Any, _data: bytes) -> Event:
    return RequestTrailers(_metadata_of(message))


def _response_headers(message: Any, _data: bytes) -> Event:
    part = message.response_headers
    headers = _headers(part.headers.headers)
    return ResponseHeaders(headers, part.end_of_stream, _config_of(message), _metadata_of(message))


def _response_body(message: Any, _data: bytes) -> Event:
    part = message.response_body
    return ResponseBody(part.body, part.end_of_stream, _config_of(message))


def _response_trailers(message: Any, _data: bytes) -> Event:
    return ResponseTrailers(_config_of(message))


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
    match reply:
        case BodyReply(streamed=True, data=bytes(data)):
            before, after = _streamed_frame(reply.direction is Direction.REQUEST, len(data), reply.end_of_stream)
            return b"".join((before, data, after))
        case BodyReply():
            return _encode_body(reply)
        case HeadersReply():
            # `ProcessingResponse.request_headers` 1 or `.response_headers` 2, `HeadersResponse.response` 1.
            return _edited(reply, b"\x0a" if reply.direction is Direction.REQUEST else b"\x12", b"")
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


@lru_cache(maxsize=4096)
def _edits(set_headers: tuple[tuple[str, str], ...], remove_headers: tuple[str, ...], clear_route_cache: bool) -> bytes:
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


def _metadata(metadata: DynamicMetadata | None) -> bytes:
    """Write `ProcessingResponse.dynamic_metadata` 8: a `Struct` of `Struct`s (`Value.struct_value` 5)."""
    if metadata is None:
        return b""
    parts = []
    for namespace, values in metadata.items():
        inner = b"".join([_entry(key, value) for key, value in values.items()])
        parts.append(_field(b"\x0a", _map_key(namespace) + _field(b"\x12", _field(b"\x2a", inner))))
    return _field(b"\x42", b"".join(parts))


@lru_cache(maxsize=256)
def _map_key(name: str) -> bytes:
    """Write the `key` 1 of a map entry."""
    return _field(b"\x0a", name.encode())


def _entry(key: str, value: str | bool) -> bytes:
    """Write an entry of `Struct.fields` 1: `key` 1 and `value` 2, a `Value` with `string_value` 3 or `bool_value` 4."""
    if isinstance(value, bool):
        flag = b"\x20\x01" if value else b"\x20\x00"
        return _field(b"\x0a", _map_key(key) + _field(b"\x12", flag))
    text = value.encode()
    return _text_entry_head(key, len(text)) + text


@lru_cache(maxsize=1024)
def _text_entry_head(key: str, size: int) -> bytes:
    """Write what stands before the `size` bytes of an entry's text: decision ids differ, their lengths do not."""
    text = b"\x1a" + _varint(size)
    value = b"\x12" + _varint(len(text) + size) + text
    entry = _map_key(key) + value
    return b"\x0a" + _varint(len(entry) + size) + entry


def _edited(reply: HeadersReply | BodyReply, tag: bytes, mutation: bytes) -> bytes:
    """Write a `ProcessingResponse` whose part `tag` holds a `CommonResponse` (`response` 1) with edits."""
    common = _edits(reply.set_headers, reply.remove_headers, reply.clear_route_cache) + mutation
    return _field(tag, _field(b"\x0a", common) if common else b"") + _metadata(reply.dynamic_metadata)


def _encode_body(reply: BodyReply) -> bytes:
    # `CommonResponse.body_mutation` 3, `BodyMutation.body` 1.
    mutation = b"" if reply.data is None else _field(b"\x1a", _field(b"\x0a", reply.data))
    return _edited(reply, b"\x1a" if reply.direction is Direction.REQUEST else b"\x22", mutation)


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
