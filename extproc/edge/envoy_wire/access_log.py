"""Envoy's access log messages: a `StreamAccessLogsMessage` to the `LogEntry` values of `protocol.outcome`."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from envoy.data.accesslog.v3 import accesslog_pb2
from google.protobuf.struct_pb2 import Value

from extproc.edge.envoy_wire.lean_types import LeanStreamAccessLogsMessage, LeanStruct
from extproc.protocol.outcome import LogEntry, LogFlag
from extproc.protocol.settings import DECISION_KEY, DESTINATION_NAMESPACE, OWN_NAMESPACE, SERVED_KEY
from extproc.types import Usage

__all__ = ["decode_entries"]

_parse: Final = LeanStreamAccessLogsMessage.FromString
_parse_struct: Final = LeanStruct.FromString
_type: Final = accesslog_pb2.AccessLogType
_FINAL_TYPES: Final = frozenset({_type.NotSet, _type.DownstreamEnd})
"""All others report on a request that has not ended, or on one attempt of it."""
_ATTEMPT_TYPE: Final = _type.UpstreamEnd
_NO_FLAGS: Final[frozenset[LogFlag]] = frozenset()
_USAGE_NAMESPACE: Final = f"{OWN_NAMESPACE}.usage"
_NUMBER: Final = struct.Struct("<Bd")
_NUMBER_TAG: Final = 0x11


def decode_entries(data: bytes) -> list[LogEntry]:
    """Return the HTTP entries of a `StreamAccessLogsMessage`. Raises DecodeError where the bytes are no such message."""
    return [_entry(entry) for entry in _parse(data).http_logs.log_entry]


def _entry(entry: Any) -> LogEntry:
    common = entry.common_properties
    metadata = common.metadata.filter_metadata
    decision_id = served = ""
    if (routing := metadata.get(DESTINATION_NAMESPACE)) is not None:
        fields = _parse_struct(routing).fields
        decision_id = _text(fields.get(DECISION_KEY))
        served = _text(fields.get(SERVED_KEY))
    if not decision_id and (own := metadata.get(OWN_NAMESPACE)) is not None:
        decision_id = _text(_parse_struct(own).fields.get("decision"))
    usage = metadata.get(_USAGE_NAMESPACE)
    flags = common.response_flags
    response = entry.response
    kind = common.access_log_type
    attempt = kind == _ATTEMPT_TYPE
    return LogEntry(
        decision_id=decision_id,
        interim=not attempt and (common.intermediate_log_entry or kind not in _FINAL_TYPES),
        attempt=attempt,
        status=response.response_code.value,
        details=response.response_code_details,
        flags=_flags(flags) if flags else _NO_FLAGS,
        upstream=_address(common.upstream_remote_address.socket_address),
        served=served,
        attempts=common.upstream_request_attempt_count,
        usage=_usage(_parse_struct(usage).fields) if usage else None,
        request_id="" if decision_id else entry.request.request_id,
    )


def _flags(data: bytes) -> frozenset[LogFlag]:
    """Read `ResponseFlags`."""
    flags = accesslog_pb2.ResponseFlags.FromString(data)
    return frozenset(flag for flag in LogFlag if getattr(flags, flag.value))


def _address(socket_address: Any) -> str:
    """Spell a `SocketAddress` as endpoints are named; empty where there is none."""
    host: str = socket_address.address
    if not host:
        return ""
    return f"[{host}]:{socket_address.port_value}" if ":" in host else f"{host}:{socket_address.port_value}"


def _text(value: bytes | None) -> str:
    """Return the `string_value` 3 of a `Value`; empty where it has none. Raises DecodeError."""
    if value is None:
        return ""
    size = len(value) - 2
    if 0 <= size < 0x80 and value[0] == 0x1A and value[1] == size:
        return value[2:].decode(errors="replace")  # a short text and nothing else, as in nearly all entries
    text: str = Value.FromString(value).string_value
    return text


def _usage(fields: Mapping[str, bytes]) -> Usage | None:
    """Read the metadata that the filters of our Envoy profiles write (`extproc.usage: {prompt, completion, cached}`)."""
    if not fields:
        return None
    return Usage(_tokens(fields.get("prompt")), _tokens(fields.get("completion")), _tokens(fields.get("cached")))


def _tokens(value: bytes | None) -> int | None:
    """Read the `number_value` 2 of a `Value` as a number of tokens; None where there is none, or it is out of range."""
    if value is None or len(value) != _NUMBER.size or value[0] != _NUMBER_TAG:
        return None
    number = _NUMBER.unpack(value)[1]
    return int(number) if 0 <= number < 1e12 else None
