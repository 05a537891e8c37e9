"""Request headers that come again and again with few values changed, read by comparing instead of parsing.

A gateway says the same headers in the same order for every request of one client, and the same bytes around them; ids,
lengths and addresses differ. A layout is such a message with holes. A message that fits one is what the generated types
would make of it, because every byte that is no value has been compared, and every length has been checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from extproc.edge.envoy_wire.message_parts import SECRET_HEADERS, length_at
from extproc.protocol.events import Metadata, ProtocolConfig, RequestHeaders

__all__ = ["HeaderLayouts"]

_LAYOUTS: Final = 8
"""Kinds of clients told apart; the one that came last is tried first."""
_TAILS: Final = 64
_TAIL_BYTES: Final = 128
_MESSAGE_BYTES: Final = 8192
"""Longest message that is learned from: what is known stays below 100 kB."""
_VALUE_BYTES: Final = 256
"""Longest value taken for one that comes again."""
_LEARNS_EVERY: Final = 8
"""Of messages that fit nothing, one in so many is learned from: where none comes again, that must cost little."""
_VARIABLE: Final = SECRET_HEADERS | {"traceparent", "x-request-id"}
"""Headers known to differ; a secret is never kept. What else differs is found out."""
_MAP: Final = 0x0A
_ENTRY: Final = 0x0A
_KEY: Final = 0x0A
_RAW_VALUE: Final = 0x1A
_BESIDE: Final = frozenset({0x42, 0x4A, 0x5A})
"""Tags of `ProcessingRequest` that stand beside the headers: `metadata_context` 8, `attributes` 9, `protocol_config` 11."""
_OBSERVABILITY: Final = 0x50
"""Tag of `observability_mode` 10."""


class _Entry(NamedTuple):
    """A `HeaderValue` as it came."""

    name: str
    before: bytes
    """From its tag to the length of the value, lengths left out: tag, then the key and the value's tag."""
    value: bytes | None
    wire: bytes


class _Step(NamedTuple):
    """What stands before one value that differs."""

    lead: bytes
    """What comes again, up to the tag of the entry."""
    lead_bytes: int
    middle: bytes
    """Behind the entry's length: its key, and the tag of its value."""
    middle_bytes: int


class _Layout:
    """The headers of one kind of message."""

    __slots__ = ("_headers", "_holes", "_last", "_steps", "entries", "variable")

    def __init__(self, entries: Sequence[_Entry], variable: frozenset[str]) -> None:
        self.entries = {entry.name: None if entry.name in variable else entry.wire for entry in entries}
        """By name, in order: the bytes of those that come again."""
        self.variable = variable
        self._headers = {
            entry.name: "" if entry.name in variable else (entry.value or b"").decode("latin-1") for entry in entries
        }
        self._holes = tuple(entry.name for entry in entries if entry.name in variable)
        steps = []
        lead = b""
        for entry in entries:
            if entry.name in variable:
                lead += entry.before[:1]
                steps.append(_Step(lead, len(lead), entry.before[1:], len(entry.before) - 1))
                lead = b""
            else:
                lead += entry.wire
        self._steps = tuple(steps)
        self._last = lead

    def read(self, data: bytes, position: int, end: int) -> dict[str, str] | None:
        """Return the headers that stand between `position` and `end`; None where they do not fit. Raises IndexError."""
        values = []
        for lead, lead_bytes, middle, middle_bytes in self._steps:
            if not data.startswith(lead, position):
                return None
            position += lead_bytes + 1
            size = data[position - 1]
            if size >= 0x80:
                size, position = length_at(data, position - 1)
            if not data.startswith(middle, position):
                return None
            stop = position + size
            position += middle_bytes + 1
            size = data[position - 1]
            if size >= 0x80:
                size, position = length_at(data, position - 1)
            if position + size != stop:
                return None
            values.append(data[position:stop])
            position = stop
        if position + len(self._last) != end or not data.startswith(self._last, position):
            return None
        headers = self._headers.copy()
        for name, value in zip(self._holes, values, strict=True):
            headers[name] = value.decode("latin-1")
        return headers


class _Tail(NamedTuple):
    """What follows the headers, as it was read."""

    end_of_stream: bool
    protocol_config: ProtocolConfig | None
    metadata: Metadata | None


