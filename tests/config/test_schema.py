"""The schema itself: frozen, complete, importable from one place."""

from __future__ import annotations

import pytest

from extproc.config import schema
from extproc.config.check import field_types, key_paths
from extproc.config.schema import RESTART_KEYS, Config, PoolConfig


def test_all_names_are_there() -> None:
    assert [name for name in schema.__all__ if not hasattr(schema, name)] == []


def test_restart_keys_are_keys() -> None:
    assert set(key_paths(Config)) >= RESTART_KEYS


def test_every_section_is_frozen_and_refuses_unknown_keys() -> None:
    for path, _, inner in field_types(Config):
        if inner is not None:
            assert inner.forbid_unknown_fields, path
            assert inner.cls.__struct_config__.frozen, path
    with pytest.raises(AttributeError):
        Config().server = Config().server  # type: ignore[misc]


def test_mutable_defaults_are_not_shared() -> None:
    first, second = PoolConfig(), PoolConfig()
    first.endpoints.append("a:1")
    assert second.endpoints == []
