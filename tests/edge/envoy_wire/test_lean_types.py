from __future__ import annotations

import pytest
from envoy.config.core.v3 import address_pb2, base_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import UInt32Value
from grpc_health.v1 import health_pb2

from extproc.edge.envoy_wire.lean_types import (
    LeanProcessingRequest,
    LeanStreamAccessLogsMessage,
    LeanStruct,
)

PAIRS = {
    "ProcessingRequest": pb.ProcessingRequest,
    "HttpHeaders": pb.HttpHeaders,
    "HttpBody": pb.HttpBody,
    "HeaderMap": base_pb2.HeaderMap,
    "StreamAccessLogsMessage": als_pb2.StreamAccessLogsMessage,
    "HTTPAccessLogEntries": als_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries,
    "HTTPAccessLogEntry": accesslog_pb2.HTTPAccessLogEntry,
    "AccessLogCommon": accesslog_pb2.AccessLogCommon,
    "HTTPRequestProperties": accesslog_pb2.HTTPRequestProperties,
    "HTTPResponseProperties": accesslog_pb2.HTTPResponseProperties,
    "UInt32Value": UInt32Value,
    "Address": address_pb2.Address,
    "SocketAddress": address_pb2.SocketAddress,
    "Metadata": base_pb2.Metadata,
    "Struct": Struct,
    "HealthCheckRequest": health_pb2.HealthCheckRequest,
}
_TEXTS = {FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_BYTES}
_NUMBERS = {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM}


def lean(name: str) -> Descriptor:
    pool = LeanProcessingRequest.DESCRIPTOR.file.pool
    found: Descriptor = pool.FindMessageTypeByName(f"extproc.lean.{name}")
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_names_numbers_and_kinds_are_envoys(name: str) -> None:
    for field in lean(name).fields:
        theirs = PAIRS[name].DESCRIPTOR.fields_by_name[field.name]
        assert (theirs.number, theirs.is_repeated) == (field.number, field.is_repeated)
        kinds = {field.type, theirs.type}
        assert len(kinds) == 1 or kinds <= _TEXTS or kinds <= _NUMBERS
        if field.containing_oneof is not None and not field.has_presence:
            assert theirs.containing_oneof.name == field.containing_oneof.name


def test_every_message_is_compared() -> None:
    assert set(LeanProcessingRequest.DESCRIPTOR.file.message_types_by_name) == set(PAIRS)


def test_the_kinds_of_request_exclude_one_another() -> None:
    ours = LeanProcessingRequest.DESCRIPTOR.oneofs_by_name["request"]
    theirs = pb.ProcessingRequest.DESCRIPTOR.oneofs_by_name["request"]
    assert {field.number for field in ours.fields} == {field.number for field in theirs.fields}


def test_what_nobody_reads_is_skipped() -> None:
    message = als_pb2.StreamAccessLogsMessage()
    message.identifier.log_name = "x"
    entry = message.http_logs.log_entry.add()
    entry.request.path = "/v1/completions"
    entry.request.request_id = "r1"
    (found,) = LeanStreamAccessLogsMessage.FromString(message.SerializeToString()).http_logs.log_entry
    assert found.request.request_id == "r1"


def test_maps_hold_bytes_by_key() -> None:
    values = Struct()
    values.update({"a": "text", "b": 2.0})
    fields = LeanStruct.FromString(values.SerializeToString()).fields
    assert dict(fields) == {key: values.fields[key].SerializeToString() for key in ("a", "b")}
