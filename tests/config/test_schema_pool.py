"""The section `pool`."""

from __future__ import annotations

from extproc.config.schema import PoolConfig
from extproc.config.schema_pool import ScrapeConfig


def test_mutable_defaults_are_not_shared() -> None:
    first, second = PoolConfig(), PoolConfig()
    first.endpoints.append("a:1")
    assert second.endpoints == []


def test_the_default_interval_respects_the_engine() -> None:
    # A page costs a real vLLM 6 to 37 ms: at 30 times that, scraping takes about 3 % of its API process.
    assert ScrapeConfig().cost_factor >= 30


def test_the_default_budget_leaves_most_of_a_core_to_requests() -> None:
    assert ScrapeConfig().budget == 0.3
