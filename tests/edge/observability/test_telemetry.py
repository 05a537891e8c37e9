"""Every metric: what keeps it, which labels it may have, and that it is documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from extproc.edge.observability.collectors import CollectorSources
from extproc.edge.observability.instruments import markdown_table
from extproc.edge.observability.telemetry import GONE, OTHER, Telemetry
from extproc.errors import NoEndpointError
from extproc.prefix.entries import EvictionCause, PrefixIndexStats
from extproc.types import Decision, Endpoint, EndpointSnapshot, Finished, Outcome, RequestKind, Usage

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/metrics.md"
A, B = Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000)
DECISION = Decision(
    id="0123456789abcdef",
    endpoint=A,
    fallbacks=(),
    strategy="weighted",
    scorers=(),
    candidates=(),
    filtered=(),
    note="",
    kind=RequestKind.CHAT,
    model="llama",
    prompt_bytes=400,
    matched_bytes=200,
    prompt_tokens=100,
    predicted_cached_tokens=50,
    decided_at=0.0,
)


def telemetry(sources: CollectorSources | None = None) -> Telemetry:
    made = Telemetry(sources, wall_clock=lambda: 1000.0)
    made.set_endpoints([A.id, B.id])
    made.set_models(["llama"])
    return made


def value(made: Telemetry, name: str, **labels: str) -> float | None:
    return made.registry.get_sample_value(name, labels)


def labels_of(made: Telemetry, family: str) -> set[tuple[str, ...]]:
    return {
        tuple(sample.labels.values())
        for found in made.registry.collect()
        for sample in found.samples
        if sample.name == family
    }


def test_decisions() -> None:
    made = telemetry()
    made.decided(DECISION, 60e-6, {})
    made.decided(replace(DECISION, endpoint=B, model="a client's invention", prompt_tokens=0), 0.3, {})
    assert value(made, "extproc_decisions_total", endpoint=A.id, strategy="weighted") == 1
    assert value(made, "extproc_decisions_total", endpoint=B.id, strategy="weighted") == 1
    assert value(made, "extproc_model_decisions_total", model="llama", kind="chat") == 1
    assert value(made, "extproc_model_decisions_total", model=OTHER, kind="chat") == 1
    assert value(made, "extproc_decision_duration_seconds_bucket", le="5e-05") == 0
    assert value(made, "extproc_decision_duration_seconds_bucket", le="0.0001") == 1
    assert value(made, "extproc_decision_duration_seconds_count") == 2
    assert value(made, "extproc_predicted_cached_ratio_bucket", le="0.4") == 0
    assert value(made, "extproc_predicted_cached_ratio_bucket", le="0.5") == 1
    assert value(made, "extproc_predicted_cached_ratio_count") == 1


def test_finished_requests_are_compared_with_the_prediction() -> None:
    made = telemetry()
    made.ended(Finished(DECISION, Outcome.OK, Usage(prompt_tokens=80, completion_tokens=10, cached_tokens=40), 1.0))
    made.ended(Finished(DECISION, Outcome.RESET, None, 1.0))
    assert value(made, "extproc_requests_total", endpoint=A.id, strategy="weighted", outcome="ok") == 1
    assert value(made, "extproc_requests_total", endpoint=A.id, strategy="weighted", outcome="reset") == 1
    assert value(made, "extproc_prompt_tokens_total", endpoint=A.id) == 80
    assert value(made, "extproc_completion_tokens_total", endpoint=A.id) == 10
    assert value(made, "extproc_compared_prompt_tokens_total", endpoint=A.id) == 80
    assert value(made, "extproc_reported_cached_tokens_total", endpoint=A.id) == 40
    assert value(made, "extproc_predicted_cached_tokens_total", endpoint=A.id) == 50
    assert value(made, "extproc_cached_prediction_error_ratio_sum") == pytest.approx(10 / 80)


def test_a_request_that_another_endpoint_answered_is_counted_there() -> None:
    made = telemetry()
    made.ended(
        Finished(
            DECISION, Outcome.OK, Usage(prompt_tokens=80, completion_tokens=10, cached_tokens=40), 1.0, served_by=B.id
        )
    )
    assert value(made, "extproc_rerouted_requests_total", endpoint=A.id) == 1
    assert labels_of(made, "extproc_requests_total") == {(B.id, "weighted", "ok")}
    assert value(made, "extproc_prompt_tokens_total", endpoint=B.id) == 80
    assert value(made, "extproc_compared_prompt_tokens_total", endpoint=B.id) is None, "nothing was predicted for it"
    made.ended(Finished(DECISION, Outcome.OK, None, 1.0, served_by="10.9.9.9:1"))
    assert value(made, "extproc_requests_total", endpoint=GONE, strategy="weighted", outcome="ok") == 1


@pytest.mark.parametrize(
    ("usage", "prompt"),
    [
        (Usage(completion_tokens=1), None),
        (Usage(prompt_tokens=7), 7),
        (Usage(prompt_tokens=0, cached_tokens=0), 0),
    ],
)
def test_usage_that_says_little(usage: Usage, prompt: float | None) -> None:
    made = telemetry()
    made.ended(Finished(DECISION, Outcome.OK, usage, 1.0))
    assert value(made, "extproc_prompt_tokens_total", endpoint=A.id) == prompt
    assert value(made, "extproc_cached_prediction_error_ratio_count") == 0


def test_series_of_endpoints_that_left_are_removed_and_late_events_count_as_gone() -> None:
    made = telemetry()
    made.decided(DECISION, 0.001, {})
    made.ended(Finished(DECISION, Outcome.OK, Usage(1, 1, 1), 1.0))
    made.scrape_failed(A.id, "timeout")
    made.set_endpoints([B.id])
    assert A.id not in generate_latest(made.registry).decode()
    made.decided(DECISION, 0.001, {})
    made.ended(Finished(DECISION, Outcome.ENDPOINT_GONE, None, 1.0))
    made.scrape_failed(A.id, "timeout")
    assert labels_of(made, "extproc_decisions_total") == {(GONE, "weighted")}
    assert value(made, "extproc_requests_total", endpoint=GONE, strategy="weighted", outcome="endpoint_gone") == 1
    assert value(made, "extproc_scrape_errors_total", endpoint=GONE, reason="timeout") == 1
    made.set_endpoints([])
    assert value(made, "extproc_requests_total", endpoint=GONE, strategy="weighted", outcome="endpoint_gone") == 1


def test_series_of_models_nobody_serves_any_more_are_removed() -> None:
    made = telemetry()
    made.decided(DECISION, 0.001, {})
    made.decided(replace(DECISION, model="x"), 0.001, {})
    made.set_models(["other-model"])
    assert labels_of(made, "extproc_model_decisions_total") == {(OTHER, "chat")}


def test_the_wire() -> None:
    made = telemetry()
    made.stream_opened()
    made.stream_opened()
    made.stream_ended("completed")
    made.refused(NoEndpointError("none"), {})
    made.protocol_error("body_before_headers")
    made.deadline_passed()
    made.late_response("ResponseBody")
    made.body_cut("budget")
    made.internal_error("decide")
    made.access_log_streams(3)
    made.access_log_entry("final")
    made.ended(Finished(DECISION, Outcome.LEASE_EXPIRED, None, 1.0))
    assert value(made, "extproc_streams_open") == 1
    assert value(made, "extproc_streams_ended_total", how="completed") == 1
    assert value(made, "extproc_immediate_responses_total", status="503", reason="no_endpoint") == 1
    assert value(made, "extproc_protocol_errors_total", kind="body_before_headers") == 1
    assert value(made, "extproc_late_responses_total", kind="ResponseBody") == 1
    assert value(made, "extproc_decision_deadlines_passed_total") == 1
    assert value(made, "extproc_bodies_cut_total", why="budget") == 1
    assert value(made, "extproc_internal_errors_total", where="decide") == 1
    assert value(made, "extproc_access_log_streams") == 3
    assert value(made, "extproc_access_log_entries_total", kind="final") == 1
    assert value(made, "extproc_leases_expired_total") == 1


def test_counters_without_labels_begin_at_zero() -> None:
    assert value(telemetry(), "extproc_leases_expired_total") == 0


def test_upkeep() -> None:
    made = telemetry()
    made.scraped(0.02)
    made.scrape_failed(A.id, "timeout")
    made.discovery_failed("dns")
    assert value(made, "extproc_scrape_duration_seconds_count") == 1
    assert value(made, "extproc_scrape_errors_total", endpoint=A.id, reason="timeout") == 1
    assert value(made, "extproc_discovery_failures_total", source="dns") == 1


def test_configuration() -> None:
    made = telemetry()
    made.config_loaded(1)
    assert value(made, "extproc_config_last_reload_successful") == 1
    made.config_rejected()
    assert value(made, "extproc_config_last_reload_successful") == 0
    assert value(made, "extproc_config_generation") == 1
    assert value(made, "extproc_config_last_reload_success_timestamp_seconds") == 1000
    made.config_loaded(2)
    assert value(made, "extproc_config_generation") == 2
    assert value(made, "extproc_config_reloads_total", result="success") == 2
    assert value(made, "extproc_config_reloads_total", result="failure") == 1


def test_two_pickers_in_one_process_do_not_share() -> None:
    one, other = telemetry(), telemetry()
    one.stream_opened()
    assert value(other, "extproc_streams_open") == 0


def test_the_wall_clock_is_real_by_default() -> None:
    made = Telemetry()
    made.config_loaded(1)
    found = value(made, "extproc_config_last_reload_success_timestamp_seconds")
    assert found is not None
    assert found > 1.7e9


def full() -> Telemetry:
    """Make a Telemetry in which every family has a sample."""
    snapshots = [
        EndpointSnapshot(A, observed_at=1.0, waiting=1, running=2, kv_cache_usage=0.5, in_flight=3, in_flight_tokens=4),
        EndpointSnapshot(B),
    ]
    stats = PrefixIndexStats(2, 10, 15, 3, 7, 5, dict.fromkeys(EvictionCause, 1))
    made = telemetry(
        CollectorSources(
            lambda: snapshots,
            lambda: stats,
            buffered_bytes=lambda: 99,
            log_dropped=lambda: 4,
            task_failures=lambda: {"upkeep": 1},
            now=lambda: 3.0,
        )
    )
    made.decided(DECISION, 0.001, {})
    made.ended(Finished(DECISION, Outcome.OK, Usage(10, 10, 5), 1.0))
    made.ended(Finished(DECISION, Outcome.OK, None, 1.0, served_by=B.id))
    made.stream_opened()
    made.stream_ended("completed")
    made.refused(NoEndpointError("none"), {})
    made.protocol_error("x")
    made.late_response("ResponseBody")
    made.body_cut("budget")
    made.internal_error("x")
    made.access_log_entry("final")
    made.scrape_failed(A.id, "timeout")
    made.discovery_failed("dns")
    made.config_loaded(1)
    return made


@pytest.mark.parametrize("render", [generate_latest, generate_openmetrics])
def test_every_exposed_family_is_documented(render: Any) -> None:
    made = full()
    text = DOCUMENT.read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(extproc_\w+)` \|", text, re.MULTILINE))
    exposed = {line.split()[2] for line in render(made.registry).decode().splitlines() if line.startswith("# TYPE")}
    ours = {name for name in exposed if name.startswith("extproc_")}
    assert len(ours) == len(made.instruments.definitions)
    assert ours <= documented | {name.removesuffix("_total") for name in documented}
    assert all(name.startswith(("process_", "python_gc_")) for name in exposed - ours)
    assert documented == {definition.name for definition in made.instruments.definitions}


def test_the_table_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert markdown_table(Telemetry().instruments.definitions) in text, "make docs writes it"


def test_the_queries_name_metrics_that_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    queries = "".join(re.findall(r"```(?:promql|yaml)\n(.*?)```", text, re.DOTALL))
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"extproc_\w+", queries)}
    assert names
    assert names <= {definition.name for definition in Telemetry().instruments.definitions}


def test_every_sample_has_exactly_the_labels_of_its_definition() -> None:
    made = full()
    definitions = {definition.name: definition for definition in made.instruments.definitions}
    page = generate_latest(made.registry).decode()
    seen = set()
    for family in text_string_to_metric_families(page):
        definition = definitions.get(family.name) or definitions.get(f"{family.name}_total")
        for sample in family.samples if definition else ():
            assert definition is not None
            assert set(sample.labels) - {"le"} == set(definition.labels)
            seen.add(definition.name)
    assert seen == set(definitions)
