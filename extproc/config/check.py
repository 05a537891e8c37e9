"""Checks plain values against the schema: every unknown key, wrong type and impossible value; makes a frozen section.

The schema is read by reflection (`msgspec.inspect`), so a new key needs no line here. Unlike `msgspec.convert`, which
stops at the first error, this finds all of them. Rules between keys are in `rules`.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

from msgspec import inspect

from extproc.config.document import Diagnostics, Path, path_text, shown
from extproc.config.values import Bytes, Seconds, Section, parse_bytes, parse_endpoint, parse_seconds

__all__ = ["check", "field_types", "key_paths", "type_of"]

_S = TypeVar("_S", bound=Section)


class _Bad:
    """The result for a value that has a problem."""


_BAD: Final = _Bad()
_Extra = Mapping[str, Any]
_NO_EXTRA: Final[_Extra] = {}
_LARGEST: Final = 1e300
"""No key needs more; NaN, infinity and integers that no float can hold are beyond it."""


@functools.cache
def type_of(section: type[Section]) -> inspect.StructType:
    """Return msgspec's description of a section's type; cached."""
    found = inspect.type_info(section)
    assert isinstance(found, inspect.StructType)
    return found


def field_types(section: type[Section]) -> Iterator[tuple[Path, inspect.Field, inspect.StructType | None]]:
    """Walk all keys under a section in document order, with the type of those that are sections themselves."""

    def walk(struct: inspect.StructType, path: Path) -> Iterator[tuple[Path, inspect.Field, inspect.StructType | None]]:
        for field in struct.fields:
            below = (*path, field.encode_name)
            inner = _section_of(field.type)
            yield below, field, inner
            if inner is not None:
                yield from walk(inner, below)

    return walk(type_of(section), ())


@functools.cache
def key_paths(section: type[Section]) -> tuple[str, ...]:
    """List all keys under a section, dotted, in document order."""
    return tuple(path_text(path) for path, _, _ in field_types(section))


def check(section: type[_S], value: object, diagnostics: Diagnostics, path: Path = ()) -> _S | None:
    """Turn plain values into a section that stands at `path` of its document; problems go to `diagnostics`.

    A value that has a problem is replaced by its default, so that the rules between the other keys can still be checked;
    None where that is impossible.
    """
    built = _Checker(section, diagnostics).struct(type_of(section), value, path)
    return built if isinstance(built, section) else None


def _section_of(kind: inspect.Type) -> inspect.StructType | None:
    match kind:
        case inspect.StructType():
            return kind
        case inspect.Metadata():
            return _section_of(kind.type)
        case inspect.UnionType():
            return next((found for inner in kind.types if (found := _section_of(inner))), None)
        case _:
            return None


class _Checker:
    """One walk over one document."""

    def __init__(self, root: type[Section], diagnostics: Diagnostics) -> None:
        self._root = root
        self._diagnostics = diagnostics

    def struct(self, kind: inspect.StructType, value: object, path: Path) -> object:
        if value is None:  # a section whose keys are all commented out
            value = {}
        if not isinstance(value, dict):
            return self._wrong(path, value, "a mapping with the keys " + _listed(f.encode_name for f in kind.fields))
        fields = {field.encode_name: field for field in kind.fields}
        ready: dict[str, object] = {}
        for key, item in value.items():
            field = fields.get(key)
            if field is None:
                self._unknown(key, (*path, key), tuple(fields))
                continue
            checked = self.value(field.type, item, (*path, key), _NO_EXTRA)
            if checked is not _BAD:
                ready[field.name] = checked
        for field in kind.fields:
            if field.required and field.encode_name not in value:
                self._diagnostics.add((*path, field.encode_name), "missing", f"add the key `{field.encode_name}`")
        if any(field.required and field.name not in ready for field in kind.fields):
            return _BAD
        return kind.cls(**ready)

    def value(self, kind: inspect.Type, value: object, path: Path, extra: _Extra) -> object:
        """Check one value of any type; return it as the schema wants it, or `_BAD`."""
        match kind:
            case inspect.Metadata():
                return self.value(kind.type, value, path, {**extra, **(kind.extra_json_schema or {})})
            case inspect.StructType():
                return self.struct(kind, value, path)
            case inspect.UnionType():
                if value is None and kind.includes_none:
                    return None
                if any(isinstance(t, inspect.BoolType) for t in kind.types):
                    return self._switch(kind, value, path)
                inner = next(t for t in kind.types if not isinstance(t, inspect.NoneType))
                return self.value(inner, value, path, extra)
            case inspect.ListType():
                return self._list(kind, value, path)
            case inspect.DictType():
                return self._dict(kind, value, path)
            case inspect.BoolType():
                return value if isinstance(value, bool) else self._wrong(path, value, "true or false")
            case inspect.IntType():
                return self._int(kind, value, path)
            case inspect.FloatType():
                return self._float(kind, value, path)
            case inspect.StrType():
                return self._str(kind, value, path, extra)
            case inspect.LiteralType():
                return self._literal(kind, value, path)
            case inspect.CustomType() if kind.cls in _QUANTITIES:
                return self._quantity(kind, value, path, extra)
            case _:
                raise NotImplementedError(f"the schema uses a type that this module does not support: {kind}")

    def _list(self, kind: inspect.ListType, value: object, path: Path) -> object:
        if not isinstance(value, list):
            return self._wrong(path, value, "a list", "write [] for an empty list" if value is None else "")
        items = [self.value(kind.item_type, item, (*path, i), _NO_EXTRA) for i, item in enumerate(value)]
        return _BAD if any(item is _BAD for item in items) else items

    def _dict(self, kind: inspect.DictType, value: object, path: Path) -> object:
        if not isinstance(value, dict):
            return self._wrong(path, value, "a mapping", "write {} for an empty mapping" if value is None else "")
        items = {key: self.value(kind.value_type, item, (*path, key), _NO_EXTRA) for key, item in value.items()}
        return _BAD if any(item is _BAD for item in items.values()) else items

    def _int(self, kind: inspect.IntType, value: object, path: Path) -> object:
        allowed = "a whole number" + _range(kind.ge, kind.gt, kind.le)
        if isinstance(value, bool) or not isinstance(value, int) or not _within(value, kind.ge, kind.gt, kind.le):
            return self._wrong(path, value, allowed)
        if abs(value) >= 2**63:
            return self._wrong(path, value, "a whole number below 2^63")
        return value

    def _float(self, kind: inspect.FloatType, value: object, path: Path) -> object:
        allowed = "a number" + _range(kind.ge, kind.gt, kind.le)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._wrong(path, value, allowed)
        if not _within(value, kind.ge, kind.gt, kind.le) or not abs(value) <= _LARGEST:
            return self._wrong(path, value, allowed)
        return float(value)

    def _str(self, kind: inspect.StrType, value: object, path: Path, extra: _Extra) -> object:
        if not isinstance(value, str):
            return self._wrong(path, value, "text", "put it in quotes" if isinstance(value, int | float) else "")
        if any(character < " " or character == "\x7f" for character in value):
            return self._wrong(path, value, "one line of text without control characters")
        if kind.min_length is not None and len(value) < kind.min_length:
            return self._wrong(path, value, "text that is not empty")
        if kind.pattern is not None and re.search(kind.pattern, value) is None:
            return self._wrong(path, value, _PATTERNS.get(kind.pattern, f"text that matches {kind.pattern}"))
        if extra.get("format") == "endpoint":
            return self._endpoint(value, path)
        return value

    def _endpoint(self, value: str, path: Path) -> object:
        try:
            parse_endpoint(value)
        except ValueError as error:
            self._diagnostics.add(path, f"found {shown(value)}; {error}", _ENDPOINT_REMEDY)
            return _BAD
        return value

    def _switch(self, kind: inspect.UnionType, value: object, path: Path) -> object:
        """Check a key that is true, false or one of a few words."""
        [words] = [one for one in kind.types if isinstance(one, inspect.LiteralType)]
        if isinstance(value, bool) or value in words.values:
            return value
        # Not as text in quotes, which would be neither.
        choices = [*map(str, words.values), "true", "false"]
        near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
        return self._wrong(path, value, "one of " + _listed(choices), f"did you mean `{near[0]}`?" if near else "")

    def _literal(self, kind: inspect.LiteralType, value: object, path: Path) -> object:
        choices = [str(choice) for choice in kind.values]
        if isinstance(value, str) and value in choices:
            return value
        near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
        allowed = choices[0] if len(choices) == 1 else "one of " + _listed(choices)
        return self._wrong(path, value, allowed, f"did you mean `{near[0]}`?" if near else "")

    def _quantity(self, kind: inspect.CustomType, value: object, path: Path, extra: _Extra) -> object:
        parse = _QUANTITIES[kind.cls]
        try:
            quantity = parse(value)
        except ValueError as error:
            return self._wrong(path, value, str(error))
        above, least, most = extra.get("exclusiveMinimum"), extra.get("minimum"), extra.get("maximum")
        if not _within(quantity, least, above, most):
            noun = "a duration" if kind.cls is Seconds else "a size in bytes"
            return self._wrong(path, value, noun + _range(least, above, most))
        return quantity

    def _wrong(self, path: Path, value: object, allowed: str, remedy: str = "") -> _Bad:
        """Add a wrong value. The value of a header is not repeated, because it may be a secret and logs keep these messages."""
        hidden = "headers" in path and value is not None
        found = f"a value of type {type(value).__name__}" if hidden else shown(value)
        self._diagnostics.add(path, f"found {found}; allowed: {allowed}", remedy)
        return _BAD

    def _unknown(self, key: str, path: Path, allowed: tuple[str, ...]) -> None:
        near = difflib.get_close_matches(key.replace("-", "_"), allowed, n=1) or difflib.get_close_matches(
            key, allowed, n=1
        )
        elsewhere = [other for other in key_paths(self._root) if other.rpartition(".")[2] == key]
        remedy = f"allowed here: {_listed(allowed)}"
        if near:
            remedy = f"did you mean `{near[0]}`? {remedy}"
        elif elsewhere:
            remedy = f"did you mean `{elsewhere[0]}`? {remedy}"
        self._diagnostics.add(path, "unknown key", remedy)


_QUANTITIES: Final[Mapping[type, Callable[[object], Seconds | Bytes]]] = {Seconds: parse_seconds, Bytes: parse_bytes}
_ENDPOINT_REMEDY: Final = "write host:port, for example 10.0.0.7:8000 or [2001:db8::7]:8000"
_PATTERNS: Final = {"^/": "text that begins with /"}


def _within(value: float, least: float | None, above: float | None, most: float | None) -> bool:
    # Written so that NaN is outside of every range.
    return (least is None or value >= least) and (above is None or value > above) and (most is None or value <= most)


def _range(least: float | None, above: float | None, most: float | None) -> str:
    low = f"above {above:g}" if above is not None else f"at least {least:,.10g}" if least is not None else ""
    high = f"at most {most:,.10g}" if most is not None else ""
    text = " and ".join(part for part in (low, high) if part)
    return f", {text}" if text else ""


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
