"""Memory and time of the prefix index: `python -m bench.prefix_index`, or `measure()` for `make bench`.

Each case runs in a process of its own, because memory an allocator has once taken tells nothing of the next case.
Times are CPU time, the best of several batches: what the code costs, not what else the machine was doing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

from extproc.prefix.blocks import BlockSchedule, hash_blocks, seed
from extproc.prefix.index import PrefixIndex

_SCHEDULE: Final = BlockSchedule(256)
_MB: Final = 1_000_000
_ROOT: Final = Path(__file__).resolve().parent.parent


def _resident_bytes() -> int:
    """Return this process's resident set (Linux: second field of statm, in pages)."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _chain(rng: random.Random, n_blocks: int, head: array[int] | None = None) -> array[int]:
    """Return made-up hashes: the index looks at nothing but their equality, and chained hashes never repeat."""
    tail = array("Q", rng.randbytes(8 * (n_blocks - len(head or ()))))
    return tail if head is None else head + tail


def _fill(index: PrefixIndex, rng: random.Random, prefixes: int, endpoints: int) -> None:
    """Add prefixes of 20 to 40 blocks, nine of which are one of 100 shared heads (30 %), as requests that succeed."""
    heads = [_chain(rng, 9) for _ in range(100)]
    for now in range(prefixes):
        endpoint_id = f"10.0.0.{rng.randrange(endpoints)}:8000"
        handle = index.add(endpoint_id, [_chain(rng, rng.randint(20, 40), rng.choice(heads))], now)
        index.confirm(endpoint_id, handle, now + 0.5)


def memory(prefixes: int, endpoints: int) -> dict[str, float]:
    """Measure resident memory of an index with so many prefixes of 30 blocks on average, 30 % of them shared."""
    empty = _resident_bytes()
    index = PrefixIndex(_SCHEDULE, 4_000_000)
    _fill(index, random.Random(1), prefixes, endpoints)
    full = _resident_bytes()
    stats = index.stats()
    return {
        "prefixes": prefixes,
        "endpoints": endpoints,
        "blocks": stats.blocks,
        "held_blocks": stats.held_blocks,
        "nodes": stats.nodes,
        "growth_mb": (full - empty) / _MB,
        "process_mb": full / _MB,
        "bytes_per_block": (full - empty) / stats.blocks,
    }


def _best_us(run: Callable[[int], object], per_batch: int, batches: int = 15) -> tuple[float, float]:
    """Return microseconds of CPU per call: the best batch and the median one."""
    took = []
    calls = iter(range(per_batch * batches))
    for _ in range(batches):
        begin = process_time()
        for _ in range(per_batch):
            run(next(calls))
        took.append((process_time() - begin) / per_batch * 1e6)
    return min(took), statistics.median(took)


def hashing() -> dict[str, float]:
    """Measure `seed` and `hash_blocks`."""
    rng = random.Random(2)
    figures = {"seed_us": _best_us(lambda _: seed("meta-llama/Llama-3.1-8B", ""), 2000)[0]}
    for name, n_bytes in (("1kB", 1 << 10), ("32kB", 32 << 10), ("400kB", 400_000)):
        prompt = rng.randbytes(n_bytes)
        chained = hash_blocks(prompt, 7, _SCHEDULE)
        figures[f"hash_{name}_us"] = _best_us(lambda _, p=prompt: hash_blocks(p, 7, _SCHEDULE), 200)[0]  # type: ignore[misc]
        figures[f"hash_{name}_blocks"] = len(chained)
    return figures


