"""Give body bytes back in full duplex: the gateway keeps no copy, so what is not returned is lost."""

from __future__ import annotations

from extproc.protocol.body import pieces
from extproc.protocol.events import Direction
from extproc.protocol.replies import BodyReply, Reply

__all__ = ["echo", "echo_all"]


def echo(direction: Direction, data: bytes, end_of_stream: bool, limit_bytes: int) -> list[Reply]:
    """Return replies that give one chunk back in pieces of at most `limit_bytes`, not re-cut where it is small enough.

    The last piece carries `end_of_stream`; no data is no reply, unless it ends the body.
    """
    if len(data) <= limit_bytes:
        return [BodyReply(direction, data, end_of_stream, True)] if data or end_of_stream else []
    parts = list(pieces(data, limit_bytes))
    last = len(parts) - 1
    return [BodyReply(direction, part, end_of_stream and i == last, True) for i, part in enumerate(parts)]


def echo_all(direction: Direction, chunks: list[bytes], end_of_stream: bool, limit_bytes: int) -> list[Reply]:
    """Return replies that give chunks back in order, the last one with `end_of_stream`."""
    if len(chunks) < 2:
        return echo(direction, chunks[0] if chunks else b"", end_of_stream, limit_bytes)
    replies: list[Reply] = []
    last = len(chunks) - 1
    for index, chunk in enumerate(chunks):
        replies += echo(direction, chunk, end_of_stream and index == last, limit_bytes)
    return replies
