"""Find the few wanted families on a metrics page, without parsing the page.

Byte searches jump from one wanted family to the next; of a 70 kB vLLM page 16 of 830 lines are looked at. `PageMemory`
makes that cheaper for the pages of one endpoint, which differ in numbers and hardly ever in anything else. What the
families mean is decided in `signals`.
Format: Prometheus text exposition 0.0.4 and OpenMetrics 1.0 (sample lines only; both spell them alike, and both demand
that the lines of a family stand in one group, which is what makes jumping right).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

__all__ = ["LARGEST", "PageMemory", "Series", "Wanted", "find_families", "number"]

Series: TypeAlias = list[tuple[bytes, float]]
"""Label text (with braces; empty for none) and value of each line of one family."""
Wanted: TypeAlias = Sequence[tuple[Hashable | None, bytes]]
"""Families to look for, best in the order in which they stand on the page. Of those that say the same (an older name
and a newer one) only the first that is there counts; None says nothing that another could say."""

LARGEST: Final = 1e15
"""Beyond this no engine counts, and a float soon no longer counts ones exactly: the value is damaged."""
# Possessive repeats keep matching linear on any input; a label value may hold escaped quotes, braces and commas.
_SAMPLE: Final = re.compile(
    rb'(\{[^"}\n]*+(?:"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"[^"}\n]*+)*+\})?[ \t]*+([^ \t\r\n]++)[^\n]*+'
)
"""What follows a family's name on its line: labels, value, and then maybe a timestamp or an exemplar."""
_NAME_ENDS: Final = (b"{", b" ", b"\t")
_REMEMBERED_LINES: Final = 200
_REMEMBERED_BYTES: Final = 64 * 1024
"""Most that is remembered of a page, so that no page can make us keep much."""
_SHIFT_BYTES: Final = 1000
"""So far from where it stood a family is looked for, because numbers gain and lose digits. (In less than 2,500 bytes
CPython looks without preparing a table first.)"""


@dataclass(slots=True)
class _Found:
    """What one look at a page gave."""

    families: dict[bytes, Series] = field(default_factory=dict)
    starts: dict[bytes, int] = field(default_factory=dict)
    """Where the first line of each family begins."""
    absent: list[bytes] = field(default_factory=list)
    """Families that were looked for and are not there."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The lines of one family as they stood on the page."""

    name: bytes
    begin: int
    """Where its first lead began."""
    lines: tuple[tuple[bytes, bytes], ...]
    """For each line all from the line break before it to its value (of the first line with the comment above it, so that
    no other can come first), and its label text."""


def find_families(page: bytes, wanted: Wanted) -> dict[bytes, Series]:
    """Collect the series of the wanted families; those without a single good value are left out. Never raises."""
    return _look(page, wanted).families