def decision(n_blocks: int, endpoints: int, warm_blocks: int, at_capacity: bool) -> dict[str, float]:
    """Measure match, add and confirm for chat turns of `n_blocks` blocks on a warm index.

    Each request shares a head of a quarter of its blocks, which all endpoints hold, with all others, and another
    quarter with one of 50 conversations; the rest is new, so that nothing is measured twice.
    """
    rng = random.Random(3)
    index = PrefixIndex(_SCHEDULE, 4_000_000)
    _fill(index, rng, warm_blocks // 21, endpoints)
    ids = [f"10.0.0.{i}:8000" for i in range(endpoints)]
    head = _chain(rng, max(1, n_blocks // 4))
    middles = [_chain(rng, max(2, n_blocks // 2), head) for _ in range(50)]
    now = 1e6
    for endpoint_id in ids:
        index.confirm(endpoint_id, index.add(endpoint_id, [head, rng.choice(middles)], now), now)
        if at_capacity:
            index.set_capacity(endpoint_id, index.held_bytes(endpoint_id))
    per_batch, batches = 400, 15
    chains = [[_chain(rng, n_blocks, rng.choice(middles))] for _ in range(per_batch * batches)]
    handles: list[Any] = []
    # A picker's process would do the same: what is here stays, so the collector need not look at it again.
    gc.freeze()
    matching = _best_us(lambda i: index.match(chains[i], 1), per_batch, batches)
    adding = _best_us(lambda i: handles.append(index.add(ids[i % endpoints], chains[i], now + i)), per_batch, batches)
    confirming = _best_us(lambda i: index.confirm(ids[i % endpoints], handles[i], now + i), per_batch, batches)
    return {
        "match_us": matching[0],
        "add_us": adding[0],
        "confirm_us": confirming[0],
        "match_median_us": matching[1],
        "add_median_us": adding[1],
        "matching_endpoints": len(index.match(chains[0]).matched_bytes),
        "warm_blocks": index.stats().blocks,
    }


def housekeeping() -> dict[str, float]:
    """Measure what happens rarely: an endpoint that leaves, a correction, and taking away single blocks."""
    rng = random.Random(4)
    index = PrefixIndex(_SCHEDULE, 4_000_000)
    _fill(index, rng, 47_600, 10)
    figures = {}
    begin = perf_counter()
    index.drop("10.0.0.0:8000")
    figures["drop_us"] = (perf_counter() - begin) * 1e6
    begin = perf_counter()
    swept = index.sweep(1 << 30)
    figures["sweep_us_per_node"] = (perf_counter() - begin) / swept * 1e6
    begin = perf_counter()
    gone = index.correct("10.0.0.1:8000", 10_000.0)
    figures["correct_us_per_block"] = (perf_counter() - begin) / gone * 1e6
    return figures


_CASES: Final[dict[str, Callable[[], dict[str, float]]]] = {
    "memory_100k_prefixes": lambda: memory(100_000, 10),
    "memory_million_blocks": lambda: memory(47_600, 10),
    "hashing": hashing,
    "decision_1kB_10": lambda: decision(4, 10, 100_000, False),
    "decision_32kB_100": lambda: decision(128, 100, 1_000_000, False),
    "decision_32kB_100_at_capacity": lambda: decision(128, 100, 1_000_000, True),
    "housekeeping": housekeeping,
}


SHORT: Final = ("memory_100k_prefixes",)
"""The one case that `make bench` promises an aim for; the others are for work on the index."""


def measure(cases: Sequence[str] = tuple(_CASES)) -> dict[str, Any]:
    """Run cases and return `{"figures": ..., "aims": [...]}` as the other benchmarks do."""
    figures: dict[str, Any] = {}
    for case in cases:
        command = [sys.executable, "-m", "bench.prefix_index", "--case", case]
        figures[case] = json.loads(subprocess.run(command, cwd=_ROOT, check=True, capture_output=True).stdout)
    grown = figures["memory_100k_prefixes"]["growth_mb"]
    aims: list[tuple[str, int, float]] = [("100,000 prefixes of 30 blocks on 10 endpoints, MB", 150, grown)]
    if set(cases) == set(_CASES):
        aims += _decision_aims(figures)
    return {
        "figures": figures,
        "aims": [{"name": name, "aim": aim, "measured": got, "met": got <= aim} for name, aim, got in aims],
    }


def _decision_aims(figures: dict[str, Any]) -> list[tuple[str, int, float]]:
    small, large = figures["decision_1kB_10"], figures["decision_32kB_100"]
    full = figures["decision_32kB_100_at_capacity"]
    return [
        ("index alone in a process, with a million blocks, MB", 200, figures["memory_million_blocks"]["process_mb"]),
        ("hash 32 kB, us", 40, figures["hashing"]["hash_32kB_us"]),
        ("match and add, 1 kB, 10 endpoints, us", 15, small["match_us"] + small["add_us"]),
        ("match and add, 32 kB, 100 endpoints, a million blocks, us", 80, large["match_us"] + large["add_us"]),
        ("the same with every endpoint at capacity, us", 80, full["match_us"] + full["add_us"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=sorted(_CASES), help="run one case and print its figures as JSON")
    case = parser.parse_args().case
    if case is not None:
        print(json.dumps(_CASES[case]()))
        return
    measured = measure()
    for name, figures in measured["figures"].items():
        print(name, " ".join(f"{key}={value:,.1f}" for key, value in figures.items()))
    for aim in measured["aims"]:
        print(f"{'met ' if aim['met'] else 'MISS'} {aim['name']}: {aim['measured']:.1f} (aim {aim['aim']})")


if __name__ == "__main__":
    main()
