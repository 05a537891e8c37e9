"""What several keys must agree on."""

from __future__ import annotations

import pytest

from extproc.config.load import load
from extproc.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("server: {tls: {mode: files}}", ["server.tls.certificate", "server.tls.private_key"]),
        ("server: {tls: {mode: files, certificate: c}}", ["server.tls.private_key"]),
        ("server: {tls: {certificate: c}}", ["server.tls.certificate"]),
        ("server: {tls: {mode: self-signed, private_key: k}}", ["server.tls.private_key"]),
        ("server: {tls: {client_ca: c}}", ["server.tls.client_ca"]),
        ("server: {grpc_port: 9003}", ["server.health_port"]),
        ("admin: {port: 9090}", ["admin.port"]),
        ("server: {host: 127.0.0.1, metrics_port: 1}\nadmin: {host: 127.0.0.1, port: 1}", ["admin.port"]),
        ("server: {max_inspect_bytes: 2GiB}", ["server.max_inspect_bytes"]),
        ("pool: {endpoints: ['a:1'], file: {path: p}, dns: {host: h, port: 1}}", ["pool.file", "pool.dns"]),
        ("pool: {dns: {host: h}}", ["pool.dns.port"]),
        ("pool: {scrape: {headers: {'a b': c}}}", ["pool.scrape.headers"]),
        ("pool: {scrape: {models_path: v1}}", ["pool.scrape.models_path"]),
        ("pool: {scrape: {busy_interval: 10s}}", ["pool.scrape.busy_interval"]),
        ("routing: {weights: {prefix: 0, kv-cache: 0, queue: 0, in-flight: 0, lora: 0}}", ["routing.weights"]),
        ("routing: {session_header: 'x session'}", ["routing.session_header"]),
    ],
)
def test_refused(text: str, paths: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert [problem.path for problem in caught.value.problems] == paths
    assert all(problem.remedy and problem.line for problem in caught.value.problems)


@pytest.mark.parametrize(
    "text",
    [
        "server: {tls: {mode: files, certificate: c, private_key: k, client_ca: a}}",
        "server: {tls: {mode: self-signed, client_ca: a}}",
        "server: {grpc_port: 0, health_port: 0}",
        "server: {host: 10.0.0.1, metrics_port: 1}\nadmin: {host: 127.0.0.1, port: 1}",
        "pool: {dns: {host: h, type: SRV}}",
        "pool: {dns: {host: h, port: 1}}",
        "pool: {scrape: {models_path: '', headers: {authorization: Bearer x}}}",
        "routing: {strategy: random, session_header: '', weights: {prefix: 0, kv-cache: 0, queue: 0, in-flight: 0, lora: 0}}",
    ],
)
def test_accepted(text: str) -> None:
    load(text)


@pytest.mark.parametrize(
    "text",
    [
        "server: {tls: {mode: filez}}",
        "server: {tls: {mode: files, certificate: 5, private_key: k}}",
        "server: {grpc_port: x, health_port: 9002}",
        "server: {max_inspect_bytes: x, max_buffered_bytes: 1}",
        "pool: {dns: {host: h, port: x}}",
        "pool: {scrape: {busy_interval: 10s, idle_interval: x}}",
        "pool: {scrape: {headers: {'a b': 5}}}",
        "routing: {strategy: x, weights: {prefix: 0, kv-cache: 0, queue: 0, in-flight: 0, lora: 0}}",
    ],
)
def test_a_rule_keeps_silent_where_a_key_is_bad_already(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert len(caught.value.problems) == 1


def test_close_needs_the_native_transport() -> None:
    with pytest.raises(ConfigError) as caught:
        load("server: {transport: grpcio, response_phase: close}")
    (problem,) = caught.value.problems
    assert (problem.path, "native" in problem.remedy) == ("server.response_phase", True)
    assert load("server: {transport: native, response_phase: close}").server.response_phase == "close"
    assert load("server: {transport: grpcio, response_phase: auto}").server.response_phase == "auto"