def number(text: bytes) -> float | None:
    """Read a sample value; None where it is no number, negative, not finite or absurd."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= LARGEST else None


class PageMemory:
    """Reads the pages of one endpoint one after the other, and remembers how the last one was laid out.

    It finds what `find_families` finds on every page that keeps to the format.
    """

    __slots__ = ("_absent", "_groups")

    def __init__(self) -> None:
        self._groups: list[_Group] | None = None
        self._absent: list[bytes] = []

    def find_families(self, page: bytes, wanted: Wanted) -> dict[bytes, Series]:
        """Do what the function of this name does, for always the same `wanted`; at half its cost where only numbers have changed."""
        families = self._again(page)
        if families is not None:
            return families
        found = _look(page, wanted)
        self._groups, self._absent = _layout(page, found), found.absent
        return found.families

    def _again(self, page: bytes) -> dict[bytes, Series] | None:
        """Read a page laid out as the last one; None: it is not, or a value is not good."""
        if self._groups is None:
            return None
        families: dict[bytes, Series] = {}
        position = 0
        for group in self._groups:
            name, lines = group.name, group.lines
            lead = lines[0][0]
            most = group.begin + _SHIFT_BYTES + len(lead)
            position = page.find(lead, max(position, group.begin - _SHIFT_BYTES), most)
            if position < 0:
                return None
            series: Series = []
            for lead, labels in lines:
                if not page.startswith(lead, position):
                    return None
                position += len(lead)
                end = page.find(b"\n", position)
                value = number(page[position:end])
                if end < 0 or value is None:
                    return None
                series.append((labels, value))
                position = end
            if _continues(page, name, position + 1):
                return None
            families[name] = series
        for name in self._absent:
            if _find(page, name, 0, len(page)) >= 0:
                return None
        return families


def _look(page: bytes, wanted: Wanted) -> _Found:
    """Look for all wanted families from the beginning."""
    found = _Found()
    known: set[Hashable] = set()
    position = 0
    for says, name in wanted:
        if says in known or name in found.families:
            continue
        # Families stand in a fixed order, so the next one is mostly a short way ahead, and rarely behind us.
        start = _find(page, name, position, len(page))
        if start < 0 < position:
            start = _find(page, name, 0, position + len(name) + 2)
        if start < 0:
            found.absent.append(name)
            continue
        found.starts[name] = start
        series, position = _group(page, name, start)
        if series:
            found.families[name] = series
            if says is not None:
                known.add(says)
    return found


def _find(page: bytes, name: bytes, start: int, end: int) -> int:
    """Find a sample line of exactly this family that begins in `page[start:end]`; -1: none."""
    if start == 0 and _continues(page, name, 0):
        return 0
    needle = b"\n" + name
    position = page.find(needle, start, end)
    while position >= 0 and page[position + len(needle) : position + len(needle) + 1] not in _NAME_ENDS:
        position = page.find(needle, position + 1, end)
    return position + 1 if position >= 0 else -1


def _continues(page: bytes, name: bytes, start: int) -> bool:
    """Tell whether the line that begins at `start` is one of this family."""
    return page.startswith(name, start) and page[start + len(name) : start + len(name) + 1] in _NAME_ENDS


def _group(page: bytes, name: bytes, start: int) -> tuple[Series, int]:
    """Read the lines of one family from `start` on; also give the position of the line break after the last one."""
    series: Series = []
    while True:
        sample = _SAMPLE.match(page, start + len(name))
        if sample is None:
            end = page.find(b"\n", start + len(name))
            end = end if end >= 0 else len(page)
        else:
            end = sample.end()
            value = number(sample[2])
            if value is not None:
                series.append((sample[1] or b"", value))
        start = end + 1
        if not _continues(page, name, start):
            return series, end


def _layout(page: bytes, found: _Found) -> list[_Group] | None:
    """Note how a page is laid out; None where that is no help: too long, damaged, or without comments."""
    groups: list[_Group] = []
    lines, kept_bytes = 0, 0
    for name, start in sorted(found.starts.items(), key=lambda item: item[1]):
        # From the line break before the comment above the first line.
        begin = page.rfind(b"\n", 0, max(start - 1, 0))
        if begin < 0 or not page.startswith(b"\n#", begin):
            return None
        leads = _leads(page, name, begin, start)
        lines += len(leads)
        kept_bytes += sum(len(lead) for lead, _ in leads)
        if not leads or lines > _REMEMBERED_LINES or kept_bytes > _REMEMBERED_BYTES:
            return None
        groups.append(_Group(name, begin, tuple(leads)))
    return groups


def _leads(page: bytes, name: bytes, begin: int, start: int) -> list[tuple[bytes, bytes]]:
    """Note what stands before each value of a family whose first line begins at `start`; empty where a value is damaged."""
    leads: list[tuple[bytes, bytes]] = []
    while True:
        sample = _SAMPLE.match(page, start + len(name))
        if sample is None or number(sample[2]) is None:
            return []
        leads.append((page[begin : sample.start(2)], sample[1] or b""))
        begin = sample.end()
        start = begin + 1
        if not _continues(page, name, start):
            return leads
