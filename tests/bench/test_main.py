import asyncio
import sys
from pathlib import Path

import pytest

from bench.__main__ import _cpu_model, aim_lines, main
from bench.load import LoadResult
from bench.stage import cpu_s
from extproc.sim.processes import Children


def test_aims_say_what_was_measured_and_whether_it_was_met() -> None:
    lines = aim_lines(
        [
            {"name": "CPU", "aim": 1.5, "measured": 1.4, "met": True},
            {"name": "p99", "aim": 1.5, "measured": 1.61, "met": False},
        ]
    )
    assert lines[0].split() == ["met", "CPU", "aim", "1.5", "measured", "1.40"]
    assert lines[1].startswith("MISSED p99")


def test_the_processor_is_named() -> None:
    assert _cpu_model("processor\t: 0\nmodel name\t: Fast One\n") == "Fast One"


def test_without_h2load_it_fails_and_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path)])
    assert main() == 1
    assert "apt-get install -y nghttp2-client" in capsys.readouterr().err


def test_quantiles_are_of_the_nearest_rank() -> None:
    result = LoadResult(100, 0, 2.0, tuple(float(place) for place in range(100)))
    assert (result.rate, result.quantile_s(0.5), result.quantile_s(0.99)) == (50.0, 50.0, 99.0)


def test_the_cpu_time_of_another_process_can_be_read(tmp_path: Path) -> None:
    async def live() -> float:
        async with Children(tmp_path) as children:
            child = await children.start("waits", [sys.executable, "-c", "import time; time.sleep(60)"])
            while (used_s := cpu_s(child)) == 0.0:
                await asyncio.sleep(0.01)
            return used_s

    assert asyncio.run(live()) > 0.0
