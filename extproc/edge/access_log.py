"""Envoy's gRPC access log: how requests ended, for those whose response we never see.

Serves `envoy.service.accesslog.v3.AccessLogService` beside ext_proc, on the same port. Decides nothing: entries become
`LogEntry` values and go to a sink; what they mean stands in `protocol.outcome`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import grpc
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

from extproc.protocol.outcome import LogEntry, LogFlag
from extproc.protocol.seams import StreamObserver
from extproc.protocol.settings import SessionSettings
from extproc.vocabulary import Usage

__all__ = ["AccessLogService", "LogSink", "decode_entries"]

LogSink = Callable[[LogEntry], None]

_log = logging.getLogger(__name__)
_parse: Final = als_pb2.StreamAccessLogsMessage.FromString
_type: Final = accesslog_pb2.AccessLogType
_FINAL_TYPES: Final = frozenset({_type.NotSet, _type.DownstreamEnd})
"""All others tell of a request that is still under way, or of one attempt of it."""
_FLAGS: Final = tuple(LogFlag)
_NO_FLAGS: Final[frozenset[LogFlag]] = frozenset()
_USAGE_KEY: Final = "usage"


class AccessLogService:
    """Takes access log streams and counts those that are connected."""

    def __init__(self, sink: LogSink, settings: Callable[[], SessionSettings], observer: StreamObserver) -> None:
        self._sink = sink
        self._settings = settings
        self._observer = observer
        self._closing = asyncio.Event()
        self._ends: set[Callable[[], None]] = set()
        self.streams = 0
        """Access log streams connected now; Envoy opens one per worker, with its first entry."""

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

    def join(self, end: Callable[[], None]) -> None:
        """Count a stream of a transport that has no coroutines; `end` is called when the service closes."""
        self._ends.add(end)
        self._count(1)

    def leave(self, end: Callable[[], None]) -> None:
        """Count a stream that has ended; harmless when repeated."""
        if end in self._ends:
            self._ends.discard(end)
            self._count(-1)

    async def _stream_access_logs(self, _requests: Any, context: Any) -> bytes:
        self._count(1)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            while (data := await _read_unless(closing, context)) is not grpc.aio.EOF:
                self.take(data)
        finally:
            closing.cancel()
            self._count(-1)
        return b""  # an empty StreamAccessLogsResponse

    def _count(self, change: int) -> None:
        self.streams += change
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
        if not entry.decision_id:
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


async def _read_unless(closing: asyncio.Future[Any], context: Any) -> Any:
    """Return the next message, or EOF at the end of the stream or of the service."""
    reading = asyncio.ensure_future(context.read())
    try:
        await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else grpc.aio.EOF
    finally:
        reading.cancel()


def decode_entries(data: bytes, settings: SessionSettings) -> list[LogEntry]:
    """Return the HTTP entries of a `StreamAccessLogsMessage`. Raises DecodeError where it is none."""
    return [_entry(entry, settings) for entry in _parse(data).http_logs.log_entry]


def _entry(entry: Any, settings: SessionSettings) -> LogEntry:
    common = entry.common_properties
    metadata = common.metadata.filter_metadata
    routing = metadata.get(settings.destination_namespace)
    own = metadata.get(settings.own_namespace)
    response = entry.response
    return LogEntry(
        decision_id=_text(routing, settings.decision_key) or _text(own, "decision"),
        interim=common.intermediate_log_entry or common.access_log_type not in _FINAL_TYPES,
        status=response.response_code.value,
        details=response.response_code_details,
        flags=_flags(common),
        upstream=_address(common.upstream_remote_address),
        served=_text(routing, settings.served_key),
        attempts=common.upstream_request_attempt_count,
        duration_s=_seconds(common, "duration"),
        first_byte_s=_seconds(common, "time_to_first_upstream_rx_byte"),
        usage=_usage(metadata.get(f"{settings.own_namespace}.{_USAGE_KEY}")),
        request_id=entry.request.request_id,
    )


def _flags(common: Any) -> frozenset[LogFlag]:
    # Nearly always absent or empty, and one look costs less than one at each of them.
    if not common.HasField("response_flags") or not (flags := common.response_flags).ListFields():
        return _NO_FLAGS
    return frozenset(flag for flag in _FLAGS if getattr(flags, flag.value))


def _text(fields: Struct | None, key: str) -> str:
    if fields is None:
        return ""
    values = fields.fields
    return values[key].string_value if key in values else ""


def _address(address: Any) -> str:
    socket = address.socket_address
    host = socket.address
    if not host:
        return ""
    return f"[{host}]:{socket.port_value}" if ":" in host else f"{host}:{socket.port_value}"


def _seconds(common: Any, field: str) -> float | None:
    if not common.HasField(field):
        return None
    duration = getattr(common, field)
    return float(duration.seconds + duration.nanos * 1e-9)


def _usage(fields: Struct | None) -> Usage | None:
    """Return what filters of our Envoy profiles lifted out of the response (`extproc.usage: {prompt, completion, cached}`)."""
    if fields is None:
        return None
    values = fields.fields
    if not values:
        return None
    return Usage(_tokens(values, "prompt"), _tokens(values, "completion"), _tokens(values, "cached"))


def _tokens(values: Any, key: str) -> int | None:
    # Asking for what is not there would put it there.
    if key not in values:
        return None
    value = values[key]
    if not value.HasField("number_value") or not 0 <= (number := value.number_value) < 1e12:
        return None
    return int(number)
