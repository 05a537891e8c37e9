"""Counters, gauges, histograms and collectors, against what prometheus-client makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as TheirHistogram

from extproc.edge.observability.instruments import Definition, Instruments, markdown_table


def made() -> tuple[CollectorRegistry, Instruments]:
    registry = CollectorRegistry()
    return registry, Instruments(registry)


def test_counters() -> None:
    registry, instruments = made()
    counter = instruments.counter("extproc_x_total", "Text.", "a", "b")
    counter.add(("1", "2"))
    counter.add(("1", "2"), 2.5)
    counter.add(("3", "2"))
    assert registry.get_sample_value("extproc_x_total", {"a": "1", "b": "2"}) == 3.5
    counter.keep(0, frozenset({"3"}))
    assert registry.get_sample_value("extproc_x_total", {"a": "1", "b": "2"}) is None
    assert registry.get_sample_value("extproc_x_total", {"a": "3", "b": "2"}) == 1


def test_gauges() -> None:
    registry, instruments = made()
    gauge = instruments.gauge("extproc_g", "Text.", 4)
    gauge.value -= 1
    assert registry.get_sample_value("extproc_g") == 3


def test_label_values_are_escaped() -> None:
    registry, instruments = made()
    instruments.counter("extproc_x_total", "Text.", "a").add(('"\n\\',))
    assert 'a="\\"\\n\\\\"' in generate_latest(registry).decode()


@given(st.lists(st.floats(0, 10)))
def test_histograms_agree_with_prometheus_client(observations: list[float]) -> None:
    registry, instruments = made()
    bounds = (0.0, 0.5, 1.0, 2.5, 5.0)
    ours = instruments.histogram("extproc_h", "Text.", bounds)
    theirs_registry = CollectorRegistry()
    theirs = TheirHistogram("extproc_h", "Text.", buckets=bounds, registry=theirs_registry)
    for observation in observations:
        ours.observe(observation)
        theirs.observe(observation)
    page = [line for line in generate_latest(theirs_registry).decode().splitlines() if "_created" not in line]
    assert generate_latest(registry).decode().splitlines() == page


def test_bounds_ascend() -> None:
    with pytest.raises(AssertionError):
        made()[1].histogram("extproc_h", "Text.", (1.0, 0.5))


@pytest.mark.parametrize(
    ("name", "kind"), [("x_total", "counter"), ("extproc_x", "counter"), ("extproc_x_total", "gauge")]
)
def test_names_follow_the_conventions(name: str, kind: str) -> None:
    with pytest.raises(AssertionError):
        Definition(name, kind, "Text.")  # type: ignore[arg-type]


def test_readings() -> None:
    registry, instruments = made()
    rows: list[tuple[tuple[str, ...], tuple[float | None, ...]]] = [(("a",), (1, None)), (("b",), (2, 3))]
    instruments.collector(
        (Definition("extproc_r", "gauge", "R.", ("l",)), Definition("extproc_s_total", "counter", "S.", ("l",))),
        lambda: rows,
    )
    assert registry.get_sample_value("extproc_r", {"l": "a"}) == 1
    assert registry.get_sample_value("extproc_s_total", {"l": "a"}) is None
    assert registry.get_sample_value("extproc_s_total", {"l": "b"}) == 3
    rows.clear()
    assert registry.get_sample_value("extproc_r", {"l": "a"}) is None


def test_the_table() -> None:
    table = markdown_table([Definition("extproc_r", "gauge", "R.", ("l",)), Definition("extproc_s", "histogram", "S.")])
    assert table.splitlines()[2:] == ["| `extproc_r` | gauge | `l` | R. |", "| `extproc_s` | histogram | - | S. |"]
