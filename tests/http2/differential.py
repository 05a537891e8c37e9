"""The same bytes to `http2` and to a server of the `h2` library: the same events, or both refuse.

The application behind both answers every request, and each frame that ours writes is sent through the library too, which
knows what may be sent: states, windows, sizes. Where the two may differ stands in `DIFFERENCES`, with the reason.
"""

from __future__ import annotations

import contextlib
import gc
import random
import re
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
from hpack import Decoder

from extproc.http2.connection import Connection
from extproc.http2.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    GoawayReceived,
    RequestEnded,
    RequestReceived,
    StreamRefused,
    StreamReset,
)
from extproc.http2.frames import FRAME_HEADER, FRAME_HEADER_BYTES, PREFACE, FrameType, frame
from extproc.http2.headers import encode_fields
from extproc.http2.limits import Limits
from tests.http2.wire import Frame, cut

CORPUS: Final = Path(__file__).parent / "corpus"
OK: Final = encode_fields((b":status", b"200"))
END: Final = encode_fields((b"grpc-status", b"0"))
WIDE: Final = Limits(
    concurrent_streams=8,
    stream_window=1000,
    continuations=63,
    decoded_bytes=1 << 30,
    idle_frames=1 << 30,
    resets=1 << 30,
    header_block_bytes=1 << 20,
)
"""No bound on what only costs: the library has none. Few streams and a narrow window, so that short inputs meet them."""


BACKPRESSURE_BYTES: Final = 4096
"""What may wait for a window before the application echoes no more."""


class Difference(NamedTuple):
    """A frame on which both may part."""

    frame: str
    """Pattern of its name; `NAME, ignored` is one that ours takes without telling anything."""
    ours: str
    """Pattern of what ours says of it; `taken` where it takes it."""
    theirs: str
    why: str
    """Section of RFC 9113."""


DIFFERENCES: Final = (
    Difference(
        ".*", "stream: .*", "connection: .*", "5.4: whoever may reset the stream may end the connection instead"
    ),
    Difference("HEADERS|CONTINUATION", "taken", ".*does not have an :authority or Host.*", "8.3.1: it may be absent"),
    Difference(
        "HEADERS|CONTINUATION", "taken", ".*mismatched :authority.*", "8.3.1 (should): nothing here reads either"
    ),
    Difference("HEADERS|CONTINUATION", "stream: content-length is wrong", "taken", "8.1.1: h2 looks at DATA alone"),
    Difference("HEADERS|CONTINUATION", "stream: less than content-length", "taken", "8.1.1: h2 looks at DATA alone"),
    Difference(
        "HEADERS|CONTINUATION", "connection: HEADERS on a closed stream", "stream", "5.1 (may): the stream was reset"
    ),
    Difference(
        "HEADERS",
        "connection: HEADERS without its priority",
        "taken|stream",
        "6.2: hyperframe reads it out of the padding",
    ),
    Difference(
        "HEADERS",
        "taken",
        "connection: ProtocolError: Received frame with invalid padding.",
        "6.2: padding may be all that remains; hyperframe wants one byte of fields beside it",
    ),
    Difference(
        "CONTINUATION", "connection: CONTINUATION without HEADERS", "stream", "6.10: also where the stream is closed"
    ),
    Difference(
        "DATA|HEADERS|CONTINUATION", "taken", "stream", "5.1: late frames of a stream we have reset are ignored"
    ),
    Difference(
        "HEADERS, ignored",
        "taken",
        "connection: TooManyStreamsError.*",
        "5.1: as above; h2 counts the streams before it looks which one it is",
    ),
    Difference("RST_STREAM", "connection: RST_STREAM on an idle stream", "taken", "6.4: h2 ignores it"),
    Difference(
        "WINDOW_UPDATE",
        "taken",
        ".*non-compliant data",
        "6.9, 5.1: of zero, for a stream that is closed: late, ignored",
    ),
    Difference(
        "SETTINGS",
        "connection: .* out of range",
        "taken",
        "6.5.3: each value counts; h2 sees the last of a repeated one",
    ),
    Difference(
        "SETTINGS",
        "taken",
        ".*Setting 8 has invalid value.*",
        "6.5.2: unknown here; h2 knows it (RFC 8441, which gives it no meaning towards a server)",
    ),
    Difference("PUSH_PROMISE", "connection: a client cannot push", "taken", "8.4: h2 waits for the end of its block"),
    Difference("10", "taken", "connection: .*", "5.5: ALTSVC is unknown here; h2 wants it well-formed (RFC 7838)"),
    Difference(
        ".*", "connection: frame too large", "taken", "4.2: known from the frame's header; h2 waits for the payload"
    ),
    Difference(".*", "connection: the first frame is not SETTINGS", ".*", "3.4: h2 does not look"),
)
"""What the RFC leaves open, or where the library is the one that errs."""


