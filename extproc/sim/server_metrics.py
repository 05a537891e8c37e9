"""What one model server measures beside the engine's own counters: gauges as of the last step, histograms, outcomes.

How they are written is `metrics_page`'s business. Bucket bounds are those of a recorded page of vLLM 0.32.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.sim.engine import Engine

_LATENCY_BOUNDS: Final = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
_TTFT_BOUNDS: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_TOKEN_TIME_BOUNDS: Final = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TOKEN_COUNT_STEPS: Final = (1.0, 2.0, 5.0)
_ITERATION_BOUNDS: Final = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
FINISHED_REASONS: Final = ("stop", "length", "abort", "error", "repetition")


def token_count_bounds(max_model_len: int) -> tuple[float, ...]:
    """Bucket bounds for token counts: 1, 2, 5, 10, ... up to the model's length (vLLM's build_1_2_5_buckets)."""
    bounds: list[float] = []
    magnitude = 1
    while True:
        for step in _TOKEN_COUNT_STEPS:
            if step * magnitude > max_model_len:
                return tuple(bounds)
            bounds.append(step * magnitude)
        magnitude *= 10


class Histogram:
    """Counts per bucket; `bounds` are inclusive upper bounds, ascending, without +Inf."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class ServerMetrics:
    """What one server process has measured since `started_s` (Unix seconds); a restart makes a new one."""

    def __init__(self, engine: Engine, *, loras: Sequence[str], max_model_len: int, started_s: float) -> None:
        self.engine = engine
        self.started_s = started_s
        self.num_running = 0
        self.num_waiting = 0
        self.kv_cache_usage = 0.0
        counts = token_count_bounds(max_model_len)
        self.time_to_first_token_s = Histogram(_TTFT_BOUNDS)
        self.inter_token_s = Histogram(_TOKEN_TIME_BOUNDS)
        self.time_per_output_token_s = Histogram(_TOKEN_TIME_BOUNDS)
        self.e2e_s = Histogram(_LATENCY_BOUNDS)
        self.queue_s = Histogram(_LATENCY_BOUNDS)
        self.inference_s = Histogram(_LATENCY_BOUNDS)
        self.prefill_s = Histogram(_LATENCY_BOUNDS)
        self.decode_s = Histogram(_LATENCY_BOUNDS)
        self.prompt_tokens = Histogram(counts)
        self.generation_tokens = Histogram(counts)
        self.max_tokens = Histogram(counts)
        self.computed_tokens = Histogram(counts)
        self.preemptions = Histogram((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0))
        self.choices = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.iteration_tokens = Histogram(_ITERATION_BOUNDS)
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        self.rejected = 0
        self.max_lora = len(loras)
        self.lora_series: dict[tuple[str, str], float] = {("", ""): started_s} if loras else {}

    def take_gauges(self, unix_s: float) -> None:
        """Note the engine's state, as vLLM does at the end of a step: between steps the page does not move."""
        engine = self.engine
        self.num_running = engine.num_running
        self.num_waiting = engine.num_waiting
        self.kv_cache_usage = engine.kv_cache_usage
        if self.max_lora:
            self.lora_series[",".join(engine.running_loras()), ",".join(engine.waiting_loras())] = unix_s
