from __future__ import annotations

import contextlib
import json
from time import thread_time

import pytest

from bench.heavy_bodies import LIMIT_BYTES, Heavy, heavy_bodies, largest_read_whole
from extproc.errors import InvalidRequestError
from extproc.request import parse

HEAVY = list(heavy_bodies(cut=False, twice=False))


def test_they_fill_the_limit_and_are_told_apart() -> None:
    assert len({heavy.name for heavy in HEAVY}) == len(HEAVY) > 300
    sizes = {heavy.name: len(heavy.make(LIMIT_BYTES)) for heavy in HEAVY[::7] if not heavy.name.startswith("gzip")}
    assert all(LIMIT_BYTES - 800_000 < size <= LIMIT_BYTES for size in sizes.values()), sizes


def test_those_that_are_read_twice_and_those_that_are_cut_come_beside_them() -> None:
    first = next(heavy_bodies(cut=False, twice=False))
    every = heavy_bodies()
    found = {one.name.removeprefix(first.name): one for one in (next(every) for _ in range(8))}
    assert set(found) == {
        "",
        ", cut",
        ", NaN first",
        ", NaN last",
        ", surrogate last",
        ", wrong type last",
        ", great number last",
        ", no JSON last",
    }
    for name in ("", ", NaN first", ", NaN last", ", surrogate last", ", wrong type last", ", great number last"):
        assert json.loads(found[name].make(LIMIT_BYTES))["model"] == "m"
    assert not found[", cut"].complete


@pytest.mark.parametrize("heavy", HEAVY[::11], ids=lambda heavy: heavy.name)
def test_no_body_takes_long(heavy: Heavy) -> None:
    """Three times the aim of `bench core`, in CPU time of this thread: before there was a bound, half a second and more."""
    for body in (heavy.make(LIMIT_BYTES), largest_read_whole(heavy)):
        assert _least(heavy, body) < 0.15


def _least(heavy: Heavy, body: bytes) -> float:
    took = []
    for _ in range(5):
        begin = thread_time()
        with contextlib.suppress(InvalidRequestError):
            parse(heavy.path, body, content_encoding=heavy.content_encoding)
        took.append(thread_time() - begin)
        if took[-1] < 0.15:
            break
    return min(took)
