"""Translate between ext_proc's protobuf messages and the session's events and replies.

Bytes in, values out, and back; nothing here knows state. Messages are read by `lean_types`. Replies are written by the
generated types, and what recurs of them is kept: a decision differs from the one before in its id, a piece of a body in
its data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, TypeAlias, assert_never

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError

from extproc.edge.envoy_wire.lean_types import LeanProcessingRequest
from extproc.edge.envoy_wire.message_parts import MalformedMessageError, body_modes, body_of, headers_of, metadata_of
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
from extproc.protocol.replies import BodyReply, DecisionReply, HeadersReply, ImmediateReply, TrailersReply
from extproc.protocol.settings import DECISION_KEY, DESTINATION, DESTINATION_NAMESPACE, OWN_NAMESPACE

__all__ = ["WireReply", "decode", "echoed", "encode", "response_piece"]

WireReply = DecisionReply | HeadersReply | BodyReply | TrailersReply | ImmediateReply
"""Every reply that is a message; `Finish` is the end of the stream."""

_REQUEST_BODY: Final = b"\x22"
_RESPONSE_BODY: Final = b"\x2a"
"""Tags of `ProcessingRequest`: `request_body` 4, `response_body` 5."""
_BODIES: Final = (_REQUEST_BODY, _RESPONSE_BODY)
_OVERWRITE: Final = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_REQUEST_BODY_AS_IS: Final[bytes] = pb.ProcessingResponse(request_body=pb.BodyResponse()).SerializeToString()
_RESPONSE_BODY_AS_IS: Final[bytes] = pb.ProcessingResponse(response_body=pb.BodyResponse()).SerializeToString()
_REQUEST_TRAILERS: Final[bytes] = pb.ProcessingResponse(request_trailers=pb.TrailersResponse()).SerializeToString()
_RESPONSE_TRAILERS: Final[bytes] = pb.ProcessingResponse(response_trailers=pb.TrailersResponse()).SerializeToString()
_Headers: TypeAlias = tuple[tuple[str, str], ...]
_parse: Final = LeanProcessingRequest.FromString
_UNKNOWN: Final = Unknown()


def decode(data: bytes) -> Event:
    """Read one `ProcessingRequest`. Raises MalformedMessageError.

    A message whose kind is not known, and any message in `observability_mode`, which must not be answered, is `Unknown`.
    """
    begin = data[:1]
    if begin in _BODIES and (body := body_of(data)) is not None:
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

    The short way for what a gateway sends with every token.
    """
    if data[:1] != _RESPONSE_BODY:
        return None
    body = body_of(data)
    if body is None:
        return None
    piece, ends, _ = body
    return None if ends else piece


def echoed(piece: bytes) -> bytes:
    """Write the reply that returns such a piece unchanged; the same bytes as `encode` would write."""
    before, _ = _streamed_frame(False, len(piece), False)
    return before + piece


def _modes(message: Any) -> ProtocolConfig | None:
    return body_modes(message.protocol_config) if message.HasField("protocol_config") else None


def _request_headers(message: Any, data: bytes) -> Event:
    part = message.request_headers
    headers = headers_of(part.headers.headers)
    return RequestHeaders(
        headers, part.end_of_stream, _modes(message), metadata_of(message.metadata_context), len(data)
    )


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
    """Write one `ProcessingResponse`."""
    # Not a match, whose patterns are slower; the two kinds that every request has come first.
    if isinstance(reply, BodyReply):
        data = reply.data
        request = reply.direction is Direction.REQUEST
        if data is None:
            return _REQUEST_BODY_AS_IS if request else _RESPONSE_BODY_AS_IS
        before, after = _streamed_frame(request, len(data), reply.end_of_stream)
        return b"".join((before, data, after))
    if isinstance(reply, DecisionReply):
        return _decision(reply)
    if isinstance(reply, HeadersReply):
        recurs = all(len(value) <= _LONGEST_KEPT for _, value in reply.set_headers)
        write = _headers if recurs else _headers.__wrapped__
        return write(reply.direction is Direction.REQUEST, reply.set_headers, reply.remove_headers)
    match reply:
        case TrailersReply():
            return _REQUEST_TRAILERS if reply.direction is Direction.REQUEST else _RESPONSE_TRAILERS
        case ImmediateReply():
            return _immediate(reply)
        case _:
            assert_never(reply)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


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
"""Longest header value of a reply that is kept: few differ in a pool, but no two explanations are the same."""


