"""Read the signals that routing needs from an engine's metrics page, without parsing the page.

All series of a family count: data-parallel ranks are summed (KV cache usage: mean). How families are found on a page is
the concern of `page`; what the values mean for routing, and when pages are fetched, is not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache, wraps
from operator import attrgetter
from types import MappingProxyType
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from extproc.edge.scraping.engines import ENGINES, Signal
from extproc.edge.scraping.page import LARGEST, Series, find_families, number
from extproc.types import EndpointMetrics

__all__ = ["has_load", "read_metrics", "read_models", "signal_names"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_REMEMBERED_BYTES = 4096
"""Longest label text whose parsed form is kept, so that no page can fill the memory."""
_SIGNALS = tuple(field.name for field in fields(EndpointMetrics) if field.name not in {"models", "scrape_s"})
_VALUES = attrgetter(*_SIGNALS)
_NOTHING = (0.0,)
_SHARED_RANKS = (b"tp_rank", b"pp_rank", b"moe_ep_rank")
"""SGLang with `--enable-metrics-for-all-schedulers`: these ranks repeat one scheduler's numbers; `dp_rank` does not."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """One engine's table, prepared for reading pages."""

    wanted: tuple[tuple[Signal | None, bytes], ...]
    """Families to look for, info families last, in the order in which they mostly stand on the page."""
    load: tuple[bytes, ...]
    """The families of waiting and running requests."""
    cache_labels: tuple[bytes, bytes, bytes]
    cache_info: bytes
    lora_info: bytes
    sources: tuple[tuple[Signal, bytes, tuple[bytes, bytes] | None], ...]


class _Model(msgspec.Struct):
    """One entry of `/v1/models`; vLLM names an adapter's base model as `parent`."""

    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_MODELS = msgspec.json.Decoder(_Models)


def read_metrics(page: bytes, engine: str, *, scrape_s: float = 0.0) -> EndpointMetrics:
    """Read one page as `engine` (a key of `ENGINES`; KeyError otherwise) writes it; `scrape_s` is passed through.

    Never raises for any page: what is absent, damaged, negative or not finite is None, so a page that is no metrics
    page gives only None (see `has_load`). Cost: linear in the page.
    """
    reader = _reader(engine)
    families = find_families(page, reader.wanted)
    found: dict[Signal, list[float]] = {}
    for signal, family, where in reader.sources:
        series = families.get(family)
        if series is not None and signal not in found:
            values = [series[0][1]] if len(series) == 1 and where is None else _values(series, where)
            if values:
                found[signal] = values
    cache_tokens, block_tokens = _cache(reader, found, families)
    lora = families.get(reader.lora_info)
    lora_max, lora_running, lora_waiting = _lora(lora) if lora else (None, None, None)
    kv_cache_usage = found.get(Signal.KV_CACHE_USAGE)
    process_start = found.get(Signal.PROCESS_START)
    return EndpointMetrics(
        waiting=_sum(found.get(Signal.WAITING)),
        running=_sum(found.get(Signal.RUNNING)),
        kv_cache_usage=min(sum(kv_cache_usage) / len(kv_cache_usage), 1.0) if kv_cache_usage else None,
        cache_tokens=cache_tokens,
        block_tokens=block_tokens,
        lora_running=lora_running,
        lora_waiting=lora_waiting,
        lora_max=lora_max,
        prompt_tokens_total=_sum(found.get(Signal.PROMPT_TOKENS)),
        generation_tokens_total=_sum(found.get(Signal.GENERATION_TOKENS)),
        prefix_queries_total=_sum(found.get(Signal.PREFIX_QUERIES)),
        prefix_hits_total=_sum(found.get(Signal.PREFIX_HITS)),
        requests_total=_sum(found.get(Signal.REQUESTS)),
        process_start_time_s=max(process_start) if process_start else None,
        models=_model_names(reader, families),
        scrape_s=scrape_s,
    )


def has_load(metrics: EndpointMetrics) -> bool:
    """Tell whether a page had any signal of the endpoint's load; if not, it was not a metrics page of this engine."""
    return metrics.waiting is not None or metrics.running is not None or metrics.kv_cache_usage is not None


def signal_names(metrics: EndpointMetrics) -> frozenset[str]:
    """Name the signals that a page had; `models` too, where it named any."""
    names = [name for name, value in zip(_SIGNALS, _VALUES(metrics), strict=True) if value is not None]
    return frozenset([*names, "models"] if metrics.models else names)


def read_models(body: bytes) -> dict[str, str | None] | None:
    """Read `/v1/models`: each model or adapter name with its parent (None: a base model); None: not such a list."""
    try:
        return {model.id: model.parent for model in _MODELS.decode(body).data}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


