"""ext_proc as an Envoy with the profile `direct` speaks it, from the client's side, over one HTTP/2 connection.

Per request: headers and body in full duplex, no response phase, and one entry on the access log stream, which carries the
decision's id back and what the engine used; entries leave in bundles, as Envoy's do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from envoy.config.core.v3 import base_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2 as modes
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from bench.h2_client import H2Client
from extproc.http2.grpc import MessageReader, message_frame
from extproc.http2.headers import encode_fields

__all__ = ["ExtProcCalls", "body_message", "headers_message", "log_entry"]

_FLUSH_S: Final = 0.05
"""`buffer_flush_interval` of the profile."""
_MAX_MESSAGE_BYTES: Final = 64 << 20
_FULL_DUPLEX: Final = modes.ProcessingMode.FULL_DUPLEX_STREAMED


def _call_block(path: bytes) -> bytes:
    return encode_fields(
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"picker"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )


_PROCESS: Final = _call_block(b"/envoy.service.ext_proc.v3.ExternalProcessor/Process")
_LOGS: Final = _call_block(b"/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs")


def headers_message(request_id: str, body_bytes: int) -> bytes:
    """Write the first message of a stream: the headers h2load sends, as Envoy passes them on."""
    fields = {
        ":authority": "127.0.0.1:10000",
        ":path": "/v1/chat/completions",
        ":method": "POST",
        ":scheme": "http",
        "user-agent": "h2load nghttp2/1.52.0",
        "content-type": "application/json",
        "content-length": str(body_bytes),
        "x-forwarded-for": "127.0.0.1",
        "x-forwarded-proto": "http",
        "x-envoy-internal": "true",
        "x-request-id": request_id,
    }
    headers = base_pb2.HeaderMap(
        headers=[base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in fields.items()]
    )
    message = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=headers, end_of_stream=False),
        protocol_config=pb.ProtocolConfiguration(request_body_mode=_FULL_DUPLEX),
    )
    return bytes(message.SerializeToString())


def body_message(body: bytes) -> bytes:
    """Write the second message: the whole body."""
    return bytes(pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)).SerializeToString())


def log_entry(decision_id: str, prompt_bytes: int) -> accesslog_pb2.HTTPAccessLogEntry:
    """Write the entry of a request that went well, with the engine's usage."""
    entry = accesslog_pb2.HTTPAccessLogEntry()
    entry.response.response_code.value = 200
    entry.response.response_code_details = "via_upstream"
    common = entry.common_properties
    common.access_log_type = accesslog_pb2.AccessLogType.DownstreamEnd
    common.duration.nanos = 2_000_000
    common.upstream_request_attempt_count = 1
    metadata = common.metadata.filter_metadata
    metadata["extproc"].fields["decision"].string_value = decision_id
    usage = metadata["extproc.usage"].fields
    usage["prompt"].number_value = prompt_bytes // 4
    usage["completion"].number_value = 1
    return entry


class _Call:
    __slots__ = ("body_bytes", "decision_id", "done", "ok", "reader", "sent")

    def __init__(self, sent: float, body_bytes: int) -> None:
        self.reader = MessageReader(_MAX_MESSAGE_BYTES, "identity")
        self.sent = sent
        self.body_bytes = body_bytes
        self.decision_id = ""
        self.done = False
        self.ok = False


class ExtProcCalls:
    """The streams of one connection; a sink of its answers."""

    def __init__(self, on_end: Callable[[float, bool], None]) -> None:
        """Tell `on_end` of each stream when it began, and whether the body came back."""
        self._on_end = on_end
        self._calls: dict[int, _Call] = {}
        self._log: int | None = None
        self._entries: list[accesslog_pb2.HTTPAccessLogEntry] = []
        self._count = 0
        self.client: H2Client

    def open_log(self) -> None:
        """Open the access log stream, as Envoy does with its first entry."""
        first = als_pb2.StreamAccessLogsMessage(
            identifier=als_pb2.StreamAccessLogsMessage.Identifier(log_name="extproc")
        )
        self._log = self.client.request(_LOGS, (message_frame(first.SerializeToString()),), end=False)

    def begin(self, body: bytes, sent: float) -> None:
        """Open a stream and say everything."""
        self._count += 1
        head = headers_message(f"6c1a2f34-5b6d-4f7e-8a90-{self._count:012x}", len(body))
        payload = (message_frame(head), message_frame(body_message(body)))
        self._calls[self.client.request(_PROCESS, payload, end=False)] = _Call(sent, len(body))

    def headers(self, stream_id: int, block: bytes) -> None:
        """Look at nothing: the messages tell enough."""

    def data(self, stream_id: int, payload: bytes) -> None:
        """Take answers; the last of them ends our half, as Envoy does."""
        call = self._calls.get(stream_id)
        if call is None or call.done:
            return
        for message in call.reader.feed(payload):
            answer = pb.ProcessingResponse.FromString(message)
            kind = answer.WhichOneof("response")
            if kind == "request_headers":
                call.decision_id = _decision(answer)
            elif kind == "request_body":
                streamed = answer.request_body.response.body_mutation.streamed_response
                if streamed.end_of_stream:
                    call.done = call.ok = True
            else:
                call.done = True  # an immediate response: no load should see one
            if call.done:
                self.client.send(stream_id, b"", end=True)
                return

    def ended(self, stream_id: int, *, reset: bool) -> None:
        """Report the request on the access log."""
        call = self._calls.pop(stream_id, None)
        if call is None:
            return
        if call.ok and call.decision_id:
            if not self._entries:
                asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)
            self._entries.append(log_entry(call.decision_id, call.body_bytes))
        self._on_end(call.sent, call.ok and not reset)

    def _flush(self) -> None:
        entries, self._entries = self._entries, []
        logs = als_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=entries)
        message = als_pb2.StreamAccessLogsMessage(http_logs=logs).SerializeToString()
        if self._log is not None:
            self.client.send(self._log, message_frame(message), end=False)


def _decision(answer: pb.ProcessingResponse) -> str:
    fields = answer.dynamic_metadata.fields
    if "extproc" not in fields:
        return ""
    return str(fields["extproc"].struct_value.fields["decision"].string_value)
