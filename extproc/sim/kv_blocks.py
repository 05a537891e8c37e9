"""The paged KV cache of one replica: which blocks are in use, which are free, and which prefix each still caches.

A block is an integer. A free block keeps its content until it is handed out again, so a later request with the same prefix finds it
(vLLM's automatic prefix caching). What to allocate and when is `engine`'s business. All operations cost O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks, all free and empty at first.

    Free blocks form one queue, least recently freed first; allocation takes from its front, even blocks that still cache something.
    One block is known per key: when a second copy of a prefix is computed, the newer one answers for it (vLLM keeps both; which
    of the copies outlives the other differs, hits do not).
    """

    __slots__ = ("_block_of", "_free", "_key_of", "_refs", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._refs = [0] * num_blocks
        self._key_of: list[Hashable | None] = [None] * num_blocks
        self._block_of: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request uses (they may still cache something)."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content a request could hit, in use or free."""
        return len(self._block_of)

    def match(self, keys: Sequence[Hashable], limit: int) -> list[int]:
        """Find the blocks that hold the longest leading run of `keys`, at most `limit` of them; nothing is claimed."""
        block_of = self._block_of
        found: list[int] = []
        for key in keys[:limit]:
            block = block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """Count those of `blocks` that no request uses: claiming them takes them from the free ones."""
        refs = self._refs
        return sum(1 for block in blocks if not refs[block])

    def claim(self, blocks: Iterable[int]) -> None:
        """Take another reference on each block found by `match`."""
        refs, free = self._refs, self._free
        for block in blocks:
            if not refs[block]:
                del free[block]
            refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for new content, evicting what the least recently freed ones cached.

        The caller has checked `num_free`; too few raise KeyError from the empty queue.
        """
        taken: list[int] = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def remember(self, block: int, key: Hashable) -> None:
        """Register `block`, which the caller uses, under `key`."""
        previous = self._block_of.get(key)
        if previous == block:
            return
        if previous is not None:
            self._key_of[previous] = None
        self._forget(block)
        self._key_of[block] = key
        self._block_of[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block of a request, given head first; tails become evictable before heads."""
        refs, free = self._refs, self._free
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                free[block] = None

    def forget_all(self) -> None:
        """Drop every cached prefix; references stay (vLLM's `reset_prefix_cache`)."""
        self._block_of.clear()
        self._key_of = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
