"""A radix tree over block hashes whose edges are packed arrays, with the holders of each node.

Decides structure only: walking, splitting, joining, and the bookkeeping of holders. What is kept and what is evicted is
decided in `index`. Two invariants: an endpoint that holds a node holds all its ancestors; and the uses of an endpoint
along a path are never older above than below.

Memory: an edge is one `bytes` object with eight bytes a block; a node with one holder needs no dictionary for it, a
leaf none for children. Nothing recurses: conversations make chains of any depth.
"""

from __future__ import annotations

from array import array
from typing import Final

__all__ = ["HASH_BYTES", "Holder", "Node", "RadixTree", "Use"]

HASH_BYTES: Final = 8


class Use:
    """One use of a path by one endpoint: from `terminal` upwards, as far as no later use has taken over.

    The uses of an endpoint form a ring in order of recency around its `Holder.order`. Every use in it owns at least
    its terminal, and whatever the endpoint holds below that was used earlier; so the terminal of the oldest use is what
    an engine evicts next (least recently used, tails before heads), and a use costs one entry however long its path.
    """

    __slots__ = ("holder", "newer", "now", "older", "terminal")

    def __init__(self, holder: Holder, now: float, terminal: Node, order: Use | None) -> None:
        """Enter the ring of `order` as the newest; without one begin a ring."""
        self.holder = holder
        self.now = now
        self.terminal = terminal
        if order is None:
            order = self.older = self
        newest = order.older
        self.older = newest
        self.newer = order
        newest.newer = self
        order.older = self

    def leave(self) -> None:
        """Take this use out of its ring. O(1)."""
        older, newer = self.older, self.newer
        older.newer = newer
        newer.older = older

    def renew(self, now: float) -> None:
        """Make this use the newest of its ring. O(1)."""
        self.now = now
        order = self.holder.order
        if order.older is self:
            return
        self.leave()
        newest = order.older
        self.older = newest
        self.newer = order
        newest.newer = self
        order.older = self


class Holder:
    """One endpoint as the tree sees it: what it holds, in bytes and blocks, and in which order it was used."""

    __slots__ = ("blocks", "capacity", "held_bytes", "id", "limit", "order", "pending")

    def __init__(self, endpoint_id: str, capacity: int, root: Node) -> None:
        self.id = endpoint_id
        self.capacity = capacity
        """What its engine can hold, in bytes, before corrections."""
        self.limit = capacity
        """The estimate after corrections, in bytes; at most `capacity`."""
        self.held_bytes = 0
        self.blocks = 0
        self.pending: dict[Node, set[object]] = {}
        """Speculative nodes, with the requests (`index.PrefixHandle`) that claim them; all other nodes held are confirmed."""
        self.order = Use(self, 0.0, root, None)
        """Anchor of the ring of uses: `order.newer` is the oldest, `order.older` the newest."""


class Node:
    """A run of blocks that is held as a whole or not at all."""

    __slots__ = ("children", "edge", "end", "parent", "shared", "sole", "start")

    def __init__(self, parent: Node | None, edge: bytes, start: int, end: int) -> None:
        self.parent: Node = self if parent is None else parent
        self.edge = edge
        """Block hashes in native byte order, eight bytes each."""
        self.start = start
        """Blocks from the root to the beginning of the edge."""
        self.end = end
        """Blocks from the root to the end of the edge; 0 once the node is no longer part of the tree."""
        self.children: dict[int, Node] | None = None
        """By first block hash; None for a leaf."""
        self.sole: Use | None = None
        """The use of the only holder, where there is just one."""
        self.shared: dict[Holder, Use] | None = None
        """The latest use by each holder, where there are several."""

    def use_by(self, holder: Holder) -> Use | None:
        """Return the latest use of this node by one endpoint; None: it does not hold the node."""
        sole = self.sole
        if sole is not None:
            return sole if sole.holder is holder else None
        return None if self.shared is None else self.shared.get(holder)

    def holders(self) -> list[Holder]:
        """Return all holders of this node."""
        return [self.sole.holder] if self.sole is not None else list(self.shared or ())


def _hashes(edge: bytes) -> memoryview[int]:
    return memoryview(edge).cast("Q")


