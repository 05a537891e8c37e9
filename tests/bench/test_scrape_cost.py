from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import page_server, scrape_cost
from bench.scrape_cost import SCENARIOS, Figures, Scenario, aims, lines
from extproc.pool.signals import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "pool" / "data" / "busy.txt"
FIGURES = Figures(
    cores=0.04,
    pages_per_s=43.0,
    page_cpu_us=900,
    scrape_ms=1,
    oldest_ms=249,
    oldest_share=0.996,
    stretch=1,
    late_ms=2,
    failures=0,
)


def test_pages_differ_in_counters_and_load_only() -> None:
    page = PAGE.read_bytes()
    busy, idle = page_server.variants(page, busy=True), page_server.variants(page, busy=False)
    assert len({len(one) for one in busy}) > 1
    for one in busy:
        assert abs(len(one) - len(page)) < 50
        assert read_metrics(one, "vllm").running == 3.0
    assert all(read_metrics(one, "vllm").running == 0.0 for one in idle)
    counters = [read_metrics(one, "vllm").prompt_tokens_total for one in busy]
    assert counters == sorted(counters, key=float)  # type: ignore[arg-type]


def test_every_pool_has_an_aim_and_those_of_busy_ones_an_age() -> None:
    found = {scenario.name: FIGURES for scenario in SCENARIOS}
    rows = aims(found)
    assert [row["aim"] for row in rows if row["name"].endswith("cores")] == [0.05, 0.05, 0.05, 0.4, 0.4, 0.03]
    assert sum(row["name"].endswith("oldest / allowed") for row in rows) == 3
    assert [row["name"] for row in rows if not row["met"]] == ["scraping 100 endpoints, busy, budget 0.03, cores"]
    late = {name: replace(FIGURES, oldest_share=1.01) for name in found}
    assert sum(not row["met"] for row in aims(late)) == 4


def test_one_line_per_pool() -> None:
    text = lines({"10 endpoints, busy": FIGURES})
    assert len(text) == 2
    assert "0.040" in text[1]
    assert "249" in text[1]


@pytest.mark.e2e
@pytest.mark.parametrize("path", ["/busy", "/slow", "/idle"])
def test_a_small_pool(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_cost, "_RUN_UP_S", 1.0)
    argv = [sys.executable, "-m", "bench.page_server", str(PAGE), "2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            ports = [int(word) for word in server.stdout.readline().split()]
            found = asyncio.run(scrape_cost._run(Scenario("two", 2, path, 0.05), ports, 0.6))
        finally:
            server.terminate()
    assert found.cores > 0
    if path != "/idle":
        assert found.pages_per_s > 0
        assert found.scrape_ms > (10 if path == "/slow" else 0)