class Options(NamedTuple):
    """What the first byte of an input chooses."""

    raw: bool
    """The input begins with the preface or with what stands in its place; else preface and SETTINGS are put before it."""
    answers: bool
    """The application answers at once, and does not wait for the end of the request."""
    echoes: int
    """How often each piece of a body comes back."""
    acknowledges: bool
    """The application returns the stream's window."""
    leaves: bool
    """The application ends its answer with the first piece of a body, and hears the rest."""

    @classmethod
    def of(cls, byte: int) -> Options:
        return cls(bool(byte & 1), bool(byte & 2), (0, 1, 50, 1)[byte >> 2 & 3], bool(byte & 16), bool(byte & 32))


def pieces(data: bytes) -> Iterator[bytes]:
    """Cut an input into its frames; what is left over, or begins no frame, is the last piece."""
    position = 0
    while position < len(data):
        end = len(data)
        if data.startswith(PREFACE[:3], position):
            end = position + len(PREFACE)
        elif len(data) - position >= FRAME_HEADER_BYTES:
            high, low, *_ = FRAME_HEADER.unpack_from(data, position)
            end = position + FRAME_HEADER_BYTES + (high << 8 | low)
        yield data[position:end]
        position = end


def incomplete(piece: bytes) -> bool:
    """Say whether a piece is less than a frame, or more (a preface and what stands in its place count as frames)."""
    if len(piece) < FRAME_HEADER_BYTES:
        return True
    high, low, *_ = FRAME_HEADER.unpack_from(piece)
    return len(piece) != FRAME_HEADER_BYTES + (high << 8 | low) and piece != PREFACE


def stream_of(data: bytes) -> tuple[Options, list[bytes]]:
    """Return options and pieces of an input."""
    options = Options.of(data[0] if data else 0)
    start = [] if options.raw else [PREFACE, frame(FrameType.SETTINGS, 0, 0)]
    return options, [*start, *pieces(data[1:])]


