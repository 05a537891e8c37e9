"""What is published about the configuration, derived from its types: the JSON Schema and the reference.

`make docs` writes both (`generate_docs`). Tests keep `extproc/config/schema.json` and `docs/configuration.md` equal to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import inspect

from extproc.config.check import field_types, type_of
from extproc.config.document import path_text
from extproc.config.endpoints import EndpointEntry
from extproc.config.schema import RESTART_KEYS, Config
from extproc.config.values import MAX_BYTES, MAX_SECONDS, Bytes, Seconds, Section
from scripts.config_reference_text import AFTER, BEFORE

__all__ = ["describe", "json_schema", "markdown"]

_SCHEMA_URI: Final = "https://json-schema.org/draft/2020-12/schema"
_DURATION_PATTERN: Final = r"^[0-9]{1,15}(\.[0-9]{1,9})?(ms|s|m|h)$"
_SIZE_PATTERN: Final = "^[0-9]{1,19}(B|KiB|MiB|GiB|TiB)$"


def json_schema() -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of the configuration document, for editors and for CI.

    It is made from the same types as `load`; rules between keys (`rules`) are not in it.
    """
    definitions: dict[str, Any] = {}
    root = _struct(type_of(Config), definitions)
    return {
        "$schema": _SCHEMA_URI,
        "title": "extproc configuration",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def json_schema_text() -> str:
    """Return the JSON Schema as it is committed."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def describe(field: inspect.Field) -> str:
    """Return a key's description: its own, or the first line of the section's that it holds. Empty: there is none."""
    kind = field.type
    while isinstance(kind, inspect.Metadata):
        if text := (kind.extra_json_schema or {}).get("description"):
            return str(text)
        kind = kind.type
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((_doc(inner.cls) for inner in kinds if isinstance(inner, inspect.StructType)), "")


def markdown() -> str:
    """Return `docs/configuration.md`."""
    lines = [BEFORE.strip(), "", "## Reference", ""]
    top = [path for path, _, inner in field_types(Config) if inner is None and len(path) == 1]
    lines += _table(Config, (), {path_text(path) for path in top})
    for path, field, inner in field_types(Config):
        if inner is None:
            continue
        name = path_text(path)
        optional = " Absent by default." if field.default is None else ""
        lines += ["", f"### `{name}`", "", describe(field) + optional, ""]
        assert issubclass(inner.cls, Section)
        lines += _table(inner.cls, path, None)
    lines += ["", AFTER.strip(), "", *_table(EndpointEntry, (), None)]
    return "\n".join(lines) + "\n"


def _table(section: type[Section], path: tuple[str | int, ...], only: set[str] | None) -> Iterable[str]:
    """Render the keys of one section that are no sections themselves."""
    rows = []
    for field in type_of(section).fields:
        name = path_text((*path, field.encode_name))
        if _is_section(field.type) or (only is not None and name not in only):
            continue
        restart = " **Needs a restart.**" if name in RESTART_KEYS and section is not EndpointEntry else ""
        text = describe(field).removesuffix(" Needs a restart.")
        rows.append(f"| `{name}` | {_type_text(field.type)} | {_default_text(field)} | {text}{restart} |")
    return ["| key | allowed | default | meaning |", "|---|---|---|---|", *rows]


def _doc(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split())


def _is_section(kind: inspect.Type) -> bool:
    match kind:
        case inspect.StructType():
            return True
        case inspect.Metadata():
            return _is_section(kind.type)
        case inspect.UnionType():
            return any(_is_section(inner) for inner in kind.types)
        case _:
            return False


def _type_text(kind: inspect.Type, extra: dict[str, Any] | None = None) -> str:
    """Say what one key may hold, for the table."""
    extra = extra or {}
    match kind:
        case inspect.Metadata():
            return _type_text(kind.type, {**extra, **(kind.extra_json_schema or {})})
        case inspect.UnionType():  # true, false or one of a few words
            return ", ".join(_type_text(one) for one in kind.types)
        case inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case inspect.BoolType():
            return "`true`, `false`"
        case inspect.IntType() | inspect.FloatType():
            noun = "whole number" if isinstance(kind, inspect.IntType) else "number"
            return noun + _range_text(kind.ge, kind.gt, kind.le)
        case inspect.StrType():
            if extra.get("format") == "endpoint":
                return "`host:port`"
            return "text" + (", not empty" if kind.min_length else "") + (", begins with `/`" if kind.pattern else "")
        case inspect.ListType():
            return f"list of {_type_text(kind.item_type)}"
        case inspect.DictType():
            return "mapping of text to text"
        case inspect.CustomType() if kind.cls is Seconds:
            return "duration" + (", above 0" if "exclusiveMinimum" in extra else "")
        case inspect.CustomType() if kind.cls is Bytes:
            return "size" + _range_text(extra.get("minimum"), None, extra.get("maximum"))
        case _:
            raise NotImplementedError(f"the schema uses a type this module does not know: {kind}")


def _range_text(least: float | None, above: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f", {least:,.10g} to {most:,.10g}"
    if above is not None and most is not None:
        return f", above {above:,.10g}, at most {most:,.10g}"
    return f", at least {least:,.10g}" if least is not None else ""


def _default(field: inspect.Field) -> object:
    """Return the default as a document would hold it, or NODEFAULT."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    match field.default:
        case Seconds():
            return _seconds_text(field.default)
        case Bytes():
            return _bytes_text(field.default)
        case _:
            return field.default


def _default_text(field: inspect.Field) -> str:
    default = _default(field)
    if default is msgspec.NODEFAULT:
        return "(required)"
    return f"`{json.dumps(default)}`" if not isinstance(default, str) or not default else f"`{default}`"


def _seconds_text(value: Seconds) -> str:
    if value < 1:
        return f"{value * 1000:g}ms"
    return f"{value / 60:g}m" if value >= 120 and value % 60 == 0 else f"{value:g}s"


def _bytes_text(value: Bytes) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value}B"


