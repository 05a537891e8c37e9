"""Makes a checked, frozen `Config` of text; reports all problems at once, each with its path, line and remedy.

Also compares two configurations (`restart_needed`), applies command-line flags (`apply_overrides`) and shows a
configuration (`to_document`, `public_document`, `dump`). Reads no files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import yaml

from extproc.config import rules
from extproc.config.check import check, key_paths
from extproc.config.document import FLOAT_PATTERN, FLOAT_TAG, Diagnostics, parse
from extproc.config.schema import API_VERSION, ENDPOINT_SOURCES, RESTART_KEYS, Config
from extproc.config.values import Bytes, Seconds, parse_endpoint

__all__ = [
    "apply_overrides",
    "dump",
    "load",
    "parse_endpoint",
    "public_document",
    "restart_needed",
    "to_document",
]

MASK: Final = "***"
"""Replaces secrets wherever a configuration is shown."""


def load(text: str | bytes, *, source: str = "") -> Config:
    """Read one YAML or JSON document; an empty one is all defaults.

    `source` (a file name) leads each line of the error's text. Raises ConfigError with every problem found, in
    document order, and nothing else whatever the text.
    """
    document = parse(text, source=source)
    return _checked(document.value, document.diagnostics, source)


def apply_overrides(config: Config, overrides: Mapping[str, object], *, source: str = "command line") -> Config:
    """Return the configuration with single keys replaced, checked again as a whole.

    Keys are dotted paths (`server.grpc_port`); values are as in the document (`9002`, `"250ms"`), and None removes an
    optional section. Raises ConfigError for an unknown key, a bad value, or one that contradicts another key.
    """
    values = to_document(config)
    diagnostics = Diagnostics()
    for key, value in overrides.items():
        *parents, last = key.split(".")
        section: dict[str, Any] = values
        for parent in parents:
            inner = section.get(parent)
            if not isinstance(inner, dict):
                inner = section[parent] = {}
            section = inner
        section[last] = value
    return _checked(values, diagnostics, source)


def restart_needed(old: Config, new: Config) -> tuple[str, ...]:
    """List the keys that differ and take effect only after a restart, in document order."""
    return tuple(key for key in key_paths(Config) if key in RESTART_KEYS and _at(old, key) != _at(new, key))


def to_document(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values; every key is there, and `load` of it gives an equal Config."""
    document: dict[str, Any] = msgspec.to_builtins(config, enc_hook=_plain)
    for source in ENDPOINT_SOURCES:  # a section that is not set is absent, not null
        if document["pool"][source] is None:
            del document["pool"][source]
    return document


def public_document(config: Config) -> dict[str, Any]:
    """Return `to_document` with secrets masked: what a page or a log may show."""
    document = to_document(config)
    headers = document["pool"]["scrape"]["headers"]
    document["pool"]["scrape"]["headers"] = dict.fromkeys(headers, MASK)
    return document


def dump(config: Config) -> str:
    """Write the configuration as YAML that `load` reads back as an equal Config."""
    return yaml.dump(to_document(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 reads as a number, beside what PyYAML quotes for YAML 1.1."""


_Dumper.add_implicit_resolver(FLOAT_TAG, re.compile(FLOAT_PATTERN), list("-+0123456789."))


def _checked(value: object, diagnostics: Diagnostics, source: str) -> Config:
    if isinstance(value, dict):
        version = value.get("apiVersion", API_VERSION)
        if isinstance(version, str) and version != API_VERSION:
            diagnostics.add(
                ("apiVersion",),
                f'"{version[:60]}" is not supported by this version of extproc',
                f"supported: `{API_VERSION}`",
            )
            value = {key: item for key, item in value.items() if key != "apiVersion"}
    config = check(Config, value, diagnostics)
    if config is not None:
        rules.apply(config, diagnostics)
    diagnostics.raise_if_any(source)
    assert config is not None, "a document without problems gives a Config"
    return config


def _at(config: Config, key: str) -> object:
    value: object = config
    for step in key.split("."):
        value = getattr(value, step)
    return value


def _plain(value: object) -> float | int:
    """Convert Seconds and Bytes to plain numbers for msgspec."""
    assert isinstance(value, Seconds | Bytes)
    return float(value) if isinstance(value, Seconds) else int(value)
