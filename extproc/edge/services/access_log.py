"""Envoy's gRPC access log: how requests ended, for those whose response we never see.

Serves `envoy.service.accesslog.v3.AccessLogService` beside ext_proc, on the same port. Decides nothing: entries become
`LogEntry` values and go to a sink; what they mean stands in `protocol.outcome`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
from envoy.config.core.v3 import address_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value
from google.protobuf.wrappers_pb2 import UInt32Value

from extproc.edge.envoy_wire.lean_types import LeanStreamAccessLogsMessage, LeanStruct, remembered
from extproc.protocol.interfaces import Observer
from extproc.protocol.outcome import LogEntry, LogFlag
from extproc.protocol.settings import SessionSettings
from extproc.types import Usage

__all__ = ["AccessLogService", "LogSink", "decode_entries"]

LogSink = Callable[[LogEntry], None]

_log = logging.getLogger(__name__)
_parse: Final = LeanStreamAccessLogsMessage.FromString
_parse_struct: Final = LeanStruct.FromString
_type: Final = accesslog_pb2.AccessLogType
_FINAL_TYPES: Final = frozenset({_type.NotSet, _type.DownstreamEnd})
"""All others tell of a request that is still under way, or of one attempt of it."""
_ATTEMPT_TYPE: Final = _type.UpstreamEnd
_NO_FLAGS: Final[frozenset[LogFlag]] = frozenset()
_USAGE_KEY: Final = "usage"
_NUMBER: Final = struct.Struct("<Bd")
_NUMBER_TAG: Final = 0x11

_MOST_HOSTS: Final = 10_000
"""Hosts remembered; requests of further ones are released by estimate once their log is gone."""


class AccessLogService:
    """Takes access log streams and counts those that are connected."""

    def __init__(
        self,
        sink: LogSink,
        settings: Callable[[], SessionSettings],
        observer: Observer,
        *,
        max_stream_s: float = 0.0,
    ) -> None:
        """Start with no stream.

        `max_stream_s`: after this time a stream on grpc.aio is ended, because Envoy never ends it and would keep a
        connection that is too old; 0: never. The native transport ends it when it ends the connection.
        """
        self._sink = sink
        self._settings = settings
        self._observer = observer
        self._closing = asyncio.Event()
        self._max_stream_s = max_stream_s
        self._ends: dict[Callable[[], None], str] = {}
        self._hosts: Counter[str] = Counter()
        self._known: set[str] = set()
        self.streams = 0
        """Access log streams connected now; Envoy opens one per worker, with its first entry."""

    def logs_of(self, peer: str) -> bool:
        """Tell whether a stream from the same host as `peer` (`ipv4:address:port`) is connected; ports differ."""
        return _host(peer) in self._hosts

    def has_logged(self, peer: str) -> bool:
        """Tell whether a stream from the same host as `peer` is connected or was before."""
        return _host(peer) in self._known

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service for a grpc.aio server; messages come as bytes, so that a bad one is ours to judge."""
        method = grpc.stream_unary_rpc_method_handler(self._stream_access_logs)
        return grpc.method_handlers_generic_handler(
            "envoy.service.accesslog.v3.AccessLogService", {"StreamAccessLogs": method}
        )

    def close(self) -> None:
        """End all streams with OK: Envoy never ends them by itself, and would keep a stopping server waiting."""
        self._closing.set()
        for end in tuple(self._ends):
            end()

    def join(self, end: Callable[[], None], peer: str) -> None:
        """Count a stream of a transport that has no coroutines; `end` is called when the service closes."""
        self._ends[end] = peer
        self._count(1, peer)

    def leave(self, end: Callable[[], None]) -> None:
        """Count a stream that has ended; harmless when repeated."""
        peer = self._ends.pop(end, None)
        if peer is not None:
            self._count(-1, peer)

    async def _stream_access_logs(self, _requests: Any, context: Any) -> bytes:
        self._count(1, context.peer())
        closing = asyncio.ensure_future(self._wait_closing())
        try:
            while (data := await _read_unless(closing, context)) is not grpc.aio.EOF:
                self.take(data)
        finally:
            closing.cancel()
            self._count(-1, context.peer())
        return b""  # an empty StreamAccessLogsResponse

    async def _wait_closing(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._max_stream_s or None):
                await self._closing.wait()

    def _count(self, change: int, peer: str) -> None:
        self.streams += change
        host = _host(peer)
        self._hosts[host] += change
        if len(self._known) < _MOST_HOSTS:
            self._known.add(host)
        if not self._hosts[host]:
            del self._hosts[host]
        self._observer.access_log_streams(self.streams)

    def take(self, data: bytes) -> None:
        """Pass the entries of one message on; a bad message or a failing sink costs these entries, not the stream."""
        try:
            entries = decode_entries(data, self._settings())
        except DecodeError:
            self._observer.access_log_entry("malformed")
            _log.warning("an access log message is not readable", extra={"message_bytes": len(data)})
            return
        for entry in entries:
            self._pass_on(entry)

    def _pass_on(self, entry: LogEntry) -> None:
        if entry.attempt:
            self._observer.access_log_entry("attempt")
        elif not entry.decision_id:
            self._observer.access_log_entry("uncorrelated")
            if entry.interim:
                return
        else:
            self._observer.access_log_entry("interim" if entry.interim else "final")
        try:
            self._sink(entry)
        except Exception:  # noqa: BLE001 - the next entry may still be taken
            self._observer.internal_error("access_log")
            _log.exception("an access log entry was lost", extra={"decision": entry.decision_id})


