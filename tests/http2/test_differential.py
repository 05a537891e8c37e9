"""The kept inputs, random ones, and a few seconds of the coverage-guided fuzzer."""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.http2.differential import CORPUS, DIFFERENCES, check, corpus, line_of
from tests.http2.fuzz import FOUND, MISSING, NO_FUZZER
from tests.http2.mutation import MOST_BYTES, Mutator, changed_bytes, minimised

pytestmark = pytest.mark.long

KEPT = corpus()


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str) -> None:
    check(KEPT[name])


@given(st.sampled_from(sorted(KEPT)), st.lists(st.integers(0, 2**32), min_size=1, max_size=8))
def test_what_is_kept_and_changed(name: str, seeds: list[int]) -> None:
    data = KEPT[name]
    rng = random.Random(seeds[0])
    mutator = Mutator(list(KEPT.values()), lambda piece, most: changed_bytes(rng, piece, most))
    for seed in seeds:
        data = mutator(data, MOST_BYTES, seed)
    check(data)


@given(st.binary(max_size=300))
def test_arbitrary_bytes(data: bytes) -> None:
    check(data)


def test_every_difference_names_the_section_and_is_met() -> None:
    for difference in DIFFERENCES:
        assert re.match(r"\d+\.\d", difference.why)
    assert len({difference[:3] for difference in DIFFERENCES}) == len(DIFFERENCES)


def test_the_corpus_is_small_and_text() -> None:
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 200_000
    assert {path.suffix for path in CORPUS.iterdir()} == {".txt"}
    assert all(bytes.fromhex(line_of(data)) == data for data in KEPT.values())


def test_a_finding_is_minimised() -> None:
    data = bytes.fromhex("00 000000040000000000 000001000000000001ab 000000040100000000")
    assert minimised(data, lambda shorter: b"\xab" in shorter) == bytes.fromhex("00 000001000000000001ab")


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason=MISSING)
def test_the_fuzzer_runs(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    argv = [sys.executable, "-m", "tests.http2.fuzz", "--seconds", "1", "--seed", "1", "--keep", str(kept)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=CORPUS.parents[2])
    assert done.returncode == 0, done.stderr
    assert kept.read_text(encoding="utf-8").strip()


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason=MISSING)
def test_a_finding_fails_the_run() -> None:
    argv = [sys.executable, "-m", "tests.http2.fuzz", "--seconds", "5", "--seed", "1", "--find"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=CORPUS.parents[2])
    assert done.returncode == FOUND
    assert "fuzz: found" in done.stderr


def test_without_the_fuzzer_a_message_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.http2.fuzz import main

    monkeypatch.setitem(sys.modules, "atheris", None)
    assert main([]) == NO_FUZZER
    assert "atheris is not installed" in capsys.readouterr().err
