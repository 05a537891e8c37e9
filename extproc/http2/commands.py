"""What the owner of a connection may do: answer, return windows, ask for life, and end it in peace or at once.

The other half, what the peer may do, is `connection`.
"""

from __future__ import annotations

from typing import Final

from extproc.http2.frames import (
    DEFAULT_WINDOW,
    MAX_WINDOW,
    ErrorCode,
    Flag,
    FrameType,
    Setting,
    frame,
    goaway,
    rst_stream,
    settings,
    window_update,
)
from extproc.http2.limits import ANSWER_EARNS_BYTES, Limits, TokenBucket
from extproc.http2.outbound import Outbound
from extproc.http2.streams import ClosedStreams, Closing, Stream

__all__ = ["LAST_CALL", "Commands"]

LAST_CALL: Final = b"last\x00\x00\x00\x00"
"""Payload of the PING between the two GOAWAYs of a graceful end (6.8)."""


class Commands:
    """The state of a connection and what its owner does with it; a command for a stream that is gone does nothing."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._failed = False
        self._streams: dict[int, Stream] = {}
        self._closed = ClosedStreams()
        self._highest = 0
        self._last_allowed = MAX_WINDOW
        self._ending = False
        self._idle = TokenBucket(limits.idle_frames, limits.idle_frames_per_s, now)
        self._resets = TokenBucket(limits.resets, limits.resets_per_s, now)
        self._decoding = TokenBucket(limits.decoded_bytes, limits.decoded_bytes_per_s, now)
        self.outbound = Outbound(self._idle)
        # Our preface (3.4): SETTINGS, which the peer may learn of late: until then it uses the smaller defaults.
        self.outbound.out += (
            settings(
                (
                    (Setting.HEADER_TABLE_SIZE, limits.table_bytes),
                    (Setting.MAX_CONCURRENT_STREAMS, limits.concurrent_streams),
                    (Setting.INITIAL_WINDOW_SIZE, limits.stream_window),
                    (Setting.MAX_FRAME_SIZE, limits.frame_bytes),
                    (Setting.MAX_HEADER_LIST_SIZE, limits.header_list_bytes),
                )
            ),
            window_update(0, limits.connection_window - DEFAULT_WINDOW),
        )

    @property
    def open_streams(self) -> int:
        """How many streams are not over."""
        return len(self._streams)

    @property
    def finished(self) -> bool:
        """Whether nothing more can happen: failed, or the graceful end is reached. Write the output and close."""
        return self._failed or (self._last_allowed != MAX_WINDOW and not self._streams)

    def pending_bytes(self, stream_id: int) -> int:
        """Return how much of a stream waits for the peer's windows."""
        stream = self._streams.get(stream_id)
        return len(stream.pending) if stream is not None else 0

    @property
    def all_pending_bytes(self) -> int:
        """How much of all streams waits for the peer's windows."""
        return self.outbound.pending_bytes

    def output(self) -> bytes:
        """Return what is to be written, once."""
        out = self.outbound.out
        if not out:
            return b""
        data = b"".join(out)
        out.clear()
        return data

    def send_headers(self, stream_id: int, block: bytes) -> None:
        """Send the header block (`headers.encode_fields`) that begins a response."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.answered = True
            self.outbound.headers(stream_id, block, 0)

    def send_data(self, stream_id: int, data: bytes) -> None:
        """Send a piece of the response's body, or keep it until the peer's windows allow it."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self.outbound.data(stream, data)

    def end_stream(self, stream_id: int, block: bytes, *, linger: bool = False) -> None:
        """End the response with a header block: trailers after all data, or the only block there is; empty: no trailers.

        Where the peer has not said all it is told to stop (8.1): its rest is of no interest. With `linger` it is:
        the stream is half-closed (5.1) and its events go on until the peer ends or resets it, or `reset` does.
        """
        stream = self._streams.get(stream_id)
        if stream is not None and stream.ending is None:
            stream.ending = block
            stream.lingers = linger
            stream.answered = True
            if not stream.pending:
                self._end(stream)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """End a stream at once (6.4)."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self.outbound.out.append(rst_stream(stream_id, code))
            self._close(stream, Closing.RESET)

    def acknowledge(self, stream_id: int, size_bytes: int) -> None:
        """Say that a piece of a request's body needs no room any more: the peer may send as much again (6.9)."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.returnable += size_bytes
            # In few, large steps; a stream that fits its window needs none.
            if stream.returnable * 2 >= self._limits.stream_window and stream.remote_open:
                stream.receive_window += stream.returnable
                self.outbound.out.append(window_update(stream_id, stream.returnable))
                stream.returnable = 0

    def ping(self, payload: bytes) -> None:
        """Ask whether the peer is alive; `payload` is eight bytes (6.7)."""
        self.outbound.out.append(frame(FrameType.PING, 0, 0, payload))

    def shut_down(self) -> None:
        """Ask the peer to open no more streams, without refusing what it has under way (6.8).

        The final GOAWAY follows when the peer has answered the PING that comes with the first.
        """
        if not self._ending:
            self._ending = True
            self.outbound.out.append(goaway(MAX_WINDOW, ErrorCode.NO_ERROR))
            self.ping(LAST_CALL)

    @property
    def refuses_streams(self) -> bool:
        """Whether the peer has been told that no further stream is taken: what it begins now is not lost unnoticed."""
        return self._failed or self._last_allowed != MAX_WINDOW

    def refuse_streams(self) -> None:
        """Refuse streams from now on: the second step of `shut_down`, for a peer that does not answer the first."""
        if self._last_allowed == MAX_WINDOW:
            self._ending = True
            self._last_allowed = self._highest
            self.outbound.out.append(goaway(self._highest, ErrorCode.NO_ERROR))

    def fail(self, code: ErrorCode, reason: str) -> None:
        """End the connection at once: GOAWAY, and nothing else (5.4.1)."""
        self._failed = True
        last = min(self._highest, self._last_allowed)  # 6.8: never above what an earlier GOAWAY has said
        self.outbound.out.append(goaway(last, code, reason.encode()))
        for stream in self._streams.values():
            self.outbound.forget(stream)
        self._streams.clear()

    def _close(self, stream: Stream, how: Closing) -> None:
        self.outbound.forget(stream)
        del self._streams[stream.id]
        self._closed.add(stream.id, how)
        if stream.answered:
            self._resets.left += 1
            self._decoding.left += ANSWER_EARNS_BYTES

    def _end(self, stream: Stream) -> None:
        assert stream.ending is not None
        if stream.ending:
            self.outbound.headers(stream.id, stream.ending, Flag.END_STREAM)
        else:
            self.outbound.out.append(frame(FrameType.DATA, Flag.END_STREAM, stream.id))
        if stream.remote_open:
            if stream.lingers:
                return
            self.outbound.out.append(rst_stream(stream.id, ErrorCode.NO_ERROR))  # 8.1
        self._close(stream, Closing.RESET if stream.remote_open else Closing.ENDED)