def _struct(kind: inspect.StructType, definitions: dict[str, Any]) -> dict[str, Any]:
    properties = {}
    for field in kind.fields:
        schema = _schema(field.type, definitions, {})
        schema["description"] = describe(field)
        if not _is_section(field.type) and not field.required:
            schema["default"] = _default(field)
        properties[field.encode_name] = schema
    found: dict[str, Any] = {"type": "object", "description": _doc(kind.cls), "properties": properties}
    required = [field.encode_name for field in kind.fields if field.required]
    if required:
        found["required"] = required
    return {**found, "additionalProperties": False}


def _schema(kind: inspect.Type, definitions: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    match kind:
        case inspect.Metadata():
            return _schema(kind.type, definitions, {**extra, **(kind.extra_json_schema or {})})
        case inspect.StructType():
            name = kind.cls.__name__
            definitions[name] = _struct(kind, definitions)
            # A section with all its keys commented out is null, and means the defaults.
            needed = any(field.required for field in kind.fields)
            reference = {"$ref": f"#/$defs/{name}"}
            return reference if needed else {"anyOf": [reference, {"type": "null"}]}
        case inspect.UnionType():
            rest = [_schema(one, definitions, extra) for one in kind.types if not isinstance(one, inspect.NoneType)]
            return {"anyOf": [*rest, {"type": "null"}] if kind.includes_none else rest}
        case inspect.LiteralType():
            return {"enum": list(kind.values)}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType() | inspect.FloatType():
            bounds = {"minimum": kind.ge, "exclusiveMinimum": kind.gt, "maximum": kind.le}
            noun = "integer" if isinstance(kind, inspect.IntType) else "number"
            return {"type": noun, **{key: value for key, value in bounds.items() if value is not None}}
        case inspect.StrType():
            limits = {"minLength": kind.min_length, "pattern": kind.pattern}
            return {"type": "string", **{key: value for key, value in limits.items() if value is not None}}
        case inspect.ListType():
            return {"type": "array", "items": _schema(kind.item_type, definitions, {})}
        case inspect.DictType():
            return {"type": "object", "additionalProperties": _schema(kind.value_type, definitions, {})}
        case inspect.CustomType() if kind.cls in {Seconds, Bytes}:
            return _quantity(kind, extra)
        case _:
            raise NotImplementedError(f"the schema uses a type this module does not know: {kind}")


def _quantity(kind: inspect.CustomType, extra: dict[str, Any]) -> dict[str, Any]:
    """Describe a duration or a size: a number, or text with a unit. The bounds hold for the number only."""
    bounds = {key: extra[key] for key in ("minimum", "exclusiveMinimum", "maximum") if key in extra}
    if "exclusiveMinimum" not in bounds:
        bounds.setdefault("minimum", 0)
    is_seconds = kind.cls is Seconds
    bounds.setdefault("maximum", MAX_SECONDS if is_seconds else MAX_BYTES)
    return {
        "anyOf": [
            {"type": "number" if is_seconds else "integer", **bounds},
            {"type": "string", "pattern": _DURATION_PATTERN if is_seconds else _SIZE_PATTERN},
        ]
    }
