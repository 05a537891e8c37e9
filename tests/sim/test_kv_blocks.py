import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.kv_blocks import BlockPool


def pool_with(keys: list[str], spare: int = 0) -> tuple[BlockPool, list[int]]:
    """A pool where a request has filled one block per key and holds them."""
    pool = BlockPool(len(keys) + spare)
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.remember(block, key)
    return pool, blocks


def test_freed_blocks_still_answer() -> None:
    pool, blocks = pool_with(["a", "b", "c"])
    pool.release(blocks)
    assert pool.num_free == 3
    assert pool.match(["a", "b", "x", "c"], 10) == blocks[:2]
    assert pool.match(["a", "b", "c"], 1) == blocks[:1]


def test_tails_are_evicted_before_heads() -> None:
    pool, blocks = pool_with(["a", "b", "c"])
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match(["a", "b", "c"], 3) == blocks[:2]
    pool.allocate(2)
    assert pool.match(["a"], 1) == []
    assert pool.num_cached == 0


def test_least_recently_freed_goes_first() -> None:
    pool, blocks = pool_with(["a", "b"])
    pool.release(blocks[:1])
    pool.release(blocks[1:])
    pool.claim(blocks[:1])
    pool.release(blocks[:1])
    assert pool.allocate(1) == [blocks[1]]
    assert pool.match(["a"], 1) == [blocks[0]]


def test_a_claimed_block_is_not_evicted_until_all_let_go() -> None:
    pool, blocks = pool_with(["a"])
    pool.claim(blocks)
    pool.release(blocks)
    assert pool.num_free == 0
    assert pool.count_free(blocks) == 0
    pool.release(blocks)
    assert pool.num_free == 1
    assert pool.count_free(blocks) == 1


def test_a_newer_copy_answers_for_the_prefix() -> None:
    pool, (first, second) = pool_with(["a", "b"])
    pool.remember(second, "a")
    assert pool.match(["a"], 1) == [second]
    assert pool.match(["b"], 1) == []
    pool.remember(second, "a")
    pool.release([first])
    pool.allocate(1)
    assert pool.match(["a"], 1) == [second]


def test_forget_all_keeps_references() -> None:
    pool, blocks = pool_with(["a"], spare=1)
    pool.forget_all()
    assert pool.num_cached == 0
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_too_few_blocks() -> None:
    with pytest.raises(KeyError):
        BlockPool(1).allocate(2)


@given(st.lists(st.tuples(st.sampled_from(["take", "drop", "forget"]), st.integers(0, 7)), max_size=80))
def test_no_block_is_lost_or_held_twice(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    for name, number in operations:
        if name == "take":
            keys = [(number % 3, depth) for depth in range(number % 4 + 1)]
            hits = pool.match(keys, len(keys))
            if len(keys) - len(hits) + pool.count_free(hits) <= pool.num_free:
                pool.claim(hits)
                blocks = hits + pool.allocate(len(keys) - len(hits))
                for block, key in zip(blocks, keys, strict=True):
                    pool.remember(block, key)
                held.append(blocks)
        elif name == "drop" and held:
            pool.release(held.pop(number % len(held)))
        elif name == "forget" and number == 0:
            pool.forget_all()
        in_use = {block for blocks in held for block in blocks}
        assert pool.num_free == 8 - len(in_use)
        assert pool.num_cached <= 8
