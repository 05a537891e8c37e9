"""Hypothesis strategies for configurations, made from the schema itself, so that new keys are covered unasked."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from extproc.config.check import type_of
from extproc.config.schema import API_VERSION, KIND, Config
from extproc.config.values import Bytes, Seconds

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)
HOSTS = st.sampled_from(["localhost", "127.0.0.1", "10.1.2.3", "[::1]", "[2001:db8::5]", "vllm-0.svc"])
ENDPOINTS = st.builds(lambda host, port: f"{host}:{port}", HOSTS, st.integers(1, 65535))
HEADERS = st.from_regex(r"[a-zA-Z-]{1,12}", fullmatch=True)


def values(kind: inspect.Type, extra: dict[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """Values of one key, as a document holds them."""
    extra = extra or {}
    match kind:
        case inspect.Metadata():
            return values(kind.type, {**extra, **(kind.extra_json_schema or {})})
        case inspect.StructType():
            return section(kind)
        case inspect.UnionType() if not kind.includes_none:
            return st.one_of([values(one, extra) for one in kind.types])
        case inspect.UnionType():
            return st.one_of(st.none(), *(values(t, extra) for t in kind.types if not isinstance(t, inspect.NoneType)))
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(kind.ge or 0, kind.le or 2**40)
        case inspect.FloatType():
            least = kind.ge if kind.ge is not None else kind.gt
            return st.floats(least, kind.le, exclude_min=kind.gt is not None)
        case inspect.StrType():
            if extra.get("format") == "endpoint":
                return ENDPOINTS
            return TEXT.map(lambda t: f"/{t}") if kind.pattern or kind.min_length else TEXT
        case inspect.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case inspect.DictType():
            return st.dictionaries(HEADERS, TEXT, max_size=3)
        case inspect.CustomType() if kind.cls is Seconds:
            return st.floats(0.001, 1e6) | st.integers(1, 999).map(lambda n: f"{n}ms")
        case inspect.CustomType() if kind.cls is Bytes:
            return st.integers(65536, 2**31 - 1) | st.integers(64, 999).map(lambda n: f"{n}KiB")
        case _:
            raise AssertionError(kind)


def section(kind: inspect.StructType) -> st.SearchStrategy[dict[str, Any]]:
    required = {field.encode_name: values(field.type) for field in kind.fields if field.required}
    optional = {field.encode_name: values(field.type) for field in kind.fields if not field.required}
    return st.fixed_dictionaries(required, optional=optional)


def _mend(document: dict[str, Any]) -> dict[str, Any]:
    """Make a document whose keys are fine each for itself obey the rules between keys."""
    server = document.setdefault("server", {})
    server["tls"] = {"mode": "files", "certificate": "c", "private_key": "k"}
    server.update(grpc_port=1, health_port=2, metrics_port=0)
    server["max_buffered_bytes"] = 2**40
    if server.get("response_phase") == "close":
        server["transport"] = "native"
    document.setdefault("admin", {})["port"] = 4
    pool = document.setdefault("pool", {})
    sources = [key for key in ("endpoints", "file", "dns") if pool.get(key)]
    for key in sources[1:]:
        del pool[key]
    if pool.get("dns"):
        pool["dns"]["port"] = 8000
    scrape = pool.setdefault("scrape", {})
    scrape.update(busy_interval=1, idle_interval=2, models_path="/m")
    routing = document.setdefault("routing", {})
    routing["session_header"] = "x-s"
    routing.setdefault("weights", {})["prefix"] = 1
    document.update(apiVersion=API_VERSION, kind=KIND)
    return document


def documents() -> st.SearchStrategy[dict[str, Any]]:
    """Valid configuration documents as plain values."""
    return section(type_of(Config)).map(_mend)
