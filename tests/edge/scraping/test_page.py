"""Families on a metrics page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.scraping.page import find_families, number

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
A = [(b'{engine="0"}', 1.0), (b'{engine="1"}', 2.0)]
FAMILIES = {b"fam:a": A, b"fam:b_old": [(b"", 3.5)], b"fam:info": [(b'{x="y"}', 1.0)]}


@pytest.mark.parametrize(
    ("page", "families"),
    [
        (PAGE, FAMILIES),
        (PAGE[: PAGE.index(b"\nfam:a") + 1], {}),
        (b"", {}),
        (b"<html>", {}),
        (PAGE[:-1], FAMILIES),
        (PAGE.replace(b"fam:b_old 3.5", b"fam:b_old\t3.5 1700000000"), FAMILIES),
        (PAGE.replace(b"3.5", b"NaN"), {name: FAMILIES[name] for name in (b"fam:a", b"fam:info")}),
        (PAGE.replace(b'{x="y"} 1', b"{x="), {name: FAMILIES[name] for name in (b"fam:a", b"fam:b_old")}),
        (b"fam:b_new 4\n" + PAGE, {b"fam:b_new": [(b"", 4.0)], b"fam:a": A, b"fam:info": FAMILIES[b"fam:info"]}),
        (PAGE + b"fam:b_new 4\n", {b"fam:b_new": [(b"", 4.0)], b"fam:a": A, b"fam:info": FAMILIES[b"fam:info"]}),
        (b"fam:a_longer 9\nfam:a 1\n", {b"fam:a": [(b"", 1.0)]}),
        (b'fam:a{x="} 1\nfam:a 2', {b"fam:a": [(b"", 2.0)]}),
    ],
    ids=[
        "all", "comment alone", "empty", "foreign", "no last break", "tab and timestamp", "damaged value", "damaged labels",
        "first line", "behind", "longer name", "a damaged line",
    ],
)  # fmt: skip
def test_families(page: bytes, families: dict[bytes, list[tuple[bytes, float]]]) -> None:
    assert find_families(page, WANTED) == families


@pytest.mark.parametrize(
    ("text", "value"),
    [(b"1", 1.0), (b"1.5e3", 1500.0), (b"-1", None), (b"NaN", None), (b"+Inf", None), (b"1e16", None), (b"", None)],
)
def test_number(text: bytes, value: float | None) -> None:
    assert number(text) == value


@st.composite
def _well_formed(draw: st.DrawFn) -> tuple[bytes, dict[bytes, list[tuple[bytes, float]]]]:
    """Write a page as the format allows it, families in any order, each in one group; also say what stands on it."""
    lines: list[str] = []
    families: dict[bytes, list[tuple[bytes, float]]] = {}
    for name in draw(st.permutations(("fam:a", "fam:b_new", "fam:b_old", "fam:info", "fam:a_longer"))):
        if draw(st.booleans()):
            lines.append(f"# TYPE {name} gauge")
        series = []
        for label in draw(st.lists(st.sampled_from(('{x="1"}', '{x="2"}', "")), max_size=3, unique=True)):
            text, value = draw(st.sampled_from((("0", 0.0), ("123456.5", 123456.5), ("-1", None), ("5 17", 5.0))))
            lines.append(f"{name}{label} {text}")
            if value is not None:
                series.append((label.encode(), value))
        if series and name != "fam:a_longer":
            families[name.encode()] = series
    if b"fam:b_new" in families:
        families.pop(b"fam:b_old", None)
    return "\n".join(lines).encode() + draw(st.sampled_from((b"\n", b""))), families


@given(_well_formed())
def test_families_of_any_page(written: tuple[bytes, dict[bytes, list[tuple[bytes, float]]]]) -> None:
    page, families = written
    assert find_families(page, WANTED) == families


@given(page=st.binary(max_size=200).map(lambda tail: PAGE + tail) | st.binary(max_size=300))
def test_no_page_raises(page: bytes) -> None:
    find_families(page, WANTED)
