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

from extproc.config.schema import RoutingConfig, StrategyName
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


def cell(strategy: StrategyName, workload: str, seeds: int) -> str:
    """Run one strategy on one workload; return `mean / p99` in milliseconds, each the mean over seeds."""
    arrivals_of, replicas, gpu, scrape_s = WORKLOADS[workload]
    runs = [
        fleet.run(
            RoutingConfig(strategy=strategy),
            arrivals_of(seed),
            replicas=replicas,
            gpu=gpu,
            scrape_s=scrape_s,
            seed=seed,
        )
        for seed in range(1, seeds + 1)
    ]
    mean = statistics.fmean(run.mean_ms for run in runs)
    p99 = statistics.fmean(run.p99_ms for run in runs)
    return f"{mean:,.0f} / {p99:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs per cell (default: %(default)s)")
    args = parser.parse_args()
    print(f"| strategy | {' | '.join(WORKLOADS)} |")
    print("|---" * (len(WORKLOADS) + 1) + "|")
    for strategy in STRATEGIES:
        cells = [cell(strategy, workload, args.seeds) for workload in WORKLOADS]
        print(f"| `{strategy}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
