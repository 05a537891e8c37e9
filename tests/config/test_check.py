"""Every unknown key, wrong type and impossible value is found, and said in a way that helps."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest

from extproc.config.check import check, field_types, key_paths, type_of
from extproc.config.document import Diagnostics, parse
from extproc.config.schema import Config, DnsConfig, RoutingConfig
from extproc.config.values import Section
from extproc.errors import ConfigError


def problems(value: Any, section: type[Section] = Config) -> list[str]:
    diagnostics = Diagnostics()
    check(section, value, diagnostics)
    try:
        diagnostics.raise_if_any("")
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"server": 5}, "server: found the number 5; allowed: a mapping with the keys `transport`"),
        ([], "found an empty list; allowed: a mapping with the keys `apiVersion`"),
        ({"server": {"grpc_port": True}}, "server.grpc_port: found true; allowed: a whole number, at least 0 and at most 65,535"),
        ({"server": {"grpc_port": 90.5}}, "server.grpc_port: found the number 90.5; allowed: a whole number"),
        ({"server": {"grpc_port": 65536}}, "server.grpc_port: found the number 65536"),
        ({"pool": {"endpoints": None}}, "pool.endpoints: found nothing (null); allowed: a list; write [] for an empty list"),
        ({"pool": {"endpoints": "a:1"}}, 'pool.endpoints: found the text "a:1"; allowed: a list'),
        ({"pool": {"endpoints": ["a:1", 5]}}, "pool.endpoints[1]: found the number 5; allowed: text; put it in quotes"),
        ({"pool": {"endpoints": ["a"]}}, 'pool.endpoints[0]: found the text "a"; the port is missing; write host:port'),
        ({"pool": {"scrape": {"headers": None}}}, "pool.scrape.headers: found nothing (null); allowed: a mapping; write {} for an empty mapping"),
        ({"pool": {"scrape": {"headers": {"a": 5}}}}, "pool.scrape.headers.a: found a value of type int; allowed: text"),
        (
            {"explain": {"header": "breif"}},
            'explain.header: found the text "breif"; allowed: one of `brief`, `full`, `true`, `false`; did you mean `brief`?',
        ),
        ({"explain": {"header": "true"}}, 'explain.header: found the text "true"; allowed: one of'),
        ({"explain": {"header": 1}}, "explain.header: found the number 1; allowed: one of `brief`, `full`, `true`, `false`"),
        ({"pool": {"scrape": {"enabled": "yes"}}}, 'pool.scrape.enabled: found the text "yes"; allowed: true or false'),
        ({"pool": {"scrape": {"path": "m"}}}, 'pool.scrape.path: found the text "m"; allowed: text that begins with /'),
        ({"pool": {"scrape": {"timeout": 0}}}, "pool.scrape.timeout: found the number 0; allowed: a duration, above 0"),
        ({"pool": {"scrape": {"timeout": "0s"}}}, 'pool.scrape.timeout: found the text "0s"; allowed: a duration, above 0'),
        ({"server": {"max_message_bytes": "1KiB"}}, "allowed: a size in bytes, at least 65,536 and at most 2,147,483,647"),
        ({"server": {"max_inspect_bytes": 1.5}}, "allowed: a whole number of bytes, or text such as"),
        ({"server": {"host": ""}}, 'server.host: found the text ""; allowed: text that is not empty'),
        ({"server": {"host": "a\nb"}}, "allowed: one line of text without control characters"),
        ({"routing": {"strategy": "wieghted"}}, "did you mean `weighted`?"),
        ({"routing": {"strategy": 5}}, "routing.strategy: found the number 5; allowed: one of `least-load`"),
        ({"routing": {"near_tie": float("nan")}}, "routing.near_tie: found the number nan; allowed: a number, at least 0 and at most 1"),
        ({"routing": {"near_tie": "1"}}, 'routing.near_tie: found the text "1"; allowed: a number'),
        ({"routing": {"limits": {"queue": 10**30}}}, "routing.limits.queue: found the number 1e+30; allowed: a whole number below 2^63"),
        ({"prefix": {"bytes_per_token": 0}}, "prefix.bytes_per_token: found the number 0; allowed: a number, above 0 and at most 64"),
        ({"pool": {"dns": {}}}, "pool.dns.host: missing; add the key `host`"),
        ({"server": {"grpcPort": 1}}, "server.grpcPort: unknown key; did you mean `grpc_port`? allowed here: `transport`"),
        ({"routing": {"weights": {"kv_cache": 1}}}, "unknown key; did you mean `kv-cache`?"),
        ({"strategy": "random"}, "strategy: unknown key; did you mean `routing.strategy`?"),
        ({"zzz": 1}, "zzz: unknown key; allowed here: `apiVersion`"),
    ],
)  # fmt: skip
def test_pointed_errors(value: Any, problem: str) -> None:
    found = problems(value)
    assert len(found) == 1
    assert problem in found[0]


def test_all_problems_are_found() -> None:
    assert (
        len(problems({"a": 1, "server": {"b": 1, "grpc_port": -1}, "routing": {"strategy": "x", "near_tie": 7}})) == 5
    )


def test_defaults_stand_in_for_bad_values() -> None:
    diagnostics = Diagnostics()
    config = check(Config, {"server": {"grpc_port": -1, "health_port": 7}, "pool": {"dns": {"port": 1}}}, diagnostics)
    assert config is not None
    assert (config.server.grpc_port, config.server.health_port, config.pool.dns) == (9002, 7, None)


def test_nothing_can_stand_in_for_a_missing_required_key() -> None:
    assert check(DnsConfig, {}, Diagnostics()) is None


def test_optional_section_may_be_null() -> None:
    diagnostics = Diagnostics()
    config = check(Config, {"pool": {"dns": None, "file": {"path": "/x"}}, "server": None}, diagnostics)
    assert config is not None
    assert config.pool.file is not None
    diagnostics.raise_if_any("")


def test_numbers_become_floats() -> None:
    routing = check(RoutingConfig, {"near_tie": 1}, Diagnostics())
    assert routing is not None
    assert isinstance(routing.near_tie, float)


def test_an_unknown_type_in_the_schema_is_our_mistake() -> None:
    class Strange(Section, frozen=True):
        odd: complex = 1j

    with pytest.raises(NotImplementedError):
        problems({"odd": 1}, Strange)


def test_an_unknown_pattern_is_shown() -> None:
    kind = msgspec.defstruct(
        "Patterned", [("text", Annotated[str, msgspec.Meta(pattern="^a+$")], "a")], bases=(Section,), frozen=True
    )
    assert issubclass(kind, Section)
    assert problems({"text": "b"}, kind) == ['text: found the text "b"; allowed: text that matches ^a+$']


def test_paths_in_document_order() -> None:
    paths = key_paths(Config)
    assert paths[:4] == ("apiVersion", "kind", "server", "server.transport")
    assert "routing.weights.kv-cache" in paths
    assert {path for path, _, inner in field_types(Config) if inner} >= {("pool", "dns"), ("server", "tls")}
    assert type_of(Config) is type_of(Config)


def test_line_numbers_of_values_behind_an_alias() -> None:
    document = parse("server: &s\n  grpc_port: -1\nadmin: *s\n")
    check(Config, document.value, document.diagnostics)
    with pytest.raises(ConfigError) as caught:
        document.diagnostics.raise_if_any("")
    assert [(p.path, p.line) for p in caught.value.problems] == [("server.grpc_port", 2), ("admin.grpc_port", 3)]
