import math
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from extproc.sim.engine import Engine, EngineRequest
from extproc.sim.metrics import (
    PYTHON_FAMILIES,
    Histogram,
    MetricsPage,
    ServerMetrics,
    format_value,
    http_families,
    selected,
    token_count_bounds,
)
from extproc.sim.presets import PRESETS

# Families a recorded page of vLLM 0.32 has, as far as a picker or a dashboard may read them.
RECORDED = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason engine_sleep_state kv_cache_usage_perc
prefix_cache_queries prefix_cache_hits external_prefix_cache_queries external_prefix_cache_hits mm_cache_queries mm_cache_hits
num_preemptions prompt_tokens prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source generation_tokens
request_success admission_rejections request_prompt_tokens request_generation_tokens iteration_tokens_total
request_max_num_generation_tokens request_params_n request_params_max_tokens time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds request_num_preemptions
request_prefill_kv_computed_tokens cache_config_info
""".split()


def make(*, loras: tuple[str, ...] = (), padded: bool = False) -> tuple[Engine, ServerMetrics, MetricsPage]:
    engine = Engine(PRESETS["l4-llama-3.1-8b-fp8"])
    metrics = ServerMetrics(engine, loras=loras, max_model_len=8192, started_s=1795228943.4)
    return engine, metrics, MetricsPage(metrics, "tiny", padded=padded)


def values(page: MetricsPage) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(page.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


@pytest.mark.parametrize(
    "value", [0, 1, 0.5, 19200, 999999, 1000000.0, 1795228943.4, 123456789.0, 1e16, 2e-05, 0.5792988313856428, math.inf]
)
def test_numbers_are_written_as_the_client_library_writes_them(value: float) -> None:
    assert format_value(value) == floatToGoString(value)  # type: ignore[no-untyped-call]


def test_families_are_the_recorded_ones() -> None:
    _, _, page = make()
    names = {family.name for family in text_string_to_metric_families(page.render().decode())}
    assert {f"vllm:{name}" for name in RECORDED} <= names
    assert "process_start_time_seconds" in names
    assert "vllm:lora_requests_info" not in names


def test_recorded_lines() -> None:
    _, _, page = make()
    text = page.render().decode()
    for line in (
        'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0',
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 0.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 0.0',
        'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 0.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny"} 0.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 0.0',
        "process_start_time_seconds 1.7952289434e+09",
        "# TYPE vllm:prefix_cache_hits_total counter",
    ):
        assert f"{line}\n" in text


def test_values_come_from_the_engine_and_the_measurements() -> None:
    engine, metrics, page = make()
    labels = frozenset({("engine", "0"), ("model_name", "tiny")})
    for name in ("a", "b"):
        engine.add(EngineRequest(name, 40, 1, ["x", "y"]))
    engine.begin_step(0.0)
    engine.end_step()
    metrics.time_to_first_token_s.observe(0.3)
    metrics.num_waiting = 4
    metrics.rejected = 2
    seen = values(page)
    assert seen["vllm:prompt_tokens_total", labels] == 80
    assert seen["vllm:prefix_cache_queries_total", labels] == 80
    assert seen["vllm:prefix_cache_hits_total", labels] == 32
    assert seen["vllm:generation_tokens_total", labels] == 2
    assert seen["vllm:num_requests_waiting", labels] == 4
    assert seen["vllm:time_to_first_token_seconds_count", labels] == 1
    assert seen["vllm:time_to_first_token_seconds_sum", labels] == 0.3
    assert seen["vllm:time_to_first_token_seconds_bucket", labels | {("le", "0.25")}] == 0
    assert seen["vllm:time_to_first_token_seconds_bucket", labels | {("le", "0.5")}] == 1
    assert seen["vllm:prompt_tokens_by_source_total", labels | {("source", "local_compute")}] == 48
    rejected = frozenset({("model_name", "tiny"), ("reason", "max_num_queued_reqs")})
    assert seen["vllm:admission_rejections_total", rejected] == 2


def test_cache_config() -> None:
    _, _, page = make()
    ((labels, value),) = [
        (dict(key[1]), value) for key, value in values(page).items() if key[0] == "vllm:cache_config_info"
    ]
    assert value == 1
    assert (labels["block_size"], labels["num_gpu_blocks"], labels["kv_cache_size_tokens"]) == ("16", "5000", "80000")
    assert labels["hash_block_size"] == "None"


def test_adapters() -> None:
    _, metrics, page = make(loras=("alpha", "beta"))
    metrics.lora_series["beta,alpha", ""] = 1795229608.0
    line = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="beta,alpha",waiting_lora_adapters=""} 1.795229608e+09\n'
    assert line in page.render().decode()


def test_a_padded_page_is_as_long_as_a_real_one() -> None:
    _, _, page = make(padded=True)
    assert 60_000 < len(page.render()) < 80_000
    assert len(values(page)) > 600


class Recorded(Collector):
    """Gives the families of a page."""

    def __init__(self, page: bytes) -> None:
        self._page = page.decode()

    def collect(self) -> Iterable[Metric]:
        return text_string_to_metric_families(self._page)


@pytest.mark.parametrize(
    "names",
    [
        ["vllm:num_requests_running", "vllm:prompt_tokens_total", "process_start_time_seconds"],
        ["vllm:prompt_tokens", "vllm:request_success_total", "vllm:cache_config_info", "no_such_family"],
        ["vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum"],
        ["vllm:prompt_tokens_created", "vllm:lora_requests_info"],
        ["vllm:num_requests"],
    ],
)
def test_a_selected_page_is_what_the_client_library_makes_of_the_whole_one(names: list[str]) -> None:
    _, _, made = make(loras=("alpha",), padded=True)
    page = made.render()
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(Recorded(page))
    theirs = generate_latest(registry.restricted_registry(names))
    ours = selected(page, names)

    def samples(text: bytes) -> list[tuple[str, dict[str, str], float]]:
        families = text_string_to_metric_families(text.decode())
        return sorted(((one.name, one.labels, one.value) for family in families for one in family.samples), key=repr)

    assert samples(ours) == samples(theirs)
    assert len(ours) < len(page) / 5
    assert selected(ours, names) == ours


def test_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == 8.0


def test_token_counts_go_up_to_the_models_length() -> None:
    recorded = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    assert token_count_bounds(8192) == recorded
    assert token_count_bounds(5000) == recorded


def test_gauges_move_when_they_are_taken() -> None:
    engine = Engine(PRESETS["l4-llama-3.1-8b-fp8"])
    metrics = ServerMetrics(engine, loras=["a", "b"], max_model_len=100, started_s=5.0)
    engine.add(EngineRequest("r1", 160, 2, (), "b"))
    engine.begin_step(0.0)
    engine.add(EngineRequest("r2", 160, 2, (), "a"))
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_cache_usage) == (0, 0, 0.0)
    metrics.take_gauges(7.0)
    assert (metrics.num_running, metrics.num_waiting) == (1, 1)
    assert metrics.kv_cache_usage == 1 - (4999 - 10) / 4999
    assert metrics.lora_series == {("", ""): 5.0, ("b", "a"): 7.0}


def test_no_adapters_no_series() -> None:
    metrics = ServerMetrics(Engine(PRESETS["h100-llama-3.1-8b"]), loras=[], max_model_len=100, started_s=5.0)
    metrics.take_gauges(7.0)
    assert metrics.lora_series == {}


def test_padding_is_valid_and_holds_nothing_a_picker_reads() -> None:
    families = list(text_string_to_metric_families(PYTHON_FAMILIES + http_families("1.0")))
    assert len(families) > 5
    assert not [family.name for family in families if family.name.startswith("vllm:")]