def cuts(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """Cut bytes anywhere."""
    position = 0
    while position < len(data):
        end = position + rng.choice((1, 2, 5, 9, 50, 5000))
        yield data[position:end]
        position = end


class Application:
    """Answers what a connection tells, the same way each time."""

    def __init__(self, connection: Connection, options: Options) -> None:
        self.connection = connection
        self.options = options
        self.left: set[int] = set()

    def act(self, events: list[Event]) -> None:
        connection, options = self.connection, self.options
        for event in events:
            match event:
                case RequestReceived():
                    if options.answers:
                        connection.send_headers(event.stream_id, OK)
                case DataReceived():
                    if options.answers:
                        self._echo(event)
                    if options.acknowledges:
                        connection.acknowledge(event.stream_id, len(event.data))
                    if options.answers and options.leaves:
                        connection.end_stream(event.stream_id, END, linger=True)
                case RequestEnded():
                    if not options.answers:
                        connection.send_headers(event.stream_id, OK)
                    connection.end_stream(event.stream_id, END)
                case _:
                    pass

    def _echo(self, event: DataReceived) -> None:
        stream_id = event.stream_id
        if stream_id not in self.left and self.connection.pending_bytes(stream_id) < BACKPRESSURE_BYTES:
            for _ in range(self.options.echoes):
                self.connection.send_data(stream_id, event.data)
        if self.options.leaves:
            self.left.add(stream_id)


def told(event: Event) -> tuple[Any, ...] | None:
    """Say in common words what ours tells; None: the library has no word for it."""
    match event:
        case RequestReceived():
            return ("request", event.stream_id, event.block.fields)
        case DataReceived():
            return ("data", event.stream_id, event.data)
        case RequestEnded():
            return ("end", event.stream_id)
        case StreamReset() if not event.reason:
            return ("reset", event.stream_id)
        case GoawayReceived():
            return ("leaving", event.debug)
        case _:
            return None


def told_by_h2(event: Any) -> tuple[Any, ...] | None:
    """Say in common words what the library tells."""
    match event:
        case h2.events.RequestReceived():
            fields = tuple((bytes(name), bytes(value)) for name, value in event.headers)
            return ("request", event.stream_id, fields)
        case h2.events.DataReceived() if event.data:
            return ("data", event.stream_id, bytes(event.data))
        case h2.events.StreamEnded():
            return ("end", event.stream_id)
        case h2.events.StreamReset() if event.remote_reset:
            return ("reset", event.stream_id)
        case h2.events.ConnectionTerminated():
            return ("leaving", (event.additional_data or b"")[:256])
        case _:
            return None


class Pair:
    """Both sides, kept in step frame by frame."""

    def __init__(self, options: Options) -> None:
        self.ours = Connection(WIDE, 0.0)
        self.application = Application(self.ours, options)
        self.theirs: Any = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding=None, normalize_inbound_headers=False)
        )
        codes = h2.settings.SettingCodes
        self.theirs.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                codes.MAX_CONCURRENT_STREAMS: WIDE.concurrent_streams,
                codes.INITIAL_WINDOW_SIZE: WIDE.stream_window,
                codes.MAX_HEADER_LIST_SIZE: WIDE.header_list_bytes,
            },
        )
        self.theirs.initiate_connection()
        self.decoder = Decoder()
        self.mirror(skip=2)  # SETTINGS and the connection's window
        self.theirs.increment_flow_control_window(WIDE.connection_window - 65_535)

    def step(self, piece: bytes, rng: random.Random) -> bool:
        """Give one frame to both, cut anywhere. Returns False where it has ended the comparison."""
        events: list[Event] = []
        for part in cuts(rng, piece):
            events += self.ours.receive(part, 0.0)
        out = cut(self.ours.output())
        theirs, refusal = self._theirs(cuts(rng, piece))
        if incomplete(piece):
            return False  # 4.2: each knows some mistakes by the frame's header already, and not the same ones
        mine = self._verdict(events)
        if mine != refusal or mine != "taken":
            if not any(mine.startswith(level) and refusal.startswith(level) for level in ("stream", "connection")):
                self._explained(mine, refusal, piece, told_nothing=not events)
            if mine.startswith("connection") or refusal.startswith("connection"):
                return False
        faults = (event for event in events if isinstance(event, (StreamReset, StreamRefused)) and event.reason)
        ours_only = {event.stream_id for event in faults} if refusal == "taken" else set()
        said = [word for event in events if (word := told(event)) is not None]
        heard = [word for event in theirs if (word := told_by_h2(event)) is not None and word[1] not in ours_only]
        assert said == heard, f"{piece.hex()}: ours {said}, theirs {heard}"
        if any(word[0] == "leaving" for word in said):
            return False  # 6.8: open streams go on with us; the library hears nothing any more
        self._send(out)
        self.application.act(events)
        self.mirror()
        return True

    def _theirs(self, parts: Iterator[bytes]) -> tuple[list[Any], str]:
        found: list[Any] = []
        # Counting forgets closed streams: their windows would else move with SETTINGS, and overflow (6.9.2).
        assert self.theirs.open_inbound_streams <= WIDE.concurrent_streams
        try:
            for part in parts:
                found += self.theirs.receive_data(part)
        except h2.exceptions.ProtocolError as error:
            return found, f"connection: {type(error).__name__}: {error}"
        resets = [event for event in found if isinstance(event, h2.events.StreamReset) and not event.remote_reset]
        written = [heard for heard in cut(self.theirs.data_to_send()) if heard.kind == FrameType.RST_STREAM]
        return found, "stream" if resets or written else "taken"

    @staticmethod
    def _verdict(events: list[Event]) -> str:
        faults = [event for event in events if isinstance(event, (StreamReset, StreamRefused)) and event.reason]
        match events:
            case [*_, ConnectionFailed(_, reason)]:
                return f"connection: {reason}"
            case _ if faults:
                return f"stream: {faults[0].reason}"
            case _:
                return "taken"

    @staticmethod
    def _explained(mine: str, refusal: str, piece: bytes, *, told_nothing: bool) -> None:
        kind = piece[3] if len(piece) > 3 else 0
        name = FrameType(kind).name if kind in tuple(FrameType) else str(kind)
        names = (name, f"{name}, ignored") if told_nothing else (name,)
        for known in DIFFERENCES:
            alike = any(re.fullmatch(known.frame, one) for one in names)
            if alike and re.fullmatch(known.ours, mine, re.DOTALL) and re.fullmatch(known.theirs, refusal, re.DOTALL):
                return
        raise AssertionError(f"{name} {piece.hex()}: ours {mine!r}, theirs {refusal!r}")

    def mirror(self, skip: int = 0) -> None:
        """Send through the library what ours writes: it raises where that must not be sent."""
        self._send(cut(self.ours.output())[skip:])
        # What waits, waits for a window.
        for stream in self.ours._streams.values():
            if stream.pending:
                assert self.theirs.local_flow_control_window(stream.id) <= 0, "sending stopped without a reason"

    def _send(self, out: list[Frame]) -> None:
        theirs = self.theirs
        for kind, flags, stream_id, payload in out:
            assert len(payload) <= theirs.max_outbound_frame_size
            ends = bool(flags & 1)
            if kind == FrameType.HEADERS:
                assert flags & 4
                theirs.send_headers(stream_id, self.decoder.decode(payload, raw=True), end_stream=ends)
            elif kind == FrameType.DATA:
                theirs.send_data(stream_id, payload, end_stream=ends)
            elif kind == FrameType.RST_STREAM:
                # The library may have done it already, or have forgotten the stream.
                with contextlib.suppress(h2.exceptions.NoSuchStreamError, h2.exceptions.StreamClosedError):
                    theirs.reset_stream(stream_id, int.from_bytes(payload))
            elif kind == FrameType.WINDOW_UPDATE:
                theirs.increment_flow_control_window(int.from_bytes(payload), stream_id or None)
            else:
                # Acknowledgements, which the library writes by itself.
                assert kind in (FrameType.SETTINGS, FrameType.PING)
                assert ends
        theirs.clear_outbound_data_buffer()


