from __future__ import annotations

from typing import Any

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.envoy_wire.access_log import decode_entries
from extproc.edge.envoy_wire.lean_types import LeanStreamAccessLogsMessage, LeanStruct
from extproc.protocol.outcome import LogEntry, LogFlag
from extproc.protocol.settings import SessionSettings
from extproc.types import Usage

SETTINGS = SessionSettings()
Types = accesslog_pb2.AccessLogType


def message(*entries: accesslog_pb2.HTTPAccessLogEntry) -> bytes:
    out = als_pb2.StreamAccessLogsMessage()
    out.http_logs.log_entry.extend(entries)
    data: bytes = out.SerializeToString()
    return data


def entry(decision: str = "d1", namespace: str = "envoy.lb", key: str = "x-extproc-decision") -> Any:
    out = accesslog_pb2.HTTPAccessLogEntry()
    if decision:
        out.common_properties.metadata.filter_metadata[namespace].fields[key].string_value = decision
    return out


def one(log: Any) -> LogEntry:
    (found,) = decode_entries(message(log))
    return found


def test_a_full_entry() -> None:
    log = entry()
    common = log.common_properties
    common.metadata.filter_metadata["envoy.lb"].fields["x-gateway-destination-endpoint-served"].string_value = "b:2"
    usage = common.metadata.filter_metadata["extproc.usage"].fields
    for key, value in (("prompt", 100), ("completion", 7), ("cached", 64)):
        usage[key].number_value = value
    common.access_log_type = Types.DownstreamEnd
    common.upstream_remote_address.socket_address.address = "10.0.0.1"
    common.upstream_remote_address.socket_address.port_value = 8000
    common.upstream_request_attempt_count = 2
    common.response_flags.upstream_remote_reset = True
    log.response.response_code.value = 200
    log.response.response_code_details = "via_upstream"
    log.request.request_id = "r1"
    assert one(log) == LogEntry(
        decision_id="d1",
        status=200,
        details="via_upstream",
        flags=frozenset({LogFlag.UPSTREAM_REMOTE_RESET}),
        upstream="10.0.0.1:8000",
        served="b:2",
        attempts=2,
        usage=Usage(100, 7, 64),
    )


def test_the_request_id_stands_for_a_decision_that_is_not_named() -> None:
    log = entry("")
    log.request.request_id = "r1"
    assert one(log) == LogEntry("", request_id="r1")


def test_an_empty_entry_is_not_ours() -> None:
    assert one(entry("")) == LogEntry("")


def test_the_decision_may_come_back_in_our_own_namespace() -> None:
    assert one(entry("d2", "extproc", "decision")).decision_id == "d2"


def test_ipv6_is_in_brackets() -> None:
    log = entry()
    log.common_properties.upstream_remote_address.socket_address.address = "2600::1"
    log.common_properties.upstream_remote_address.socket_address.port_value = 80
    assert one(log).upstream == "[2600::1]:80"


@pytest.mark.parametrize(
    ("kind", "interim"),
    [
        (Types.NotSet, False),
        (Types.DownstreamEnd, False),
        (Types.DownstreamPeriodic, True),
        (Types.DownstreamStart, True),
        (Types.UpstreamPeriodic, True),
    ],
)
def test_only_the_end_is_final(kind: int, interim: bool) -> None:
    log = entry()
    log.common_properties.access_log_type = kind
    assert one(log).interim is interim
    assert not one(log).attempt


def test_an_entry_of_one_attempt() -> None:
    log = entry("")
    log.common_properties.access_log_type = Types.UpstreamEnd
    log.common_properties.upstream_remote_address.socket_address.address = "10.0.0.1"
    log.common_properties.upstream_remote_address.socket_address.port_value = 8000
    log.response.response_code.value = 503
    log.request.request_id = "r1"
    assert one(log) == LogEntry("", attempt=True, status=503, upstream="10.0.0.1:8000", request_id="r1")


def test_an_intermediate_entry_is_interim_whatever_its_type() -> None:
    log = entry()
    log.common_properties.intermediate_log_entry = True
    assert one(log).interim


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt": 3.0}, Usage(3, None, None)),
        ({"prompt": "3", "completion": True, "cached": -1.0}, Usage()),
        ({"prompt": float("nan"), "cached": float("inf")}, Usage()),
        ({}, None),
    ],
)
def test_usage_is_what_can_be_tokens(usage: Any, expected: Usage | None) -> None:
    log = entry()
    log.common_properties.metadata.filter_metadata["extproc.usage"].update(usage)
    assert one(log).usage == expected


def test_every_flag_is_a_field_of_envoys() -> None:
    fields = accesslog_pb2.ResponseFlags.DESCRIPTOR.fields_by_name
    for flag in LogFlag:
        log = entry()
        setattr(log.common_properties.response_flags, fields[flag.value].name, True)
        assert one(log).flags == {flag}


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 200, 20_000])
def test_texts_may_be_of_any_length(size: int) -> None:
    assert one(entry("x" * size)).decision_id == "x" * size


def test_what_is_no_text_names_no_decision() -> None:
    log = entry("")
    log.common_properties.metadata.filter_metadata["envoy.lb"].fields["x-extproc-decision"].number_value = 7
    assert not one(log).decision_id


@given(st.binary(max_size=150))
def test_arbitrary_values_raise_only_decode_errors(value: bytes) -> None:
    fields = LeanStruct(fields={"x-extproc-decision": value})
    log = LeanStreamAccessLogsMessage()
    common = log.http_logs.log_entry.add().common_properties
    common.metadata.filter_metadata["envoy.lb"] = fields.SerializeToString()
    common.response_flags = value
    try:
        expected = Value.FromString(value).string_value
        (found,) = decode_entries(log.SerializeToString())
    except DecodeError:
        return
    assert found.decision_id == expected


def test_bytes_that_are_no_message() -> None:
    with pytest.raises(DecodeError):
        decode_entries(b"\xff")
