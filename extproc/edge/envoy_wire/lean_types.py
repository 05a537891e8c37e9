"""Message types with only the fields that are read, and `bytes` for sub-messages that recur from message to message.

The generated types (`xds-protos`) make an object of every sub-message that is accessed, which is most of the cost of
reading. With these types the same parser, upb, skips the fields that are not read, and returns as bytes the parts that
mostly recur byte for byte (a header, body modes), so that a dictionary finds them. Field names and numbers
are Envoy's; a test compares them.

One difference to the generated types: of a sub-message read as `bytes` that occurs twice the last one counts, where
protobuf would merge the two. No encoder writes that.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

__all__ = ["LeanHealthCheckRequest", "LeanProcessingRequest", "LeanStreamAccessLogsMessage", "LeanStruct"]

_PACKAGE: Final = "extproc.lean"

_SCALARS: Final = {
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "int32": FieldDescriptorProto.TYPE_INT32,
}
_MESSAGES: Final[dict[str, tuple[str, ...]]] = {
    # envoy/service/ext_proc/v3/external_processor.proto
    "ProcessingRequest": (
        "oneof HttpHeaders request_headers 2",
        "oneof HttpHeaders response_headers 3",
        "oneof HttpBody request_body 4",
        "oneof HttpBody response_body 5",
        "oneof bytes request_trailers 6",
        "oneof bytes response_trailers 7",
        "bytes metadata_context 8",
        "bool observability_mode 10",
        # Its presence matters: both body modes NONE is an empty one.
        "optional bytes protocol_config 11",
    ),
    "HttpHeaders": ("HeaderMap headers 1", "bool end_of_stream 3"),
    "HttpBody": ("bytes body 1", "bool end_of_stream 2"),
    # envoy/config/core/v3/base.proto; an entry is a HeaderValue
    "HeaderMap": ("repeated bytes headers 1",),
    # envoy/service/accesslog/v3/als.proto
    "StreamAccessLogsMessage": ("HTTPAccessLogEntries http_logs 2",),
    "HTTPAccessLogEntries": ("repeated HTTPAccessLogEntry log_entry 1",),
    # envoy/data/accesslog/v3/accesslog.proto
    "HTTPAccessLogEntry": (
        "AccessLogCommon common_properties 1",
        "HTTPRequestProperties request 3",
        "HTTPResponseProperties response 4",
    ),
    "AccessLogCommon": (
        "Address upstream_remote_address 13",
        "bytes response_flags 16",
        "Metadata metadata 17",
        "uint32 upstream_request_attempt_count 24",
        "bool intermediate_log_entry 27",
        "int32 access_log_type 33",
    ),
    "HTTPRequestProperties": ("string request_id 9",),
    "HTTPResponseProperties": ("UInt32Value response_code 1", "string response_code_details 6"),
    # google/protobuf/wrappers.proto
    "UInt32Value": ("uint32 value 1",),
    # envoy/config/core/v3/address.proto
    "Address": ("SocketAddress socket_address 1",),
    "SocketAddress": ("string address 2", "uint32 port_value 3"),
    # envoy/config/core/v3/base.proto: by namespace, a Struct
    "Metadata": ("map bytes filter_metadata 1",),
    # google/protobuf/struct.proto: by key, a Value
    "Struct": ("map bytes fields 1",),
    # grpc/health/v1/health.proto
    "HealthCheckRequest": ("string service 1",),
}


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="extproc/lean.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        for text in fields:
            *labels, kind, name, number = text.split()
            field = made.field.add(name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL)
            if "map" in labels:
                _make_map(made, field)
                continue
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            if "repeated" in labels:
                field.label = FieldDescriptorProto.LABEL_REPEATED
            if "oneof" in labels:
                if not made.oneof_decl:
                    made.oneof_decl.add(name="request")
                field.oneof_index = 0
            if "optional" in labels:
                # descriptor.proto: an optional field stands in a oneof of its own, behind all real ones.
                field.proto3_optional = True
                field.oneof_index = len(made.oneof_decl)
                made.oneof_decl.add(name=f"_{name}")
    return file


def _make_map(message: DescriptorProto, field: FieldDescriptorProto) -> None:
    """Make a map from texts to bytes: on the wire, a repeated message of `key` 1 and `value` 2 (descriptor.proto)."""
    # The compiler's name for it, which upb asks for.
    entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=field.LABEL_OPTIONAL, type=field.TYPE_BYTES)
    field.label, field.type = field.LABEL_REPEATED, field.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


_pool: Final = DescriptorPool()
_pool.AddSerializedFile(_file().SerializeToString())


def _message(name: str) -> Any:
    return GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


LeanProcessingRequest: Final = _message("ProcessingRequest")
LeanStreamAccessLogsMessage: Final = _message("StreamAccessLogsMessage")
LeanStruct: Final = _message("Struct")
LeanHealthCheckRequest: Final = _message("HealthCheckRequest")
