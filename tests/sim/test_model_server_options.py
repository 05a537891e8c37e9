import argparse

import pytest

from extproc.sim.model_server_options import ModelServerOptions, add_arguments, options_from
from extproc.sim.presets import PRESETS


def parse(*words: str) -> ModelServerOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_from(parser.parse_args(words))


def test_defaults_agree() -> None:
    assert parse() == ModelServerOptions(name="127.0.0.1:8000")


def test_every_word() -> None:
    options = parse(
        *"--host ::1 --port 8001 --name a --model m --lora x --lora y --max-model-len 100 --max-num-queued-reqs 3 --pad-metrics".split(),
        *"--gpu h100-llama-3.1-8b --speed 10 --kv-cache-tokens 3200 --max-num-batched-tokens 512 --max-num-seqs 4 --block-size 32".split(),
    )
    assert (options.host, options.port, options.name, options.model, options.loras) == (
        "::1",
        8001,
        "a",
        "m",
        ("x", "y"),
    )
    assert (options.max_model_len, options.max_num_queued_requests, options.pad_metrics) == (100, 3, True)
    assert (options.speed, options.constants.num_gpu_blocks, options.constants.block_size) == (10, 100, 32)
    assert options.constants.max_num_batched_tokens == 512
    assert options.constants.max_num_seqs == 4
    assert options.constants.weight_read_s == PRESETS["h100-llama-3.1-8b"].weight_read_s


def test_the_default_length_fits_a_small_cache() -> None:
    assert parse("--kv-cache-tokens", "1600").max_model_len == 1584


@pytest.mark.parametrize(
    "words",
    ["--port 70000", "--speed 0", "--max-model-len 90000", "--kv-cache-tokens 1", "--name é", "--max-num-seqs 0"],
)
def test_impossible_values(words: str) -> None:
    with pytest.raises(ValueError):
        parse(*words.split())
