"""What recurs in ext_proc messages, known by its bytes: headers, body modes and dynamic metadata.

A gateway says nearly the same each time, so that most parts cost one look-up; the generated types read the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.struct_pb2 import Value

from extproc.edge.lean_types import remembered
from extproc.errors import ProtocolError
from extproc.protocol.events import BodyMode, ProtocolConfig

__all__ = ["MalformedMessageError", "StructMetadata", "body_modes", "headers_of", "metadata_of", "plain_value"]

_KEPT_HEADERS: Final = 1024
"""All go where there is no room, most of them ids of requests long gone; those that recur are back at once."""
_KEPT_HEADER_BYTES: Final = 256
"""Longest header that is kept: what is longer hardly comes again, and memory stays below 1 MB."""
_SECRET: Final = frozenset({"authorization", "proxy-authorization", "api-key", "x-api-key", "cookie"})
"""Not kept: a client's secret does not outlive its request here."""

_header: Final = base_pb2.HeaderValue.FromString
_config: Final = pb.ProtocolConfiguration.FromString
_known: Final[dict[bytes, tuple[str, str]]] = {}


class MalformedMessageError(ProtocolError):
    """Bytes that are no `ProcessingRequest`, or one with a body mode that does not exist."""


def headers_of(entries: Iterable[bytes]) -> dict[str, str]:
    """Return the headers of a `HeaderMap` by name; repeated ones joined by `, ` as RFC 9110 section 5.2 allows.

    `entries` are `HeaderValue`s. Raises DecodeError. Costs 0.2 us for a known entry, 1 us for another.
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
    if len(entry) <= _KEPT_HEADER_BYTES and header[0] not in _SECRET:
        if len(_known) >= _KEPT_HEADERS:
            _known.clear()
        _known[entry] = header
    return header


@remembered
def body_modes(data: bytes) -> ProtocolConfig:
    """Read a `ProtocolConfiguration`. Raises DecodeError and MalformedMessageError."""
    config = _config(data)
    modes = config.request_body_mode, config.response_body_mode
    try:
        return ProtocolConfig(BodyMode(modes[0]), BodyMode(modes[1]))
    except ValueError as error:
        raise MalformedMessageError(f"unknown body mode {modes[0]} or {modes[1]}") from error


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


def metadata_of(data: bytes) -> StructMetadata | None:
    """Read a `Metadata`; None where it is empty, as Envoy sends it with every message. Raises DecodeError."""
    return _metadata(data) if data else None


@remembered
def _metadata(data: bytes) -> StructMetadata:
    return StructMetadata(base_pb2.Metadata.FromString(data).filter_metadata)


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
