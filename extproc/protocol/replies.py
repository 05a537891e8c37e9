"""What we say on one ext_proc stream, as plain values.

The names follow `envoy.service.ext_proc.v3.ProcessingResponse`. Which reply is due when is the session's concern; how it
looks on the wire is the edge's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from extproc.protocol.events import Direction

__all__ = [
    "BodyReply",
    "DynamicMetadata",
    "Finish",
    "HeadersReply",
    "ImmediateReply",
    "Reply",
    "TrailersReply",
]

DynamicMetadata: TypeAlias = Mapping[str, Mapping[str, str | bool]]
"""`{namespace: {key: value}}`."""


@dataclass(frozen=True, slots=True)
class HeadersReply:
    """Go on with the headers, edited; values overwrite what was there."""

    direction: Direction
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()
    dynamic_metadata: DynamicMetadata | None = None
    clear_route_cache: bool = False


@dataclass(frozen=True, slots=True)
class BodyReply:
    """Go on with the body.

    `streamed`: full duplex, `data` is what the gateway passes on. Else None leaves the body as it is and bytes replace
    it; header edits are honoured there only in the buffered modes.
    """

    direction: Direction
    data: bytes | None = None
    end_of_stream: bool = False
    streamed: bool = False
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()
    dynamic_metadata: DynamicMetadata | None = None
    clear_route_cache: bool = False


@dataclass(frozen=True, slots=True)
class TrailersReply:
    """Go on with the trailers as they are."""

    direction: Direction
    dynamic_metadata: DynamicMetadata | None = None


@dataclass(frozen=True, slots=True)
class ImmediateReply:
    """Answer the client now, without an endpoint."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    details: str
    """Shows up in the gateway's access log as response code details."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the stream with OK; always the last reply."""


Reply: TypeAlias = HeadersReply | BodyReply | TrailersReply | ImmediateReply | Finish
