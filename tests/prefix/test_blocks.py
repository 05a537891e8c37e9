"""Block boundaries and chained hashes."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from extproc.prefix.blocks import BlockSchedule, hash_blocks, seed

SCHEDULES = st.builds(BlockSchedule, st.integers(1, 40), st.integers(1, 9))


def _cuts(schedule: BlockSchedule, n_bytes: int) -> list[int]:
    """Block ends up to `n_bytes`, straight from the definition: the size doubles whenever the position has."""
    ends, at, size, until = [], 0, schedule.block_bytes, 2 * schedule.per_doubling * schedule.block_bytes
    while at + size <= n_bytes:
        at += size
        ends.append(at)
        if at == until:
            size, until = 2 * size, 2 * until
    return ends


@given(SCHEDULES, st.integers(0, 5000))
def test_positions_follow_the_definition(schedule: BlockSchedule, n_bytes: int) -> None:
    ends = _cuts(schedule, n_bytes)
    assert [schedule.bytes_at(i + 1) for i in range(len(ends))] == ends
    assert schedule.bytes_at(0) == 0
    assert schedule.blocks_in(n_bytes) == len(ends)
    covered = schedule.bytes_at(schedule.blocks_in(n_bytes))
    assert n_bytes - covered < max(schedule.block_bytes, n_bytes / schedule.per_doubling + 1)


@given(SCHEDULES, st.binary(max_size=300))
def test_each_hash_is_chained_to_the_one_before(schedule: BlockSchedule, prompt: bytes) -> None:
    expected, begin, chained = [], 0, 7
    for end in _cuts(schedule, len(prompt)):
        chained = xxhash.xxh3_64_intdigest(prompt[begin:end], chained)
        expected.append(chained)
        begin = end
    assert hash_blocks(prompt, 7, schedule).tolist() == expected


@given(SCHEDULES, st.text("ab", max_size=80), st.text("ab", max_size=80))
def test_hashes_are_equal_iff_the_block_prefix_is(schedule: BlockSchedule, one: str, other: str) -> None:
    a, b = hash_blocks(one.encode(), 1, schedule), hash_blocks(other.encode(), 1, schedule)
    for i in range(min(len(a), len(b))):
        end = schedule.bytes_at(i + 1)
        assert (a[i] == b[i]) == (one[:end] == other[:end])


def test_sizes_promised_in_the_docstring() -> None:
    schedule = BlockSchedule(256)
    counts = {n: len(hash_blocks(bytes(n), 0, schedule)) for n in (255, 256, 32 << 10, 400_000, 4 << 20)}
    assert counts == {255: 0, 256: 1, 32 << 10: 128, 400_000: 353, 4 << 20: 576}


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a", ""), ("b", "")), (("a", "x"), ("a", "")), (("a", "bc"), ("ab", "c")), (("1:a", ""), ("", "1:a"))],
)
def test_seed_separates_models_and_salts(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert seed(*one) != seed(*other)
    assert hash_blocks(b"x" * 64, seed(*one), BlockSchedule(16)) != hash_blocks(
        b"x" * 64, seed(*other), BlockSchedule(16)
    )


def test_long_names_are_seeded_like_short_ones() -> None:
    name = "m" * 300
    assert seed(name, "s") == xxhash.xxh3_64_intdigest(b"300:%bs" % name.encode())
    assert seed("m", "s") == seed("m", "s") == xxhash.xxh3_64_intdigest(b"1:ms")


@pytest.mark.parametrize("n_bytes", [0, 255, 256, 4096, 4097, 32_768, 32_769, 100_000])
def test_long_prompts_are_hashed_like_short_ones(n_bytes: int) -> None:
    schedule, prompt = BlockSchedule(256), bytes(range(251)) * 400
    expected, begin, chained = [], 0, 7
    for end in _cuts(schedule, n_bytes):
        chained = xxhash.xxh3_64_intdigest(prompt[begin:end], chained)
        expected.append(chained)
        begin = end
    assert hash_blocks(prompt[:n_bytes], 7, schedule).tolist() == expected


def test_seed_is_the_same_everywhere() -> None:
    """Pickers exchange hashes, so the value is part of the format."""
    assert seed("llama", "") == xxhash.xxh3_64_intdigest(b"5:llama")


@given(st.text(st.characters()), st.text(st.characters()))
def test_seed_takes_any_text(model: str, salt: str) -> None:
    assert 0 <= seed(model, salt) < 1 << 64
    assert seed("\ud800", "\udfff") != seed("", "")
