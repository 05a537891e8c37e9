"""Inputs changed frame by frame, for the fuzzers: most of what comes of it is almost right."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final

from tests.http2.differential import pieces

__all__ = ["MOST_BYTES", "Mutator", "changed_bytes", "minimised"]

MOST_BYTES: Final = 3000
"""Longest input; no bound of the protocol needs more, under the limits of `differential`."""
NUMBERS: Final = (0, 1, 4, 5, 0x3FFF, 0x4000, 0xFFFF, 0x10000, 0xFFFFFF, 0x1000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


class Mutator:
    """Changes inputs; `raw(data, most)` changes bytes, and frames come from `seeds`."""

    def __init__(self, seeds: list[bytes], raw: Callable[[bytes, int], bytes]) -> None:
        self._frames = [piece for seed in seeds for piece in pieces(seed[1:])]
        self._raw = raw

    def __call__(self, data: bytes, most: int, seed: int) -> bytes:
        """Return another input of at most so many bytes; the seed decides which."""
        rng = random.Random(seed)
        if not data or rng.random() < 0.05:
            return bytes(self._raw(data, most))
        frames = list(pieces(data[1:]))
        options = data[:1] if rng.random() < 0.95 else bytes((rng.randrange(64),))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
            self._change(frames, rng)
        return (options + b"".join(frames))[:most]

    def _change(self, frames: list[bytes], rng: random.Random) -> None:
        where = rng.randrange(len(frames) + 1)
        what = rng.randrange(10)
        if what < 3 or where == len(frames):
            frames.insert(where, rng.choice(self._frames))
        elif what == 3:
            del frames[where]
        elif what == 4:
            frames.append(frames[where])
        elif what == 5:
            other = rng.randrange(len(frames))
            frames[where], frames[other] = frames[other], frames[where]
        elif len(frames[where]) >= 9:
            frames[where] = self._changed(frames[where], rng)

    def _changed(self, piece: bytes, rng: random.Random) -> bytes:
        kind, flags, stream_id = struct.unpack(">BBI", piece[3:9])
        payload = piece[9:]
        match rng.randrange(7):
            case 0:
                kind = rng.choice((0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 12, 255))
            case 1 | 2:
                flags ^= rng.choice((1, 4, 8, 32, 128))
            case 3:
                stream_id = rng.choice((0, 1, 1, 2, 3, 3, 5, 7, 9, 11, stream_id + 2, 0x80000001, 0x7FFFFFFF))
            case 4 if len(payload) >= 4:
                start = rng.randrange(len(payload) - 3)
                payload = payload[:start] + struct.pack(">I", rng.choice(NUMBERS)) + payload[start + 4 :]
            case _:
                payload = bytes(self._raw(payload, 300))
        return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream_id & 0xFFFFFFFF) + payload


def minimised(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """Return an input that still fails, and does not without any one of its frames."""
    frames = list(pieces(data[1:]))
    where = 0
    while where < len(frames):
        fewer = frames[:where] + frames[where + 1 :]
        if fails(data[:1] + b"".join(fewer)):
            frames = fewer
        else:
            where += 1
    return data[:1] + b"".join(frames)


def changed_bytes(rng: random.Random, data: bytes, most: int) -> bytes:
    """Change one byte, as the fuzzer's own mutator would."""
    if not data:
        return bytes((rng.randrange(256),))
    where = rng.randrange(len(data))
    return (data[:where] + bytes((rng.randrange(256),)) + data[where + rng.randrange(2) :])[:most]
