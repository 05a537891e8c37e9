from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import page_server, scrape_cost
from bench.scrape_cost import SCENARIOS, Figures, Scenario, aims, lines
from extproc.edge.scraping.engines import ENGINES
from extproc.edge.scraping.signals import read_metrics
from extproc.edge.scraping.source import selected_path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "edge" / "scraping" / "data" / "busy.txt"
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


def bodies(answers: page_server.Answers, path: str, count: int) -> list[bytes]:
    return [answers.next(path.encode())[0].partition(b"\r\n\r\n")[2] for _ in range(count)]


def test_pages_differ_in_counters_and_load_only() -> None:
    page = PAGE.read_bytes()
    answers = page_server.Answers(page)
    busy = bodies(answers, "/busy", 200)
    assert {len(one) - len(busy[0]) for one in busy} == {0, 2}
    assert all(abs(len(one) - len(page)) < 50 for one in busy)
    assert {read_metrics(one, "vllm").running for one in busy} == {3.0}
    assert {read_metrics(one, "vllm").running for one in bodies(answers, "/idle", 2)} == {0.0}
    # A counter that fell would be an engine that has restarted.
    counters = [read_metrics(one, "vllm").prompt_tokens_total for one in busy + bodies(answers, "/whole/busy", 2)]
    assert counters == sorted(set(counters), key=float)  # type: ignore[arg-type]
    assert b'"bench"' in bodies(answers, "/v1/models", 1)[0]


def test_engines_select_as_vllm_does_but_for_those_that_do_not() -> None:
    answers = page_server.Answers(PAGE.read_bytes())
    whole = read_metrics(bodies(answers, "/busy", 1)[0], "vllm")
    part = selected_path("/slow", ENGINES["vllm"].families)
    (body,) = bodies(answers, part, 1)
    assert len(body) < 4000
    assert replace(read_metrics(body, "vllm"), prompt_tokens_total=None, generation_tokens_total=None) == replace(
        whole, prompt_tokens_total=None, generation_tokens_total=None
    )
    assert len(bodies(answers, f"/whole{part}", 1)[0]) > 60_000
    assert [round(answers.next(path.encode())[1] * 1e3, 1) for path in ("/slow", part, f"/whole{part}", "/busy")] == [
        10.0,
        1.7,
        10.0,
        0.0,
    ]


def test_every_pool_has_an_aim_and_those_of_busy_ones_an_age() -> None:
    found = {scenario.name: FIGURES for scenario in SCENARIOS}
    rows = aims(found)
    assert [row["aim"] for row in rows if row["name"].endswith("cores")] == [
        *(0.05, 0.05, 0.05, 0.4, 0.4),
        *(0.05, 0.05, 0.4, 0.03),
    ]
    assert sum(row["name"].endswith("oldest / allowed") for row in rows) == 6
    assert [row["name"] for row in rows if not row["met"]] == ["scraping 100, busy, whole pages, budget 0.03, cores"]
    late = {name: replace(FIGURES, oldest_share=1.01) for name in found}
    assert sum(not row["met"] for row in aims(late)) == 7


def test_one_line_per_pool() -> None:
    text = lines({"10 endpoints, busy": FIGURES})
    assert len(text) == 2
    assert "0.040" in text[1]
    assert "249" in text[1]


@pytest.mark.e2e
@pytest.mark.parametrize("path", ["/busy", "/slow", "/idle", "/whole/slow"])
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
        assert found.scrape_ms > {"/slow": 1.6, "/whole/slow": 10}.get(path, 0)