def _host(peer: str) -> str:
    return peer.rpartition(":")[0]


async def _read_unless(closing: asyncio.Future[Any], context: Any) -> Any:
    """Return the next message, or EOF at the end of the stream or of the service."""
    reading = asyncio.ensure_future(context.read())
    try:
        await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else grpc.aio.EOF
    finally:
        reading.cancel()


def decode_entries(data: bytes, settings: SessionSettings) -> list[LogEntry]:
    """Return the HTTP entries of a `StreamAccessLogsMessage`. Raises DecodeError where it is none. Costs 8 us an entry."""
    return [_entry(entry, settings) for entry in _parse(data).http_logs.log_entry]


def _entry(entry: Any, settings: SessionSettings) -> LogEntry:
    common = entry.common_properties
    metadata = common.metadata.filter_metadata
    decision_id = served = ""
    if (routing := metadata.get(settings.destination_namespace)) is not None:
        fields = _parse_struct(routing).fields
        decision_id = _text(fields.get(settings.decision_key))
        served = _text(fields.get(settings.served_key))
    if not decision_id and (own := metadata.get(settings.own_namespace)) is not None:
        decision_id = _text(_parse_struct(own).fields.get("decision"))
    usage = metadata.get(f"{settings.own_namespace}.{_USAGE_KEY}")
    flags = common.response_flags
    response = entry.response
    kind = common.access_log_type
    attempt = kind == _ATTEMPT_TYPE
    return LogEntry(
        decision_id=decision_id,
        interim=not attempt and (common.intermediate_log_entry or kind not in _FINAL_TYPES),
        attempt=attempt,
        status=_status(response.response_code),
        details=response.response_code_details,
        flags=_flags(flags) if flags else _NO_FLAGS,
        upstream=_address(common.upstream_remote_address),
        served=served,
        attempts=common.upstream_request_attempt_count,
        usage=_usage(_parse_struct(usage).fields) if usage else None,
        request_id="" if decision_id else entry.request.request_id,
    )


@remembered
def _status(data: bytes) -> int:
    """Read an `UInt32Value`."""
    status: int = UInt32Value.FromString(data).value
    return status


@remembered
def _flags(data: bytes) -> frozenset[LogFlag]:
    """Read `ResponseFlags`."""
    flags = accesslog_pb2.ResponseFlags.FromString(data)
    return frozenset(flag for flag in LogFlag if getattr(flags, flag.value))


@remembered
def _address(data: bytes) -> str:
    """Read an `Address`."""
    address = address_pb2.Address.FromString(data).socket_address
    host = address.address
    if not host:
        return ""
    return f"[{host}]:{address.port_value}" if ":" in host else f"{host}:{address.port_value}"


def _text(value: bytes | None) -> str:
    """Read a `Value` as a text, its `string_value` 3; anything else is an empty one. Raises DecodeError."""
    if value is None:
        return ""
    size = len(value) - 2
    if 0 <= size < 0x80 and value[0] == 0x1A and value[1] == size:
        return value[2:].decode(errors="replace")  # nothing but a short text, as nearly always
    text: str = Value.FromString(value).string_value
    return text


def _usage(fields: Mapping[str, bytes]) -> Usage | None:
    """Return what filters of our Envoy profiles lifted out of the response (`extproc.usage: {prompt, completion, cached}`)."""
    if not fields:
        return None
    return Usage(_tokens(fields.get("prompt")), _tokens(fields.get("completion")), _tokens(fields.get("cached")))


def _tokens(value: bytes | None) -> int | None:
    """Read a `Value` as a number of tokens; None where it is no number (`number_value` 2) or cannot be one."""
    if value is None or len(value) != _NUMBER.size or value[0] != _NUMBER_TAG:
        return None
    number = _NUMBER.unpack(value)[1]
    return int(number) if 0 <= number < 1e12 else None
