"""Read the gateway's subset hint: which endpoints a request may go to.

On paper a list of `ip:port` strings (Endpoint Picker Protocol); in the field also one comma-joined string, list items that
hold commas themselves, and bare addresses that stand for all ports. All of them are accepted.
"""

from __future__ import annotations

__all__ = ["parse_subset"]


def parse_subset(value: object) -> frozenset[str]:
    """Return the addresses a hint names, as written but for white space; empty where it names none.

    Accepts text, a list of texts, or nothing; whatever is neither text nor list names nobody, because a hint that is
    present must never widen the choice to the whole pool.
    """
    if isinstance(value, str):
        return frozenset(item for part in value.split(",") if (item := part.strip()))
    if isinstance(value, list | tuple):
        return frozenset().union(*(parse_subset(item) for item in value))
    return frozenset()
