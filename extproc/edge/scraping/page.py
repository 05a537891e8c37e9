"""Find the few wanted families on a metrics page, without parsing the page.

Byte searches jump from one wanted family to the next; of a 70 kB vLLM page 16 of 830 lines are looked at. `PageMemory`
makes that cheaper for the pages of one endpoint, which differ in numbers and hardly ever in anything else. What the
families mean is decided in `signals`.
Format: Prometheus text exposition 0.0.4 and OpenMetrics 1.0 (sample lines only; both spell them alike, and both demand
that the lines of a family stand in one group, which is what makes jumping right).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, TypeAlias

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


@dataclass(slots=True)
class _Sample:
    """One line whose value is wanted, as it was last."""

    place: int
    """Which line of its region it is."""
    line: bytes
    lead: bytes
    """All of it before the space and the value."""
    said: tuple[bytes, float]
    """Its labels and its value."""


@dataclass(frozen=True, slots=True)
class _Region:
    """Families that stood one behind the other, with the comments above each (so that no other line can come first)."""

    begin: int
    """Where its first line began."""
    end: int
    """Where the line break stood that ended its last line."""
    first: bytes
    """Its first line, a comment, with a line break before and after."""
    line_count: int
    comments_of: Callable[[list[bytes]], Any]
    """Picks the comments out of all lines."""
    comments: Any
    families: tuple[tuple[bytes, tuple[_Sample, ...]], ...]

    @classmethod
    def of(cls, page: bytes, begin: int, end: int, families: Sequence[tuple[bytes, Series]]) -> _Region:
        """Note what stands between two places: comments, and the lines of these families in this order."""
        lines = page[begin:end].split(b"\n")
        places = [place for place, line in enumerate(lines) if not line.startswith(b"#")]
        wanted = ((place, lines[place], lines[place].rpartition(b" ")[0]) for place in places)
        comments_of = itemgetter(*(place for place, line in enumerate(lines) if line.startswith(b"#")))
        return cls(
            begin=begin,
            end=end,
            first=b"\n" + lines[0] + b"\n",
            line_count=len(lines),
            comments_of=comments_of,
            comments=comments_of(lines),
            families=tuple((name, tuple(_Sample(*next(wanted), said) for said in series)) for name, series in families),
        )


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

    __slots__ = ("_absent", "_regions")

    def __init__(self) -> None:
        self._regions: list[_Region] | None = None
        self._absent: list[tuple[bytes, bytes]] = []
        """Families that are not there, and how a line of theirs would begin."""

    def find_families(self, page: bytes, wanted: Wanted) -> dict[bytes, Series]:
        """Do what the function of this name does, for always the same `wanted`; at a third of its cost where only numbers have changed."""
        families = self._again(page)
        if families is not None:
            return families
        found = _look(page, wanted)
        self._regions, self._absent = _layout(page, found), [(name, b"\n" + name) for name in found.absent]
        return found.families

    def _again(self, page: bytes) -> dict[bytes, Series] | None:
        """Read a page laid out as the last one; None: it is not, or a value is not good."""
        if self._regions is None:
            return None
        families: dict[bytes, Series] = {}
        shift = 0
        """How much further down than on the last page we are: numbers before have gained digits."""
        for region in self._regions:
            end = _reread(page, region, region.begin + shift, families)
            if end < 0:
                near = max(region.begin - _SHIFT_BYTES, 0)
                line_break = page.find(region.first, near, region.begin + _SHIFT_BYTES + len(region.first))
                end = _reread(page, region, line_break + 1, families)
            if end < 0:
                return None
            shift = end - region.end
        for name, needle in self._absent:
            if (page.startswith(name) or page.find(needle) >= 0) and _find(page, name, 0, len(page)) >= 0:
                return None
        return families


def _reread(page: bytes, region: _Region, begin: int, families: dict[bytes, Series]) -> int:
    """Read a region that should begin at a place; return where its last line ends, -1: it is not there, or has changed."""
    if begin and page[begin - 1 : begin] != b"\n":
        return -1
    text = page[begin : begin + region.end - region.begin + _SHIFT_BYTES]
    lines = text.split(b"\n", region.line_count)
    if len(lines) <= region.line_count or region.comments_of(lines) != region.comments:
        return -1
    try:
        for name, samples in region.families:
            families[name] = series = []
            for sample in samples:
                line = lines[sample.place]
                if line != sample.line:
                    lead, _, number_text = line.rpartition(b" ")
                    value = float(number_text)
                    if lead != sample.lead or not 0.0 <= value <= LARGEST:
                        return -1
                    sample.line, sample.said = line, (sample.said[0], value)
                series.append(sample.said)
    except ValueError:
        return -1
    end = begin + len(text) - len(lines[-1]) - 1
    # Mostly a comment comes next, and need not be looked at any closer.
    return -1 if not lines[-1].startswith(b"#") and _continues(page, name, end + 1) else end


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


def _layout(page: bytes, found: _Found) -> list[_Region] | None:
    """Note how a page is laid out; None where that is no help: too long, damaged, or without comments."""
    regions: list[_Region] = []
    begin, end = 0, -1
    families: list[tuple[bytes, Series]] = []
    for name, start in sorted(found.starts.items(), key=lambda item: item[1]):
        above = _comments_above(page, start)
        if above == start or name not in found.families:
            return None
        if families and above != end + 1:
            regions.append(_Region.of(page, begin, end, families))
            families = []
        if not families:
            begin = above
        end = _plain_end(page, name, start, len(found.families[name]))
        if end < 0:
            return None
        families.append((name, found.families[name]))
    if families:
        regions.append(_Region.of(page, begin, end, families))
    too_much = sum(region.line_count for region in regions) > _REMEMBERED_LINES or (
        sum(region.end - region.begin for region in regions) > _REMEMBERED_BYTES
    )
    return None if too_much else regions


def _comments_above(page: bytes, start: int) -> int:
    """Find where the comments begin that stand above the line that begins at `start`; `start` itself: there are none."""
    while start > 0:
        line = page.rfind(b"\n", 0, start - 1) + 1
        if not page.startswith(b"#", line):
            break
        start = line
    return start


def _plain_end(page: bytes, name: bytes, start: int, count: int) -> int:
    """Find the end of the last line of a family, if it has so many lines of a good value behind a single space; else -1."""
    while True:
        sample = _SAMPLE.match(page, start + len(name))
        if sample is None or number(sample[2]) is None or sample.end(2) != sample.end():
            return -1
        if page[start : sample.start(2)] != name + (sample[1] or b"") + b" ":
            return -1
        count -= 1
        start = sample.end() + 1
        if not _continues(page, name, start):
            return sample.end() if count == 0 else -1
