"""Prompt bytes to chained block hashes: decides where blocks end and what one hash stands for.

What belongs to a prompt, and in which order, is decided in `request`; which endpoints hold a block, in `index`.
XXH3-64 is fast, not cryptographic: a client that crafts two colliding prompts misroutes only its own requests.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Final

from xxhash import xxh3_64_intdigest

__all__ = ["BLOCKS_PER_DOUBLING", "BlockSchedule", "hash_blocks", "seed"]

BLOCKS_PER_DOUBLING: Final = 64
"""Blocks between a position and its double; its inverse (1.6 %) bounds the relative error of a match."""


@dataclass(frozen=True, slots=True)
class BlockSchedule:
    """Where block boundaries lie; the same for all prompts, so that equal prefixes have equal blocks.

    The first `2 * per_doubling` blocks have `block_bytes` each; from then on the size doubles whenever the position
    has doubled. A common prefix of x bytes is therefore seen up to max(block_bytes, x / per_doubling) bytes short:
    at the defaults (256 bytes, 64) exact to 256 bytes below 32 kB and to 1.6 % beyond, with 128 hashes for 32 kB,
    353 for 400 kB and 576 for 4 MB.
    """

    block_bytes: int
    """Size of the first blocks, in bytes, at least 1."""
    per_doubling: int = BLOCKS_PER_DOUBLING
    """Blocks per doubling of the position, at least 1."""

    def bytes_at(self, n_blocks: int) -> int:
        """Return how many leading bytes the first `n_blocks` blocks cover. O(1)."""
        if n_blocks < 2 * self.per_doubling:
            return n_blocks * self.block_bytes
        octave, step = divmod(n_blocks, self.per_doubling)
        return (self.per_doubling + step) * self.block_bytes << (octave - 1)

    def blocks_in(self, n_bytes: int) -> int:
        """Return how many whole blocks the first `n_bytes` bytes contain: the inverse of `bytes_at`. O(1)."""
        units = n_bytes // self.block_bytes
        octave = (units // self.per_doubling).bit_length() - 1
        if octave < 1:
            return units
        return self.per_doubling * octave + (units >> octave)


def seed(model: str, cache_salt: str) -> int:
    """Return the start of the chain for what separates caches in an engine: model or adapter name, and salt.

    The same on every endpoint and in every picker, so that hashes can be exchanged. Any text is accepted, lone
    surrogates included. Source: vLLM's `extra_keys` of a block hash (LoRA, cache_salt).
    """
    return _short_seed(model, cache_salt) if len(model) + len(cache_salt) <= _SHORT_TEXT else _seed(model, cache_salt)


def _seed(model: str, cache_salt: str) -> int:
    name = model.encode("utf-8", "surrogatepass")
    # The length in front keeps ("a", "bc") and ("ab", "c") apart.
    return xxh3_64_intdigest(b"%d:%b%b" % (len(name), name, cache_salt.encode("utf-8", "surrogatepass")))


_SHORT_TEXT: Final = 256
_short_seed = lru_cache(maxsize=256)(_seed)
"""Most requests name one of a few models. Clients write the names, so long ones are not remembered: 0.3 MB at most."""


_COPIED_BYTES: Final = 4096


@lru_cache(maxsize=64)
def _cutter(size: int) -> Struct:
    return Struct(f"{size}s")


def hash_blocks(prompt: bytes, seed: int, schedule: BlockSchedule) -> array[int]:
    """Return the chained XXH3-64 hashes of the whole blocks of one prompt, as unsigned 64-bit integers.

    Each block is hashed with the hash before it as the seed, so that one hash stands for everything up to its end
    (as in engines' block hashes): hash i is equal for two prompts iff their first i + 1 blocks are (up to collisions
    of 64 bits). The last, partial block is left out, because engines hit whole blocks only.
    """
    chained = seed
    size, n_bytes = schedule.block_bytes, len(prompt)
    end = 2 * schedule.per_doubling * size
    # A view of a short prompt costs more than copying it.
    view = prompt if n_bytes <= _COPIED_BYTES else memoryview(prompt)
    if n_bytes <= end:
        # Struct.iter_unpack cuts equal pieces faster than slicing in a loop.
        pieces = _cutter(size).iter_unpack(view[: n_bytes - n_bytes % size])
        return array("Q", [chained := xxh3_64_intdigest(piece, chained) for (piece,) in pieces])
    hashes: list[int] = []
    begin = 0
    while (whole := (min(end, n_bytes) - begin) // size) > 0:
        pieces = _cutter(size).iter_unpack(view[begin : begin + whole * size])
        hashes += [chained := xxh3_64_intdigest(piece, chained) for (piece,) in pieces]
        begin, end, size = end, 2 * end, 2 * size
    return array("Q", hashes)
