import dataclasses

import pytest

from extproc.sim.presets import PRESETS, EngineConstants

L4 = PRESETS["l4-llama-3.1-8b-fp8"]


def test_the_l4_preset_has_the_fitted_values() -> None:
    assert L4.kv_cache_tokens == 80_000
    assert L4.num_gpu_blocks == 5_000
    assert L4.prefill_tokens_per_s == 5_800


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plausible(name: str) -> None:
    constants = PRESETS[name]
    assert 1_000 < constants.prefill_tokens_per_s < 100_000
    assert constants.num_gpu_blocks * constants.block_size <= constants.kv_cache_tokens
    assert 0.001 < constants.weight_read_s < 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_tokens_per_s": 0.0},
        {"weight_read_s": -1.0},
        {"weight_read_s": 0.0, "step_overhead_s": 0.0},
        {"block_size": 0},
        {"max_num_batched_tokens": 8},
        {"kv_cache_tokens": 31},
    ],
)
def test_impossible_constants_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        EngineConstants(**(dataclasses.asdict(L4) | change))
