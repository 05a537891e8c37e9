"""Data of the prefix index: block states, causes of eviction, handles and statistics. The behaviour is in `index`."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from extproc.prefix.tree import Holder, Node

__all__ = ["BlockState", "EvictionCause", "PrefixHandle", "PrefixIndexStats"]


class BlockState(enum.Enum):
    """Whether an endpoint is known, or only expected, to hold a block. Cache tiers will be further members."""

    SPECULATIVE = "speculative"
    """Routed there; the request has not succeeded yet."""
    CONFIRMED = "confirmed"
    """A request that contained it succeeded there."""


class EvictionCause(enum.Enum):
    """Why blocks were evicted; the value is a metric label."""

    CAPACITY = "capacity"
    """The engine's cache, as modelled, is full."""
    BOUND = "bound"
    """The index itself is full."""
    CORRECTION = "correction"
    """What the engine reported shows that it no longer has them."""
    RESTART = "restart"
    """The endpoint restarted or left."""
    RETRACTED = "retracted"
    """The request that should have computed them failed."""


class PrefixHandle(msgspec.Struct, eq=False):
    """What is needed to confirm or retract one `add`; lives as long as its request, eight bytes a block.

    Compared by identity: two equal requests have separate claims.
    """

    holder: Holder
    chains: tuple[array[int], ...]
    ends: list[Node]
    """The node at which each chain ended when it was added; saves a walk as long as that node still ends there."""
    used_at: float | None = None
    """When the deepest block that was held before was last used; None: there was none. Of several chains the earliest."""


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
