"""Header blocks: bytes to validated fields, and fields to bytes.

Decoding is the `hpack` library's. A block that changed nothing in the dynamic table decodes to the same fields until
something else changes the table, so it is cached with its result: the header blocks of one gateway are equal byte for
byte. What we write uses literals without indexing: no state, so that a block can be a constant.
"""

from __future__ import annotations

import re
from typing import Any, Final

from hpack import Decoder, HPACKError
from hpack.exceptions import OversizedHeaderListError

from extproc.http2.frames import ConnectionLevelError, ErrorCode
from extproc.http2.limits import Limits

__all__ = ["Field", "HeaderBlock", "HeaderReader", "encode_fields", "request_fault", "trailers_fault"]

Field = tuple[bytes, bytes]

_KEPT_BLOCKS: Final = 64
_KEPT_BLOCK_BYTES: Final = 1024
_KEPT_FIELDS: Final = 64
"""A field may arrive as one byte, and takes a hundred when kept."""
_REQUEST_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
# 8.2.1: no uppercase, no control or space characters, no bytes above 0x7e; a colon only at the start of pseudo-headers.
_NAME: Final = re.compile(rb":?[!-9;-@\[-~]+")
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]|\A[ \t]|[ \t]\Z")
# 8.2.2: connection-specific fields are not allowed.
_CONNECTION_FIELDS: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)


class HeaderBlock:
    """The fields of one block, in order; `fault` says what makes them malformed as a request (empty: nothing)."""

    __slots__ = ("content_length", "fault", "fields", "note")

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self.fields = fields
        self.fault = request_fault(fields)
        self.content_length = _content_length(fields)
        """None where it is absent; -1 where it is no number."""
        self.note: Any = None
        """For the owner of the connection: what it derived from the fields. Cached and dropped together with the block."""


class HeaderReader:
    """Decodes the header blocks of one connection, in order of arrival: HPACK is stateful."""

    __slots__ = ("_decoder", "_kept")

    def __init__(self, limits: Limits) -> None:
        self._decoder = Decoder(limits.header_list_bytes)
        self._decoder.header_table_size = limits.table_bytes
        self._decoder.max_allowed_table_size = limits.table_bytes
        self._kept: dict[bytes, HeaderBlock] = {}

    def knows(self, data: bytes) -> bool:
        """Whether a block is cached, and needs no decoding."""
        return data in self._kept

    def read(self, data: bytes) -> HeaderBlock:
        """Decode one block. Raises ConnectionLevelError: after an error both sides' tables differ (4.3)."""
        kept = self._kept.get(data)
        if kept is not None:
            return kept
        table = self._decoder.header_table
        entries = table.dynamic_entries
        # An added entry is a new object at the front; `before` keeps the old one alive, so identity tells them apart.
        before = (entries[0] if entries else None, len(entries), table.maxsize)
        try:
            fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(data, raw=True))
        except OversizedHeaderListError as error:
            # 10.5.1: the rest was not decoded, so the tables differ and the connection must end.
            raise ConnectionLevelError(ErrorCode.ENHANCE_YOUR_CALM, "header list too large") from error
        except (HPACKError, ValueError, IndexError) as error:
            # ValueError: an integer of thousands of digits in the library's own message.
            raise ConnectionLevelError(ErrorCode.COMPRESSION_ERROR, "header block cannot be decoded") from error
        block = HeaderBlock(fields)
        first, count, maxsize = before
        if (entries[0] if entries else None) is not first or len(entries) != count or table.maxsize != maxsize:
            self._kept.clear()
        elif len(data) <= _KEPT_BLOCK_BYTES and len(fields) <= _KEPT_FIELDS:
            if len(self._kept) >= _KEPT_BLOCKS:
                self._kept.clear()
            self._kept[data] = block
        return block


def request_fault(fields: tuple[Field, ...]) -> str:
    """Return what makes a request malformed (8.1.1, 8.2, 8.3); empty: it is well-formed."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if fault := _field_fault(name, value):
            return fault
        if name[0] != 0x3A:
            regular = True
            continue
        if regular:
            return "pseudo-header after a regular field"  # 8.3
        if name not in _REQUEST_PSEUDO:
            return "unknown pseudo-header"  # 8.3
        if name in pseudo:
            return "pseudo-header repeated"  # 8.3
        pseudo[name] = value
    if pseudo.get(b":method") == b"CONNECT":
        return "" if pseudo.keys() == {b":method", b":authority"} else "malformed CONNECT"  # 8.5
    if not all(pseudo.get(name) for name in (b":method", b":scheme", b":path")):
        return "pseudo-header missing or empty"  # 8.3.1
    return ""


def trailers_fault(fields: tuple[Field, ...]) -> str:
    """Return what makes trailers malformed; empty: nothing. They have no pseudo-headers (8.1)."""
    for name, value in fields:
        if fault := _field_fault(name, value):
            return fault
        if name[0] == 0x3A:
            return "pseudo-header in trailers"
    return ""


def _field_fault(name: bytes, value: bytes) -> str:
    if _NAME.fullmatch(name) is None:
        return "field name not allowed"  # 8.2.1
    if _BAD_VALUE.search(value) is not None:
        return "field value not allowed"  # 8.2.1
    if name in _CONNECTION_FIELDS or (name == b"te" and value.lower() != b"trailers"):
        return "connection-specific field"  # 8.2.2; the word has no case (RFC 9110 10.1.4)
    return ""


def _content_length(fields: tuple[Field, ...]) -> int | None:
    # RFC 9110 8.6: digits; repeated values must be equal.
    found: int | None = None
    for name, value in fields:
        if name == b"content-length":
            length = int(value) if value.isdigit() and len(value) < 19 else -1
            found = length if found is None or found == length else -1
    return found


def _integer(number: int, prefix_bits: int) -> bytes:
    """Write an HPACK integer whose leading bits are zero (RFC 7541 section 5.1)."""
    full = (1 << prefix_bits) - 1
    if number < full:
        return bytes((number,))
    out = bytearray((full,))
    number -= full
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def encode_fields(*fields: Field) -> bytes:
    """Write fields as literals without indexing, not Huffman coded (RFC 7541 section 6.2.2)."""
    parts = []
    for name, value in fields:
        parts += [b"\x00", _integer(len(name), 7), name, _integer(len(value), 7), value]
    return b"".join(parts)