@lru_cache(maxsize=4096)
def _headers(request: bool, set_headers: tuple[tuple[str, str], ...], remove_headers: tuple[str, ...]) -> bytes:
    message = pb.ProcessingResponse()
    part = message.request_headers if request else message.response_headers
    part.SetInParent()
    if set_headers or remove_headers:
        _edit(part.response.header_mutation, set_headers, remove_headers)
    return _serialized(message)


def _edit(mutation: Any, set_headers: Iterable[tuple[str, str]], remove_headers: Iterable[str]) -> None:
    """Fill a `HeaderMutation`.

    Values go into `raw_value`: Envoy 1.40 ignores `value`. agentgateway honours an explicit append action, Envoy
    overwrites in any case.
    """
    for name, value in set_headers:
        option = mutation.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = _OVERWRITE
    mutation.remove_headers.extend(remove_headers)


def _decision(reply: DecisionReply) -> bytes:
    """Write a decision. All of it but the id recurs, unless the decision is explained or replaces a body."""
    decision = reply.decision
    if decision is None:
        return _decision_message("", reply.answers, "", (), reply.remove_headers, False)
    removed = reply.remove_headers + decision.remove_headers
    edits = reply.answers, decision.destination, decision.set_headers, removed, reply.retriable
    if reply.explanation or reply.data is not None:
        return _decision_message(decision.id, *edits, reply.explanation, reply.data)
    decision_id = decision.id.encode()
    before, between, after = _decision_frame(len(decision_id), *edits)
    return b"".join((before, decision_id, between, decision_id, after))


@lru_cache(maxsize=4096)
def _decision_frame(
    id_bytes: int,
    answers: type[Any],
    destination: str,
    set_headers: _Headers,
    removed: tuple[str, ...],
    retriable: bool,
) -> list[bytes]:
    """Return what stands before, between and after the two places of a decision's id."""
    placeholder = "\0" * id_bytes  # is in no header and no metadata
    message = _decision_message(placeholder, answers, destination, set_headers, removed, retriable)
    return message.split(placeholder.encode())


def _decision_message(
    decision_id: str,
    answers: type[Any],
    destination: str,
    set_headers: _Headers,
    removed: tuple[str, ...],
    retriable: bool,
    explanation: str = "",
    data: bytes | None = None,
) -> bytes:
    """Write the reply to the request's headers, body or trailers (`answers`); no destination: no metadata either."""
    message = pb.ProcessingResponse()
    if answers is RequestTrailers:
        message.request_trailers.SetInParent()
    else:
        part = message.request_headers if answers is RequestHeaders else message.request_body
        part.SetInParent()
        if destination:
            set_headers = ((DESTINATION, destination), *set_headers)
        if data is not None:
            # Envoy refuses a changed body whose length differs from the content-length set with it.
            set_headers = (*set_headers, ("content-length", str(len(data))))
            part.response.body_mutation.body = data
        if set_headers or removed:
            _edit(part.response.header_mutation, set_headers, removed)
    if destination:
        own: dict[str, str | bool] = {"decision": decision_id}
        if retriable:
            own["retry"] = True
        if explanation:
            own["explain"] = explanation
        metadata = message.dynamic_metadata
        metadata.get_or_create_struct(DESTINATION_NAMESPACE).update(
            {DESTINATION: destination, DECISION_KEY: decision_id}
        )
        metadata.get_or_create_struct(OWN_NAMESPACE).update(own)
    return _serialized(message)


def _immediate(reply: ImmediateReply) -> bytes:
    message = pb.ProcessingResponse()
    part = message.immediate_response
    part.status.code = reply.status  # an open enum: any status may stand there
    _edit(part.headers, reply.headers, ())
    part.body = reply.body
    part.details = reply.details
    return _serialized(message)


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
