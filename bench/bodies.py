"""What is sent: chat bodies of one kind per load, written to files, one body per line (JSON has no line breaks).

No two bodies of `GrowingChats` are alike, and most of each was sent before: several tenants, each with a system prompt of
its own, and conversations that grow by a question and an answer per turn until they start anew.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from bench.core_cost import Conversations, chat_body

__all__ = ["GrowingChats", "LongPrompts", "write_bodies", "write_one"]

_TENANTS: Final = 4
_SYSTEM_BYTES: Final = 400
_TURN_BYTES: Final = 150
"""Of one question, and of one answer."""


def _text(rng: random.Random, n_bytes: int) -> str:
    return rng.randbytes(n_bytes // 2).hex()


class GrowingChats:
    """Bodies of conversations that take turns at random and grow: 0.7 to 3 kB."""

    def __init__(self, rng: random.Random, *, conversations: int = 40, turns: int = 8) -> None:
        self._rng = rng
        self._turns = turns
        self._systems = [_text(rng, _SYSTEM_BYTES) for _ in range(_TENANTS)]
        # Spread over all lengths from the start: the mix is the same at any time.
        self._open = [self._begin(place, 2 * (place % turns)) for place in range(conversations)]

    def next(self) -> bytes:
        """Write the next turn of some conversation."""
        place = self._rng.randrange(len(self._open))
        texts = self._open[place]
        if len(texts) > 2 * self._turns:
            texts = self._open[place] = self._begin(place, 0)
        texts.append(_text(self._rng, _TURN_BYTES))
        body = chat_body(texts, 0, stream=False)
        texts.append(_text(self._rng, _TURN_BYTES))  # what the model will have answered
        return body

    def _begin(self, place: int, said: int) -> list[str]:
        return [self._systems[place % _TENANTS], *(_text(self._rng, _TURN_BYTES) for _ in range(said))]


class LongPrompts:
    """Bodies of 30 prefix blocks on average (20 to 40), nine of which are one of 100 heads: `prefix_index`'s, as requests."""

    HEADS: Final = 100
    HEAD_BLOCKS: Final = 9

    def __init__(self, rng: random.Random, block_bytes: int = 256) -> None:
        self._rng = rng
        self._block_bytes = block_bytes
        self._heads = [_text(rng, self.HEAD_BLOCKS * block_bytes) for _ in range(self.HEADS)]

    def next(self) -> bytes:
        """Write one more, unlike all others."""
        fresh = self._rng.randint(20, 40) - self.HEAD_BLOCKS
        text = _text(self._rng, fresh * self._block_bytes + self._block_bytes // 2)
        return chat_body([self._rng.choice(self._heads), text], 0, stream=False)


def write_one(path: Path, body_bytes: int, rng: random.Random, *, stream: bool = False) -> Path:
    """Write one body of `body_bytes` bytes, which is sent again and again; return the path."""
    path.write_bytes(Conversations(body_bytes, histories=1, rng=rng, stream=stream).next())
    return path


def write_bodies(path: Path, count: int, rng: random.Random) -> Path:
    """Write `count` turns of growing conversations; return the path."""
    chats = GrowingChats(rng)
    path.write_bytes(b"\n".join(chats.next() for _ in range(count)))
    return path
