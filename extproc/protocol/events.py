"""What the gateway says on one ext_proc stream, as plain values.

The names follow `envoy.service.ext_proc.v3.ProcessingRequest`; how they are read from the wire is the edge's concern.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

__all__ = [
    "BodyMode",
    "DeadlinePassed",
    "Direction",
    "Event",
    "HalfClosed",
    "Metadata",
    "PlainMetadata",
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
    """Dynamic metadata of one message, converted only where somebody looks (Envoy repeats it on every message)."""

    def value(self, namespace: str, key: str) -> object | None:
        """Return the value as text, number, bool, list or dict; None where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class PlainMetadata:
    """Metadata that is already plain values: `{namespace: {key: value}}`."""

    namespaces: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def value(self, namespace: str, key: str) -> object | None:
        """Return the value at (namespace, key), or None."""
        return self.namespaces.get(namespace, {}).get(key)


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The request's headers; names in lower case, pseudo-headers among them where the gateway sends any."""

    headers: Mapping[str, str]
    end_of_stream: bool = False
    protocol_config: ProtocolConfig | None = None
    metadata: Metadata | None = None
    wire_bytes: int = 0
    """Size of the message they came in: what holding them costs."""


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A piece of the request body, or all of it in the buffered modes."""

    data: bytes
    end_of_stream: bool = False
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The request's trailers; in full duplex they, not `end_of_stream`, end the body."""

    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    """The response's headers: the engine's, or those of a local reply of the gateway."""

    headers: Mapping[str, str]
    end_of_stream: bool = False
    protocol_config: ProtocolConfig | None = None
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A piece of the response body."""

    data: bytes
    end_of_stream: bool = False
    protocol_config: ProtocolConfig | None = None


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    """The response's trailers."""

    protocol_config: ProtocolConfig | None = None


@dataclass(frozen=True, slots=True)
class HalfClosed:
    """The gateway will send nothing more on this stream."""


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The stream is gone: cancelled, reset, or its connection closed. Nothing can be sent any more."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time `Session.deadline` named has come."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A message that asks nothing we know (a new kind, or observability mode); never answered."""


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
