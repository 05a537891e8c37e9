"""Which metric family of which engine carries which signal.

Tables only; finding the lines on a page and combining their series is the concern of `signals`. Sources: vLLM 0.32 (recorded
pages), docs.sglang.io production metrics, TensorRT-LLM's and Triton's metric lists, and the names that the Gateway API
Inference Extension's model server protocol asks for.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ENGINES", "EngineTable", "Signal", "Source"]


class Signal(enum.StrEnum):
    """One value to read from a page; a string, because a plain enum's hash costs a Python call on every look-up."""

    WAITING = "waiting"
    RUNNING = "running"
    KV_CACHE_USAGE = "kv_cache_usage"
    BLOCK_TOKENS = "block_tokens"
    BLOCKS = "blocks"
    CACHE_TOKENS = "cache_tokens"
    PROMPT_TOKENS = "prompt_tokens"
    GENERATION_TOKENS = "generation_tokens"
    PREFIX_QUERIES = "prefix_queries"
    PREFIX_HITS = "prefix_hits"
    REQUESTS = "requests"
    PROCESS_START = "process_start"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a signal stands; a later source of the same signal counts only where the earlier ones are absent."""

    signal: Signal
    family: str
    """Sample name; counters as they stand on the page, with `_total`."""
    where: tuple[str, str] | None = None
    """Label and value that a series must have; None: every series counts."""


@dataclass(frozen=True, slots=True)
class EngineTable:
    """What one engine's page is read for."""

    sources: tuple[Source, ...]
    cache_info: str = ""
    """Info family whose labels describe the KV cache; empty: none."""
    cache_labels: tuple[str, str, str] = ("", "", "")
    """Labels of `cache_info`: tokens in all, tokens per block, blocks."""
    lora_info: str = ""
    """Info family whose labels list the LoRA adapters in use; empty: none."""

    @property
    def infos(self) -> tuple[str, ...]:
        """The info families."""
        return tuple(info for info in (self.cache_info, self.lora_info) if info)

    @property
    def families(self) -> tuple[str, ...]:
        """Sample names of all families that are read, each once."""
        return tuple(dict.fromkeys((*(source.family for source in self.sources), *self.infos)))


_PROCESS_START = Source(Signal.PROCESS_START, "process_start_time_seconds")

ENGINES: Mapping[str, EngineTable] = MappingProxyType(
    {
        "vllm": EngineTable(
            sources=(
                _PROCESS_START,
                Source(Signal.RUNNING, "vllm:num_requests_running"),
                Source(Signal.WAITING, "vllm:num_requests_waiting"),
                Source(Signal.KV_CACHE_USAGE, "vllm:kv_cache_usage_perc"),
                Source(Signal.KV_CACHE_USAGE, "vllm:gpu_cache_usage_perc"),
                Source(Signal.PREFIX_QUERIES, "vllm:prefix_cache_queries_total"),
                Source(Signal.PREFIX_QUERIES, "vllm:gpu_prefix_cache_queries_total"),
                Source(Signal.PREFIX_HITS, "vllm:prefix_cache_hits_total"),
                Source(Signal.PREFIX_HITS, "vllm:gpu_prefix_cache_hits_total"),
                Source(Signal.PROMPT_TOKENS, "vllm:prompt_tokens_total"),
                Source(Signal.GENERATION_TOKENS, "vllm:generation_tokens_total"),
                Source(Signal.REQUESTS, "vllm:request_success_total"),
            ),
            cache_info="vllm:cache_config_info",
            # `num_gpu_blocks` is the sum over all ranks on every rank's series when it is overridden; the tokens are not.
            cache_labels=("kv_cache_size_tokens", "block_size", "num_gpu_blocks"),
            lora_info="vllm:lora_requests_info",
        ),
        "sglang": EngineTable(
            sources=(
                _PROCESS_START,
                Source(Signal.WAITING, "sglang:num_queue_reqs"),
                Source(Signal.RUNNING, "sglang:num_running_reqs"),
                Source(Signal.KV_CACHE_USAGE, "sglang:token_usage"),
                # From 0.5.11 on plain gauges; before, labels of the info family.
                Source(Signal.CACHE_TOKENS, "sglang:max_total_num_tokens"),
                Source(Signal.BLOCK_TOKENS, "sglang:page_size"),
                Source(Signal.BLOCKS, "sglang:num_pages"),
                Source(Signal.PROMPT_TOKENS, "sglang:prompt_tokens_total"),
                Source(Signal.GENERATION_TOKENS, "sglang:generation_tokens_total"),
                # Every prompt token is looked up in the radix cache.
                Source(Signal.PREFIX_QUERIES, "sglang:prompt_tokens_total"),
                Source(Signal.PREFIX_HITS, "sglang:cached_tokens_total"),
                Source(Signal.REQUESTS, "sglang:num_requests_total"),
            ),
            cache_info="sglang:cache_config_info",
            cache_labels=("", "page_size", "num_pages"),
        ),
        "trtllm": EngineTable(
            sources=(
                _PROCESS_START,
                Source(Signal.WAITING, "trtllm_num_requests_waiting"),
                Source(Signal.RUNNING, "trtllm_num_requests_running"),
                Source(Signal.KV_CACHE_USAGE, "trtllm_kv_cache_utilization"),
                Source(Signal.BLOCK_TOKENS, "trtllm_kv_cache_tokens_per_block"),
                Source(Signal.BLOCKS, "trtllm_kv_cache_max_blocks"),
                Source(Signal.REQUESTS, "trtllm_request_success_total"),
            )
        ),
        "triton-trtllm": EngineTable(
            sources=(
                _PROCESS_START,
                Source(Signal.WAITING, "nv_trt_llm_request_metrics", ("request_type", "waiting")),
                Source(Signal.RUNNING, "nv_trt_llm_request_metrics", ("request_type", "scheduled")),
                Source(Signal.KV_CACHE_USAGE, "nv_trt_llm_kv_cache_block_metrics", ("kv_cache_block_type", "fraction")),
                Source(Signal.BLOCK_TOKENS, "nv_trt_llm_kv_cache_block_metrics", ("kv_cache_block_type", "tokens_per")),
                Source(Signal.BLOCKS, "nv_trt_llm_kv_cache_block_metrics", ("kv_cache_block_type", "max")),
            )
        ),
        # No running requests: `nv_inference_exec_count`, which others read as such, counts executed batches for ever.
        "triton": EngineTable(
            sources=(
                _PROCESS_START,
                Source(Signal.WAITING, "nv_inference_pending_request_count"),
                Source(Signal.REQUESTS, "nv_inference_request_success"),
            )
        ),
    }
)
