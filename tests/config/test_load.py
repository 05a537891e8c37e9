"""From text to Config and back, overrides, and what needs a restart."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.config.load import (
    apply_overrides,
    dump,
    load,
    parse_endpoint,
    public_document,
    restart_needed,
    to_document,
)
from extproc.config.schema import RESTART_KEYS, Config
from extproc.errors import ConfigError
from tests.config.strategies import documents


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, source="c.yaml")
    return str(caught.value).splitlines()


def test_an_empty_document_is_all_defaults() -> None:
    assert load("") == Config() == load("server:\npool: {}\n")


def test_the_issue_s_example() -> None:
    config = load(
        "pool:\n  endpoints: [127.0.0.1:8001, 127.0.0.1:8002]\n"
        "routing:\n  strategy: weighted\n  weights: {prefix: 3, kv-cache: 2, queue: 2, in-flight: 1}\n"
    )
    assert [parse_endpoint(text) for text in config.pool.endpoints] == [("127.0.0.1", 8001), ("127.0.0.1", 8002)]
    assert config.routing.weights.kv_cache == 2


def test_units() -> None:
    config = load("server: {decision_deadline: 250ms, grace_period: 1h, max_inspect_bytes: 64KiB}")
    assert float(config.server.decision_deadline) == 0.25
    assert float(config.server.grace_period) == 3600
    assert int(config.server.max_inspect_bytes) == 65536


def test_json_is_read_too() -> None:
    assert load(json.dumps({"server": {"grpc_port": 1}}, indent="\t")).server.grpc_port == 1


def test_problems_carry_source_line_and_path_in_document_order() -> None:
    assert problems(
        "routing: {near_tie: 5}\nserver:\n  grpc_port: x\n  tls: {mode: files, private_key: k}\n  zzz: 1\n"
    ) == [
        "c.yaml: line 1: routing.near_tie: found the number 5; allowed: a number, at least 0 and at most 1",
        'c.yaml: line 3: server.grpc_port: found the text "x"; allowed: a whole number, at least 0 and at most 65,535',
        "c.yaml: line 4: server.tls.certificate: missing, but required by `mode: files`; set the path of a PEM file",
        problems("server: {zzz: 1}")[0].replace("line 1", "line 5"),
    ]


def test_another_version_says_what_is_supported() -> None:
    found = problems("apiVersion: extproc/v9\nkind: Other\n")
    assert "supported: `extproc/v1alpha1`" in found[0]
    assert "allowed: ExtprocConfig" in found[1]
    assert "apiVersion" in problems("apiVersion: 5")[0]


def test_a_list_is_no_configuration() -> None:
    assert "found a list of 1" in problems("[a]")[0]


def test_overrides_beat_the_file() -> None:
    config = load("server: {grpc_port: 5}\npool: {dns: {host: h, port: 1}}")
    changed = apply_overrides(config, {"server.grpc_port": 7, "pool.dns": None, "pool.endpoints": ["a:1"]})
    assert (changed.server.grpc_port, changed.pool.dns, changed.pool.endpoints) == (7, None, ["a:1"])
    assert apply_overrides(Config(), {"pool.dns.host": "h", "pool.dns.port": 1}).pool.dns is not None
    assert apply_overrides(config, {}) == config


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("server.grpc_prot", 1, "command line: server.grpc_prot: unknown key; did you mean `grpc_port`?"),
        ("server.grpc_port", "x", "command line: server.grpc_port: found"),
        ("server.grpc_port.x", 1, "command line: server.grpc_port: found a mapping"),
        ("admin.port", 9090, "command line: admin.port: port 9090 is already used by `server.metrics_port`"),
    ],
)
def test_bad_overrides(key: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(Config(), {key: value})
    assert problem in str(caught.value)


def test_restart_needed() -> None:
    old = load("")
    new = load("server: {grpc_port: 1, drain_delay: 1, tls: {mode: self-signed}}\nlog: {queue: 5}\nadmin: {port: 3}")
    assert restart_needed(old, new) == ("server.grpc_port", "server.tls.mode", "admin.port", "log.queue")
    assert restart_needed(old, load("server: {drain_delay: 1}")) == ()


def test_every_restart_key_exists() -> None:
    overrides: dict[str, Any] = {
        "server.host": "h", "server.grpc_port": 1, "server.health_port": 2, "server.metrics_port": 3,
        "server.tls.mode": "files", "server.tls.certificate": "c", "server.tls.private_key": "k",
        "server.tls.client_ca": "a", "server.max_message_bytes": "1MiB",
        "server.max_connections": 9, "server.max_connection_age": 9, "server.max_connection_age_jitter": 0.3, "admin.host": "h", "admin.port": 4, "log.queue": 1,
    }  # fmt: skip
    others = RESTART_KEYS - {"server.transport"}  # has one choice only
    assert set(restart_needed(Config(), apply_overrides(Config(), {k: overrides[k] for k in others}))) == others


def test_secrets_are_masked() -> None:
    config = load("pool: {scrape: {headers: {authorization: Bearer s3cret}}}")
    assert "s3cret" not in json.dumps(public_document(config))
    assert public_document(config)["pool"]["scrape"]["headers"] == {"authorization": "***"}
    assert "s3cret" in json.dumps(to_document(config))


def test_a_secret_is_not_repeated_in_an_error() -> None:
    assert "s3cret" not in "".join(problems("pool: {scrape: {headers: [s3cret]}}"))
    assert "123456" not in "".join(problems("pool: {scrape: {headers: {authorization: 123456}}}"))


def test_documents_hold_only_plain_values() -> None:
    def walk(value: object) -> None:
        assert type(value) in {dict, list, str, int, float, bool, type(None)}
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(inner)

    walk(to_document(load("pool: {file: {path: p}}")))


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(documents())
def test_any_valid_config_survives_a_round_trip(document: dict[str, Any]) -> None:
    config = apply_overrides(Config(), {}) if not document else load(json.dumps(document))
    assert load(dump(config)) == config
    assert load(json.dumps(to_document(config))) == config
    assert restart_needed(config, load(dump(config))) == ()


KEYS = st.sampled_from(
    ["server", "pool", "routing", "tls", "mode", "endpoints", "dns", "host", "weights", "prefix", "x"]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(ODD)
def test_any_document_raises_only_config_error(document: Any) -> None:
    with contextlib.suppress(ConfigError):
        load(json.dumps(document))


@given(st.text() | st.binary())
def test_any_text_raises_only_config_error(text: str | bytes) -> None:
    with contextlib.suppress(ConfigError):
        load(text)