class RadixTree:
    """All nodes, and the operations that keep their number minimal."""

    __slots__ = ("_walked", "_where", "blocks", "nodes", "root")

    def __init__(self) -> None:
        self.root = Node(None, b"", 0, 0)
        self._walked: array[int] | None = None
        """The chain of the last walk, as long as the tree has not changed since."""
        self._where: tuple[Node, int] = self.root, 0
        self.nodes = 0
        """Nodes below the root."""
        self.blocks = 0
        """Distinct blocks in all edges."""

    def walk(self, chain: array[int]) -> tuple[Node, int]:
        """Return the deepest node `chain` reaches into and how many of its blocks match; (root, 0) for none.

        The count lies between the node's start (exclusive) and its end. One dictionary lookup and one comparison of
        bytes per node; where an edge differs, a binary search, for which chained hashes allow one comparison a step.
        The result is kept until the tree changes, because every request is first matched and then added.
        """
        if chain is self._walked:
            return self._where
        self._walked = chain
        node, depth, n = self.root, 0, len(chain)
        packed = chain.tobytes()
        while depth < n and (children := node.children) is not None:
            child = children.get(chain[depth])
            if child is None:
                break
            node = child
            edge, end = node.edge, node.end
            if packed.startswith(edge, depth * HASH_BYTES):
                depth = end
                continue
            low, high, start = depth + 1, min(end, n), depth
            while low < high:
                middle = (low + high + 1) // 2
                at = (middle - 1) * HASH_BYTES
                mine = (middle - 1 - start) * HASH_BYTES
                if packed[at : at + HASH_BYTES] == edge[mine : mine + HASH_BYTES]:
                    low = middle
                else:
                    high = middle - 1
            depth = low
            break
        self._where = node, depth
        return self._where

    def take(self, node: Node, use: Use, claim: object | None) -> tuple[int, float | None]:
        """Make `use`, which ends at `node`, its holder's latest from there up to the root.

        With a claim, what the holder did not have before is speculative; without, all is confirmed. Returns the depth in
        blocks from which on the path is new to the holder (the path's length: nothing is), and when the deepest node that
        is not new was last used.
        """
        holder, root = use.holder, self.root
        pending = holder.pending
        new_from = node.end
        used_at: float | None = None
        while node is not root:
            previous = node.sole
            if previous is not None:
                if previous.holder is holder:
                    node.sole = use
                else:
                    node.sole, node.shared, previous = None, {previous.holder: previous, holder: use}, None
            elif (shared := node.shared) is not None:
                previous = shared.get(holder)
                shared[holder] = use
            else:
                node.sole = use
            if previous is None:
                new_from = node.start
                if claim is not None:
                    pending[node] = {claim}
            else:
                if used_at is None:
                    used_at = previous.now
                if previous.terminal is node and previous is not use:
                    previous.leave()
                if pending:
                    if claim is None:
                        pending.pop(node, None)
                    elif (claims := pending.get(node)) is not None:
                        claims.add(claim)
            if (children := node.children) is not None and len(children) == 1:
                node = self.join(node)
            node = node.parent
        return new_from, used_at

    def attach(self, parent: Node, chain: array[int]) -> Node:
        """Add and return a leaf under `parent` with the blocks of `chain` behind it; the caller gives it a holder."""
        self._walked = None
        depth = parent.end
        leaf = Node(parent, chain[depth:].tobytes(), depth, len(chain))
        if parent.children is None:
            parent.children = {}
        parent.children[chain[depth]] = leaf
        self.nodes += 1
        self.blocks += leaf.end - depth
        return leaf

    def split(self, node: Node, at: int) -> Node:
        """Divide `node` behind its first blocks, at depth `at`; return the new upper part, held and used alike.

        The lower part stays the same object, so that the terminals of uses need no change. O(holders).
        """
        self._walked = None
        cut = (at - node.start) * HASH_BYTES
        parent = node.parent
        head = Node(parent, node.edge[:cut], node.start, at)
        assert parent.children is not None
        parent.children[_hashes(head.edge)[0]] = head
        node.parent = head
        node.start = at
        node.edge = node.edge[cut:]
        head.children = {_hashes(node.edge)[0]: node}
        head.sole = node.sole
        if node.shared is not None:
            head.shared = dict(node.shared)
        for holder in head.holders():
            claims = holder.pending.get(node)
            if claims is not None:
                holder.pending[head] = set(claims)
        self.nodes += 1
        return head

    def join(self, node: Node) -> Node:
        """Undo a split: let the only child of `node` absorb it, if both are held, used and claimed alike.

        Returns whichever node now ends or contains the place where `node` was: the child, or `node` unchanged.
        Equal uses mean that no use ends at `node`, so no terminal refers to what disappears.
        """
        if node.children is None or len(node.children) != 1 or node is self.root:
            return node
        (child,) = node.children.values()
        if node.sole is not child.sole or node.shared != child.shared:
            return node
        holders = node.holders()
        if any(holder.pending.get(node) != holder.pending.get(child) for holder in holders if holder.pending):
            return node
        for holder in holders:
            holder.pending.pop(node, None)
        self._walked = None
        parent = node.parent
        assert parent.children is not None
        parent.children[_hashes(node.edge)[0]] = child
        child.parent = parent
        child.start = node.start
        child.edge = node.edge + child.edge
        node.children, node.end = None, 0  # so that joining a reference that outlived its node does nothing
        self.nodes -= 1
        return child

    def truncate(self, node: Node, end: int) -> None:
        """Forget the blocks of a leaf behind depth `end`, which lies inside it."""
        self._walked = None
        keep = (end - node.start) * HASH_BYTES
        self.blocks -= node.end - end
        node.edge = node.edge[:keep]
        node.end = end

    def release(self, node: Node, holder: Holder) -> None:
        """Remove a holder from a node, below which it must hold nothing. A node without holders is removed.

        The caller accounts for the blocks. O(1). Joining what remains is left to the caller, who may still hold
        references to nodes above.
        """
        use = node.use_by(holder)
        assert use is not None
        assert use.terminal is node
        parent = node.parent
        if parent.use_by(holder) is use:
            use.terminal = parent
        else:
            use.leave()
        if holder.pending:
            holder.pending.pop(node, None)
        shared = node.shared
        if shared is not None:
            del shared[holder]
            if len(shared) == 1:
                (node.sole,) = shared.values()
                node.shared = None
            return
        self._walked = None
        node.sole = None
        siblings = parent.children
        assert siblings is not None
        assert node.children is None
        del siblings[_hashes(node.edge)[0]]
        if not siblings:
            parent.children = None
        self.nodes -= 1
        self.blocks -= node.end - node.start
        node.end = 0
