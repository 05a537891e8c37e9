"""The index: named behaviours, and agreement with a plain-dictionary model under any operation sequence."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.prefix.blocks import BlockSchedule, hash_blocks
from extproc.prefix.entries import BlockState, EvictionCause, PrefixHandle
from extproc.prefix.index import UNBOUNDED, PrefixIndex
from extproc.prefix.tree import HASH_BYTES, Node

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
SMALL = BlockSchedule(1, 2)
"""Sizes 1, 1, 1, 1, 2, 2, 4, 4, ...: a few letters already cross several sizes."""


def chain(text: str) -> array[int]:
    return hash_blocks(text.encode(), 0, SMALL)


def check_structure(index: PrefixIndex) -> None:
    """Assert what must hold inside: closure under prefixes, no empty nodes, one live use per path end, counts."""
    tree = index._tree
    nodes, blocks = 0, 0
    live: dict[int, set[int]] = {}
    held: dict[int, int] = {}
    stack = [tree.root]
    while stack:
        node = stack.pop()
        children = node.children
        assert children is None or children
        for first, child in (children or {}).items():
            hashes = memoryview(child.edge).cast("Q").tolist()
            assert first == hashes[0]
            assert child.parent is node
            assert child.start == node.end
            nodes, blocks = nodes + 1, blocks + len(hashes)
            assert (child.sole is None) != (child.shared is None)
            assert child.shared is None or len(child.shared) > 1
            for holder in child.holders():
                use = child.use_by(holder)
                assert use is not None
                live.setdefault(id(holder), set()).add(id(use))
                held[id(holder)] = held.get(id(holder), 0) + len(hashes)
                assert node is tree.root or node.use_by(holder) is not None
                assert use.terminal.use_by(holder) is use
            stack.append(child)
    assert (tree.nodes, tree.blocks) == (nodes, blocks)
    for holder in [*index._holders.values(), *index.unswept]:
        ring, use = [], holder.order.newer
        while use is not holder.order:
            assert use.newer.older is use
            ring.append(use)
            use = use.newer
        assert {id(use) for use in ring} == live.get(id(holder), set())
        assert holder.blocks == held.get(id(holder), 0)
        assert all(node.use_by(holder) is not None for node in holder.pending)


@dataclass
class ModelEndpoint:
    """What one endpoint holds, block by block: insertion order is eviction order."""

    capacity: int = UNBOUNDED
    limit: int = UNBOUNDED
    used: dict[int, float] = field(default_factory=dict)
    pending: dict[int, set[PrefixHandle]] = field(default_factory=dict)


class IndexAgainstDictionaries(RuleBasedStateMachine):
    """Compares every answer of the index with a model that knows single blocks only."""

    texts = st.text("ab", min_size=0, max_size=15)
    endpoints = st.sampled_from([A, B, C])
    max_blocks = 25

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(SMALL, self.max_blocks)
        self.model: dict[str, ModelEndpoint] = {}
        self.parents: dict[int, int | None] = {}
        self.sizes: dict[int, int] = {}
        self.seen: dict[str, array[int]] = {}
        self.handles: list[tuple[str, ModelEndpoint, PrefixHandle]] = []
        self.now = 0.0
        self.evicted = dict.fromkeys(EvictionCause, 0)

    def _chain(self, text: str) -> array[int]:
        hashes = self.seen[text] = chain(text)
        for i, block in enumerate(hashes):
            self.parents[block] = hashes[i - 1] if i else None
            self.sizes[block] = SMALL.bytes_at(i + 1) - SMALL.bytes_at(i)
        return hashes

    def _bytes(self, endpoint: ModelEndpoint) -> int:
        return sum(self.sizes[block] for block in endpoint.used)

    def _remove(self, endpoint: ModelEndpoint, block: int, cause: EvictionCause) -> None:
        del endpoint.used[block]
        endpoint.pending.pop(block, None)
        self.evicted[cause] += 1

    def _used_at(self, endpoint: ModelEndpoint, chains: list[array[int]]) -> float | None:
        """When the deepest block held of each chain was used last, chain after chain; the earliest."""
        times: list[float] = []
        used = dict(endpoint.used)
        for hashes in chains:
            held = [used[block] for block in hashes if block in used]
            times += held[-1:]
            used |= dict.fromkeys(hashes, self.now)
        return min(times, default=None)

    def _use(self, endpoint: ModelEndpoint, chains: list[array[int]], handle: PrefixHandle | None) -> None:
        for hashes in chains:
            before = self._bytes(endpoint)
            for block in reversed(hashes):
                new = endpoint.used.pop(block, None) is None
                endpoint.used[block] = self.now
                if handle is None:
                    endpoint.pending.pop(block, None)
                elif new or block in endpoint.pending:
                    endpoint.pending.setdefault(block, set()).add(handle)
            endpoint.limit = min(endpoint.capacity, endpoint.limit + (self._bytes(endpoint) - before) // 16)
        self._fit(endpoint)
        while (excess := sum(len(e.used) for e in self.model.values()) - self.max_blocks) > 0:
            fullest = max(self.model.values(), key=lambda e: len(e.used))
            for block in list(fullest.used)[:excess]:
                self._remove(fullest, block, EvictionCause.BOUND)

    def _fit(self, endpoint: ModelEndpoint) -> None:
        while self._bytes(endpoint) > endpoint.limit:
            self._remove(endpoint, next(iter(endpoint.used)), EvictionCause.CAPACITY)

    @rule(endpoint=endpoints, texts=st.lists(texts, min_size=1, max_size=2), step=st.sampled_from([0.0, 1.0]))
    def add(self, endpoint: str, texts: list[str], step: float) -> None:
        self.now += step
        chains = [self._chain(text) for text in texts]
        model = self.model.setdefault(endpoint, ModelEndpoint())
        handle = self.index.add(endpoint, chains, self.now)
        assert handle.used_at == self._used_at(model, chains)
        self._use(model, chains, handle)
        self.handles.append((endpoint, model, handle))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), step=st.sampled_from([0.0, 1.0]), forget=st.booleans())
    def confirm(self, data: st.DataObject, step: float, forget: bool) -> None:
        self.now += step
        endpoint, model, handle = entry = data.draw(st.sampled_from(self.handles), label="handle")
        self.index.confirm(endpoint, handle, self.now)
        if self.model.get(endpoint) is model:
            self._use(model, list(handle.chains), None)
        if forget:
            self.handles.remove(entry)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), keep=st.booleans())
    def retract(self, data: st.DataObject, keep: bool) -> None:
        endpoint, model, handle = data.draw(st.sampled_from(self.handles), label="handle")
        self.index.retract(endpoint, handle, keep=keep)
        if self.model.get(endpoint) is model:
            for block, vouchers in list(model.pending.items()):
                if handle in vouchers:
                    vouchers.discard(handle)
                    if keep:
                        del model.pending[block]
                    elif not vouchers:
                        self._remove(model, block, EvictionCause.RETRACTED)

    @rule(endpoint=endpoints, back=st.integers(0, 4))
    def correct(self, endpoint: str, back: int) -> None:
        model = self.model.get(endpoint)
        gone = self.index.correct(endpoint, self.now - back)
        if model is None:
            assert gone == 0
            return
        before, blocks = self._bytes(model), len(model.used)
        for block, at in list(model.used.items()):
            has_children = any(self.parents[other] == block for other in model.used)
            if at <= self.now - back and block not in model.pending and not has_children:
                self._remove(model, block, EvictionCause.CORRECTION)
        assert gone == blocks - len(model.used)
        if gone:
            model.limit = min(model.limit, max(self._bytes(model), before // 2))

    @rule(endpoint=endpoints, capacity=st.one_of(st.integers(0, 40), st.just(UNBOUNDED)))
    def set_capacity(self, endpoint: str, capacity: int) -> None:
        self.index.set_capacity(endpoint, capacity)
        model = self.model.setdefault(endpoint, ModelEndpoint())
        model.limit = min(model.limit, capacity) if model.limit < model.capacity else capacity
        model.capacity = capacity
        self._fit(model)

    @rule(endpoint=endpoints)
    def drop(self, endpoint: str) -> None:
        self.index.drop(endpoint)
        model = self.model.pop(endpoint, None)
        if model is not None:
            self.evicted[EvictionCause.RESTART] += len(model.used)

    @rule(n=st.integers(0, 5))
    def sweep(self, n: int) -> None:
        assert 0 <= self.index.sweep(n) <= n

    @rule(texts=st.lists(texts, min_size=1, max_size=3))
    def match_several(self, texts: list[str]) -> None:
        chains = [self._chain(text) for text in texts]
        found = self.index.match(chains, 99)
        assert found.prompt_bytes == 99
        parts = [self.index.match([hashes]) for hashes in chains]
        for endpoint in (A, B, C):
            assert found.matched_bytes.get(endpoint, 0) == sum(part.matched_bytes.get(endpoint, 0) for part in parts)

    @invariant()
    def matches_agree(self) -> None:
        for hashes in self.seen.values():
            found = self.index.match([hashes])
            for endpoint in (A, B, C):
                model = self.model.get(endpoint, ModelEndpoint())
                depth = 0
                while depth < len(hashes) and hashes[depth] in model.used:
                    depth += 1
                assert found.matched_bytes.get(endpoint, 0) == SMALL.bytes_at(depth)
                assert (endpoint in found.matched_bytes) == (depth > 0)
                assert self.index.states(endpoint, hashes) == [
                    BlockState.SPECULATIVE if block in model.pending else BlockState.CONFIRMED
                    for block in hashes[:depth]
                ]

    @invariant()
    def accounts_agree(self) -> None:
        for endpoint in (A, B, C):
            model = self.model.get(endpoint, ModelEndpoint())
            assert self.index.held_bytes(endpoint) == self._bytes(model) <= self.index.capacity_bytes(endpoint)
            assert self.index.capacity_bytes(endpoint) == model.limit
        stats = self.index.stats()
        assert stats.endpoints == len(self.model)
        assert stats.held_blocks == sum(len(model.used) for model in self.model.values()) <= self.max_blocks
        assert stats.evicted == self.evicted

    @invariant()
    def structure_holds(self) -> None:
        check_structure(self.index)

    def teardown(self) -> None:
        """Dropping everybody and sweeping leaves nothing behind."""
        for endpoint in (A, B, C):
            self.index.drop(endpoint)
        self.index.sweep(1 << 30)
        stats = self.index.stats()
        assert (stats.blocks, stats.nodes, stats.held_blocks, stats.endpoints) == (0, 0, 0, 0)


TestIndexAgainstDictionaries = IndexAgainstDictionaries.TestCase
TestIndexAgainstDictionaries.settings = settings(deadline=None, stateful_step_count=40)


def test_a_routed_prompt_matches_at_once() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.add(A, [chain("aaaabb")], 1.0)
    found = index.match([chain("aaaabbcc"), chain("zz")], 10)
    assert (found.prompt_bytes, found.matched_bytes) == (10, {A: 6})
    assert index.match([chain("zzzz"), chain("aa")]).matched_bytes == {A: 2}
    assert index.match([]).matched_bytes == {}
    assert (index.stats().lookups, index.stats().hits) == (3, 2)


def test_a_failed_request_is_forgotten_unless_another_vouches_for_it() -> None:
    index = PrefixIndex(SMALL, 1000)
    first = index.add(A, [chain("aaaa")], 1.0)
    second = index.add(A, [chain("aaab")], 2.0)
    index.retract(A, first)
    assert index.match([chain("aaaa")]).matched_bytes == {A: 3}
    index.confirm(A, second, 3.0)
    index.retract(A, second)
    assert index.states(A, chain("aaab")) == [BlockState.CONFIRMED] * 4


def test_prompts_of_one_request_that_share_a_head_are_retracted_together() -> None:
    index = PrefixIndex(SMALL, 1000)
    handle = index.add(A, [chain("aaaa"), chain("aabb"), chain("aa")], 1.0)
    index.retract(A, handle)
    assert index.stats().nodes == 0
    check_structure(index)


def test_confirm_brings_back_what_was_evicted_meanwhile() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.set_capacity(A, 4)
    handle = index.add(A, [chain("aaaa")], 1.0)
    index.add(A, [chain("bbbb")], 2.0)
    assert index.match([chain("aaaa")]).matched_bytes == {}
    index.confirm(A, handle, 3.0)
    assert index.match([chain("aaaa")]).matched_bytes == {A: 4}
    assert index.stats().evicted[EvictionCause.CAPACITY] == 8


def test_handles_from_before_a_restart_do_nothing() -> None:
    index = PrefixIndex(SMALL, 1000)
    late, failed = index.add(A, [chain("aaaa")], 1.0), index.add(A, [chain("aaaa")], 1.0)
    index.drop(A)
    index.drop(A)
    index.confirm(A, late, 2.0)
    index.retract(A, failed)
    assert index.match([chain("aaaa")]).matched_bytes == {}
    index.add(A, [chain("aa")], 3.0)
    index.retract(A, failed)
    assert index.match([chain("aaaa")]).matched_bytes == {A: 2}


def test_a_prompt_larger_than_the_cache_keeps_its_head() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.set_capacity(A, 3)
    index.add(A, [chain("abababab")], 1.0)
    assert index.match([chain("abababab")]).matched_bytes == {A: 3}


def test_eviction_takes_tails_before_heads_and_the_least_recent_first() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.set_capacity(A, 8)
    index.add(A, [chain("aaaa")], 1.0)
    index.add(A, [chain("bbbb")], 2.0)
    index.add(A, [chain("aa")], 3.0)
    index.add(A, [chain("ccc")], 4.0)
    assert index.match([chain("aaaa")]).matched_bytes == {A: 2}
    assert index.match([chain("bbbb")]).matched_bytes == {A: 3}


def test_a_correction_takes_everything_as_old_and_lowers_the_capacity() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.set_capacity(A, 100)
    for now, text in enumerate(("aaaa", "bbbb", "cccc", "dddd")):
        index.confirm(A, index.add(A, [chain(text)], now), now)
    index.add(A, [chain("aaaacc")], 4.0)
    assert index.correct(A, 1.0) == 4
    assert index.capacity_bytes(A) == 14
    assert index.match([chain("bbbb")]).matched_bytes == {}
    assert index.match([chain("aaaacc")]).matched_bytes == {A: 6}
    index.set_capacity(A, 90)
    assert index.capacity_bytes(A) == 14
    assert index.correct("nobody", 1.0) == 0
    assert index.correct(A, 1.0) == 0
    assert index.capacity_bytes(A) == 14


def test_a_corrected_capacity_grows_again_with_use() -> None:
    coarse = BlockSchedule(16)
    index = PrefixIndex(coarse, 1000)
    index.set_capacity(A, 1000)
    index.confirm(A, index.add(A, [hash_blocks(bytes(640), 0, coarse)], 0.0), 0.0)
    assert index.correct(A, 0.0) == 40
    assert index.capacity_bytes(A) == 320
    for i in range(1, 9):
        index.add(A, [hash_blocks(bytes([i]) * 160, 0, coarse)], float(i))
    assert index.capacity_bytes(A) == 320 + 8 * 10
    index.set_capacity(A, 300)
    assert index.capacity_bytes(A) == 300


def test_the_fullest_endpoint_pays_when_the_index_is_full() -> None:
    index = PrefixIndex(SMALL, 8)
    index.add(A, [chain("aa"), chain("bbbb")], 1.0)
    index.add(B, [chain("aa"), chain("cc")], 2.0)
    assert index.stats().held_blocks == 8
    assert index.match([chain("aa")]).matched_bytes == {B: 2}
    assert index.stats().evicted[EvictionCause.BOUND] == 2


def test_nodes_are_bounded_beside_blocks() -> None:
    index = PrefixIndex(SMALL, 1000, max_nodes=3)
    for now, text in enumerate(("aa", "ba", "ca", "da", "ea")):
        index.add(A, [chain(text)], now)
    assert index.stats().nodes == 3
    assert index.match([chain("ba")]).matched_bytes == {}
    assert index.match([chain("ca")]).matched_bytes == {A: 2}
    assert PrefixIndex(SMALL, 1_000_000).max_nodes == 125_000


def test_dropped_endpoints_make_room_first() -> None:
    index = PrefixIndex(SMALL, 12)
    index.add(A, [chain(letter * 2) for letter in "abcdef"], 1.0)
    index.drop(A)
    assert index.stats().held_blocks == 0
    index.add(B, [chain("gggg"), chain("hhhhhh")], 2.0)
    assert index.stats().blocks <= 12
    assert index.match([chain("hhhhhh")]).matched_bytes == {B: 6}
    assert index.stats().evicted == {**dict.fromkeys(EvictionCause, 0), EvictionCause.RESTART: 12}


def test_growing_conversations_leave_one_node() -> None:
    index = PrefixIndex(SMALL, 1000)
    for now in range(1, 15):
        index.confirm(A, index.add(A, [chain("abbabaabaabbab"[:now])], now), now + 0.5)
    assert index.stats().nodes == 1
    side = index.add(A, [chain("abc")], 20.0)
    assert index.stats().nodes == 3
    index.retract(A, side)
    index.confirm(A, index.add(A, [chain("abbabaabaabbab")], 21.0), 22.0)
    assert index.stats().nodes == 1


def test_long_chains_do_not_recurse() -> None:
    """More nodes on one path than Python recurses: 5,000 turns of a conversation, each used earlier than the one before."""
    index = PrefixIndex(BlockSchedule(1, 1 << 20), 1 << 40)
    whole = array("Q", range(1, 5_001))
    for end in range(5_000, 0, -1):
        index.add(A, [whole[:end]], -end)
    assert index.stats().nodes == 5_000
    assert index.match([whole]).matched_bytes == {A: 5_000}
    index.drop(A)
    assert index.sweep(10_000) == 5_000


def test_a_correction_spares_requests_under_way_and_all_before_them() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.confirm(A, index.add(A, [chain("aa")], 0.0), 0.0)
    index.add(A, [chain("aabb")], 1.0)
    index.confirm(A, index.add(A, [chain("aacc")], 2.0), 2.0)
    assert index.correct(A, 2.0) == 2
    assert index.match([chain("aabb")]).matched_bytes == {A: 4}
    assert index.match([chain("aacc")]).matched_bytes == {A: 2}
    check_structure(index)


def test_a_departing_tail_is_cut_where_others_hold_more() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.add(A, [chain("aaaa")], 1.0)
    index.add(B, [chain("aaaa")], 1.0)
    index.set_capacity(A, 2)
    assert index.match([chain("aaaa")]).matched_bytes == {A: 2, B: 4}
    check_structure(index)


@pytest.mark.parametrize("endpoint_id", ["nobody", B])
def test_questions_about_strangers(endpoint_id: str) -> None:
    index = PrefixIndex(SMALL, 1000)
    index.add(A, [chain("aaaa"), array("Q")], 1.0)
    index.set_capacity(B, UNBOUNDED)
    assert index.held_bytes(endpoint_id) == 0
    assert index.capacity_bytes(endpoint_id) == UNBOUNDED
    assert index.states(endpoint_id, chain("aaaa")) == []


def test_an_edge_costs_eight_bytes_a_block() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.add(A, [chain("abababab")], 1.0)
    (node,) = (index._tree.root.children or {}).values()
    assert isinstance(node, Node)
    assert len(node.edge) == HASH_BYTES * len(chain("abababab"))


def test_several_prompts_add_up_and_the_oldest_use_counts() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.add(A, [chain("aaaa")], 1.0)
    index.add(A, [chain("bb")], 2.0)
    index.add(B, [chain("bb")], 3.0)
    found = index.match([chain("aaaa"), chain("bbaa"), chain("cc"), array("Q")], 10)
    assert found.matched_bytes == {A: 6, B: 2}
    chains = [chain("bbaa"), chain("aaaa"), chain("cc"), array("Q")]
    assert index.add(A, chains, 4.0).used_at == 1.0
    assert index.add(B, chains, 4.0).used_at == 3.0
    assert index.add(C, chains, 4.0).used_at is None


def test_a_burst_keeps_its_prompt_until_the_last_of_it_has_failed() -> None:
    index = PrefixIndex(SMALL, 1000)
    burst = [index.add(A, [chain("aaaa")], 1.0) for _ in range(3)]
    for handle in burst:
        assert index.states(A, chain("aaaa")) == [BlockState.SPECULATIVE] * 4
        index.retract(A, handle)
    assert index.match([chain("aaaa")]).matched_bytes == {}
    assert index.stats().evicted[EvictionCause.RETRACTED] == 4


def test_sweeping_can_be_spread_over_time() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.add(A, [chain(letter * 2) for letter in "abc"], 1.0)
    index.drop(A)
    assert (index.sweep(2), index.stats().nodes) == (2, 1)
    assert (index.sweep(2), index.stats().nodes) == (1, 0)
    assert index.sweep(2) == 0


def test_retracting_spares_what_was_confirmed_before() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.confirm(A, index.add(A, [chain("aa")], 1.0), 2.0)
    index.add(A, [chain("aacc")], 3.0)
    index.retract(A, index.add(A, [chain("aabb")], 3.0))
    assert index.match([chain("aabb")]).matched_bytes == {A: 2}
    long, short = index.add(B, [chain("dddd")], 4.0), index.add(B, [chain("dd")], 5.0)
    index.retract(B, long)
    assert index.match([chain("dddd")]).matched_bytes == {B: 2}
    index.retract(B, short)
    assert index.match([chain("dddd")]).matched_bytes == {}


def test_a_shallow_holder_below_which_the_same_endpoint_goes_on() -> None:
    index = PrefixIndex(SMALL, 1000)
    index.add(A, [chain("aaaa")], 1.0)
    index.add(A, [chain("aa")], 2.0)
    assert index.match([chain("aaaa")]).matched_bytes == {A: 4}
    index.add(B, [chain("aaaa")], 3.0)
    assert index.match([chain("aaaa")]).matched_bytes == {A: 4, B: 4}
    assert index.add(A, [chain("aaaa")], 4.0).used_at == 1.0
    assert index.add(A, [chain("aa")], 5.0).used_at == 4.0
