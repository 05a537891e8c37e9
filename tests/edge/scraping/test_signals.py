from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.scraping.engines import ENGINES
from extproc.edge.scraping.signals import has_load, read_metrics, read_models, signal_names
from extproc.types import EndpointMetrics

DATA = Path(__file__).parent / "data"


def recorded(name: str) -> EndpointMetrics:
    return read_metrics((DATA / f"{name}.txt").read_bytes(), "vllm", scrape_s=0.02)


def vllm(*lines: str) -> EndpointMetrics:
    return read_metrics("\n".join(lines).encode(), "vllm")


def test_busy_vllm() -> None:
    assert recorded("busy") == EndpointMetrics(
        waiting=23.0,
        running=14.0,
        kv_cache_usage=0.5792988313856428,
        cache_tokens=19200,
        block_tokens=32,
        prompt_tokens_total=224995.0,
        generation_tokens_total=1978.0,
        prefix_queries_total=224995.0,
        prefix_hits_total=86720.0,
        requests_total=103.0,
        process_start_time_s=1795228943.4,
        models=frozenset({"tiny"}),
        scrape_s=0.02,
    )


def test_data_parallel_ranks_are_summed() -> None:
    metrics = recorded("data_parallel_2")
    assert metrics.cache_tokens == 2 * 9600
    assert metrics.block_tokens == 32
    assert metrics.prefix_queries_total == 2 * 1096
    assert metrics.requests_total == 8
    assert metrics.process_start_time_s is None
    metrics = vllm(
        'vllm:num_requests_running{engine="0",model_name="a"} 3.0',
        'vllm:num_requests_running{engine="1",model_name="a"} 4.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.2',
        'vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.6',
    )
    assert metrics.running == 7
    assert metrics.kv_cache_usage == pytest.approx(0.4)


def test_lora_takes_the_newest_series() -> None:
    metrics = recorded("lora_busy")
    assert metrics.lora_max == 2
    assert metrics.lora_running == metrics.lora_waiting == frozenset({"alpha", "beta"})
    metrics = vllm(
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.9e+09',
        'vllm:lora_requests_info{waiting_lora_adapters=" x , ",max_lora="4",running_lora_adapters=""} 2.1e+09',
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="older",waiting_lora_adapters=""} 1.8e+09',
    )
    assert metrics.lora_running == frozenset()
    assert metrics.lora_waiting == frozenset({"x"})


def test_no_lora_without_slots() -> None:
    metrics = vllm('vllm:lora_requests_info{running_lora_adapters="a"} 1', "vllm:num_requests_running 1")
    assert (metrics.lora_max, metrics.lora_running, metrics.lora_waiting) == (None, None, None)


def test_longer_names_comments_and_other_families_do_not_match() -> None:
    metrics = vllm(
        "# HELP vllm:num_requests_waiting 7",
        "# TYPE vllm:num_requests_waiting gauge",
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 5.0',
        'xvllm:num_requests_waiting{engine="0"} 6.0',
        ' vllm:num_requests_waiting{engine="0"} 8.0',
    )
    assert metrics.waiting is None
    metrics = vllm('vllm:num_requests_waiting_by_reason{reason="capacity"} 5.0', "vllm:num_requests_waiting 2.0")
    assert metrics.waiting == 2
    metrics = vllm("vllm:num_requests_waiting 2.0", 'vllm:num_requests_waiting_by_reason{reason="capacity"} 5.0')
    assert metrics.waiting == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3.0),
        ("3.5e+01", 35.0),
        ("0.0", 0.0),
        ("2 1795228943400", 2.0),
        ('2.0 1795228943.4 # {trace_id="x"} 1', 2.0),
        ("NaN", None),
        ("+Inf", None),
        ("-Inf", None),
        ("-1", None),
        ("1e300", None),
        ("many", None),
        ("", None),
    ],
)
def test_sample_values(text: str, value: float | None) -> None:
    assert vllm(f"vllm:num_requests_waiting {text}").waiting == value
    assert vllm(f'vllm:num_requests_waiting{{engine="0"}}\t{text}\r').waiting == value


def test_a_damaged_series_does_not_spoil_the_others() -> None:
    metrics = vllm(
        'vllm:num_requests_waiting{engine="0} 4',
        'vllm:num_requests_waiting{engine="1"} NaN',
        'vllm:num_requests_waiting{engine="2"} 5',
        "vllm:num_requests_running 1",
    )
    assert (metrics.waiting, metrics.running) == (5, 1)


