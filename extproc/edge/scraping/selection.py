"""Whether an endpoint is asked for its whole metrics page or only for the families that are read.

Python's Prometheus client writes only the samples that a query names (`name[]=...`), which costs the engine a fraction of
the whole page. Other engines ignore such a query: they write the whole page, an empty one (the same client in its
multiprocess mode: SGLang, TensorRT-LLM) or an error. So every endpoint has to show what it does: a whole page comes first,
and the selected one must have the same signals in at most half the bytes. What is asked for is written in `source`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

__all__ = ["PageSummary", "Selection"]

_PATIENCE: Final = 1_000
"""Whole pages after which an engine that did not select is tried again; twice as many each time."""
_LONGEST: Final = 0.5
"""Largest ratio of a selected page to the whole page. (An engine that ignores the query has a ratio close to one.)"""


@dataclass(frozen=True, slots=True)
class PageSummary:
    """Which signals a page had, and how long it was."""

    signals: frozenset[str]
    page_bytes: int


class _Stage(enum.Enum):
    OFF = "off"
    UNKNOWN = "unknown"
    """No whole page has been seen since the engine came up: that is what comes next."""
    TRIED = "tried"
    """The next scrape shows whether the engine selects."""
    SELECTED = "selected"
    WHOLE = "whole"
    """The engine does not select: whole pages until it has been down or has restarted, or many have come."""


class Selection:
    """Decides whether one endpoint is asked for the whole page or the selected one.

    While `selects`, fetch the selected page and call `accepts` with it, or `lost` if it could not be fetched. Where it is
    not accepted fetch the whole page in the same scrape; call `compare` with every whole page.
    """

    __slots__ = ("_fault", "_given_up", "_offered", "_patience", "_stage", "_whole", "_whole_pages")

    def __init__(self, *, allowed: bool) -> None:
        """Begin with whole pages; stay with them where it is not `allowed`."""
        self._stage = _Stage.UNKNOWN if allowed else _Stage.OFF
        self._whole = PageSummary(frozenset(), 0)
        self._offered: PageSummary | None = None
        self._fault = ""
        self._given_up = ""
        """The reason that `compare` has returned last."""
        self._patience = _PATIENCE
        self._whole_pages = 0

    @property
    def selects(self) -> bool:
        """Whether the next scrape asks for the selected page."""
        return self._stage is _Stage.SELECTED or self._stage is _Stage.TRIED

    @property
    def selected(self) -> bool:
        """Whether the endpoint has shown that it selects."""
        return self._stage is _Stage.SELECTED

    def accepts(self, page: PageSummary) -> bool:
        """Take a selected page; False: it lacks signals of the last whole page, or is too long."""
        self._offered = page
        self._fault = _fault(page, self._whole)
        if self._fault:
            return False
        self._stage = _Stage.SELECTED
        return True

    def lost(self, why: str) -> None:
        """Note that the selected page could not be fetched, or had no signals; `why` is for the log."""
        self._offered = None
        self._fault = why

    def compare(self, whole: PageSummary) -> str:
        """Take a whole page. Return why only whole pages are fetched from now on; empty: that is not so, or not new.

        A selected page that lacked signals of the last whole page is compared again with this one: an engine's page changes.
        An engine that has selected before may fail once (a long step, a broken connection), but not twice in a row.
        """
        self._whole = whole
        offered, self._offered = self._offered, None
        if self._stage is _Stage.UNKNOWN:
            self._stage = _Stage.TRIED
        elif self.selects:
            if offered is not None:
                self._fault = _fault(offered, whole)
            if not self._fault:
                self._stage = _Stage.SELECTED
            elif self._stage is _Stage.SELECTED:
                self._stage = _Stage.TRIED
            else:
                return self._give_up()
        elif self._stage is _Stage.WHOLE:
            # It may have been a bad moment: a start under load, a broken connection.
            self._whole_pages += 1
            if self._whole_pages >= self._patience:
                self._patience *= 2
                self._stage = _Stage.TRIED
        return ""

    def _give_up(self) -> str:
        self._stage, self._whole_pages = _Stage.WHOLE, 0
        before, self._given_up = self._given_up, self._fault
        return "" if before == self._fault else self._fault

    def begin_anew(self) -> None:
        """Begin again with a whole page: the endpoint was down, or its engine has restarted."""
        if self._stage is not _Stage.OFF:
            self._stage, self._given_up, self._patience = _Stage.UNKNOWN, "", _PATIENCE


def _fault(page: PageSummary, whole: PageSummary) -> str:
    """Return why a selected page cannot replace a whole one; empty: it can."""
    if not page.signals >= whole.signals:
        return f"lacks {', '.join(sorted(whole.signals - page.signals))}"
    if page.page_bytes > whole.page_bytes * _LONGEST:
        return f"{page.page_bytes} bytes, the whole page {whole.page_bytes}"
    return ""
