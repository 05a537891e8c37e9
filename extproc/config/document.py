"""Parses YAML (or JSON) text into plain values with their positions, and reports errors in the text itself.

Decides what is accepted as a document: one mapping or list, string keys, no duplicate keys, no tags, scalars by the core
schema of YAML 1.2 (so `no` and `on` are text, `010` is not eight and `1:30` is not ninety: the traps of YAML 1.1).
The meaning of the values is checked in `check`. Reads no files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from extproc.errors import ConfigError, ConfigProblem

__all__ = [
    "FLOAT_PATTERN",
    "FLOAT_TAG",
    "MAX_DEPTH",
    "MAX_DOCUMENT_CHARACTERS",
    "Diagnostics",
    "Document",
    "Path",
    "parse",
    "path_text",
    "shown",
]

Path = tuple[str | int, ...]
"""Keys and list indices from the root of the document."""

MAX_DOCUMENT_CHARACTERS: Final = 4 * 2**20
"""Four times what a Kubernetes ConfigMap can hold; larger text is a mistake (a wrong file), not a configuration."""

MAX_DEPTH: Final = 64
"""Lists and mappings within each other; the schema needs six."""

_SHOWN_CHARACTERS: Final = 60


def path_text(path: Path) -> str:
    """Render a path as `pool.endpoints[2]`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def shown(value: object) -> str:
    """Name a value of a document in a message, cut to a readable length."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case int() | float():
            text = f"{value:.6g}" if isinstance(value, float) or abs(value) > 10**18 else str(value)
            return f"the number {text}"
        case str():
            cut = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "..."
            return f"the text {json.dumps(cut, ensure_ascii=False)}"
        case list():
            return f"a list of {len(value)} items" if value else "an empty list"
        case _:
            return "a mapping"


class Diagnostics:
    """Problems collected while a document is read, sorted into document order at the end."""

    def __init__(self, positions: Mapping[Path, tuple[int, int]] | None = None) -> None:
        self._positions = {} if positions is None else positions
        self._found: list[tuple[tuple[int, int], Path, ConfigProblem]] = []

    def add(self, path: Path, message: str, remedy: str = "", *, at: tuple[int, int] | None = None) -> None:
        """Add one problem; `at` is (line, column) from 0 where that is not the position of `path`."""
        where = at or self._position(path)
        line = where[0] + 1 if where != _NOWHERE else 0
        self._found.append((where, path, ConfigProblem(path_text(path), message, remedy, line)))

    def touches(self, *paths: Path) -> bool:
        """Tell whether one of these values, something in it or something around it has a problem already."""
        return any(
            found[: len(path)] == path or path[: len(found)] == found for _, found, _ in self._found for path in paths
        )

    def raise_if_any(self, source: str) -> None:
        """Raise ConfigError with all problems, in document order."""
        if self._found:
            ordered = sorted(self._found, key=lambda entry: entry[0])
            raise ConfigError(tuple(problem for _, _, problem in ordered), source=source)

    def _position(self, path: Path) -> tuple[int, int]:
        """Find the position of a value, or of the nearest value around it (a missing key has none)."""
        for length in range(len(path), -1, -1):
            if (place := self._positions.get(path[:length])) is not None:
                return place
        return _NOWHERE


_NOWHERE: Final = (-1, -1)


@dataclass(frozen=True, slots=True)
class Document:
    """Plain values (dict, list, str, int, float, bool, None) and the problems found."""

    value: object
    diagnostics: Diagnostics


class _Loader(yaml.SafeLoader):
    """PyYAML's composer with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own spelling

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 - PyYAML's own spelling
        """Refuse deep nesting early: PyYAML's time is quadratic in it."""
        self._refuse_depth(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        self._refuse_depth(len(self.indents))
        return bool(super().add_indent(column))

    def _refuse_depth(self, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise yaml.scanner.ScannerError(problem="nested too deeply", problem_mark=self.get_mark())


_INT: Final = "tag:yaml.org,2002:int"
FLOAT_TAG: Final = "tag:yaml.org,2002:float"
FLOAT_PATTERN: Final = (
    r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan)\Z"
)
_BOOL: Final = "tag:yaml.org,2002:bool"
_NULL: Final = "tag:yaml.org,2002:null"
_STR: Final = "tag:yaml.org,2002:str"
_MERGE: Final = "tag:yaml.org,2002:merge"

for _tag, _pattern, _first in (
    (_NULL, r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    (_BOOL, r"(?:true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    (_INT, r"[-+]?(?:0|[1-9][0-9]*)\Z", list("-+0123456789")),
    (FLOAT_TAG, FLOAT_PATTERN, list("-+0123456789.")),
    (_MERGE, r"<<\Z", ["<"]),
):
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def parse(text: str | bytes, *, source: str = "") -> Document:
    """Read one document; problems inside it are in `diagnostics`, text that is not a document raises ConfigError.

    An empty text is the value None. Pure Python: a long list of endpoints takes a while, so a running picker calls it in a thread.
    """
    node = _compose(_decode(text, source), source)
    positions: dict[Path, tuple[int, int]] = {}
    diagnostics = Diagnostics(positions)
    if node is None:
        return Document(None, diagnostics)
    positions[()] = _place(node)
    return Document(_Builder(positions, diagnostics).value(node, ()), diagnostics)


def _decode(text: str | bytes, source: str) -> str:
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _broken(source, f"not UTF-8 text (at byte {error.start})", "save the file as UTF-8") from None
    if len(text) > MAX_DOCUMENT_CHARACTERS:
        raise _broken(source, f"{len(text)} characters; the limit is {MAX_DOCUMENT_CHARACTERS}")
    if "\t" in text and text.lstrip().startswith(("{", "[")):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return text
        # JSON may be indented with tabs, which YAML forbids; a tab in JSON is never part of a value.
        return text.replace("\t", "    ")
    return text


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise _broken(source, f"not readable as YAML: {what}", line=mark.line + 1 if mark else 0) from error
    except yaml.YAMLError as error:
        what = " ".join(str(error).split())
        raise _broken(source, f"not readable as YAML: {what}") from error
    except (ValueError, OverflowError) as error:  # PyYAML on escapes such as "\UFFFFFFFF"
        raise _broken(source, f"not readable as YAML: {error}") from error


def _broken(source: str, message: str, remedy: str = "", line: int = 0) -> ConfigError:
    return ConfigError((ConfigProblem("", message, remedy, line),), source=source)


def _place(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line, node.start_mark.column


class _Builder:
    """Turns nodes into plain values. A node that an alias refers to is built once, so that aliases cannot multiply it."""

    def __init__(self, positions: dict[Path, tuple[int, int]], diagnostics: Diagnostics) -> None:
        self._positions = positions
        self._diagnostics = diagnostics
        self._built: dict[int, object] = {}
        self._open: set[int] = set()

    def value(self, node: yaml.Node, path: Path) -> object:
        key = id(node)
        if key in self._open:
            self._diagnostics.add(path, "an alias contains itself", "remove the alias", at=_place(node))
            return None
        if key not in self._built:
            self._open.add(key)
            self._built[key] = self._build(node, path)
            self._open.discard(key)
        return self._built[key]

    def _build(self, node: yaml.Node, path: Path) -> object:
        match node:
            case yaml.MappingNode() if node.tag == "tag:yaml.org,2002:map":
                return self._mapping(node, path)
            case yaml.SequenceNode() if node.tag == "tag:yaml.org,2002:seq":
                items: list[object] = []
                for index, item in enumerate(node.value):
                    self._positions.setdefault((*path, index), _place(item))
                    items.append(self.value(item, (*path, index)))
                return items
            case yaml.ScalarNode() if node.tag in {_STR, _INT, FLOAT_TAG, _BOOL, _NULL, _MERGE}:
                return self._scalar(node, path)
            case _:
                self._diagnostics.add(path, f"the tag {node.tag} is not supported", "remove the tag")
                return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            at = _place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._diagnostics.add(path, "a list or mapping is used as a key", "write the key as plain text", at=at)
                continue
            if key_node.tag == _MERGE:
                self._diagnostics.add(path, "merge keys (`<<`) are not supported", "write out the keys", at=at)
                continue
            key = _clean(str(key_node.value))
            below = (*path, key)
            if key in values:
                first = self._positions[below][0] + 1
                self._diagnostics.add(below, f"duplicate key, first on line {first}", "remove one of them", at=at)
                continue
            self._positions.setdefault(below, at)
            values[key] = self.value(value_node, below)
        return values

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> object:
        text = str(node.value)
        try:
            match node.tag:
                case tag if tag == _NULL:
                    return None
                case tag if tag == _BOOL:
                    return {"true": True, "false": False}[text.lower()]
                case tag if tag == _INT:
                    return int(text)
                case tag if tag == FLOAT_TAG:
                    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
                case _:
                    return _clean(text)
        except (ValueError, KeyError):  # an explicit tag such as `!!int abc`, or thousands of digits
            self._diagnostics.add(path, f"{shown(text)} cannot be read as {node.tag.rpartition(':')[2]}")
            return None


def _clean(text: str) -> str:
    r"""Join surrogate pairs, which JSON's `\ud83d\ude00` leaves as two; a lone one becomes a replacement character."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