def test_label_values_with_escapes_commas_and_braces() -> None:
    metrics = vllm('vllm:num_requests_waiting{x="a\\"} 9 {,b\\\\",model_name="m\\n\\"{,}\\\\x é",engine="0",} 4')
    assert metrics.waiting == 4
    assert metrics.models == {'m\n"{,}\\x é'}


def test_families_in_any_order() -> None:
    text = (DATA / "busy.txt").read_text()
    groups = text.split("# HELP ")
    assert vllm("# HELP ".join(reversed(groups))) == read_metrics(text.encode(), "vllm")


def test_older_vllm_names() -> None:
    metrics = vllm(
        "vllm:gpu_cache_usage_perc 0.25",
        "vllm:gpu_prefix_cache_queries_total 10",
        "vllm:gpu_prefix_cache_hits_total 4",
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1',
    )
    assert metrics.kv_cache_usage == 0.25
    assert (metrics.prefix_queries_total, metrics.prefix_hits_total) == (10, 4)
    assert (metrics.cache_tokens, metrics.block_tokens) == (1600, 16)
    both = vllm("vllm:kv_cache_usage_perc 0.5", "vllm:gpu_cache_usage_perc 0.25")
    assert both.kv_cache_usage == 0.5
    damaged = vllm("vllm:kv_cache_usage_perc NaN", "vllm:gpu_cache_usage_perc 0.25")
    assert damaged.kv_cache_usage == 0.25


def test_cache_info_that_does_not_say() -> None:
    metrics = vllm('vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1')
    assert (metrics.cache_tokens, metrics.block_tokens) == (None, None)


def test_usage_is_a_share() -> None:
    assert vllm("vllm:kv_cache_usage_perc 57").kv_cache_usage == 1.0


@pytest.mark.parametrize(
    "cache",
    [
        'sglang:cache_config_info{page_size="64",num_pages="100"} 1',
        "sglang:page_size 64\nsglang:num_pages 100",
        "sglang:max_total_num_tokens 6400\nsglang:page_size 64",
    ],
)
def test_sglang(cache: str) -> None:
    page = f"""
sglang:num_queue_reqs{{model_name="m",tp_rank="0",dp_rank="0"}} 2
sglang:num_queue_reqs{{model_name="m",tp_rank="1",dp_rank="0"}} 3
sglang:num_queue_reqs{{model_name="m",tp_rank="2",dp_rank="1"}} 5
sglang:num_running_reqs{{model_name="m",tp_rank="0"}} 7
sglang:token_usage{{model_name="m"}} 0.28
sglang:prompt_tokens_total{{model_name="m"}} 1000
sglang:cached_tokens_total{{model_name="m",cache_source="device"}} 300
sglang:cached_tokens_total{{model_name="m",cache_source="host"}} 100
sglang:generation_tokens_total{{model_name="m"}} 50
sglang:num_requests_total{{model_name="m"}} 9
{cache}
"""
    assert read_metrics(page.encode(), "sglang") == EndpointMetrics(
        waiting=8,
        running=7,
        kv_cache_usage=0.28,
        cache_tokens=6400,
        block_tokens=64,
        prompt_tokens_total=1000,
        generation_tokens_total=50,
        prefix_queries_total=1000,
        prefix_hits_total=400,
        requests_total=9,
        models=frozenset({"m"}),
    )


def test_gauges_come_before_the_labels_of_the_info_family() -> None:
    page = b"""sglang:max_total_num_tokens 640
sglang:cache_config_info{page_size="16",num_pages="50"} 1
"""
    metrics = read_metrics(page, "sglang")
    assert (metrics.cache_tokens, metrics.block_tokens) == (640, 16)


def test_trtllm() -> None:
    page = b"""trtllm_num_requests_waiting{model_name="m"} 2
trtllm_num_requests_running{model_name="m"} 3
trtllm_kv_cache_utilization{model_name="m"} 0.5
trtllm_kv_cache_tokens_per_block{model_name="m"} 32
trtllm_kv_cache_max_blocks{model_name="m"} 10
trtllm_request_success_total{finished_reason="stop"} 4
"""
    metrics = read_metrics(page, "trtllm")
    assert (metrics.waiting, metrics.running, metrics.kv_cache_usage) == (2, 3, 0.5)
    assert (metrics.cache_tokens, metrics.block_tokens, metrics.requests_total) == (320, 32, 4)


