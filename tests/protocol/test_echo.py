from __future__ import annotations

from extproc.protocol.echo import echo, echo_all
from extproc.protocol.events import Direction
from extproc.protocol.replies import BodyReply

R = Direction.REQUEST


def test_a_small_chunk_goes_back_as_it_came() -> None:
    data = b"abc"
    (reply,) = echo(R, data, False, 3)
    assert isinstance(reply, BodyReply)
    assert reply.data is data


def test_no_data_is_no_reply_unless_it_ends_the_body() -> None:
    assert echo(R, b"", False, 3) == echo_all(R, [], False, 3) == []
    assert echo(R, b"", True, 3) == echo_all(R, [], True, 3) == [BodyReply(R, b"", True, True)]


def test_only_the_last_piece_ends_the_body() -> None:
    assert echo_all(R, [b"abcd", b"efgh"], True, 3) == [
        BodyReply(R, b"abc", False, True),
        BodyReply(R, b"d", False, True),
        BodyReply(R, b"efg", False, True),
        BodyReply(R, b"h", True, True),
    ]
