"""What one model server measures, and its /metrics page in the names, labels and number format of vLLM 0.32.

Families, label order and bucket bounds are those of a recorded page; families that the model has no values for are there
with zeros. A page can be padded to the size of a real one (69 kB) with constant families that a picker does not read.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from extproc.sim.engine import Engine

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"
_SUFFIXES: Final = ("_bucket", "_sum", "_count")
"""What the samples of a histogram add to its family's name."""
_HEAD: Final = b"# HELP "
_NAME_END: Final = re.compile(rb"[{ ]")
_LATENCY_BOUNDS: Final = tuple(
    map(float, "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680".split())
)
_TTFT_BOUNDS: Final = tuple(
    map(float, "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560".split())
)
_TOKEN_TIME_BOUNDS: Final = tuple(
    map(float, "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80".split())
)
_TOKEN_COUNT_STEPS: Final = (1.0, 2.0, 5.0)
_ITERATION_BOUNDS: Final = tuple(map(float, "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384".split()))
FINISHED_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
PYTHON_FAMILIES: Final = "".join(
    f"# HELP {name} {doc}\n# TYPE {name} {kind}\n" + "".join(f"{name}{series}\n" for series in values)
    for name, kind, doc, values in (
        (
            "python_gc_objects_collected_total",
            "counter",
            "Objects collected during gc",
            ['{generation="0"} 31771.0', '{generation="1"} 7321.0', '{generation="2"} 637.0'],
        ),
        (
            "python_info",
            "gauge",
            "Python platform information",
            ['{implementation="CPython",major="3",minor="11"} 1.0'],
        ),
        ("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", [" 7.13998336e+08"]),
        ("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", [" 9.68"]),
        ("process_open_fds", "gauge", "Number of open file descriptors.", [" 34.0"]),
    )
)


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


def selected(page: bytes, names: Collection[str]) -> bytes:
    """Leave of a page only the samples of these names, as `name[]` does with Python's Prometheus client.

    A counter's name ends in `_total` there; a family without such a sample is left out with its comments.
    (prometheus_client/registry.py, RestrictedRegistry; it writes families in another order, but always in the same.)
    """
    wanted = {name.encode() for name in names}
    families = wanted | {name.removesuffix(suffix).encode() for name in names for suffix in _SUFFIXES}
    out: list[bytes] = []
    for family in page.removeprefix(_HEAD).split(b"\n" + _HEAD):
        if family.split(b" ", 1)[0] in families:
            lines = family.removesuffix(b"\n").split(b"\n")
            samples = [line for line in lines[2:] if _NAME_END.split(line, 1)[0] in wanted]
            if samples:
                out += (_HEAD + lines[0], lines[1], *samples)
    return b"".join(line + b"\n" for line in out)


def format_value(value: float) -> str:
    """Write a number as the Prometheus client of Python does: 0.0, 1.795228943e+09, +Inf."""
    if value == float("inf"):
        return "+Inf"
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+0{dot - 1}"
    return text