class HeaderLayouts:
    """The layouts that were seen; bounded, whatever a peer sends."""

    __slots__ = ("_layouts", "_misses", "_tails")

    def __init__(self) -> None:
        self._layouts: list[_Layout] = []
        self._tails: dict[tuple[int, bytes], _Tail] = {}
        self._misses = 0

    def read(self, data: bytes) -> RequestHeaders | None:
        """Read a `ProcessingRequest` that begins with `request_headers` 2; None: it fits nothing known.

        Costs 2 to 3 us; where nothing fits, 1 us.
        """
        try:
            start, end, stop = _bounds(data)
            tail = self._tails.get((stop - end, data[end:]))
            if tail is None or stop > len(data):
                return None
            for place, layout in enumerate(self._layouts):
                headers = layout.read(data, start, end)
                if headers is not None:
                    if place:
                        self._layouts.insert(0, self._layouts.pop(place))
                    return RequestHeaders(headers, tail.end_of_stream, tail.protocol_config, tail.metadata, len(data))
        except IndexError:
            pass
        return None

    def learn(self, data: bytes, event: RequestHeaders) -> None:
        """Take note of a message that fitted nothing, and of what it was read as."""
        self._misses += 1
        if self._misses % _LEARNS_EVERY != 1 or len(data) > _MESSAGE_BYTES:
            return
        try:
            start, end, stop = _bounds(data)
            entries = _entries(data, start, end)
            alone = not _says_more(data, stop)
        except (IndexError, UnicodeDecodeError):
            return
        # Also where one stands there twice: then the two differ.
        if {entry.name: (entry.value or b"").decode("latin-1") for entry in entries} != event.headers:
            return
        if not alone or len(entries) != len(event.headers) or len(data) - end > _TAIL_BYTES:
            return
        if len(self._tails) >= _TAILS:
            self._tails.clear()
        self._tails[stop - end, data[end:]] = _Tail(event.end_of_stream, event.protocol_config, event.metadata)
        self._add(entries)

    def _add(self, entries: Sequence[_Entry]) -> None:
        valued = {entry.name for entry in entries if entry.value is not None}
        variable = {entry.name for entry in entries if len(entry.value or b"") > _VALUE_BYTES} | _VARIABLE
        names = [entry.name for entry in entries]
        for layout in self._layouts:
            if list(layout.entries) == names:
                variable |= layout.variable
                variable |= {entry.name for entry in entries if layout.entries[entry.name] != entry.wire}
                self._layouts.remove(layout)
                break
        self._layouts.insert(0, _Layout(entries, frozenset(variable & valued)))
        del self._layouts[_LAYOUTS:]


def _bounds(data: bytes) -> tuple[int, int, int]:
    """Return where the entries begin and end, and where `HttpHeaders` ends. Raises IndexError where there are none."""
    size, start = length_at(data, 1)
    stop = start + size
    if data[start] != _MAP:  # `HttpHeaders.headers` 1
        raise IndexError
    size, start = length_at(data, start + 1)
    return start, start + size, stop


def _says_more(data: bytes, position: int) -> bool:
    """Return whether anything stands there that could take the place of the headers: the last of them counts.

    Raises IndexError where the message is cut.
    """
    while position < len(data):
        tag = data[position]
        if tag in _BESIDE:
            size, position = length_at(data, position + 1)
            position += size
        elif tag == _OBSERVABILITY:
            position += 2
        else:
            return True
    return position != len(data)


def _entries(data: bytes, position: int, end: int) -> list[_Entry]:
    """Cut a `HeaderMap` into its entries. Raises IndexError where one is not as Envoy writes it, UnicodeDecodeError."""
    found = []
    while position < end:
        begin = position
        if data[position] != _ENTRY:  # `HeaderMap.headers` 1
            raise IndexError
        size, position = length_at(data, position + 1)
        stop, opened = position + size, position
        if data[position] != _KEY:  # `HeaderValue.key` 1
            raise IndexError
        size, position = length_at(data, position + 1)
        name = data[position : position + size].decode()
        position += size
        value = None
        before = data[begin : begin + 1]
        if position < stop:
            if data[position] != _RAW_VALUE:  # `HeaderValue.raw_value` 3
                raise IndexError
            before += data[opened : position + 1]
            size, position = length_at(data, position + 1)
            value = data[position : position + size]
            position += size
        if position != stop:
            raise IndexError
        found.append(_Entry(name, before, value, data[begin:stop]))
    if position != end:
        raise IndexError
    return found
