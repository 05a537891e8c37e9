import itertools
from pathlib import Path

import pytest

from bench import soak_picker
from bench.soak import Report, Sample, slope, soak
from bench.soak_load import Words

MIB = 2**20


def sample(requests: int, mebibytes: float) -> Sample:
    return Sample(requests, int(mebibytes * MIB), 0, 0, 0)


def test_the_slope_is_in_mebibytes_per_hundred_thousand_requests() -> None:
    assert slope([sample(0, 50), sample(50_000, 51), sample(100_000, 52)]) == pytest.approx(2.0)
    assert slope([sample(0, 50), sample(100, 90)]) == 0.0


@pytest.mark.parametrize(
    ("requests", "growth", "left", "failed", "passed"),
    [
        (1_000_000, 0.5, 0, 0, True),
        (1_000_000, 1.5, 0, 0, False),
        (20_000, 9.0, 0, 0, True),
        (1_000_000, 0.0, 1, 0, False),
        (1_000_000, 0.0, 0, 1, False),
    ],
)
def test_what_passes(requests: int, growth: float, left: int, failed: int, passed: bool) -> None:
    report = Report(requests, "native", "calm", growth=growth, left={"extproc_streams_open": left}, failed=failed)
    assert report.passed is passed


def test_every_request_says_something_of_its_own() -> None:
    words = Words()
    said = [words.of(number) for number in range(25)]
    assert len({message for message, _ in said}) == 25
    assert sum(cut for _, cut in said) == 1
    assert len({len(message) for message, cut in said if not cut}) == 2, "whole ones, and one that is no JSON"


@pytest.mark.e2e
@pytest.mark.parametrize("transport", ["grpcio", "native"])
async def test_nothing_is_left_and_nothing_grows(tmp_path: Path, transport: str) -> None:
    """Three rounds: what the first has left behind for good is there before the second."""
    requests = 2500
    report = await soak(tmp_path, requests=requests, rounds=3, transport=transport, engines=1, max_blocks=1000)
    assert report.failed == 0
    assert report.reset == 3 * requests / 25
    assert report.left
    assert not any(report.left.values())
    # The index is full and churns: by up to a thousand blocks of memory one way or the other. A leak grows in every round.
    growth = [after - before for before, after in itertools.pairwise(report.objects)]
    assert min(growth) < requests / 10, growth


def test_a_picker_that_cannot_start_is_said(tmp_path: Path) -> None:
    config = tmp_path / "extproc.yaml"
    config.write_text("server: {transport: smoke-signals}")
    assert soak_picker.main("calm", tmp_path, str(config)) == 2
