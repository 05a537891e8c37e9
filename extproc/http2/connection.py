"""One HTTP/2 connection, server side: bytes in, events out; commands in, bytes out.

Each frame is judged where it is handled, with the section of RFC 9113 that names the rule. An error within one stream is
answered with RST_STREAM, any other with GOAWAY. Server push, priorities and upgrades from HTTP/1.1 are not supported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, assert_never

from extproc.http2.blocks import BlockAssembly, RawBlock, check_dependency, unpadded
from extproc.http2.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    GoawayReceived,
    RequestEnded,
    RequestReceived,
    SendingResumed,
    StreamRefused,
    StreamReset,
)
from extproc.http2.frames import (
    DEFAULT_WINDOW,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    MAX_WINDOW,
    PREFACE,
    ConnectionLevelError,
    ErrorCode,
    Flag,
    FrameType,
    Setting,
    StreamLevelError,
    frame,
    goaway,
    read_settings,
    rst_stream,
    settings,
    window_update,
)
from extproc.http2.headers import HeaderBlock, HeaderReader, trailers_fault
from extproc.http2.limits import (
    ANSWER_EARNS_BYTES,
    FIELD_COST,
    HEADERS_EARN,
    STREAMS_PER_COST,
    USUAL_BLOCK_BYTES,
    USUAL_FIELDS,
    Limits,
    TokenBucket,
)
from extproc.http2.outbound import Outbound
from extproc.http2.streams import ClosedStreams, Closing, Stream

__all__ = ["Connection"]

_U32: Final = struct.Struct(">I")
_SHUTDOWN_PING: Final = b"last\x00\x00\x00\x00"
"""Payload of the PING between the two GOAWAYs of a graceful shutdown (6.8)."""


class Connection:
    """One connection.

    `receive` every piece of the byte stream, act on the events in order, and write `output()` afterwards. Commands for a
    stream that is gone are no-ops: its end is among the events. After ConnectionFailed nothing is read any more.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._failed = False
        self._streams: dict[int, Stream] = {}
        self._closed = ClosedStreams()
        self._highest = 0
        self._last_allowed = MAX_WINDOW
        self._shutting_down = False
        self._idle_tokens = TokenBucket(limits.idle_frames, limits.idle_frames_per_s, now)
        self._reset_tokens = TokenBucket(limits.resets, limits.resets_per_s, now)
        self._decode_tokens = TokenBucket(limits.decoded_bytes, limits.decoded_bytes_per_s, now)
        self._now = now
        self._events: list[Event] = []
        self._rest, self._preface_left = b"", PREFACE
        self._preface_received = False
        self._restricted = True  # only certain frames may come next: before the peer's SETTINGS, within a header block
        self._reader = HeaderReader(limits)
        self._blocks = BlockAssembly(limits)
        self._returnable = 0
        self._return_bytes = (limits.connection_window + 1) // 2  # in few, large steps
        self._receive_window = limits.connection_window
        # By frame type; DATA first, as it comes most often.
        self._handlers: tuple[Callable[[int, int, bytes], None], ...] = (
            self._on_data,
            self._on_headers,
            self._on_priority,
            self._on_rst_stream,
            self._on_settings,
            self._on_push_promise,
            self._on_ping,
            self._on_goaway,
            self._on_window_update,
            self._on_continuation,
        )
        self.outbound = Outbound(self._idle_tokens)
        # Our preface (3.4): SETTINGS; until the peer has read it, it uses the defaults, which are smaller.
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
    def preface_received(self) -> bool:
        """Whether the peer's preface, its SETTINGS frame included, is complete."""
        return self._preface_received

    @property
    def mid_frame(self) -> bool:
        """Whether the peer has begun a frame or a header block that it has not finished."""
        return bool(self._rest) or bool(self._blocks.open_stream)

    @property
    def open_streams(self) -> int:
        """Number of open and half-closed streams."""
        return len(self._streams)

    @property
    def finished(self) -> bool:
        """Whether the connection has failed or its graceful shutdown is complete: write the output and close."""
        return self._failed or (self._last_allowed != MAX_WINDOW and not self._streams)

    def pending_bytes(self, stream_id: int) -> int:
        """Return the bytes of a stream that wait for the peer's flow-control windows."""
        stream = self._streams.get(stream_id)
        return len(stream.pending) if stream is not None else 0

    @property
    def all_pending_bytes(self) -> int:
        """Bytes of all streams that wait for the peer's flow-control windows."""
        return self.outbound.pending_bytes

    def output(self) -> bytes:
        """Return the bytes to write, and forget them."""
        out = self.outbound.out
        if not out:
            return b""
        data = b"".join(out)
        out.clear()
        return data

    # -- commands -------------------------------------------------------------------------------------------------

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

        A peer that has not ended its request is told to stop sending (8.1). Not with `linger`: then the stream stays
        half-closed (5.1), and its events go on until the peer ends or resets it, or `reset` does.
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
        """Return flow-control credit for a piece of a request's body: the peer may send as much again (6.9)."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.returnable += size_bytes
            # In few, large steps; a stream that fits its window needs none.
            if stream.returnable * 2 >= self._limits.stream_window and stream.remote_open:
                stream.receive_window += stream.returnable
                self.outbound.out.append(window_update(stream_id, stream.returnable))
                stream.returnable = 0

    def ping(self, payload: bytes) -> None:
        """Send PING with a payload of eight bytes (6.7)."""
        self.outbound.out.append(frame(FrameType.PING, 0, 0, payload))

    def shut_down(self) -> None:
        """Begin a graceful shutdown: GOAWAY that asks for no more streams and refuses none that are under way (6.8).

        The final GOAWAY follows when the peer has answered the PING that comes with the first.
        """
        if not self._shutting_down:
            self._shutting_down = True
            self.outbound.out.append(goaway(MAX_WINDOW, ErrorCode.NO_ERROR))
            self.ping(_SHUTDOWN_PING)

    @property
    def refuses_streams(self) -> bool:
        """Whether the final GOAWAY was sent: the peer knows that streams it opens now are refused."""
        return self._failed or self._last_allowed != MAX_WINDOW

    def refuse_streams(self) -> None:
        """Refuse streams from now on: the second step of `shut_down`, for a peer that does not answer the first."""
        if self._last_allowed == MAX_WINDOW:
            self._shutting_down = True
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

    # -- reading -------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take received bytes, cut anywhere, and return their events in order. Never raises.

        `now` in seconds, monotonic. Keeps at most one incomplete frame and one incomplete header block.
        """
        if self._failed:
            return []
        self._now, self._events = now, []
        events = self._events
        try:
            if self._preface_left:
                data = self._read_preface(data)
            self._read_frames(self._rest + data if self._rest else data)
        except ConnectionLevelError as fault:
            self.fail(fault.code, fault.reason)
            self._rest, self._blocks = b"", BlockAssembly(self._limits)
            events.append(ConnectionFailed(fault.code, fault.reason))
        self._events = []  # do not keep the last bodies while the connection is silent
        return events

    def _read_preface(self, data: bytes) -> bytes:
        # 3.4: exactly these bytes; a wrong one is known as soon as it comes.
        expected = self._preface_left
        size = min(len(expected), len(data))
        if data[:size] != expected[:size]:
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "not an HTTP/2 client preface")
        self._preface_left = expected[size:]
        return data[size:]

    def _read_frames(self, data: bytes) -> None:
        position, size, most = 0, len(data), self._limits.frame_bytes
        handlers, known = self._handlers, len(self._handlers)
        while size - position >= FRAME_HEADER_BYTES:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(data, position)
            length = high << 8 | low
            if length > most:
                # 4.2; for a frame within one stream it may be a stream error, but then its payload would still have to be read.
                raise ConnectionLevelError(ErrorCode.FRAME_SIZE_ERROR, "frame too large")
            start = position + FRAME_HEADER_BYTES
            end = start + length
            if end > size:
                break
            position = end
            stream_id &= MAX_WINDOW  # 4.1: the reserved bit is ignored
            if self._restricted:
                self._check_order(kind, flags, stream_id)
            try:
                if kind < known:
                    handlers[kind](flags, stream_id, data[start:end])
                else:
                    self._spend_idle()  # 4.1, 5.5: unknown frames are ignored
            except StreamLevelError as fault:
                self._on_stream_fault(fault)
        self._rest = data[position:]

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        if not self._preface_received and (kind != FrameType.SETTINGS or flags & Flag.ACK):
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")  # 3.4
        if self._preface_received and (kind != FrameType.CONTINUATION or stream_id != self._blocks.open_stream):
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "header block interrupted")  # 4.3

    def _spend_idle(self, cost: int = 1) -> None:
        # 10.5: legal frames that carry nothing, in excessive numbers.
        if not self._idle_tokens.spend(self._now, cost):
            raise ConnectionLevelError(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    def _spend_decoding(self, size_bytes: int) -> None:
        # 10.5.1: charged before decoding, because decoding is the cost.
        if not self._decode_tokens.spend(self._now, size_bytes):
            raise ConnectionLevelError(ErrorCode.ENHANCE_YOUR_CALM, "too many bytes of header blocks")

    def _spend_reset(self) -> None:
        # 10.5: streams that cost work and never get an answer.
        if not self._reset_tokens.spend(self._now):
            raise ConnectionLevelError(ErrorCode.ENHANCE_YOUR_CALM, "too many streams were cut short")

    def _on_stream_fault(self, fault: StreamLevelError) -> None:
        # Also a reset that the peer provokes (CVE-2025-8671) counts as a stream cut short.
        self._spend_reset()
        stream = self._streams.get(fault.stream_id)
        self.outbound.out.append(rst_stream(fault.stream_id, fault.code))
        if stream is not None:
            self._close(stream, Closing.RESET)
            self._events.append(StreamReset(fault.stream_id, fault.code, fault.reason))
            return
        if fault.stream_id <= self._highest and fault.code is not ErrorCode.STREAM_CLOSED:
            # Refused when it was opened: what the peer has under way is ignored (5.4.2).
            self._closed.add(fault.stream_id, Closing.RESET)
        self._events.append(StreamRefused(fault.stream_id, fault.code, fault.reason))

    def _on_drained(self, stream: Stream) -> None:
        if stream.ending is not None:
            self._end(stream)
        else:
            self._events.append(SendingResumed(stream.id))

    def _close(self, stream: Stream, how: Closing) -> None:
        self.outbound.forget(stream)
        del self._streams[stream.id]
        self._closed.add(stream.id, how)
        if stream.answered:
            self._reset_tokens.tokens += 1
            self._decode_tokens.tokens += ANSWER_EARNS_BYTES

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

    def _is_idle(self, stream_id: int) -> bool:
        # 5.1.1: clients open odd streams in rising order; even ones would be ours, and we open none.
        return stream_id > self._highest or stream_id % 2 == 0

    # -- frames of a stream --------------------------------------------------------------------------------------

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        if size:
            # 6.9: the whole payload counts, padding too, and also for a stream that is gone.
            self._receive_window -= size
            if self._receive_window < 0:
                raise ConnectionLevelError(ErrorCode.FLOW_CONTROL_ERROR, "connection window exceeded")
            self._returnable += size
            if self._returnable >= self._return_bytes:
                self._receive_window += self._returnable
                self.outbound.out.append(window_update(0, self._returnable))
                self._returnable = 0
        stream = self._streams.get(stream_id)
        if not flags and size and stream is not None:  # the common case
            stream.take(size, size)
            self._idle_tokens.tokens += 1
            self._events.append(DataReceived(stream_id, payload))
            return
        data = unpadded(payload) if flags & Flag.PADDED else payload
        if stream is None:
            if self._is_idle(stream_id):  # includes stream 0 (6.1)
                raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "DATA on an idle stream")
            if self._closed.how(stream_id) is not Closing.RESET:
                raise StreamLevelError(stream_id, ErrorCode.STREAM_CLOSED, "DATA on a closed stream")  # 5.1
            if not size:
                self._spend_idle()
            return
        stream.take(size, len(data))
        if data:
            self._idle_tokens.tokens += 1
            self._events.append(DataReceived(stream_id, data))
        if size != len(data):
            self.acknowledge(stream_id, size - len(data))
        if flags & Flag.END_STREAM:
            self._end_request(stream)
        elif not data:
            self._spend_idle()

    def _end_request(self, stream: Stream) -> None:
        stream.end_remote()
        self._events.append(RequestEnded(stream.id))
        if stream.lingers and not stream.pending:
            self._close(stream, Closing.ENDED)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._on_block(self._blocks.begin(flags, stream_id, payload))

    def _on_continuation(self, flags: int, _stream_id: int, payload: bytes) -> None:
        self._on_block(self._blocks.add_continuation(flags, payload))

    def _on_block(self, raw: RawBlock | None) -> None:
        self._restricted = raw is None
        if raw is None:
            return
        # Decoded whatever becomes of it: HPACK's table is shared by all streams (4.3).
        data, opens = bytes(raw.data), raw.stream_id > self._highest
        if (not opens or len(data) > USUAL_BLOCK_BYTES) and not self._reader.knows(data):
            self._spend_decoding(len(data) - USUAL_BLOCK_BYTES if opens else len(data))
        block = self._reader.read(data)
        if len(block.fields) > USUAL_FIELDS:
            self._spend_idle(FIELD_COST * (len(block.fields) - USUAL_FIELDS))
        stream = self._streams.get(raw.stream_id)
        if stream is not None:
            self._on_trailers(stream, raw, block)
        elif self._is_idle(raw.stream_id):
            self._open(raw, block)
        else:
            match self._closed.how(raw.stream_id):
                case Closing.RESET:
                    self._spend_idle()
                case Closing.ENDED:
                    raise ConnectionLevelError(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")  # 5.1
                case Closing.UNKNOWN:
                    raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "stream identifier goes backwards")  # 5.1.1
                case other:
                    assert_never(other)

    def _open(self, raw: RawBlock, block: HeaderBlock) -> None:
        stream_id, ends = raw.stream_id, raw.ends
        if stream_id % 2 == 0:
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "even stream identifier")  # 5.1.1
        self._highest = stream_id
        self._idle_tokens.tokens += HEADERS_EARN
        if raw.fault is not None:
            raise raw.fault
        if block.fault:
            raise StreamLevelError(stream_id, ErrorCode.PROTOCOL_ERROR, block.fault)  # 8.1.1
        length = block.content_length
        if length is not None and (length < 0 or (ends and length)):
            raise StreamLevelError(stream_id, ErrorCode.PROTOCOL_ERROR, "content-length is wrong")  # 8.1.1
        if len(self._streams) >= self._limits.concurrent_streams or stream_id > self._last_allowed:
            # 5.1.2 and 6.8: not processed, so that the client may repeat it elsewhere.
            raise StreamLevelError(stream_id, ErrorCode.REFUSED_STREAM, "stream refused")
        stream = Stream(stream_id, self.outbound.initial_window, self._limits.stream_window, length, self._now)
        self._streams[stream_id] = stream
        self._events.append(RequestReceived(stream_id, block))
        if ends:
            self._end_request(stream)

    def _on_trailers(self, stream: Stream, raw: RawBlock, block: HeaderBlock) -> None:
        if not stream.remote_open:
            raise StreamLevelError(stream.id, ErrorCode.STREAM_CLOSED, "HEADERS after the end of the request")  # 5.1
        if raw.fault is not None:
            raise raw.fault
        fault = (
            trailers_fault(block.fields) if raw.ends else "a second header block that does not end the request"
        )  # 8.1
        if fault:
            raise StreamLevelError(stream.id, ErrorCode.PROTOCOL_ERROR, fault)
        self._end_request(stream)

    def _on_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        # 5.3.2: priorities have no effect here; the frame's shape is checked as 6.3 asks.
        if not stream_id:
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        self._spend_idle()
        if len(payload) != 5:
            raise StreamLevelError(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of a wrong size")
        if (fault := check_dependency(stream_id, payload)) is not None:
            raise fault

    def _on_rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionLevelError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of a wrong size")  # 6.4
        stream = self._streams.get(stream_id)
        if stream is None:
            if self._is_idle(stream_id):
                raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on an idle stream")  # 6.4
            self._spend_idle()
            # Whichever side ended it first, the peer has nothing under way on it from now on.
            self._closed.add(stream_id, Closing.ENDED)
            return
        if not stream.answered and self._now - stream.opened < self._limits.premature_s:
            self._spend_reset()
        self._close(stream, Closing.ENDED)
        self._events.append(StreamReset(stream_id, _U32.unpack(payload)[0], ""))

    # -- frames of the connection --------------------------------------------------------------------------------

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")  # 6.5
        if len(payload) % 6 or (flags & Flag.ACK and payload):
            raise ConnectionLevelError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong size")  # 6.5
        self._spend_idle()
        if flags & Flag.ACK:
            return
        self._preface_received, self._restricted = True, False
        changed = read_settings(payload)
        if changed.frame_bytes is not None:
            self.outbound.frame_bytes = changed.frame_bytes
        self.outbound.out.append(frame(FrameType.SETTINGS, Flag.ACK, 0))  # 6.5.3
        if changed.initial_window is not None and changed.initial_window != self.outbound.initial_window:
            self._apply_initial_window(changed.initial_window)

    def _apply_initial_window(self, window: int) -> None:
        """Apply a new initial window to every stream: they move by the difference, below zero too (6.9.2)."""
        self._spend_idle(1 + len(self._streams) // STREAMS_PER_COST)
        tokens = self._idle_tokens.tokens
        change = window - self.outbound.initial_window
        self.outbound.initial_window = window
        for stream in list(self._streams.values()):
            try:
                if self.outbound.increment_stream_window(stream, change):
                    self._on_drained(stream)
            except StreamLevelError as fault:
                raise ConnectionLevelError(ErrorCode.FLOW_CONTROL_ERROR, fault.reason) from fault
        self._idle_tokens.tokens = tokens

    def _on_push_promise(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "a client cannot push")  # 8.4

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "PING on a stream")  # 6.7
        if len(payload) != 8:
            raise ConnectionLevelError(ErrorCode.FRAME_SIZE_ERROR, "PING of a wrong size")  # 6.7
        self._spend_idle()
        if not flags & Flag.ACK:
            self.outbound.out.append(frame(FrameType.PING, Flag.ACK, 0, payload))
            return
        if payload == _SHUTDOWN_PING and self._shutting_down:
            self.refuse_streams()

    def _on_goaway(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")  # 6.8
        if len(payload) < 8:
            raise ConnectionLevelError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of a wrong size")  # 6.8
        self._spend_idle()
        self._events.append(GoawayReceived(_U32.unpack_from(payload, 4)[0], payload[8:264]))

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionLevelError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of a wrong size")  # 6.9
        increment = _U32.unpack(payload)[0] & MAX_WINDOW
        self._spend_idle()
        if not stream_id:
            if not increment:
                raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of zero")  # 6.9
            for drained in self.outbound.increment_window(increment):
                self._on_drained(drained)
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            if self._is_idle(stream_id):
                raise ConnectionLevelError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")  # 5.1
            return  # 5.1: may arrive after the end of a stream
        if not increment:
            raise StreamLevelError(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of zero")  # 6.9
        if self.outbound.increment_stream_window(stream, increment):
            self._on_drained(stream)
