"""What is read when somebody scrapes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from extproc.edge.observability.collectors import Collectors, CollectorSources
from extproc.edge.observability.instruments import Instruments
from extproc.edge.observability.telemetry import Telemetry
from extproc.prefix.entries import EvictionCause, PrefixIndexStats
from extproc.types import Endpoint, EndpointSnapshot

A, B = Endpoint("10.0.0.1", 8000), Endpoint("2001:db8::1", 8000)


def value(made: Telemetry, name: str, **labels: str) -> float | None:
    return made.registry.get_sample_value(name, labels)


def test_endpoints_and_the_age_of_their_signals() -> None:
    snapshots = [
        EndpointSnapshot(A, observed_at=7.5, waiting=1, running=2, kv_cache_usage=0.5, health_score=0.25, demoted=True),
        EndpointSnapshot(B, in_flight=3, in_flight_tokens=400, scrape_failures=2, probation=0.25),
    ]
    made = Telemetry(CollectorSources(snapshots=lambda: snapshots, now=lambda: 10.0))
    a, b = A.id, "[2001:db8::1]:8000"
    assert value(made, "extproc_endpoint_signal_age_seconds", endpoint=a) == 2.5
    assert value(made, "extproc_endpoint_waiting_requests", endpoint=a) == 1
    assert value(made, "extproc_endpoint_running_requests", endpoint=a) == 2
    assert value(made, "extproc_endpoint_kv_cache_usage_ratio", endpoint=a) == 0.5
    assert value(made, "extproc_endpoint_health_score", endpoint=a) == 0.25
    assert value(made, "extproc_endpoint_demoted", endpoint=a) == 1
    assert value(made, "extproc_endpoint_on_probation", endpoint=a) == 0
    assert value(made, "extproc_endpoint_on_probation", endpoint=b) == 1
    assert value(made, "extproc_endpoint_in_flight_requests", endpoint=b) == 3
    assert value(made, "extproc_endpoint_in_flight_tokens", endpoint=b) == 400
    assert value(made, "extproc_endpoint_scrape_failures_in_a_row", endpoint=b) == 2
    # Unknown is not zero.
    assert value(made, "extproc_endpoint_signal_age_seconds", endpoint=b) is None
    assert value(made, "extproc_endpoint_waiting_requests", endpoint=b) is None
    snapshots.pop(0)
    assert value(made, "extproc_endpoint_in_flight_requests", endpoint=a) is None


def test_a_signal_is_never_younger_than_now() -> None:
    made = Telemetry(CollectorSources(snapshots=lambda: [EndpointSnapshot(A, observed_at=11.0)], now=lambda: 10.0))
    assert value(made, "extproc_endpoint_signal_age_seconds", endpoint=A.id) == 0


def test_who_gives_only_what_is_asked_for() -> None:
    snapshots = [EndpointSnapshot(A), EndpointSnapshot(B)]
    made = Telemetry(
        CollectorSources(snapshots=lambda: snapshots, scrape_selects=lambda endpoint_id: endpoint_id == A.id)
    )
    assert value(made, "extproc_endpoint_scrape_selected", endpoint=A.id) == 1
    assert value(made, "extproc_endpoint_scrape_selected", endpoint=B.id) == 0


def test_the_index() -> None:
    stats = PrefixIndexStats(2, 10, 15, 3, 7, 5, {EvictionCause.CAPACITY: 4})
    made = Telemetry(CollectorSources(index=lambda: stats))
    assert value(made, "extproc_prefix_index_blocks") == 10
    assert value(made, "extproc_prefix_index_held_blocks") == 15
    assert value(made, "extproc_prefix_index_nodes") == 3
    assert value(made, "extproc_prefix_index_bytes") == 3 * 400 + 10 * 8
    assert value(made, "extproc_prefix_lookups_total") == 7
    assert value(made, "extproc_prefix_hits_total") == 5
    assert value(made, "extproc_prefix_evicted_blocks_total", cause="capacity") == 4


def test_the_process() -> None:
    made = Telemetry()
    made.set_endpoints([A.id])
    assert value(made, "extproc_prefix_index_blocks") is None
    assert value(made, "extproc_endpoints") == 1
    assert value(made, "extproc_buffered_bytes") == 0
    assert value(made, "extproc_scrape_interval_stretch") == 1
    made.connect(CollectorSources(buffered_bytes=lambda: 5, log_dropped=lambda: 6, scrape_stretch=lambda: 2.5))
    assert value(made, "extproc_buffered_bytes") == 5
    assert value(made, "extproc_log_lines_dropped_total") == 6
    assert value(made, "extproc_scrape_interval_stretch") == 2.5


def test_reading_happens_only_when_somebody_scrapes() -> None:
    calls: list[int] = []

    def buffered() -> int:
        calls.append(1)
        return 0

    registry = CollectorRegistry()
    collectors = Collectors(Instruments(registry), CollectorSources(buffered_bytes=buffered), lambda: 0)
    assert calls == []
    assert registry.get_sample_value("extproc_buffered_bytes") == 0
    assert collectors.sources.buffered_bytes is buffered
    assert calls
