"""Writes YAML with comments above given places.

PyYAML drops comments, so this writes the block style itself (mappings, lists, scalars: all that proto JSON has) and leaves
the quoting of scalars to PyYAML. It knows nothing of Envoy.

A place is named by the end of its path, steps joined by `/`: the key of a mapping, the `name` of a list's element, or
else its index. `picker/health_checks/0/interval` is a place; so is `health_checks/0/interval` if there is only one.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

WIDTH = 120


def dump(document: Mapping[str, Any], comments: Mapping[str, str], *, head: str = "") -> str:
    """Write `document` as YAML, each comment above its place, `head` on top.

    A comment whose place is missing or ambiguous raises LookupError: comments have to stay true.
    """
    places = [path for path, _ in _walk(document, ())]
    chosen: dict[tuple[str, ...], str] = {}
    for place, text in comments.items():
        steps = tuple(place.split("/"))
        found = [path for path in places if path[-len(steps) :] == steps]
        if len(found) != 1:
            raise LookupError(f"comment for {place!r}: {len(found)} places instead of one: {found}")
        chosen[found[0]] = text
    lines = [*_comment(head, 0), *_mapping(document, (), 0, chosen)]
    return "\n".join(lines) + "\n"


def _walk(node: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    for step, child in _children(node):
        yield (*path, step), child
        yield from _walk(child, (*path, step))


def _children(node: object) -> list[tuple[str, object]]:
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
    if isinstance(node, list):
        return [(_step(index, item), item) for index, item in enumerate(node)]
    return []


def _step(index: int, item: object) -> str:
    name = item.get("name") if isinstance(item, Mapping) else None
    return name if isinstance(name, str) else str(index)


def _comment(text: str, indent: int) -> list[str]:
    """Wrap a comment; an empty line in it stays a line of its own, a line that begins with a space is not wrapped."""
    margin = " " * indent + "#"
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" ") or not line:
            lines.append(f"{margin}{line}".rstrip())
        else:
            lines += [f"{margin} {part}" for part in textwrap.wrap(line, WIDTH - indent - 2)]
    return lines


def _mapping(
    node: Mapping[str, Any], path: tuple[str, ...], indent: int, comments: Mapping[tuple[str, ...], str]
) -> list[str]:
    lines: list[str] = []
    for key, value in node.items():
        here = (*path, str(key))
        lines += _comment(comments.get(here, ""), indent)
        lines += _entry(f"{' ' * indent}{_scalar(key)}:", value, here, indent, comments)
    return lines


def _entry(
    start: str, value: object, path: tuple[str, ...], indent: int, comments: Mapping[tuple[str, ...], str]
) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [start, *_mapping(value, path, indent + 2, comments)]
    if isinstance(value, list) and value:
        return [start, *_list(value, path, indent, comments)]
    if isinstance(value, str) and _is_plain_block(value):
        margin = " " * (indent + 2)
        return [f"{start} |", *(f"{margin}{line}".rstrip() for line in value.removesuffix("\n").split("\n"))]
    return [f"{start} {_scalar(value)}"]


def _is_plain_block(text: str) -> bool:
    """Tell whether a multi-line text can be written as a literal block (`|`) and be read back unchanged."""
    lines = text.removesuffix("\n").split("\n")
    well_ended = text.endswith("\n") and lines[-1] != "" and not text.startswith((" ", "\n"))
    return well_ended and all(line.isprintable() and line == line.rstrip() for line in lines)


def _list(
    items: Sequence[object], path: tuple[str, ...], indent: int, comments: Mapping[tuple[str, ...], str]
) -> list[str]:
    lines: list[str] = []
    for index, item in enumerate(items):
        here = (*path, _step(index, item))
        lines += _comment(comments.get(here, ""), indent)
        if isinstance(item, Mapping) and item:
            # Comments of an element's first key would come between the dash and the key: they go above the dash.
            body = _mapping(item, here, indent + 2, comments)
            first = next(i for i, line in enumerate(body) if not line.lstrip().startswith("#"))
            lines += [line[2:] for line in body[:first]]
            lines += [f"{' ' * indent}- {body[first][indent + 2 :]}", *body[first + 1 :]]
        else:
            lines.append(f"{' ' * indent}- {_scalar(item)}")
    return lines


def _scalar(value: object) -> str:
    """Write one scalar (or an empty mapping or list) on one line, quoted where YAML needs it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
