"""Parses the endpoints file, YAML or JSON, with the same kind of errors as the configuration.

Decides the file's format; host names are resolved and the file is watched in `edge.discovery.sources`.
"""
# ruff: noqa: RUF012 - msgspec copies an empty list or dictionary for each instance

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from extproc.config.check import check
from extproc.config.document import Diagnostics, Path, parse, shown
from extproc.config.values import Section, parse_endpoint

__all__ = ["EndpointEntry", "load_endpoints"]


class EndpointEntry(Section, frozen=True):
    """One entry of the endpoints file in its long form; the short form is just `host:port`."""

    address: Annotated[
        str, Meta(min_length=1, description="Host name, IPv4 or IPv6 address (without brackets). Names are resolved.")
    ]
    port: Annotated[int, Meta(ge=1, le=65535, description="Port of the engine.")]
    name: Annotated[str, Meta(description="What a person calls it; shown beside the address.")] = ""
    models: Annotated[
        list[str], Meta(description="Models and adapters it serves; empty: as `pool.models`, else learned from it.")
    ] = []
    labels: Annotated[dict[str, str], Meta(description="Free labels, shown on the admin page.")] = {}


def load_endpoints(text: str | bytes, *, source: str = "") -> tuple[EndpointEntry, ...]:
    """Read a list of endpoints, or a mapping whose only key `endpoints` holds one.

    An empty list is a valid answer (no endpoints); an empty file is not: more likely it is being written. Raises
    ConfigError with every problem, in document order.
    """
    document = parse(text, source=source)
    diagnostics = document.diagnostics
    items = document.value
    if isinstance(items, dict):
        return _finished(_from_mapping(items, diagnostics), diagnostics, source)
    if not isinstance(items, list):
        diagnostics.add((), f"found {shown(items)}; allowed: a list, or a mapping with the key `endpoints`")
        return _finished([], diagnostics, source)
    return _finished(_entries(items, (), diagnostics), diagnostics, source)


def _from_mapping(document: dict[str, object], diagnostics: Diagnostics) -> list[EndpointEntry]:
    for key in document:
        if key != "endpoints":
            diagnostics.add((key,), "unknown key", "allowed here: `endpoints`")
    items = document.get("endpoints")
    if not isinstance(items, list):
        what = f"found {shown(items)}" if "endpoints" in document else "missing"
        diagnostics.add(("endpoints",), f"{what}; allowed: a list", "write [] for an empty list")
        return []
    return _entries(items, ("endpoints",), diagnostics)


def _entries(items: list[object], path: Path, diagnostics: Diagnostics) -> list[EndpointEntry]:
    entries = []
    for index, item in enumerate(items):
        at = (*path, index)
        entry: EndpointEntry | None = None
        match item:
            case str():
                entry = _short(item, at, diagnostics)
            case dict():
                entry = check(EndpointEntry, item, diagnostics, at)
                if entry is not None and not diagnostics.touches((*at, "address"), (*at, "port")):
                    entry = _normal(entry, at, diagnostics)
            case _:
                diagnostics.add(
                    at, f"found {shown(item)}; allowed: `host:port`, or a mapping with `address` and `port`"
                )
        if entry is not None:
            entries.append(entry)
    return entries


def _short(text: str, at: Path, diagnostics: Diagnostics) -> EndpointEntry | None:
    try:
        host, port = parse_endpoint(text)
    except ValueError as error:
        diagnostics.add(at, f"found {shown(text)}; {error}", "write host:port, or [IPv6]:port")
        return None
    return EndpointEntry(address=host, port=port)


def _normal(entry: EndpointEntry, at: Path, diagnostics: Diagnostics) -> EndpointEntry | None:
    """Check the address and give IPv6 its one spelling."""
    bracketed = f"[{entry.address}]" if ":" in entry.address else entry.address
    try:
        host, port = parse_endpoint(f"{bracketed}:{entry.port}")
    except ValueError as error:
        diagnostics.add((*at, "address"), f"found {shown(entry.address)}; {error}")
        return None
    return EndpointEntry(address=host, port=port, name=entry.name, models=entry.models, labels=entry.labels)


def _finished(entries: list[EndpointEntry], diagnostics: Diagnostics, source: str) -> tuple[EndpointEntry, ...]:
    diagnostics.raise_if_any(source)
    return tuple(entries)
