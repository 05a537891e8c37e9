"""Structure alone: walking, splitting, joining, releasing."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from extproc.prefix.tree import Holder, Node, RadixTree, Use


def hold(tree: RadixTree, hashes: list[int], *holders: Holder) -> Node:
    """Attach one path to the root as a node, held by `holders`."""
    node = tree.attach(tree.root, array("Q", hashes))
    for holder in holders:
        use = Use(holder, 1.0, node, holder.order)
        assert tree.take(node, use, None) == (0, None)
    return node


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 40))
def test_walk_finds_where_an_edge_differs(n_edge: int, n_chain: int, n_same: int) -> None:
    tree = RadixTree()
    edge = list(range(1, n_edge + 1))
    node = hold(tree, edge, Holder("a", 0, tree.root))
    same = min(n_same, n_chain, n_edge)
    chain = array("Q", edge[:same] + [1000 + i for i in range(n_chain - same)])
    assert tree.walk(chain) == ((node, same) if same else (tree.root, 0))


def test_join_undoes_split() -> None:
    tree = RadixTree()
    a, b = Holder("a", 0, tree.root), Holder("b", 0, tree.root)
    node = hold(tree, [1, 2, 3, 4, 5], a, b)
    a.pending[node] = {"request"}
    head = tree.split(node, 2)
    assert (head.start, head.end, node.start, node.end, tree.nodes, tree.blocks) == (0, 2, 2, 5, 2, 5)
    assert node.parent is head
    assert head.use_by(a) is node.use_by(a)
    assert a.pending == {node: {"request"}, head: {"request"}}
    assert a.pending[node] is not a.pending[head]
    assert tree.walk(array("Q", [1, 2, 3, 9])) == (node, 3)
    assert tree.join(head) is node
    assert (node.start, node.end, tree.nodes, tree.blocks) == (0, 5, 1, 5)
    assert a.pending == {node: {"request"}}
    assert tree.join(head) is head  # a reference that outlived its node


def test_nodes_that_differ_are_not_joined() -> None:
    tree = RadixTree()
    a, b = Holder("a", 0, tree.root), Holder("b", 0, tree.root)
    node = hold(tree, [1, 2, 3], a)
    head = tree.split(node, 1)
    a.pending[node] = {"request"}
    assert tree.join(head) is head
    a.pending.clear()
    tree.take(head, Use(b, 2.0, head, b.order), None)
    assert tree.join(head) is head
    tree.attach(head, array("Q", [1, 7])).sole = Use(a, 3.0, node, a.order)
    assert tree.join(head) is head
    assert tree.join(tree.root) is tree.root


def test_release_moves_the_end_of_a_use_upwards_and_removes_what_nobody_holds() -> None:
    tree = RadixTree()
    a, b, c = (Holder(name, 0, tree.root) for name in "abc")
    node = hold(tree, [1, 2, 3], a, b, c)
    head = tree.split(node, 1)
    tree.release(node, a)
    assert a.order.newer.terminal is head
    assert node.holders() == [b, c]
    tree.release(node, b)
    assert (node.holders(), node.use_by(a), node.use_by(c)) == ([c], None, c.order.newer)
    tree.release(node, c)
    assert (tree.nodes, tree.blocks, head.children) == (1, 1, None)
    for holder in (a, b, c):
        tree.release(head, holder)
        assert holder.order.newer is holder.order
    assert (tree.nodes, tree.blocks, tree.root.children) == (0, 0, None)


def test_uses_form_a_ring_in_order_of_recency() -> None:
    tree = RadixTree()
    holder = Holder("a", 0, tree.root)
    first, second, third = (Use(holder, now, tree.root, holder.order) for now in (1.0, 2.0, 3.0))
    second.leave()
    for now in (4.0, 5.0):
        first.renew(now)
    assert first.now == 5.0
    assert (holder.order.newer, third.newer, first.newer) == (third, first, holder.order)
    assert (holder.order.older, first.older, third.older) == (first, third, holder.order)