class MetricsPage:
    """The page as a list of fixed text and of places where a value goes, built once for one `ServerMetrics`.

    `padded` adds the families of Python and of the HTTP instrumentation, which bring the page to the size of a real one.
    """

    def __init__(self, metrics: ServerMetrics, model: str, *, padded: bool) -> None:
        self._metrics = metrics
        # The Prometheus text format escapes what JSON escapes in the same way.
        self._model = f"model_name={json.dumps(model, ensure_ascii=False)}"
        self._created = format_value(metrics.started_s)
        self._parts: list[str | Callable[[], float] | tuple[Histogram, list[str]]] = []
        self._process(padded=padded)
        self._gauges()
        self._counters()
        self._histograms()
        self._cache_config()
        self._padding = http_families(self._created) if padded else ""

    def render(self) -> bytes:
        """Write the page."""
        out: list[str] = []
        for part in self._parts:
            if isinstance(part, str):
                out.append(part)
            elif isinstance(part, tuple):
                histogram, prefixes = part
                totals = accumulate(histogram.counts)
                out += [f"{prefix}{total}.0\n" for prefix, total in zip(prefixes, totals, strict=False)]
                out.append(f"{prefixes[-2]}{sum(histogram.counts)}.0\n{prefixes[-1]}{format_value(histogram.sum)}\n")
            else:
                out.append(f"{format_value(part())}\n")
        out += (self._lora_lines(), self._padding)
        return "".join(out).encode()

    def _lora_lines(self) -> str:
        """Give vllm:lora_requests_info, one series per combination ever seen; the largest value is the current one."""
        metrics = self._metrics
        if not metrics.max_lora:
            return ""
        name = "vllm:lora_requests_info"
        return f"# HELP {name} Running stats on lora requests.\n# TYPE {name} gauge\n" + "".join(
            f'{name}{{max_lora="{metrics.max_lora}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"}} '
            f"{format_value(unix_s)}\n"
            for (running, waiting), unix_s in metrics.lora_series.items()
        )

    def _head(self, name: str, kind: str, doc: str) -> None:
        self._parts.append(f"# HELP {name} {doc}\n# TYPE {name} {kind}\n")

    def _value(self, series: str, read: Callable[[], float]) -> None:
        self._parts += (f"{series} ", read)

    def _labels(self, extra: str = "", *, engine: bool = True) -> str:
        """Labels in alphabetical order, as the client library writes them; `extra` is one label."""
        labels = [self._model, *(['engine="0"'] if engine else []), *([extra] if extra else [])]
        return "{" + ",".join(sorted(labels)) + "}"

    def _gauge(self, name: str, doc: str, series: Mapping[str, Callable[[], float]]) -> None:
        self._head(name, "gauge", doc)
        for extra, read in series.items():
            self._value(name + self._labels(extra), read)

    def _counter(self, name: str, doc: str, series: Mapping[str, Callable[[], float]], *, engine: bool = True) -> None:
        self._head(f"{name}_total", "counter", doc)
        for extra, read in series.items():
            self._value(f"{name}_total{self._labels(extra, engine=engine)}", read)
        self._head(f"{name}_created", "gauge", doc)
        self._parts += [f"{name}_created{self._labels(extra, engine=engine)} {self._created}\n" for extra in series]

    def _histogram(self, name: str, doc: str, histogram: Histogram) -> None:
        self._head(name, "histogram", doc)
        bounds = [*histogram.bounds, float("inf")]
        prefixes = [f"{name}_bucket{self._labels(f'le={_quoted(format_value(bound))}')} " for bound in bounds]
        prefixes += [f"{name}_count{self._labels()} ", f"{name}_sum{self._labels()} "]
        self._parts.append((histogram, prefixes))
        self._head(f"{name}_created", "gauge", doc)
        self._parts.append(f"{name}_created{self._labels()} {self._created}\n")

    def _process(self, *, padded: bool) -> None:
        if padded:
            self._parts.append(PYTHON_FAMILIES)
        name = "process_start_time_seconds"
        self._head(name, "gauge", "Start time of the process since unix epoch in seconds.")
        self._parts.append(f"{name} {self._created}\n")

    def _gauges(self) -> None:
        metrics = self._metrics
        self._gauge(
            "vllm:num_requests_running",
            "Number of requests in model execution batches.",
            {"": lambda: metrics.num_running},
        )
        self._gauge(
            "vllm:num_requests_waiting",
            "Number of requests waiting to be processed.",
            {"": lambda: metrics.num_waiting},
        )
        self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = deferred "
            "by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.",
            {'reason="capacity"': lambda: metrics.num_waiting, 'reason="deferred"': _zero},
        )
        self._gauge(
            "vllm:engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 means "
            "sleep level 1; discard_all = 1 means sleep level 2.",
            {
                'sleep_state="awake"': lambda: 1,
                'sleep_state="weights_offloaded"': _zero,
                'sleep_state="discard_all"': _zero,
            },
        )
        self._gauge(
            "vllm:kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            {"": lambda: metrics.kv_cache_usage},
        )

    def _counters(self) -> None:
        metrics, engine = self._metrics, self._metrics.engine
        queried, tokens = "in terms of number of queried tokens.", "Number of prefill tokens processed."
        external = "cache {} from KV connector cross-instance cache sharing, in terms of number of"
        self._counter(
            "vllm:prefix_cache_queries",
            f"Prefix cache queries, {queried}",
            {"": lambda: engine.counters.prefix_cache_queries},
        )
        self._counter(
            "vllm:prefix_cache_hits",
            "Prefix cache hits, in terms of number of cached tokens.",
            {"": lambda: engine.counters.prefix_cache_hits},
        )
        self._counter(
            "vllm:external_prefix_cache_queries",
            f"External prefix {external.format('queries')} queried tokens.",
            {"": _zero},
        )
        self._counter(
            "vllm:external_prefix_cache_hits", f"External prefix {external.format('hits')} cached tokens.", {"": _zero}
        )
        self._counter(
            "vllm:mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.", {"": _zero}
        )
        self._counter("vllm:mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.", {"": _zero})
        self._counter(
            "vllm:num_preemptions",
            "Cumulative number of preemption from the engine.",
            {"": lambda: engine.counters.preemptions},
        )
        self._counter("vllm:prompt_tokens", tokens, {"": lambda: engine.counters.prompt_tokens})
        self._counter(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            {
                'source="local_compute"': lambda: engine.counters.prompt_tokens - engine.counters.prompt_tokens_cached,
                'source="local_cache_hit"': lambda: engine.counters.prompt_tokens_cached,
                'source="external_kv_transfer"': _zero,
            },
        )
        self._counter(
            "vllm:prompt_tokens_cached",
            "Number of cached prompt tokens (local + external).",
            {"": lambda: engine.counters.prompt_tokens_cached},
        )
        tiers = ("host", "p2p", "disk", "external_unspecified")
        self._counter(
            "vllm:prompt_tokens_cached_by_source",
            "Prefix-cache hit tokens by the cache tier that supplied them.",
            {'source="device"': lambda: engine.counters.prefix_cache_hits}
            | {f'source="{tier}"': _zero for tier in tiers},
        )
        self._counter(
            "vllm:generation_tokens",
            "Number of generation tokens processed.",
            {"": lambda: engine.counters.generation_tokens},
        )
        finished = {
            f'finished_reason="{reason}"': partial(metrics.finished.__getitem__, reason) for reason in FINISHED_REASONS
        }
        self._counter("vllm:request_success", "Count of successfully processed requests.", finished)
        self._counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            {'reason="max_num_queued_reqs"': lambda: metrics.rejected, 'reason="max_num_queued_tokens"': _zero},
            engine=False,
        )

    def _histograms(self) -> None:
        metrics = self._metrics
        for name, doc, histogram in (
            ("request_prompt_tokens", "Number of prefill tokens processed.", metrics.prompt_tokens),
            ("request_generation_tokens", "Number of generation tokens processed.", metrics.generation_tokens),
            ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", metrics.iteration_tokens),
            (
                "request_max_num_generation_tokens",
                "Histogram of maximum number of requested generation tokens.",
                metrics.max_tokens,
            ),
            ("request_params_n", "Histogram of the n request parameter.", metrics.choices),
            ("request_params_max_tokens", "Histogram of the max_tokens request parameter.", metrics.max_tokens),
            (
                "time_to_first_token_seconds",
                "Histogram of time to first token in seconds.",
                metrics.time_to_first_token_s,
            ),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", metrics.inter_token_s),
            (
                "request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                metrics.time_per_output_token_s,
            ),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", metrics.e2e_s),
            ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", metrics.queue_s),
            (
                "request_inference_time_seconds",
                "Histogram of time spent in RUNNING phase for request.",
                metrics.inference_s,
            ),
            (
                "request_prefill_time_seconds",
                "Histogram of time spent in PREFILL phase for request.",
                metrics.prefill_s,
            ),
            ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", metrics.decode_s),
            (
                "request_num_preemptions",
                "Histogram of the number of times a request was preempted.",
                metrics.preemptions,
            ),
            (
                "request_prefill_kv_computed_tokens",
                "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
                metrics.computed_tokens,
            ),
        ):
            self._histogram(f"vllm:{name}", doc, histogram)

    def _cache_config(self) -> None:
        constants = self._metrics.engine.constants
        blocks, size = constants.num_gpu_blocks, constants.block_size
        labels = _CACHE_CONFIG | {
            "block_size": str(size),
            "effective_attention_block_size": str(size),
            "kv_cache_size_tokens": str(blocks * size),
            "num_gpu_blocks": str(blocks),
        }
        text = ",".join(f"{name}={_quoted(value)}" for name, value in sorted(labels.items()))
        self._head("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
        self._parts.append(f"vllm:cache_config_info{{{text}}} 1.0\n")


def _zero() -> float:
    return 0.0


def _quoted(value: str) -> str:
    return f'"{value}"'


_CACHE_CONFIG: Final = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "True",
    "engine": "0",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "sliding_window": "None",
    "user_specified_block_size": "False",
}
"""Labels of vllm:cache_config_info whose values do not depend on the preset, as a real server writes them."""


