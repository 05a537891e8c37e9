"""Find the series of a few metric families on a metrics page, without parsing the page.

Byte searches jump from one wanted family to the next, so that most lines are never looked at. What the families mean is
decided in `signals`.
Format: Prometheus text exposition 0.0.4 and OpenMetrics 1.0 (sample lines only; both spell them alike, and both demand
that the lines of a family stand in one group, which is what makes jumping correct).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Final, TypeAlias

__all__ = ["LARGEST", "Series", "Wanted", "find_families", "number"]

Series: TypeAlias = list[tuple[bytes, float]]
"""Label text (with braces; empty for none) and value of each line of one family."""
Wanted: TypeAlias = Sequence[tuple[Hashable | None, bytes]]
"""Families to look for, each with the signal it carries, best in the order in which they stand on the page. Of the
families of one signal (an older name and a newer one) only the first that is present counts; None: always wanted."""

LARGEST: Final = 1e15
"""Beyond this no engine counts, and a float soon no longer represents every integer: the value is damaged."""
# Possessive repeats keep matching linear on any input; a label value may hold escaped quotes, braces and commas.
_SAMPLE: Final = re.compile(
    rb'(\{[^"}\n]*+(?:"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"[^"}\n]*+)*+\})?[ \t]*+([^ \t\r\n]++)[^\n]*+'
)
"""What follows a family's name on its line: labels, value, and then maybe a timestamp or an exemplar."""
_NAME_ENDS: Final = (b"{", b" ", b"\t")


def find_families(page: bytes, wanted: Wanted) -> dict[bytes, Series]:
    """Collect the series of the wanted families; those without a single valid value are left out. Never raises."""
    families: dict[bytes, Series] = {}
    known: set[Hashable] = set()
    position = 0
    for signal, name in wanted:
        if signal in known or name in families:
            continue
        # Families stand in a fixed order, so the next one is mostly a short way ahead, and rarely behind.
        start = _find(page, name, position, len(page))
        if start < 0 < position:
            start = _find(page, name, 0, position + len(name) + 2)
        if start < 0:
            continue
        series, position = _group(page, name, start)
        if series:
            families[name] = series
            if signal is not None:
                known.add(signal)
    return families


def number(text: bytes) -> float | None:
    """Read a sample value; None where it is not a number, negative, not finite or above `LARGEST`."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= LARGEST else None


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
    """Read the lines of one family from `start` on; also return the position of the line break after the last one."""
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