def test_triton_trtllm() -> None:
    page = b"""nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 2
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.1
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 6239
"""
    metrics = read_metrics(page, "triton-trtllm")
    assert (metrics.waiting, metrics.running, metrics.kv_cache_usage) == (4, 2, 0.1)
    assert (metrics.cache_tokens, metrics.block_tokens) == (64 * 6239, 64)
    assert read_metrics(b'nv_trt_llm_request_metrics{request_type="max"} 512', "triton-trtllm") == EndpointMetrics()


def test_triton_has_no_running_requests() -> None:
    page = b"""nv_inference_request_success{model="a",version="1"} 12
nv_inference_exec_count{model="a",version="1"} 7
nv_inference_pending_request_count{model="a",version="1"} 3
nv_inference_pending_request_count{model="b",version="1"} 1
"""
    metrics = read_metrics(page, "triton")
    assert (metrics.waiting, metrics.running, metrics.requests_total) == (4, None, 12)


@pytest.mark.parametrize("page", [b"", b"\n", b"<html>no</html>", b'{"error": {}}', b"\x00\xff" * 100])
def test_what_is_no_metrics_page_says_nothing(page: bytes) -> None:
    metrics = read_metrics(page, "vllm")
    assert metrics == EndpointMetrics()
    assert not has_load(metrics)


def test_has_load() -> None:
    assert has_load(EndpointMetrics(waiting=0.0))
    assert has_load(EndpointMetrics(running=0.0))
    assert has_load(EndpointMetrics(kv_cache_usage=0.0))
    assert not has_load(EndpointMetrics(requests_total=3.0))


def test_signal_names_are_those_the_page_had() -> None:
    assert signal_names(EndpointMetrics(scrape_s=1.0)) == frozenset()
    assert signal_names(EndpointMetrics(waiting=0.0, lora_running=frozenset())) == {"waiting", "lora_running"}
    assert signal_names(EndpointMetrics(lora_max=4, models=frozenset({"m"}))) == {"lora_max", "models"}


def test_unknown_engine() -> None:
    with pytest.raises(KeyError):
        read_metrics(b"", "other")


def test_long_label_texts_are_read_but_not_kept() -> None:
    name = "m" * 5000
    assert vllm(f'vllm:num_requests_waiting{{model_name="{name}"}} 1').models == {name}


FRAGMENTS = st.sampled_from(
    [
        *(source.family.encode() for table in ENGINES.values() for source in table.sources),
        *(info.encode() for table in ENGINES.values() for info in (table.cache_info, table.lora_info)),
        *(b"\n", b"{", b"}", b'"', b"\\", b",", b"=", b" ", b"1", b"NaN", b"+Inf", b"1e15", b"max_lora", b"tp_rank="),
        *(b"block_size", b"num_gpu_blocks", b'running_lora_adapters="', b'model_name="'),
    ]
)


@given(st.lists(FRAGMENTS | st.binary(max_size=6)).map(b"".join), st.sampled_from(sorted(ENGINES)))
def test_no_page_raises(page: bytes, engine: str) -> None:
    metrics = read_metrics(page, engine)
    for value in (metrics.waiting, metrics.running, metrics.requests_total):
        assert value is None or value >= 0
    assert metrics.kv_cache_usage is None or 0 <= metrics.kv_cache_usage <= 1


VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)


@given(VALUES, VALUES, st.booleans(), st.integers(0, 10**6), st.integers(0, 10**6))
def test_any_label_value_in_any_order(model: str, other: str, swapped: bool, first: int, second: int) -> None:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    labels = [f'model_name="{escaped(model)}"', f'other="{escaped(other)}"']
    if swapped:
        labels.reverse()
    metrics = vllm(
        f"vllm:num_requests_running{{{','.join(labels)}}} {first}",
        f'vllm:num_requests_running{{{",".join(labels)},engine="1"}} {second}',
        "vllm:num_requests_waiting 0",
    )
    assert metrics.running == first + second
    assert metrics.models == ({model} if model else frozenset())


def test_read_models() -> None:
    body = (
        b'{"object":"list","data":[{"id":"tiny","root":"/m","parent":null},{"id":"alpha","parent":"tiny"},{"id":"b"}]}'
    )
    assert read_models(body) == {"tiny": None, "alpha": "tiny", "b": None}
    for bad in (b"", b"[]", b'{"data": [{}]}', b'{"data": [{"id": 3}]}', b'{"data":[{"id":"\xff"}]}'):
        assert read_models(bad) is None
    assert read_models(b'{"data": []}') == {}


@given(st.binary())
def test_read_models_never_raises(body: bytes) -> None:
    read_models(body)
