"""Which endpoint holds which prefix: decides which entries are made, how long they stay and what confirms them.

Per endpoint it models the engine's KV cache: a capacity, eviction of the least recently used, tails before heads (vLLM).
An entry is made when a request is routed (speculative), stays when the request succeeds (confirmed) and is taken back
when it fails. Contiguous matches only: an endpoint that holds a block holds all before it.

Which endpoints exist, the capacity in tokens, and what a broken promise proves is decided in `router`. Times are the
caller's monotonic clock in seconds and must not decrease. Not thread-safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from extproc.prefix.blocks import BlockSchedule
from extproc.prefix.entries import BlockState, EvictionCause, PrefixHandle, PrefixIndexStats
from extproc.prefix.tree import Holder, Node, RadixTree, Use
from extproc.types import PrefixMatch

__all__ = ["UNBOUNDED", "PrefixIndex"]

UNBOUNDED: Final = 1 << 62
"""Capacity in bytes of an endpoint of which nothing is known: too large costs little, too small a lot (simulated)."""

_BLOCKS_PER_NODE: Final = 8
"""Blocks allowed per node allowed: a node takes the memory of some fifty blocks, so that nodes need a bound, too."""

_HEALING: Final = 16
"""New bytes for which a corrected capacity grows by one: it recovers from a wrong correction; a right one is repeated."""

_DROPPED: Final = "(dropped)"
"""Id of every dropped holder until it is swept; no address looks like this."""

_SWEEP_PER_ADD: Final = 4
"""Nodes of departed endpoints cleared per `add`."""


class PrefixIndex:
    """Prefixes held by endpoints, with a model of each endpoint's cache.

    `max_blocks` bounds the blocks over all endpoints, `max_nodes` (an eighth of it, if not given) the nodes of the
    tree; beyond either, the least recently used of the endpoint with the most blocks go.
    """

    def __init__(self, schedule: BlockSchedule, max_blocks: int, max_nodes: int | None = None) -> None:
        self.schedule = schedule
        self._bytes_at = schedule.bytes_at
        self.max_blocks = max_blocks
        self.max_nodes = max(1024, max_blocks // _BLOCKS_PER_NODE) if max_nodes is None else max_nodes
        self._tree = RadixTree()
        self._holders: dict[str, Holder] = {}
        self.unswept: list[Holder] = []
        """Dropped endpoints that still hold nodes (`sweep`)."""
        self._total_blocks = 0  # of live and dropped holders
        self._lookups = 0
        self._hits = 0
        self._evicted = dict.fromkeys(EvictionCause, 0)

    def match(self, chains: Sequence[array[int]], prompt_bytes: int = 0) -> PrefixMatch:
        """Return how many leading bytes of the chains each endpoint holds; several chains add up.

        `prompt_bytes` is passed on. Request path: O(nodes on the path + endpoints that match); changes no recency.
        """
        matched: dict[str, int] = {}
        if len(chains) == 1:
            matched = self._match_chain(chains[0])
        else:
            for chain in chains:
                for endpoint_id, n_bytes in self._match_chain(chain).items():
                    matched[endpoint_id] = matched.get(endpoint_id, 0) + n_bytes
        self._lookups += 1
        if matched:
            self._hits += 1
        return PrefixMatch(prompt_bytes, matched)

    def _match_chain(self, chain: array[int]) -> dict[str, int]:
        """Match one chain, from its deepest node upwards: an endpoint holds as much as the first node it appears at."""
        matched: dict[str, int] = {}
        root = self._tree.root
        node, depth = self._tree.walk(chain)
        while node is not root:
            sole = node.sole
            if sole is not None:
                endpoint_id = sole.holder.id
                if endpoint_id not in matched:
                    matched[endpoint_id] = self._bytes_at(depth)
            elif (shared := node.shared) is not None and len(shared) != len(matched):
                # Holders of a node hold its ancestors too, so an equal number means no further holder here. All at once,
                # because one by one would be slow where many endpoints hold a system prompt.
                n_bytes = self._bytes_at(depth)
                here = {holder.id: n_bytes for holder in shared}
                matched = here | matched if matched else here
            depth = node.start
            node = node.parent
        if self.unswept:
            matched.pop(_DROPPED, None)
        return matched

    def add(self, endpoint_id: str, chains: Sequence[array[int]], now: float) -> PrefixHandle:
        """Note that a request with these chains goes to an endpoint; its new blocks are speculative.

        An endpoint not seen before is added, with unbounded capacity until `set_capacity`. Afterwards the endpoint is
        within its capacity: of a prompt larger than all of it the head is kept. Request path: O(nodes on the path), and
        amortised O(1) per block evicted.
        """
        holder = self._holders.get(endpoint_id) or self._holder(endpoint_id)
        handle = PrefixHandle(holder, tuple(chains), [])
        ends = handle.ends
        for chain in chains:
            ends.append(self._touch(holder, chain, now, handle, None) if len(chain) else self._tree.root)
        self._bound(holder)
        return handle

    def confirm(self, endpoint_id: str, handle: PrefixHandle, now: float) -> None:
        """Note that the request of an `add` succeeded: the endpoint has just had all its blocks.

        They count as used now (an engine frees them when the request ends) and come back if they had been evicted
        meanwhile. Ignored if the endpoint was dropped since. Costs what `add` costs.
        """
        holder = handle.holder
        if self._holders.get(endpoint_id) is holder:
            for chain, end in zip(handle.chains, handle.ends):  # noqa: B905 - one end per chain, by `add`
                if len(chain):
                    self._touch(holder, chain, now, None, end)
            self._bound(holder)

    def retract(self, endpoint_id: str, handle: PrefixHandle, *, keep: bool = False) -> None:
        """Take back what an `add` claimed, because its request failed before the engine answered.

        Only speculative blocks that no other request in flight claims are removed; recency stays as it is. `keep`: it is
        not known how much the engine has computed, so the blocks stay, and are no longer speculative. Ignored if the
        endpoint was dropped since; a second time, or after `confirm`, nothing happens.
        """
        holder = handle.holder
        if self._holders.get(endpoint_id) is not holder:
            return
        lost: list[Node] = []
        for chain in handle.chains:
            node, _ = self._tree.walk(chain)
            while node is not self._tree.root:
                claims = holder.pending.get(node)
                if claims is not None and handle in claims:
                    claims.discard(handle)
                    if keep or not claims:
                        lost.append(node)
                node = node.parent
        # A request that claims a block claims all speculative ones before it, so none remains below a removed one; but
        # chains of one request may share a head, hence all nodes are collected first, and the deepest are removed first.
        lost.sort(key=lambda node: -node.end)
        for node in lost:
            if keep:
                del holder.pending[node]
            else:
                self._remove(holder, node, EvictionCause.RETRACTED)
        for node in lost:
            self._tree.join(node.parent)

    def correct(self, endpoint_id: str, promised_at: float) -> int:
        """Evict what an endpoint cannot have any more, since it has lost what it used at `promised_at`; return blocks evicted.

        `promised_at` is `PrefixHandle.used_at` of a promise that proves it (`promises`). The engine evicts in order of
        use, so all that was last used then or earlier is gone as well, except what requests in flight hold. The estimate of its
        capacity falls to what remains, by one correction at most to half of what was held (one wrong correction, say
        after a cache reset, must not cost the whole model), and grows again with use: additive increase,
        multiplicative decrease. O(blocks evicted + requests in flight).
        """
        holder = self._holders.get(endpoint_id)
        if holder is None:
            return 0
        blocks_before, bytes_before = holder.blocks, holder.held_bytes
        emptied: list[Node] = []
        kept: set[Node] = set()  # with all its ancestors
        use = holder.order.newer
        while use is not holder.order and use.now <= promised_at:
            following = use.newer
            node = use.terminal
            while node.use_by(holder) is use and node not in holder.pending and node not in kept:
                parent = node.parent
                self._remove(holder, node, EvictionCause.CORRECTION)
                node = parent
            if node in holder.pending:
                above = node
                while above is not self._tree.root and above not in kept:
                    kept.add(above)
                    above = above.parent
            use = following
            emptied.append(node)
        for node in emptied:
            self._tree.join(node)
        if holder.blocks < blocks_before:
            holder.limit = min(holder.limit, max(holder.held_bytes, bytes_before // 2))
        return blocks_before - holder.blocks

    def set_capacity(self, endpoint_id: str, capacity_bytes: int) -> None:
        """Set how much an endpoint's cache can hold, in bytes of prompt; anything beyond that is evicted at once.

        A lower estimate from `correct` stays in force.
        """
        holder = self._holder(endpoint_id)
        corrected = holder.limit < holder.capacity
        holder.limit = min(holder.limit, capacity_bytes) if corrected else capacity_bytes
        holder.capacity = capacity_bytes
        self._shrink(holder, holder.limit, holder.blocks, EvictionCause.CAPACITY)

    def drop(self, endpoint_id: str) -> None:
        """Forget an endpoint that restarted or left, with its capacity. O(1): `sweep` and later adds clear its nodes."""
        holder = self._holders.pop(endpoint_id, None)
        if holder is None:
            return
        self._evicted[EvictionCause.RESTART] += holder.blocks
        holder.id = _DROPPED
        holder.pending = {}
        self.unswept.append(holder)

    def sweep(self, max_nodes: int) -> int:
        """Clear at most `max_nodes` nodes of dropped endpoints; return how many."""
        swept = 0
        while self.unswept:
            holder = self.unswept[-1]
            if not holder.blocks:
                self.unswept.pop()
                continue
            if swept == max_nodes:
                break
            self._evict_oldest(holder, None)
            swept += 1
        return swept

    def states(self, endpoint_id: str, chain: array[int]) -> list[BlockState]:
        """Return the state of each leading block an endpoint holds; for explanations, not for the request path."""
        holder = self._holders.get(endpoint_id)
        node, depth = self._tree.walk(chain)
        states: list[BlockState] = []
        while holder is not None and node is not self._tree.root:
            if node.use_by(holder) is not None:
                state = BlockState.SPECULATIVE if node in holder.pending else BlockState.CONFIRMED
                states += [state] * (depth - node.start)
            depth = node.start
            node = node.parent
        return states[::-1]

    def held_bytes(self, endpoint_id: str) -> int:
        """Return the bytes of prompt an endpoint holds, shared prefixes once; 0 for an unknown endpoint."""
        holder = self._holders.get(endpoint_id)
        return 0 if holder is None else holder.held_bytes

    def capacity_bytes(self, endpoint_id: str) -> int:
        """Return the present estimate of an endpoint's capacity, corrections included; `UNBOUNDED` if unknown."""
        holder = self._holders.get(endpoint_id)
        return UNBOUNDED if holder is None else holder.limit

    def stats(self) -> PrefixIndexStats:
        """Return size and counters. O(endpoints)."""
        return PrefixIndexStats(
            endpoints=len(self._holders),
            blocks=self._tree.blocks,
            held_blocks=sum(holder.blocks for holder in self._holders.values()),
            nodes=self._tree.nodes,
            lookups=self._lookups,
            hits=self._hits,
            evicted=dict(self._evicted),
        )

    def _holder(self, endpoint_id: str) -> Holder:
        holder = self._holders.get(endpoint_id)
        if holder is None:
            holder = self._holders[endpoint_id] = Holder(endpoint_id, UNBOUNDED, self._tree.root)
        return holder

    def _bound(self, holder: Holder) -> None:
        """Bring everything within its bounds after an endpoint has been touched."""
        if self.unswept:
            self.sweep(_SWEEP_PER_ADD)
        if holder.held_bytes > holder.limit:
            self._shrink(holder, holder.limit, holder.blocks, EvictionCause.CAPACITY)
        while (excess := self._total_blocks - self.max_blocks) > 0:
            fullest = self._fullest()
            self._shrink(fullest, UNBOUNDED, max(0, fullest.blocks - excess), EvictionCause.BOUND)
        while self._tree.nodes > self.max_nodes:
            self._evict_oldest(self._fullest(), EvictionCause.BOUND)

    def _touch(
        self, holder: Holder, chain: array[int], now: float, handle: PrefixHandle | None, known: Node | None
    ) -> Node:
        """Make one path, from its end up to the root, the endpoint's most recent use; return its last node.

        With a handle, what is new is speculative and claimed by it; without, everything is confirmed. `known` may be the
        last node of an earlier touch.
        """
        tree = self._tree
        end = len(chain)
        use: Use | None = None
        if known is not None and known.end == end:
            node = known
            use = node.use_by(holder)
        else:
            node, depth = tree.walk(chain)
            if depth < node.end:
                node = tree.split(node, depth)
            if depth < end:
                node = tree.attach(node, chain)
            else:
                use = node.use_by(holder)
        used_at = None if use is None else use.now
        if use is not None and use.terminal is node:
            use.renew(now)
        else:
            use = Use(holder, now, node, holder.order)
        fresh_from, before = tree.take(node, use, handle)
        used_at = before if used_at is None else used_at
        if handle is not None and used_at is not None:
            handle.used_at = used_at if handle.used_at is None else min(handle.used_at, used_at)
        if fresh_from < end:
            self._took(holder, fresh_from, end)
        return node

    def _took(self, holder: Holder, start: int, end: int) -> None:
        """Account for new blocks of an endpoint."""
        new_bytes = self._bytes_at(end) - self._bytes_at(start)
        holder.held_bytes += new_bytes
        holder.blocks += end - start
        self._total_blocks += end - start
        if holder.limit < holder.capacity:
            holder.limit = min(holder.capacity, holder.limit + new_bytes // _HEALING)

    def _fullest(self) -> Holder:
        """Return the holder to evict from when the index is full: departed endpoints first, then the one with most blocks."""
        if self.unswept:
            self.sweep(0)  # removes those that hold nothing any more
        return self.unswept[-1] if self.unswept else max(self._holders.values(), key=lambda holder: holder.blocks)

    def _shrink(self, holder: Holder, to_bytes: int, to_blocks: int, cause: EvictionCause) -> None:
        """Evict an endpoint's least recently used blocks, tails before heads, down to both bounds, and no block more."""
        schedule = self.schedule
        while holder.held_bytes > to_bytes or holder.blocks > to_blocks:
            node = holder.order.newer.terminal
            end = node.end
            may_stay_bytes = schedule.bytes_at(end) - max(0, holder.held_bytes - to_bytes)
            keep = min(schedule.blocks_in(max(0, may_stay_bytes)), end - max(0, holder.blocks - to_blocks))
            if keep <= node.start:
                self._evict_oldest(holder, cause)
            elif node.sole is not None and node.children is None:
                self._account(holder, keep, end, cause)
                self._tree.truncate(node, keep)
            else:
                self._tree.split(node, keep)
                self._remove(holder, node, cause)

    def _evict_oldest(self, holder: Holder, cause: EvictionCause | None) -> None:
        node = holder.order.newer.terminal
        parent = node.parent
        self._remove(holder, node, cause)
        self._tree.join(parent)

    def _remove(self, holder: Holder, node: Node, cause: EvictionCause | None) -> None:
        """Remove a node from a holder; no cause for a dropped endpoint, whose blocks have been counted already."""
        self._account(holder, node.start, node.end, cause)
        self._tree.release(node, holder)

    def _account(self, holder: Holder, start: int, end: int, cause: EvictionCause | None) -> None:
        holder.held_bytes -= self.schedule.bytes_at(end) - self.schedule.bytes_at(start)
        holder.blocks -= end - start
        self._total_blocks -= end - start
        if cause is not None and holder.id is not _DROPPED:
            self._evicted[cause] += end - start
