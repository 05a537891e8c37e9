"""Engine constants for a few GPU and model pairs: how long a step takes and how much KV cache there is.

Decides nothing; `engine` turns the numbers into step times. The sources are named at each preset: two sets are fitted to published
measurements (KubeAI's benchmark on eight L4, llm-d's on pods of two H100), the others are derived from data sheets with the
efficiencies of the fitted ones and are good for relative statements only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """What one replica can do.

    A step with p prefill tokens and n decoding requests holding c context tokens takes, in seconds,
    `max(weight_read_s, (p + n) / prefill_tokens_per_s) + step_overhead_s + n * decode_request_s + c * decode_context_token_s`
    (the form that fits those measurements of vLLM V1 best).
    """

    prefill_tokens_per_s: float
    """Compute-bound token rate of a step, tokens per second, > 0."""
    weight_read_s: float
    """Seconds to read the weights once: the floor of every step's matrix work."""
    step_overhead_s: float
    """Fixed CPU and launch time of a step, seconds."""
    decode_request_s: float
    """Seconds each decoding request adds to a step (sampling, detokenising)."""
    decode_context_token_s: float
    """Seconds each context token of a decoding request adds (reading its KV)."""
    kv_cache_tokens: int
    """Size of the KV cache in tokens; rounded down to whole blocks."""
    block_size: int = 16
    """Tokens per KV block (vLLM's default on CUDA)."""
    max_num_batched_tokens: int = 8192
    """Token budget of a step (vLLM's default for `serve` on large GPUs)."""
    max_num_seqs: int = 256
    """Most requests running at once (vLLM V1 default)."""

    def __post_init__(self) -> None:
        """Refuse values that no engine can run with."""
        if self.prefill_tokens_per_s <= 0:
            raise ValueError("prefill_tokens_per_s must be positive")
        if min(self.weight_read_s, self.step_overhead_s, self.decode_request_s, self.decode_context_token_s) < 0:
            raise ValueError("times must not be negative")
        if self.weight_read_s + self.step_overhead_s <= 0:
            raise ValueError("a step must take time")
        if min(self.block_size, self.max_num_batched_tokens, self.max_num_seqs) < 1:
            raise ValueError("block_size, max_num_batched_tokens and max_num_seqs must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")  # as vLLM's SchedulerConfig
        if self.kv_cache_tokens < 2 * self.block_size:
            raise ValueError("kv_cache_tokens must hold at least two blocks")

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks as vLLM reports them; one of them is the null block and never used."""
        return self.kv_cache_tokens // self.block_size


H100_FLOPS: Final = 522e12
"""Achieved prefill FLOP/s of one H100: 15,928 tok/s of a 32.8 B model on two of them in llm-d's benchmark, 53 % of the data sheet."""
H100_BYTES_PER_S: Final = 2.4e12
"""Achieved memory bandwidth of one H100, as in the fitted 32 B pod."""
KV_BYTES_8B: Final = 32 * 8 * 128 * 2 * 2
"""Bytes of KV per token of Llama 3.1 8B: layers, KV heads, head size, key and value, bf16."""
KV_BYTES_70B: Final = 80 * 8 * 128 * 2 * 2
"""The same for Llama 3.3 70B."""

PRESETS: Final[dict[str, EngineConstants]] = {
    # Fitted to KubeAI's published benchmark (8 x L4); its token budget was 16,384.
    "l4-llama-3.1-8b-fp8": EngineConstants(
        prefill_tokens_per_s=5_800,
        weight_read_s=31.5e-3,
        step_overhead_s=6e-3,
        decode_request_s=0.25e-3,
        decode_context_token_s=5.5e-7,
        kv_cache_tokens=80_000,
        max_num_batched_tokens=16_384,
    ),
    # Fitted to llm-d's published benchmark (pods of 2 x H100, TP 2).
    "h100x2-qwen3-32b": EngineConstants(
        prefill_tokens_per_s=15_928,
        weight_read_s=9.5e-3,
        step_overhead_s=1.5e-3,
        decode_request_s=0.08e-3,
        decode_context_token_s=5.4e-8,
        kv_cache_tokens=307_328,
    ),
    # Derived: bf16 weights of 8.03 B parameters; KV in (80 GiB x 0.9 - 15 GiB weights - 3.5 GiB activations) / 128 KiB.
    "h100-llama-3.1-8b": EngineConstants(
        prefill_tokens_per_s=H100_FLOPS / (2 * 8.03e9),
        weight_read_s=2 * 8.03e9 / H100_BYTES_PER_S,
        step_overhead_s=1.5e-3,
        decode_request_s=0.08e-3,
        decode_context_token_s=KV_BYTES_8B / H100_BYTES_PER_S,
        kv_cache_tokens=438_000,
    ),
    # Derived: four GPUs, 10 % lost to all-reduce; KV in 4 x (80 GiB x 0.9 - 3.5 GiB) - 132 GiB weights, over 320 KiB.
    "h100x4-llama-3.3-70b": EngineConstants(
        prefill_tokens_per_s=0.9 * 4 * H100_FLOPS / (2 * 70.6e9),
        weight_read_s=2 * 70.6e9 / (4 * H100_BYTES_PER_S),
        step_overhead_s=2.5e-3,
        decode_request_s=0.08e-3,
        decode_context_token_s=KV_BYTES_70B / (4 * H100_BYTES_PER_S),
        kv_cache_tokens=465_000,
    ),
    # Derived: 312 TFLOP/s at 53 %, 2.0 TB/s at 72 %, memory as for the H100.
    "a100-80gb-llama-3.1-8b": EngineConstants(
        prefill_tokens_per_s=0.53 * 312e12 / (2 * 8.03e9),
        weight_read_s=2 * 8.03e9 / 1.45e12,
        step_overhead_s=2e-3,
        decode_request_s=0.1e-3,
        decode_context_token_s=KV_BYTES_8B / 1.45e12,
        kv_cache_tokens=438_000,
    ),
}
"""By name `GPU-model`; `GPUxN` is tensor parallel over N. `l4-llama-3.1-8b-fp8` is the default of the model server."""
