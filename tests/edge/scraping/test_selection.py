"""Whether an endpoint is asked for its whole page: every kind of engine, and bad days."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.scraping.selection import PageSummary, Selection

LOAD = frozenset({"waiting", "running"})
WHOLE = PageSummary(LOAD, 69_000)
SHORT = PageSummary(LOAD, 3_000)


def tried() -> Selection:
    """One that has seen the whole page once."""
    selection = Selection(allowed=True)
    assert not selection.selects
    assert selection.compare(WHOLE) == ""
    assert selection.selects
    assert not selection.selected
    return selection


def proven() -> Selection:
    selection = tried()
    assert selection.accepts(SHORT)
    assert selection.selected
    return selection


def test_an_engine_that_selects_is_asked_for_no_whole_page_any_more() -> None:
    selection = proven()
    for _ in range(3):
        assert selection.selects
        assert selection.accepts(SHORT)


def test_more_than_before_is_as_good() -> None:
    assert tried().accepts(PageSummary(LOAD | {"lora_max"}, 3_000))


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (WHOLE, "69000 bytes, the whole page 69000"),
        (PageSummary(LOAD, 34_501), "34501 bytes, the whole page 69000"),
        (PageSummary(frozenset({"running"}), 100), "lacks waiting"),
        (PageSummary(frozenset(), 0), "lacks running, waiting"),
    ],
)
def test_an_engine_that_does_not_select_is_tried_once(page: PageSummary, why: str) -> None:
    selection = tried()
    assert not selection.accepts(page)
    assert selection.compare(WHOLE) == why
    assert not selection.selects
    # Said once, and tried no more.
    assert selection.compare(WHOLE) == ""
    assert not selection.selects


def test_without_any_selected_page_it_is_tried_once_as_well() -> None:
    selection = tried()
    selection.lost("status 404")
    assert selection.compare(WHOLE) == "status 404"
    assert not selection.selects


def test_a_bad_moment_is_not_for_ever() -> None:
    """After a thousand whole pages it is tried again, then after two thousand; the same reason is told once."""
    selection = tried()
    selection.lost("no answer in time")
    assert selection.compare(WHOLE) == "no answer in time"
    for patience in (1000, 2000):
        for _ in range(patience):
            assert not selection.selects
            assert selection.compare(WHOLE) == ""
        assert selection.selects
        selection.lost("no answer in time")
        assert selection.compare(WHOLE) == ""
    for _ in range(4000):
        selection.compare(WHOLE)
    assert selection.accepts(SHORT)
    assert selection.selected


def test_one_that_has_selected_may_fail_once_but_not_twice_in_a_row() -> None:
    selection = proven()
    selection.lost("no answer in time")
    assert selection.compare(WHOLE) == ""
    assert selection.selects
    assert not selection.selected
    assert selection.accepts(SHORT)
    for wanted in ("", "no answer in time"):
        selection.lost("no answer in time")
        assert selection.compare(WHOLE) == wanted
    assert not selection.selects


def test_a_signal_that_the_whole_page_has_lost_too_is_not_missed() -> None:
    selection = proven()
    less = PageSummary(frozenset({"running"}), 2_900)
    assert not selection.accepts(less)
    assert selection.compare(PageSummary(less.signals, 68_900)) == ""
    assert selection.selected
    assert selection.accepts(less)


def test_a_page_that_has_grown_with_the_whole_one_is_still_short() -> None:
    selection = proven()
    grown = PageSummary(LOAD, 40_000)
    assert not selection.accepts(grown)
    assert selection.compare(PageSummary(LOAD, 110_000)) == ""
    assert selection.accepts(grown)


def test_an_engine_that_was_down_begins_anew() -> None:
    selection = tried()
    selection.lost("status 404")
    selection.compare(WHOLE)
    for other in (selection, proven()):
        other.begin_anew()
        assert not other.selects
        assert other.compare(WHOLE) == ""
        assert other.selects


def test_where_it_is_not_allowed_pages_stay_whole() -> None:
    selection = Selection(allowed=False)
    for _ in range(2):
        assert selection.compare(WHOLE) == ""
        assert not selection.selects
        selection.begin_anew()


class _Engine:
    """Any engine: what it gives, selected and whole."""

    def __init__(self, selected: PageSummary | None, whole: PageSummary) -> None:
        self.selected = selected
        self.whole = whole


_TOLD = st.builds(PageSummary, st.frozensets(st.sampled_from(("waiting", "running", "lora_max"))), st.integers(0, 100))


@given(turns=st.lists(st.builds(_Engine, st.none() | _TOLD, _TOLD), max_size=30))
def test_no_turn_tells_less_than_the_last_whole_page(turns: list[_Engine]) -> None:
    selection = Selection(allowed=True)
    known = PageSummary(frozenset(), 0)
    for engine in turns:
        if selection.selects:
            if engine.selected is None:
                selection.lost("gone")
            elif selection.accepts(engine.selected):
                assert engine.selected.signals >= known.signals
                assert engine.selected.page_bytes * 2 <= known.page_bytes
                assert selection.selected
                continue
        selection.compare(engine.whole)
        known = engine.whole