def http_families(created: str) -> str:
    """Give the families of vLLM's HTTP instrumentation with plausible constant values, for the size of the page only."""
    handlers = ("completions", "chat/completions", "models", "responses", "messages", "embeddings", "score", "rerank")
    paths = [f"/v1/{name}{suffix}" for name in handlers for suffix in ("", "/render")] + [
        "/tokenize",
        "/detokenize",
        "none",
    ]
    lines: list[str] = []

    def head(name: str, kind: str, doc: str) -> None:
        lines.append(f"# HELP {name} {doc}\n# TYPE {name} {kind}\n")

    for name, doc in (
        (
            "http_request_size_bytes",
            "Content length of incoming requests by handler. Only value of header is respected.",
        ),
        (
            "http_response_size_bytes",
            "Content length of outgoing responses by handler. Only value of header is respected.",
        ),
    ):
        head(name, "summary", doc)
        lines += [
            f'{name}_count{{handler="{path}"}} 146.0\n{name}_sum{{handler="{path}"}} 263359.0\n' for path in paths
        ]
        head(f"{name}_created", "gauge", doc)
        lines += [f'{name}_created{{handler="{path}"}} {created}\n' for path in paths]
    name, doc = "http_request_duration_seconds", "Latency with only few buckets by handler."
    head(name, "histogram", doc)
    for path in paths:
        for bound in ("0.1", "0.5", "1.0", "+Inf"):
            lines.append(f'{name}_bucket{{handler="{path}",le="{bound}",method="POST"}} 146.0\n')
        lines.append(
            f'{name}_count{{handler="{path}",method="POST"}} 146.0\n{name}_sum{{handler="{path}",method="POST"}} 280.34\n'
        )
    head("http_requests_total", "counter", "Total number of requests by method, status and handler.")
    for path in paths:
        for status in ("2xx", "4xx"):
            lines.append(f'http_requests_total{{handler="{path}",method="POST",status="{status}"}} 146.0\n')
    return "".join(lines)
