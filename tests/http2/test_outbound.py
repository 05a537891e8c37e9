from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.limits import TokenBucket
from extproc.http2.outbound import Outbound
from extproc.http2.streams import Stream
from tests.http2.wire import cut


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), max_size=30), st.integers(0, 20), st.integers(0, 50))
def test_windows_are_kept_and_nothing_is_lost(steps: list[tuple[int, int]], stream_window: int, window: int) -> None:
    outbound = Outbound(TokenBucket(1, 1, 0.0))
    outbound.window = window
    streams = [Stream(number, stream_window, 0, None) for number in range(3)]
    allowed, said, total = [stream_window] * 3, [b""] * 3, window
    for position, (which, size) in enumerate(steps):
        if position % 3 == 0:
            data = bytes([position]) * size
            said[which] += data
            outbound.data(streams[which], data)
        elif position % 3 == 1:
            allowed[which] += size
            outbound.increment_stream_window(streams[which], size)
        else:
            total += size
            outbound.increment_window(size)
    heard = [b"", b"", b""]
    for frame in cut(b"".join(outbound.out)):
        heard[frame.stream_id] += frame.payload
    for number in range(3):
        assert said[number] == heard[number] + bytes(streams[number].pending)
        assert len(heard[number]) <= allowed[number]
    assert sum(map(len, heard)) <= total
    assert outbound.pending_bytes == sum(len(stream.pending) for stream in streams)
    # What still waits waits for a window that is closed.
    assert outbound.window == 0 or all(not stream.pending or stream.send_window <= 0 for stream in streams)
    for stream in streams:
        outbound.forget(stream)
    assert outbound.pending_bytes == 0


def test_a_small_step_of_the_connections_window_moves_only_what_waits_first() -> None:
    outbound = Outbound(TokenBucket(1, 1, 0.0))
    outbound.window = 0
    streams = [Stream(number, 100, 0, None) for number in range(1000)]
    for stream in streams:
        outbound.data(stream, b"ab")
    assert outbound.increment_window(1) == []
    assert outbound.increment_window(2) == streams[:1]
    assert [(frame.stream_id, frame.payload) for frame in cut(b"".join(outbound.out))] == [
        (0, b"a"),
        (0, b"b"),
        (1, b"a"),
    ]
    assert outbound.increment_window(5000) == streams[1:]