@cache
def _reader(engine: str) -> _Reader:
    """Prepare an engine's table; at most one entry per engine is kept."""
    table = ENGINES[engine]
    sources = tuple((source.signal, source.family.encode(), _encoded(source.where)) for source in table.sources)
    infos = tuple((None, info.encode()) for info in table.infos)
    wanted = (*((signal, family) for signal, family, _ in sources), *infos)
    capacity, size, blocks = (label.encode() for label in table.cache_labels)
    return _Reader(
        sources=sources,
        wanted=wanted,
        load=tuple(family for signal, family, _ in sources if signal in {Signal.WAITING, Signal.RUNNING}),
        cache_info=table.cache_info.encode(),
        cache_labels=(capacity, size, blocks),
        lora_info=table.lora_info.encode(),
    )


def _encoded(where: tuple[str, str] | None) -> tuple[bytes, bytes] | None:
    return None if where is None else (where[0].encode(), where[1].encode())


def _remembered(read: Callable[Concatenate[bytes, _P], _R]) -> Callable[Concatenate[bytes, _P], _R]:
    """Keep the parsed form of short label texts: the same ones come with every scrape."""
    kept = lru_cache(maxsize=256)(read)

    @wraps(read)
    def remembering(text: bytes, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return (kept if len(text) <= _REMEMBERED_BYTES else read)(text, *args, **kwargs)  # type: ignore[arg-type]

    return remembering


@_remembered
def _labels(text: bytes) -> Mapping[bytes, bytes]:
    """Split label text."""
    return MappingProxyType(dict(_LABEL.findall(text)))


def _text(value: bytes) -> str:
    """Decode a label value: UTF-8, with the escapes of the exposition format."""
    text = value.decode("utf-8", "replace")
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text) if "\\" in text else text


def _values(series: Series, where: tuple[bytes, bytes] | None) -> list[float]:
    """Return the values of the series that count, each queue once."""
    if where is not None:
        return [value for labels, value in series if _labels(labels).get(where[0]) == where[1]]
    if b"tp_rank=" not in series[0][0]:
        return [value for _, value in series]
    queues: dict[frozenset[tuple[bytes, bytes]], float] = {}
    for labels, value in series:
        own = frozenset(item for item in _labels(labels).items() if item[0] not in _SHARED_RANKS)
        queues[own] = max(queues.get(own, 0.0), value)
    return list(queues.values())


def _sum(values: list[float] | None) -> float | None:
    return None if values is None else sum(values)


def _cache(
    reader: _Reader, found: Mapping[Signal, list[float]], families: Mapping[bytes, Series]
) -> tuple[int | None, int | None]:
    """Find the capacity of the KV cache (all ranks) and the size of a block, both in tokens."""
    tokens = _sum(found.get(Signal.CACHE_TOKENS))
    block_tokens = max(found.get(Signal.BLOCK_TOKENS, _NOTHING))
    blocks = _sum(found.get(Signal.BLOCKS))
    if tokens is None and blocks is not None and block_tokens:
        tokens = blocks * block_tokens
    series = families.get(reader.cache_info)
    if series:
        from_labels = [_cache_labels(labels, reader.cache_labels) for labels, _ in series]
        if tokens is None:
            tokens = sum([capacity for capacity, _ in from_labels])
        block_tokens = block_tokens or max([size for _, size in from_labels])
    return (int(tokens) or None) if tokens is not None else None, int(block_tokens) or None


@_remembered
def _cache_labels(text: bytes, names: tuple[bytes, bytes, bytes]) -> tuple[float, float]:
    """Read one rank's capacity and block size, in tokens; 0 where the labels do not say (`None` is a value there)."""
    labels = _labels(text)
    capacity, block_tokens, blocks = (number(labels.get(name, b"")) or 0.0 for name in names)
    return capacity or min(block_tokens * blocks, LARGEST), block_tokens


def _lora(series: Series) -> tuple[int | None, frozenset[str] | None, frozenset[str] | None]:
    """Read adapter slots, running and waiting adapters.

    vLLM keeps one series for each combination it ever had; its value is the Unix time at which it held, so the largest
    is the present one.
    """
    labels = _labels(max(series, key=lambda item: item[1])[0]) if series else {}
    slots = number(labels.get(b"max_lora", b""))
    if slots is None:
        return None, None, None
    running, waiting = (
        frozenset(name.strip() for name in _text(labels.get(key, b"")).split(",") if name.strip())
        for key in (b"running_lora_adapters", b"waiting_lora_adapters")
    )
    return int(slots), running, waiting


def _model_names(reader: _Reader, families: Mapping[bytes, Series]) -> frozenset[str]:
    """Collect the `model_name` labels of the load families, whose series every model has from the start."""
    seen = {labels for family in reader.load for labels, _ in families.get(family, ())}
    return frozenset([name for labels in seen if (name := _model_name(labels))])


@_remembered
def _model_name(text: bytes) -> str:
    return _text(_labels(text).get(b"model_name", b""))
