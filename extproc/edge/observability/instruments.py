"""Cheap counters, gauges and histograms, exposed through prometheus-client.

prometheus-client's own counters take a lock and look up a child object for each event; a request has a dozen events. Here
an event is one operation on a dictionary or list, and prometheus-client's families are built on each scrape. Not safe for
threads: events and scrapes must come from the event loop's thread. `telemetry` defines the metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

__all__ = ["Counter", "Definition", "FamilyCollector", "Gauge", "Histogram", "Instruments", "markdown_table"]

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
_I = TypeVar("_I", "Counter", "Gauge", "Histogram", "FamilyCollector")


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric family as it is exposed and documented."""

    name: str
    """As exposed: a counter ends in `_total`."""
    kind: Kind
    help: str
    labels: Labels = ()

    def __post_init__(self) -> None:
        """Check the name: prefix `extproc_`, and `_total` on counters only."""
        assert self.name.startswith("extproc_"), self.name
        assert self.name.endswith("_total") == (self.kind == "counter"), self.name

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Make an empty family of prometheus-client, for a counter or a gauge."""
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return make(self.name.removesuffix("_total"), self.help, labels=self.labels)


def markdown_table(definitions: Iterable[Definition]) -> str:
    """Render the table of `docs/metrics.md`."""
    rows = [
        f"| `{found.name}` | {found.kind} | {', '.join(f'`{label}`' for label in found.labels) or '-'} | {found.help} |"
        for found in definitions
    ]
    return "\n".join(("| metric | kind | labels | meaning |", "|---|---|---|---|", *rows)) + "\n"


class Counter:
    """Numbers that only grow, by label values."""

    __slots__ = ("definition", "values")

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.values: defaultdict[Labels, float] = defaultdict(int)
        """What is counted with each request is added here directly, which saves the call of `add`."""
        if not definition.labels:
            self.values[()] = 0

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Count `amount` for these label values."""
        self.values[labels] += amount

    def begin(self, *labels: str) -> None:
        """Expose the series of these label values with 0: `rate()` does not see the first event of a new series."""
        self.values[labels] += 0

    def keep(self, position: int, allowed: frozenset[str]) -> None:
        """Remove the series whose label at `position` is not among the allowed values."""
        for labels in [labels for labels in self.values if labels[position] not in allowed]:
            del self.values[labels]

    def collect(self) -> Iterator[Metric]:
        """Build prometheus-client's family."""
        family = self.definition.family()
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        yield family


class Gauge:
    """One number without labels that goes up and down."""

    __slots__ = ("definition", "value")

    def __init__(self, definition: Definition, value: float = 0) -> None:
        self.definition = definition
        self.value = value

    def collect(self) -> Iterator[Metric]:
        """Build prometheus-client's family."""
        family = self.definition.family()
        family.add_metric((), self.value)
        yield family


class Histogram:
    """Observations counted by bucket, without labels."""

    __slots__ = ("_names", "bounds", "counts", "definition", "total")

    def __init__(self, definition: Definition, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bucket bounds ascend"
        self.definition = definition
        self.bounds: Final = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._names = [*(_bound_text(bound) for bound in bounds), "+Inf"]

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def collect(self) -> Iterator[Metric]:
        """Build prometheus-client's family."""
        family = HistogramMetricFamily(self.definition.name, self.definition.help)
        running, buckets = 0, []
        for name, count in zip(self._names, self.counts, strict=True):
            running += count
            buckets.append((name, float(running)))
        family.add_metric((), buckets, self.total)
        yield family


class FamilyCollector:
    """Families whose values are read when somebody scrapes, all in one pass over their source.

    `read` yields rows: the label values, and one value per definition in the same order; None: no such series.
    """

    __slots__ = ("definitions", "read")

    def __init__(
        self,
        definitions: Sequence[Definition],
        read: Callable[[], Iterable[tuple[Labels, Sequence[float | None]]]],
    ) -> None:
        self.definitions = tuple(definitions)
        self.read = read

    def collect(self) -> Iterator[Metric]:
        """Build prometheus-client's families in one pass over the source."""
        families = [definition.family() for definition in self.definitions]
        for labels, values in self.read():
            for family, value in zip(families, values, strict=True):
                if value is not None:
                    family.add_metric(labels, value)
        yield from families


def _bound_text(bound: float) -> str:
    """Write a bucket's bound as all Prometheus clients do."""
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text


class Instruments(Collector):
    """All instruments of one program, exposed through one prometheus-client collector."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._instruments: list[Counter | Gauge | Histogram | FamilyCollector] = []
        self.definitions: list[Definition] = []
        registry.register(self)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Make a counter."""
        return self._add(Counter(Definition(name, "counter", text, labels)))

    def gauge(self, name: str, text: str, value: float = 0) -> Gauge:
        """Make a gauge without labels."""
        return self._add(Gauge(Definition(name, "gauge", text), value))

    def histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        """Make a histogram without labels."""
        return self._add(Histogram(Definition(name, "histogram", text), bounds))

    def collector(
        self,
        definitions: Sequence[Definition],
        read: Callable[[], Iterable[tuple[Labels, Sequence[float | None]]]],
    ) -> None:
        """Expose values that `read` returns at a scrape."""
        self._add(FamilyCollector(definitions, read))

    def collect(self) -> Iterator[Metric]:
        """Build all families; called by prometheus-client."""
        for instrument in self._instruments:
            yield from instrument.collect()

    def describe(self) -> Iterator[Metric]:
        """Return no family: prometheus-client asks on registration, before there are sources."""
        return iter(())

    def _add(self, instrument: _I) -> _I:
        self._instruments.append(instrument)
        match instrument:
            case FamilyCollector():
                self.definitions.extend(instrument.definitions)
            case _:
                self.definitions.append(instrument.definition)
        return instrument