def compare(data: bytes) -> None:
    """Give one input to both sides, frame by frame. Raises AssertionError where they differ without a reason."""
    options, parts = stream_of(data)
    rng = random.Random(zlib.crc32(data))
    pair = Pair(options)
    for part in parts:
        if not pair.step(part, rng):
            return


def check_cuts(data: bytes) -> None:
    """Give one input to ours alone, whole frames and cut anywhere: the same events and the same bytes."""
    _, parts = stream_of(data)
    whole, cut_anywhere = Connection(WIDE, 0.0), Connection(WIDE, 0.0)
    expected = [event for part in parts for event in whole.receive(part, 0.0)]
    rng = random.Random(zlib.crc32(data))
    found = [event for part in cuts(rng, b"".join(parts)) for event in cut_anywhere.receive(part, 0.0)]
    assert [told(event) or type(event) for event in found] == [told(event) or type(event) for event in expected]
    assert cut_anywhere.output() == whole.output()


TIGHT: Final = Limits(
    concurrent_streams=4,
    stream_window=500,
    connection_window=66_000,
    header_block_bytes=600,
    header_list_bytes=1500,
    continuations=4,
    table_bytes=300,
    decoded_bytes=1200,
    decoded_bytes_per_s=0.0,
    idle_frames=12,
    idle_frames_per_s=0.0,
    resets=6,
    resets_per_s=0.0,
)


def check_bounds(data: bytes) -> None:
    """Give one input to ours under narrow limits: nothing but a protocol's failure comes of it, and memory stays bounded."""
    options, parts = stream_of(data)
    connection = Connection(TIGHT, 0.0)
    application = Application(connection, options)
    for part in cuts(random.Random(zlib.crc32(data)), b"".join(parts)):
        application.act(connection.receive(part, 0.0))
        connection.output()
    held = held_bytes(connection)
    assert held <= bound_bytes(TIGHT), f"{held} bytes are held"


def bound_bytes(limits: Limits) -> int:
    """Return what one connection may hold, Python's objects included; what is written and not fetched does not count."""
    frame_and_block = limits.frame_bytes + limits.header_block_bytes + limits.frame_bytes
    # 32 bytes of a header list or a table are one field, which costs a tuple and two byte strings: at most 200 bytes.
    table = limits.table_bytes // 32 * 200 + limits.table_bytes
    stream = 800 + BACKPRESSURE_BYTES + 51 * limits.stream_window
    closed = 1100 * 200
    kept_blocks = 64 * 20_000
    return 20_000 + frame_and_block + table + kept_blocks + limits.concurrent_streams * stream + closed


def held_bytes(root: object) -> int:
    """Return the size of an object and of all that only it leads to."""
    seen: set[int] = set()
    left: list[object] = [root]
    size = 0
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, NOT_HELD):
            continue
        seen.add(id(found))
        size += sys.getsizeof(found)
        left += gc.get_referents(found)
    return size


NOT_HELD: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, Limits)


def corpus() -> dict[str, bytes]:
    """Return the kept inputs by file and line. A line: hexadecimal digits, one word per frame; `#` begins a comment."""
    found = {}
    for path in sorted(CORPUS.glob("*.txt")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if text := line.partition("#")[0].strip():
                found[f"{path.stem}:{number}"] = bytes.fromhex(text)
    return found


def line_of(data: bytes) -> str:
    """Write an input as a line of the corpus."""
    return " ".join([data[:1].hex(), *(piece.hex() for piece in pieces(data[1:]))])


def check(data: bytes) -> None:
    """Hold one input against every property. Raises AssertionError, or whatever should never be raised."""
    compare(data)
    check_cuts(data)
    check_bounds(data)
