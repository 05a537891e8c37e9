"""The nouns of the index: how sure it is of a block, why blocks leave it, and what it hands to its callers.

No behaviour; that is in `index`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from extproc.prefix.tree import Holder, Node

__all__ = ["BlockState", "EvictionCause", "PrefixHandle", "PrefixIndexStats"]


class BlockState(enum.Enum):
    """How sure we are that an endpoint holds a block. Cache tiers will be further members."""

    SPECULATIVE = "speculative"
    """Routed there; the request has not succeeded yet."""
    CONFIRMED = "confirmed"
    """A request that contained it succeeded there."""


class EvictionCause(enum.Enum):
    """Why blocks left the index; the value is a metric label."""

    CAPACITY = "capacity"
    """The engine's cache, as modelled, is full."""
    BOUND = "bound"
    """The index itself is full."""
    CORRECTION = "correction"
    """The engine reported that it no longer had them."""
    RESTART = "restart"
    """The endpoint restarted or left."""
    RETRACTED = "retracted"
    """The request that was to bring them failed."""
    REMOVED = "removed"
    """Taken away one by one, by hash."""


class PrefixHandle(msgspec.Struct, eq=False):
    """What one `add` needs to be confirmed or retracted; lives as long as its request, eight bytes a block.

    Compared by identity: two equal requests vouch separately.
    """

    holder: Holder
    chains: tuple[array[int], ...]
    ends: list[Node]
    """Where each chain ended when it was added: as long as such a node ends there, the way need not be found again."""
    used_at: float | None = None
    """When the deepest block that it held already had last been used; None: it held none. Of several chains the earliest."""


@dataclass(frozen=True, slots=True)
class PrefixIndexStats:
    """Size and counters of the index."""

    endpoints: int
    blocks: int
    """Distinct blocks in memory."""
    held_blocks: int
    """The same, counted once per endpoint that holds them; what `max_blocks` bounds."""
    nodes: int
    lookups: int
    hits: int
    """Lookups for which at least one endpoint held something."""
    evicted: Mapping[EvictionCause, int]
    """Blocks, counted once per endpoint, since the start."""
