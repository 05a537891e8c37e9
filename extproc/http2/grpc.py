"""gRPC over HTTP/2: reading a call's header fields, splitting a body into messages, and the header blocks of answers.

Source: grpc.io's PROTOCOL-HTTP2 ("the specification" below) and its compression.md. Nothing here knows a service.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from extproc.errors import ExtprocError
from extproc.http2.headers import Field, encode_fields

__all__ = [
    "OK_TRAILERS",
    "RESPONSE_HEADERS",
    "Call",
    "CallError",
    "MessageReader",
    "NotGrpcError",
    "Status",
    "message_frame",
    "open_call",
    "refusal",
    "trailers",
]


class Status(enum.IntEnum):
    """The codes of grpc.io's statuscodes.md."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CallError(ExtprocError):
    """A call that fails with a status; `accept_encoding` tells the peer to stop compressing."""

    def __init__(self, status: Status, message: str, *, accept_encoding: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.accept_encoding = accept_encoding


class NotGrpcError(ExtprocError):
    """A request that is no gRPC call; answered in plain HTTP, so that other clients can read why."""

    def __init__(self, http_status: int, text: str) -> None:
        super().__init__(text)
        self.http_status = http_status
        self.text = text


@dataclass(frozen=True, slots=True)
class Call:
    """A call, as its header fields describe it."""

    path: str
    """`/package.Service/Method`"""
    timeout_s: float | None
    """`grpc-timeout`; None: unlimited."""
    encoding: str
    """`grpc-encoding` of compressed messages; none is supported."""


_UNITS_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONTENT_TYPE: Final = b"application/grpc"
_RESPONSE_START: Final = ((b":status", b"200"), (b"content-type", _CONTENT_TYPE))
_ACCEPT_ENCODING: Final = (b"grpc-accept-encoding", b"identity")
_MESSAGE_BYTES: Final = 1024
"""Longest `grpc-message` we send: a peer's header list limit is not known to be large."""

RESPONSE_HEADERS: Final = encode_fields(*_RESPONSE_START)
"""Header block of every response with messages."""


def open_call(fields: tuple[Field, ...]) -> Call:
    """Read the header fields of a request. Raises NotGrpcError and CallError.

    The result keeps no fields: a byte of an attacker's block can be a hundred in memory.
    """
    found = dict(fields)
    if found.get(b":method") != b"POST":
        raise NotGrpcError(405, "gRPC calls are POST requests")
    kind = found.get(b"content-type", b"")
    if kind not in (_CONTENT_TYPE, b"application/grpc+proto") and not kind.startswith(b"application/grpc;"):
        # The specification: 415, so that other clients do not take a gRPC error for success.
        raise NotGrpcError(415, "this port speaks gRPC (content-type: application/grpc)")
    if b"te" not in found:
        # The specification requires it, to detect proxies that do not forward trailers. Its value was checked before.
        raise CallError(Status.INTERNAL, "te: trailers is missing; is there a proxy that cannot forward trailers?")
    timeout = found.get(b"grpc-timeout")
    return Call(
        found[b":path"].decode("latin-1"),
        None if timeout is None else _timeout_s(timeout),
        found.get(b"grpc-encoding", b"identity").decode("latin-1"),
    )


def _timeout_s(value: bytes) -> float:
    # At most eight digits and a unit.
    digits, unit = value[:-1], value[-1:]
    if not digits.isdigit() or len(digits) > 8 or unit not in _UNITS_S:
        raise CallError(Status.INTERNAL, "grpc-timeout cannot be read")
    return int(digits) * _UNITS_S[unit]


_PREFIX: Final = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""
_PREFIX_BYTES: Final = 5


def message_frame(message: bytes) -> bytes:
    """Return a message behind its prefix: not compressed, its length."""
    return _PREFIX.pack(0, len(message)) + message


class MessageReader:
    """Splits the DATA of one stream into messages; keeps at most one incomplete message."""

    __slots__ = ("_compressed", "_max_bytes", "part")

    def __init__(self, max_bytes: int, encoding: str) -> None:
        self._max_bytes = max_bytes
        self._compressed = encoding != "identity"  # not the name: it may be long, and is kept per stream
        self.part: bytearray | None = None
        """Created with the first message that arrives in pieces."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the incomplete message."""
        return len(self.part) if self.part else 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take a piece and return the messages it completes. Raises CallError, after which the stream must end.

        Copies each message once, two or three times where it arrived in pieces.
        """
        part = self.part
        if not part:
            size = len(data)
            if _PREFIX_BYTES <= size <= self._max_bytes and _PREFIX.unpack_from(data) == (0, size - _PREFIX_BYTES):
                return [data[_PREFIX_BYTES:]]
        else:
            part += data
            if len(part) < _PREFIX_BYTES:
                return []
            missing = self._length(part, 0) - (len(part) - _PREFIX_BYTES)
            if missing > 0:
                return []
            if not missing:
                # One message and nothing else, as large bodies arrive: no second copy.
                del part[:_PREFIX_BYTES]
                message = bytes(part)
                part.clear()
                return [message]
            data = bytes(part)
            part.clear()
        found = []
        position, size = 0, len(data)
        while size - position >= _PREFIX_BYTES:
            start = position + _PREFIX_BYTES
            end = start + self._length(data, position)
            if end > size:
                break
            found.append(data[start:end])
            position = end
        if position < size:
            if part is None:
                part = self.part = bytearray()
            part += data[position:]
        return found

    def end(self) -> None:
        """Check the end of the stream. Raises CallError where a message is incomplete."""
        if self.part:
            raise CallError(Status.INTERNAL, "the stream ends within a message")

    def _length(self, data: bytes | bytearray, position: int) -> int:
        """Return the length of the message whose prefix stands at `position`."""
        compressed, length = _PREFIX.unpack_from(data, position)
        if compressed:
            # compression.md: an unsupported algorithm is UNIMPLEMENTED, a flag without one INTERNAL.
            if compressed == 1 and self._compressed:
                raise CallError(Status.UNIMPLEMENTED, "compressed messages are not supported", accept_encoding=True)
            raise CallError(Status.INTERNAL, "a message is flagged as compressed, and grpc-encoding names no algorithm")
        if length > self._max_bytes:
            raise CallError(
                Status.RESOURCE_EXHAUSTED, f"a message of {length} bytes; at most {self._max_bytes} are taken"
            )
        size: int = length
        return size


def _percent_encoded(text: str) -> bytes:
    # The specification: everything but printable ASCII, and the percent sign itself.
    data = text.encode()[:_MESSAGE_BYTES]
    return b"".join([b"%%%02X" % byte if byte < 0x20 or byte > 0x7E or byte == 0x25 else b"%c" % byte for byte in data])


def _status_fields(status: Status, message: str, *, accept_encoding: bool) -> list[Field]:
    fields = [(b"grpc-status", b"%d" % status)]
    if message:
        fields.append((b"grpc-message", _percent_encoded(message)))
    if accept_encoding:
        fields.append(_ACCEPT_ENCODING)
    return fields


def trailers(status: Status, message: str = "", *, started: bool, accept_encoding: bool = False) -> bytes:
    """Write the header block that ends a call; not `started`: it is the only one (Trailers-Only)."""
    fields = _status_fields(status, message, accept_encoding=accept_encoding)
    return encode_fields(*fields) if started else encode_fields(*_RESPONSE_START, *fields)


OK_TRAILERS: Final = trailers(Status.OK, started=True)
"""Trailers of every successful call."""


def refusal(error: NotGrpcError) -> tuple[bytes, bytes]:
    """Return header block and body of a plain HTTP answer; an empty trailer block ends it."""
    body = error.text.encode() + b"\n"
    fields = [
        (b":status", b"%d" % error.http_status),
        (b"content-type", b"text/plain"),
        (b"content-length", b"%d" % len(body)),
    ]
    if error.http_status == 405:
        fields.append((b"allow", b"POST"))  # RFC 9110 15.5.6
    return encode_fields(*fields), body
