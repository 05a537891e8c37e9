"""Parts of ext_proc messages: headers, bodies, body modes and dynamic metadata.

Parts that recur from message to message byte for byte are cached by their bytes; others are parsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.struct_pb2 import Value

from extproc.errors import ProtocolError
from extproc.protocol.events import BodyMode, ProtocolConfig

__all__ = [
    "MalformedMessageError",
    "StructMetadata",
    "body_modes",
    "body_of",
    "headers_of",
    "metadata_of",
    "plain_value",
]

_KEPT_HEADERS: Final = 1024
"""The cache is cleared when it is full: most entries are ids of past requests, and those that recur come back at once."""
_KEPT_HEADER_BYTES: Final = 256
"""Longest header that is cached: longer ones rarely recur, and memory stays below 1 MB."""
_SECRET_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "api-key", "x-api-key", "cookie"})
"""Not cached: a client's secret must not outlive its request here."""

_header: Final = base_pb2.HeaderValue.FromString
_config: Final = pb.ProtocolConfiguration.FromString
_known: Final[dict[bytes, tuple[str, str]]] = {}


class MalformedMessageError(ProtocolError):
    """Bytes that are no `ProcessingRequest`, or one with an unknown body mode."""


def headers_of(entries: Iterable[bytes]) -> dict[str, str]:
    """Return the headers of a `HeaderMap` by name; repeated ones joined by `, ` as RFC 9110 section 5.2 allows.

    `entries` are `HeaderValue`s. Raises DecodeError.
    """
    known = _known.get
    pairs = [known(entry) or _read_header(entry) for entry in entries]
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    found.clear()
    for name, value in pairs:
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _read_header(entry: bytes) -> tuple[str, str]:
    """Read a `HeaderValue`.

    Envoy fills `raw_value`, NGINX Gateway Fabric and agentgateway's pseudo-headers `value`. Latin-1 maps every byte, so
    that no header can fail to decode.
    """
    message = _header(entry)
    raw = message.raw_value
    header = message.key, raw.decode("latin-1") if raw else message.value
    if len(entry) <= _KEPT_HEADER_BYTES and header[0] not in _SECRET_HEADERS:
        if len(_known) >= _KEPT_HEADERS:
            _known.clear()
        _known[entry] = header
    return header


_END: Final = b"\x10\x01"
"""`HttpBody.end_of_stream` 2."""
_METADATA: Final = 0x42
"""Tag of `ProcessingRequest.metadata_context` 8."""
_HEAD_BYTES: Final = 8
"""Bytes before the data of a body message, at most: two tags, and two lengths of at most three bytes."""
_PLACES: Final = 4096
_places: Final[dict[bytes, tuple[int, int, int]]] = {}
"""By the first bytes of a body message: where its data begins and ends, and where the `HttpBody` ends."""


def body_of(message: bytes) -> tuple[bytes, bool, bytes] | None:
    """Read a `ProcessingRequest` of a body and, perhaps, metadata without a parser: data, end of stream, metadata.

    None where anything is unusual: another field, an order or a length that encoders do not write, or an error; such a
    message is for the parser. The caller has checked the first byte, which says whose body it is. Copies the body once.
    """
    head = message[:_HEAD_BYTES]
    place = _places.get(head) or _place(head, message)
    if place is None:
        return None
    start, end, stop = place
    ends = end != stop
    if ends and message[end:stop] != _END:
        return None
    total = len(message)
    if stop == total:
        return message[start:end], ends, b""
    if stop + 2 > total or message[stop] != _METADATA:
        return None
    begin = stop + 2
    size = message[begin - 1]
    if size >= 0x80:
        try:
            size, begin = _length_at(message, stop + 1)
        except IndexError:
            return None
    return (message[start:end], ends, message[begin:]) if begin + size == total else None


def _place(head: bytes, message: bytes) -> tuple[int, int, int] | None:
    """Find the parts of a body message by its first bytes; None where it is unusual."""
    try:
        size, start = _length_at(message, 1)
        stop = start + size
        end = start
        if size and message[start] == 0x0A:  # `HttpBody.body` 1
            size, start = _length_at(message, start + 1)
            end = start + size
    except IndexError:
        return None
    if not end <= stop <= len(message) or stop - end not in (0, len(_END)):
        return None
    if len(_places) >= _PLACES:
        _places.clear()
    _places[head] = place = (start, end, stop)
    return place


def _length_at(data: bytes, position: int) -> tuple[int, int]:
    """Read a varint of at most three bytes; return it and where it ends. Raises IndexError where there is none."""
    size = data[position]
    if size < 0x80:
        return size, position + 1
    size += (data[position + 1] << 7) - 0x80
    if size < 0x4000:
        return size, position + 2
    size += (data[position + 2] << 14) - 0x4000
    if size < 0x20_0000:
        return size, position + 3
    raise IndexError


_MODES: Final = {
    pb.ProtocolConfiguration(request_body_mode=up.value, response_body_mode=down.value).SerializeToString(): (
        ProtocolConfig(up, down)
    )
    for up in BodyMode
    for down in BodyMode
}
"""Every pair of body modes, by the bytes that say nothing else."""


def body_modes(data: bytes) -> ProtocolConfig:
    """Read a `ProtocolConfiguration`. Raises DecodeError and MalformedMessageError."""
    if (modes := _MODES.get(data)) is not None:
        return modes
    config = _config(data)
    try:
        return ProtocolConfig(BodyMode(config.request_body_mode), BodyMode(config.response_body_mode))
    except ValueError as error:
        problem = f"unknown body mode {config.request_body_mode} or {config.response_body_mode}"
        raise MalformedMessageError(problem) from error


class StructMetadata:
    """Dynamic metadata; a value is converted when it is looked up."""

    __slots__ = ("_filter_metadata",)

    def __init__(self, filter_metadata: Any) -> None:
        self._filter_metadata = filter_metadata

    def value(self, namespace: str, key: str) -> object | None:
        """Return the value at (namespace, key) as plain Python, or None."""
        if namespace not in self._filter_metadata:
            return None
        fields = self._filter_metadata[namespace].fields
        return plain_value(fields[key]) if key in fields else None


def metadata_of(data: bytes) -> StructMetadata | None:
    """Read a `Metadata`; None where it is empty, as in nearly every message of Envoy. Raises DecodeError."""
    return StructMetadata(base_pb2.Metadata.FromString(data).filter_metadata) if data else None


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
