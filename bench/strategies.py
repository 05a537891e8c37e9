"""What each strategy is worth on the small simulated fleet: the table of docs/strategies.md.

    python -m bench.strategies [--seeds 3]

Mean and p99 of time to first token, in milliseconds. The fleet and its workloads are those of `tests/routing/fleet.py`;
every request goes through the whole `Router`, which learns bytes per token as it does behind Envoy.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from extproc.config.schema import RoutingConfig, StrategyName, WeightsConfig
from tests.routing import fleet

STRATEGIES: tuple[StrategyName, ...] = (
    "random",
    "round-robin",
    "least-load",
    "session",
    "prefix-hash",
    "prefix-cache",
    "weighted",
)
WORKLOADS: dict[str, tuple[Callable[[int], list[fleet.Arrival]], int, fleet.Gpu, float | None]] = {
    "chat": (functools.partial(fleet.chat, sessions_per_s=5.0), 8, fleet.L4, 0.5),
    "growing": (fleet.growing, 4, fleet.L4, 0.5),
    "hot": (functools.partial(fleet.hot, rate=24.0), 8, fleet.L4, 0.5),
    "hot, unscraped": (functools.partial(fleet.hot, rate=30.0), 8, fleet.L4, None),
    "groups": (fleet.groups, 8, fleet.H100X2, 0.5),
    "documents": (fleet.documents, 8, fleet.L4, 0.5),
    "fresh": (fleet.fresh, 8, fleet.L4, 0.5),
}
"""name: (workload of a seed, replicas, GPU, seconds between scrapes)."""


def one(strategy: StrategyName, workload: str, seed: int, prefix_weight: float | None = None) -> tuple[float, float]:
    """Run one strategy on one workload; return mean and p99 of time to first token in milliseconds."""
    arrivals_of, replicas, gpu, scrape_s = WORKLOADS[workload]
    weights = WeightsConfig() if prefix_weight is None else WeightsConfig(prefix=prefix_weight)
    run = fleet.run(
        RoutingConfig(strategy=strategy, weights=weights),
        arrivals_of(seed),
        replicas=replicas,
        gpu=gpu,
        scrape_s=scrape_s,
        seed=seed,
    )
    return run.mean_ms, run.p99_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs per cell (default: %(default)s)")
    parser.add_argument("--prefix-weight", type=float, help="`weighted` alone, with another weight of `prefix`")
    args = parser.parse_args()
    strategies = STRATEGIES if args.prefix_weight is None else ("weighted",)
    print(f"| strategy | {' | '.join(WORKLOADS)} |")
    print("|---" * (len(WORKLOADS) + 1) + "|")
    # A process of its own per run: a table of three seeds takes minutes of every core.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as runs:
        table = [
            (
                strategy,
                [
                    [
                        runs.submit(one, strategy, workload, seed, args.prefix_weight)
                        for seed in range(1, args.seeds + 1)
                    ]
                    for workload in WORKLOADS
                ],
            )
            for strategy in strategies
        ]
        for strategy, row in table:
            cells = [[run.result() for run in cell] for cell in row]
            columns = [
                f"{statistics.fmean(mean for mean, _ in cell):,.0f} / {statistics.fmean(p99 for _, p99 in cell):,.0f}"
                for cell in cells
            ]
            print(f"| `{strategy}` | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
