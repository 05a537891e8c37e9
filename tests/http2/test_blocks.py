from __future__ import annotations

import pytest

from extproc.http2.blocks import BlockAssembly, unpadded
from extproc.http2.frames import ConnectionLevelError, Flag
from extproc.http2.limits import Limits


def test_pieces_become_one_block() -> None:
    blocks = BlockAssembly(Limits())
    assert blocks.begin(Flag.END_STREAM, 3, b"a") is None
    assert blocks.open_stream == 3
    assert blocks.add_continuation(0, b"b") is None
    block = blocks.add_continuation(Flag.END_HEADERS, b"c")
    assert block is not None
    assert (block.stream_id, block.ends, bytes(block.data), block.fault) == (3, True, b"abc", None)
    assert blocks.open_stream == 0


@pytest.mark.parametrize(("payload", "inner"), [(b"\x00ab", b"ab"), (b"\x02ab\x00\x00", b"ab"), (b"\x01\x00", b"")])
def test_padding(payload: bytes, inner: bytes) -> None:
    assert unpadded(payload) == inner
    with pytest.raises(ConnectionLevelError):
        unpadded(b"\x01")
