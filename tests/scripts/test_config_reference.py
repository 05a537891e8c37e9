"""The published schema and reference equal what the code says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import inspect

from extproc.config.check import field_types
from extproc.config.endpoints import EndpointEntry
from extproc.config.load import to_document
from extproc.config.schema import Config
from extproc.config.values import Bytes, Seconds
from scripts import config_reference as reference
from tests.config.strategies import documents

ROOT = Path(__file__).resolve().parents[2]
VALIDATOR = jsonschema.Draft202012Validator(reference.json_schema())


def test_the_committed_schema_is_up_to_date() -> None:
    committed = (ROOT / "extproc/config/schema.json").read_text(encoding="utf-8")
    assert committed == reference.json_schema_text(), "make docs"


def test_the_committed_reference_is_up_to_date() -> None:
    committed = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert committed == reference.markdown(), "make docs"


@pytest.mark.parametrize("section", [Config, EndpointEntry])
def test_every_key_is_described(section: Any) -> None:
    missing = [path for path, field, _ in field_types(section) if not reference.describe(field)]
    assert missing == []


def test_every_key_is_in_the_reference() -> None:
    text = reference.markdown()
    assert [path for path, _, _ in field_types(Config) if f"`{'.'.join(map(str, path))}`" not in text] == []


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(reference.json_schema())


def test_the_defaults_fit_the_schema() -> None:
    VALIDATOR.validate(to_document(Config()))
    VALIDATOR.validate({"server": None})


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(documents())
def test_valid_documents_fit_the_schema(document: dict[str, Any]) -> None:
    VALIDATOR.validate(document)


@pytest.mark.parametrize(
    "document",
    [
        {"x": 1},
        {"server": {"grpc_port": "9002"}},
        {"server": {"grpc_port": 70000}},
        {"server": {"decision_deadline": "5 s"}},
        {"server": {"decision_deadline": 0}},
        {"server": {"max_inspect_bytes": "4MB"}},
        {"pool": {"dns": {}}},
        {"routing": {"strategy": "x"}},
    ],
)
def test_invalid_documents_do_not_fit(document: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(document)


def test_defaults_are_written_as_people_write_them() -> None:
    text = reference.markdown()
    for default in ("| `2s` |", "| `250ms` |", "| `4MiB` |", "| `10m` |", "(required)"):
        assert default in text
    assert reference._bytes_text(Bytes(5)) == "5B"
    assert reference._bytes_text(Bytes(2**30)) == "1GiB"
    assert reference._seconds_text(Seconds(90)) == "90s"
    assert reference._range_text(None, None, None) == ""


def test_types_the_module_does_not_know() -> None:
    for render in (reference._type_text, lambda kind: reference._schema(kind, {}, {})):
        with pytest.raises(NotImplementedError):
            render(inspect.BytesType())


def test_a_key_without_a_description_is_noticed() -> None:
    field = inspect.Field("a", "a", inspect.Metadata(inspect.IntType(), extra_json_schema={"title": "x"}))
    assert reference.describe(field) == ""


def test_the_schema_is_json() -> None:
    assert json.loads(reference.json_schema_text())["title"] == "extproc configuration"
