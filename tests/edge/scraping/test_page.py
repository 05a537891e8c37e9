"""Families on a page, and that a memory of the last page changes what reading costs and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.scraping.page import PageMemory, find_families, number
from extproc.edge.scraping.signals import read_metrics

DATA = Path(__file__).parent / "data"
PAGES = {name: (DATA / f"{name}.txt").read_bytes() for name in ("busy", "lora_busy", "data_parallel_2")}
WANTED = (("a", b"fam:a"), ("b", b"fam:b_new"), ("b", b"fam:b_old"), (None, b"fam:info"))
PAGE = b"""# HELP fam:a What a is.
# TYPE fam:a gauge
fam:a{engine="0"} 1.0
fam:a{engine="1"} 2.0
# TYPE fam:other counter
fam:other 7
# TYPE fam:b_old counter
fam:b_old 3.5
# TYPE fam:info gauge
fam:info{x="y"} 1
"""
FAMILIES = {
    b"fam:a": [(b'{engine="0"}', 1.0), (b'{engine="1"}', 2.0)],
    b"fam:b_old": [(b"", 3.5)],
    b"fam:info": [(b'{x="y"}', 1.0)],
}


def in_turn(*pages: bytes) -> PageMemory:
    """Read pages with one memory, and each as if it were the first; return the memory."""
    memory = PageMemory()
    for page in pages:
        assert memory.find_families(page, WANTED) == find_families(page, WANTED)
    return memory


def remembers(memory: PageMemory, page: bytes) -> bool:
    """Tell whether a page is laid out as the last one."""
    return memory._again(page) is not None


def test_families() -> None:
    assert find_families(PAGE, WANTED) == FAMILIES
    assert find_families(PAGE[: PAGE.index(b"\nfam:a") + 1], WANTED) == {}
    assert find_families(b"", WANTED) == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [(b"1", 1.0), (b"1.5e3", 1500.0), (b"-1", None), (b"NaN", None), (b"+Inf", None), (b"1e16", None), (b"", None)],
)
def test_number(text: bytes, value: float | None) -> None:
    assert number(text) == value


def test_a_page_with_other_numbers_is_laid_out_alike() -> None:
    memory = PageMemory()
    assert memory.find_families(PAGE, WANTED) == FAMILIES
    other = PAGE.replace(b"1.0", b"1234567.0").replace(b"3.5", b"0")
    assert remembers(memory, other)
    assert memory.find_families(other, WANTED)[b"fam:a"][0] == (b'{engine="0"}', 1234567.0)
    in_turn(PAGE, other, PAGE)


@pytest.mark.parametrize(
    "other",
    [
        PAGE.replace(b"fam:b_old 3.5\n", b""),
        PAGE.replace(b'fam:a{engine="1"} 2.0\n', b""),
        PAGE.replace(b"# TYPE fam:other", b'fam:a{engine="2"} 3.0\n# TYPE fam:other'),
        PAGE.replace(b'fam:a{engine="0"}', b'fam:a{engine="-1"} 9\nfam:a{engine="0"}'),
        PAGE.replace(b'x="y"', b'x="z"'),
        PAGE.replace(b"3.5", b"NaN"),
        PAGE.replace(b"3.5", b"3.5 1700000000"),
        PAGE[:-1],
        PAGE[:-2],
        PAGE + b"# TYPE fam:b_new counter\nfam:b_new 4\n",
        b"fam:b_new 4\n" + PAGE,
        b"#\n" * 2000 + PAGE,
        b"",
        b"<html>",
    ],
    ids=[
        "family left", "line left", "line at the end", "line at the begin", "labels", "damaged", "timestamp", "no break",
        "cut", "family came", "family came first", "far away", "empty", "foreign",
    ],
)  # fmt: skip
def test_a_page_laid_out_differently_is_read_from_the_beginning(other: bytes) -> None:
    memory = in_turn(PAGE)
    assert remembers(memory, PAGE)
    assert not remembers(memory, other)
    in_turn(PAGE, other, PAGE, other, other)


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace(b"# TYPE fam:b_old counter\n", b""),
        PAGE[PAGE.index(b"fam:a{") :],
        PAGE.replace(b"3.5", b"-1"),
        PAGE.replace(b'{x="y"} 1', b"{x="),
        PAGE.replace(b"fam:b_old 3.5", b"fam:b_old\t3.5"),
        PAGE.replace(b"fam:b_old 3.5", b"fam:b_old 3.5 1700000000"),
        b"# fam\n" + b"".join(b'fam:a{engine="%d"} 1\n' % number for number in range(201)),
        b'# fam\nfam:a{engine="' + b"x" * 70_000 + b'"} 1\n',
        b"",
    ],
    ids=[
        "no comment",
        "first line",
        "damaged value",
        "damaged labels",
        "tab",
        "timestamp",
        "many lines",
        "long lines",
        "empty",
    ],
)
def test_a_layout_that_is_no_help_is_not_remembered(page: bytes) -> None:
    memory = in_turn(page, page)
    assert page == b"" or not remembers(memory, page)


def test_a_memory_without_families_still_notices_them() -> None:
    in_turn(b"# nothing\n", b"# nothing\n", PAGE)


@pytest.mark.parametrize("name", PAGES)
def test_recorded_pages_are_remembered(name: str) -> None:
    page = PAGES[name]
    memory = PageMemory()
    plain = read_metrics(page, "vllm")
    assert read_metrics(page, "vllm", memory=memory) == plain
    for digits in (b"7.0", b"123456.0"):
        # The second time all lines together have moved too far: the page is remembered anew.
        grown = re.sub(rb"(?m)^(vllm:[a-z_]+(?:\{[^}]*\})?) [0-9.]+$", rb"\1 " + digits, page)
        assert digits != b"7.0" or remembers(memory, grown)
        assert read_metrics(grown, "vllm", memory=memory) == read_metrics(grown, "vllm")
        assert remembers(memory, grown)


@st.composite
def _well_formed(draw: st.DrawFn) -> bytes:
    """Write a page as the format allows it: families in any order, each in one group, mostly with a comment."""
    lines = []
    for name in draw(st.permutations(("fam:a", "fam:b_new", "fam:b_old", "fam:info", "fam:a_longer"))):
        if draw(st.booleans()):
            lines.append(f"# TYPE {name} gauge")
        labels = draw(st.lists(st.sampled_from(('{x="1"}', '{x="2"}', "")), max_size=3, unique=True))
        values = st.sampled_from(("0", "1.0", "123456.5", "-1", "NaN", "5 17"))
        lines += [f"{name}{label} {draw(values)}" for label in labels]
    return "\n".join(lines).encode() + draw(st.sampled_from((b"\n", b"")))


@given(pages=st.lists(_well_formed(), max_size=5))
def test_a_memory_changes_no_result(pages: Sequence[bytes]) -> None:
    in_turn(*pages, *reversed(pages))


@given(
    name=st.sampled_from(sorted(PAGES)),
    numbers=st.lists(st.sampled_from((b"0.0", b"7.0", b"1e+06", b"NaN", b"123456789.25")), min_size=1, max_size=7),
    again=st.lists(st.sampled_from((b"0.0", b"42.0")), min_size=1, max_size=3),
)
def test_a_memory_changes_nothing_of_recorded_pages(name: str, numbers: list[bytes], again: list[bytes]) -> None:
    def filled(values: list[bytes]) -> bytes:
        places = iter(range(10**6))
        return re.sub(
            rb"(?m)^(vllm:[a-z]+_[a-z]+_[a-z]*(?:\{[^}]*\})?) [0-9.]+$",
            lambda match: match[1] + b" " + values[next(places) % len(values)],
            PAGES[name],
        )

    memory = PageMemory()
    for page in (PAGES[name], filled(numbers), filled(again)):
        assert read_metrics(page, "vllm", memory=memory) == read_metrics(page, "vllm")


@given(pages=st.lists(st.binary(max_size=200).map(lambda tail: PAGE + tail) | st.binary(max_size=300), max_size=4))
def test_no_page_raises(pages: list[bytes]) -> None:
    memory = PageMemory()
    for page in pages:
        memory.find_families(page, WANTED)
