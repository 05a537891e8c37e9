"""Figures, table and picture of a comparison."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from extproc.demo.drive import RequestRecord
from extproc.demo.report import RunFigures, draw, figures_of, quantile, table


def record(number: int, **fields: object) -> RequestRecord:
    known: dict[str, object] = {
        "sent_s": number * 0.1,
        "session": 0,
        "turn": number,
        "status": 200,
        "first_token_s": number * 0.1 + 0.05,
        "done_s": number * 0.1 + 0.5,
        "token_gaps_s": [0.01, 0.03],
        "prompt_tokens": 100,
        "cached_tokens": 25,
        "completion_tokens": 3,
        "endpoint": f"gpu-{number % 2 + 1}",
    }
    return RequestRecord(**{**known, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [([], 0.5, 0.0), ([7.0], 0.99, 7.0), ([3.0, 1.0, 2.0], 0.5, 2.0), ([1.0, 2.0], 1.0, 2.0), ([1.0, 2.0], 0.0, 1.0)],
)
def test_quantiles(values: list[float], share: float, wanted: float) -> None:
    assert quantile(values, share) == wanted


def test_figures() -> None:
    run = [record(number) for number in range(10)]
    run.append(record(10, error="HTTP 503", status=503, first_token_s=None, done_s=1.01, endpoint="", token_gaps_s=[]))
    found = figures_of("picker", run, ["gpu-1", "gpu-2", "gpu-3"])
    assert (found.requests, found.errors) == (11, 1)
    assert found.duration_s == pytest.approx(1.4)
    assert found.requests_per_s == pytest.approx(10 / 1.4)
    assert found.output_tokens_per_s == pytest.approx(30 / 1.4)
    assert found.ttft_mean_s == pytest.approx(0.05)
    assert found.itl_mean_s == pytest.approx(0.02)
    assert found.cached_share == 0.25
    assert found.per_endpoint == {"gpu-1": 5, "gpu-2": 5, "gpu-3": 0}
    assert found.as_dict()["name"] == "picker"


def test_figures_of_a_run_in_which_nothing_worked() -> None:
    broken = record(0, error="x", first_token_s=None, done_s=None, endpoint="")
    for run in ([], [broken]):
        found = figures_of("none", run, ["gpu-1"])
        assert (found.errors, found.requests_per_s, found.ttft_p99_s, found.cached_share) == (len(run), 0, 0, 0)


def rows() -> list[RunFigures]:
    slow = [record(number, cached_tokens=20, first_token_s=number * 0.1 + 0.2) for number in range(10)]
    fast = [record(number, cached_tokens=80) for number in range(10)]
    return [figures_of("round robin", slow, ["gpu-1", "gpu-2"]), figures_of("picker", fast, ["gpu-1", "gpu-2"])]


def test_the_table_compares_the_second_row_with_the_first() -> None:
    lines = table(rows()).splitlines()
    assert lines[0].split("  ")[-1].strip() == "picker vs round robin"
    assert len({len(line) for line in lines[:2]}) == 1
    found = {line.split("  ")[0]: line for line in lines}
    assert found["prompt tokens cached"].endswith("4.0x more")
    assert found["TTFT mean, ms"].endswith("4.0x faster")
    assert "5/5" in found["requests per endpoint"]


def test_a_ratio_to_nothing_is_a_dash() -> None:
    empty = figures_of("none", [], [])
    assert "- faster" in table([empty, empty])


def test_the_picture_is_written(tmp_path: Path) -> None:
    rng = random.Random(1)
    runs = [[record(number, first_token_s=number * 0.1 + rng.random()) for number in range(5)] for _ in range(2)]
    runs[0].append(record(9, first_token_s=None))
    path = tmp_path / "deep" / "demo.png"
    draw(rows(), runs, path, title="a title")
    assert path.read_bytes().startswith(b"\x89PNG")
