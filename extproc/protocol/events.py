"""What the gateway sends on one ext_proc stream, as plain values.

The names follow `envoy.service.ext_proc.v3.ProcessingRequest`; `edge.envoy_wire` reads them from the wire. msgspec structs,
not frozen dataclasses, because each message makes several and dataclasses take longer to make.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

__all__ = [
    "BodyMode",
    "DeadlinePassed",
    "Direction",
    "Event",
    "HalfClosed",
    "Metadata",
    "ProtocolConfig",
    "RequestBody",
    "RequestHeaders",
    "RequestTrailers",
    "ResponseBody",
    "ResponseHeaders",
    "ResponseTrailers",
    "StreamLost",
    "Unknown",
]


class Direction(enum.Enum):
    """Which half of the HTTP exchange a message belongs to."""

    REQUEST = "request"
    RESPONSE = "response"


class BodyMode(enum.Enum):
    """How the gateway sends a body; the values are those of `ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4
    GRPC = 5
    """Hidden in Envoy 1.40; one reply per message, so treated like STREAMED."""


@dataclass(frozen=True, slots=True)
class ProtocolConfig:
    """Body modes of both directions; sent on the first message by Envoy 1.34 and later and by agentgateway."""

    request_body_mode: BodyMode = BodyMode.NONE
    response_body_mode: BodyMode = BodyMode.NONE


class Metadata(Protocol):
    """Dynamic metadata of one message, decoded only where a value is read (Envoy repeats it on every message)."""

    def value(self, namespace: str, key: str) -> object | None:
        """Return the value as text, number, bool, list or dict; None where there is none."""
        ...


class RequestHeaders(msgspec.Struct, frozen=True):
    """The request's headers; names in lower case, pseudo-headers among them where the gateway sends any."""

    headers: Mapping[str, str]
    end_of_stream: bool = False
    protocol_config: ProtocolConfig | None = None
    metadata: Metadata | None = None
    wire_bytes: int = 0
    """Size of the message they came in, which is charged to the body budget while they are buffered."""


class RequestBody(msgspec.Struct, frozen=True):
    """A piece of the request body, or all of it in the buffered modes."""

    data: bytes
    end_of_stream: bool = False
    metadata: Metadata | None = None


class RequestTrailers(msgspec.Struct, frozen=True):
    """The request's trailers; in full duplex they, not `end_of_stream`, end the body."""

    metadata: Metadata | None = None


class ResponseHeaders(msgspec.Struct, frozen=True):
    """The response's headers: the engine's, or those of a local reply of the gateway."""

    headers: Mapping[str, str]
    end_of_stream: bool = False
    protocol_config: ProtocolConfig | None = None
    metadata: Metadata | None = None


class ResponseBody(msgspec.Struct, frozen=True):
    """A piece of the response body."""

    data: bytes
    end_of_stream: bool = False
    protocol_config: ProtocolConfig | None = None


class ResponseTrailers(msgspec.Struct, frozen=True):
    """The response's trailers."""

    protocol_config: ProtocolConfig | None = None


class HalfClosed(msgspec.Struct, frozen=True):
    """The gateway has ended its half of the stream."""


class StreamLost(msgspec.Struct, frozen=True):
    """The stream is gone: cancelled, reset, or its connection closed. Nothing can be sent any more."""


class DeadlinePassed(msgspec.Struct, frozen=True):
    """`Session.deadline` has passed."""


class Unknown(msgspec.Struct, frozen=True):
    """A message that must not be answered: of an unknown kind, or in observability mode."""


Event: TypeAlias = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
    | HalfClosed
    | StreamLost
    | DeadlinePassed
    | Unknown
)
