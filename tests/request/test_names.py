from __future__ import annotations

import pytest

from extproc.request.names import LONGEST_NAME, bounded


@pytest.mark.parametrize("name", ["", "m", "é" * LONGEST_NAME, "x" * LONGEST_NAME])
def test_usual_names_stay_as_they_are(name: str) -> None:
    assert bounded(name) is name


@pytest.mark.parametrize("character", ["x", "é", "😀", "\ud800"])
def test_long_names_are_known_by_their_beginning_and_a_digest(character: str) -> None:
    long = character * 100_000
    short = bounded(long)
    assert len(short) < 100
    assert short[:64] == character * 64
    assert bounded(short) == short == bounded(long[:50_000] + character * 50_000)
    assert bounded(long + "y") != short
