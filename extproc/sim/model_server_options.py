"""The options of a model server, and their command-line arguments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from extproc.sim.presets import PRESETS, EngineConstants

if TYPE_CHECKING:
    import argparse

DEFAULT_PRESET: Final = "l4-llama-3.1-8b-fp8"
DEFAULT_MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_MAX_MODEL_LEN: Final = 16_384


@dataclass(frozen=True, slots=True)
class ModelServerOptions:
    """One simulated replica. Raises ValueError for what no server could run with."""

    port: int = 8000
    """TCP port, 0 for any free one. vLLM's default."""
    host: str = "127.0.0.1"
    """Address to listen on; loopback by default because POST /fault needs no permission."""
    name: str = "model-server"
    """Value of `x-model-server` in every response."""
    model: str = DEFAULT_MODEL
    """Name of the base model."""
    loras: tuple[str, ...] = ()
    """Names of LoRA adapters over it."""
    constants: EngineConstants = PRESETS[DEFAULT_PRESET]
    speed: float = 1.0
    """How many times faster than the modelled hardware time runs, > 0."""
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    """Most tokens of prompt and output together; must fit into the KV cache, as vLLM demands at start."""
    max_num_queued_requests: int | None = None
    """Answer 503 when so many requests wait already (vLLM's --max-num-queued-reqs); None: never."""
    pad_metrics: bool = False
    """Bring /metrics to the size of a real page (69 kB)."""

    def __post_init__(self) -> None:
        """Check what argparse cannot."""
        if not 0 <= self.port <= 65_535:
            raise ValueError("port must be 0 to 65535")
        if not 0 < self.speed < float("inf"):
            raise ValueError("speed must be positive")
        usable = (self.constants.num_gpu_blocks - 1) * self.constants.block_size
        if not 2 <= self.max_model_len <= usable:
            raise ValueError(f"max_model_len must be 2 to {usable}, what the KV cache holds")
        if not self.name.isprintable() or not self.name.isascii():
            raise ValueError("name must be printable ASCII, it is sent as a header")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `extproc model-server` to `parser`."""
    defaults = ModelServerOptions()
    parser.epilog = "example:\n  extproc model-server --port 8001 --speed 10"
    constants = parser.add_argument_group("hardware")
    parser.add_argument("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=defaults.port, help="port, 0 for any (default: %(default)s)")
    parser.add_argument("--name", help="value of x-model-server in responses (default: host:port)")
    parser.add_argument("--model", default=defaults.model, help="name of the base model (default: %(default)s)")
    parser.add_argument(
        "--lora", action="append", default=[], metavar="NAME", help="a LoRA adapter; repeat (default: none)"
    )
    parser.add_argument(
        "--max-model-len", type=int, help=f"tokens of prompt and output (default: {defaults.max_model_len})"
    )
    parser.add_argument(
        "--max-num-queued-reqs", type=int, metavar="N", help="answer 503 when N requests wait (default: never)"
    )
    parser.add_argument(
        "--pad-metrics", action="store_true", help="make /metrics as long as a real one, 69 kB (default: short)"
    )
    constants.add_argument(
        "--gpu", choices=sorted(PRESETS), default=DEFAULT_PRESET, help="preset (default: %(default)s)"
    )
    constants.add_argument("--speed", type=float, default=1.0, help="times faster than real (default: %(default)s)")
    constants.add_argument(
        "--kv-cache-tokens", type=int, metavar="N", help="size of the KV cache (default: the preset's)"
    )
    constants.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="token budget of a step (default: the preset's)"
    )
    constants.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="most requests running at once (default: the preset's)"
    )
    constants.add_argument("--block-size", type=int, metavar="N", help="tokens per KV block (default: the preset's)")


def options_from(args: argparse.Namespace) -> ModelServerOptions:
    """Make options of parsed arguments. Raises ValueError for impossible values."""
    names = ("kv_cache_tokens", "max_num_batched_tokens", "max_num_seqs", "block_size")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    constants = dataclasses.replace(PRESETS[args.gpu], **given)
    usable = (constants.num_gpu_blocks - 1) * constants.block_size
    return ModelServerOptions(
        port=args.port,
        host=args.host,
        name=args.name or f"{args.host}:{args.port}",
        model=args.model,
        loras=tuple(args.lora),
        constants=constants,
        speed=args.speed,
        max_model_len=args.max_model_len or min(DEFAULT_MAX_MODEL_LEN, usable),
        max_num_queued_requests=args.max_num_queued_reqs,
        pad_metrics=args.pad_metrics,
    )
