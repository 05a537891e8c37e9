from extproc.sim.engine import Engine, EngineRequest
from extproc.sim.presets import PRESETS
from extproc.sim.server_metrics import Histogram, ServerMetrics, token_count_bounds


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
