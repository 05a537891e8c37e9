"""What we say on one ext_proc stream, as plain values.

The names follow `envoy.service.ext_proc.v3.ProcessingResponse`. Which reply is due when is the session's concern; how it
looks on the wire is the edge's. Structs for the reason that stands in `events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, final

import msgspec

from extproc.protocol.events import Direction

__all__ = [
    "BodyReply",
    "DynamicMetadata",
    "Finish",
    "FinishWith",
    "HeadersReply",
    "ImmediateReply",
    "Reply",
    "TrailersReply",
]

DynamicMetadata: TypeAlias = Mapping[str, Mapping[str, str | bool]]
"""`{namespace: {key: value}}`."""


class HeadersReply(msgspec.Struct, frozen=True):
    """Go on with the headers, edited; values overwrite what was there."""

    direction: Direction
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()
    dynamic_metadata: DynamicMetadata | None = None
    clear_route_cache: bool = False


class BodyReply(msgspec.Struct, frozen=True):
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


class TrailersReply(msgspec.Struct, frozen=True):
    """Go on with the trailers as they are."""

    direction: Direction
    dynamic_metadata: DynamicMetadata | None = None


class ImmediateReply(msgspec.Struct, frozen=True):
    """Answer the client now, without an endpoint."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    details: str
    """Shows up in the gateway's access log as response code details."""


@final
class Finish(msgspec.Struct, frozen=True):
    """End the stream with OK; always the last reply."""


@final
class FinishWith(msgspec.Struct, frozen=True):
    """End the stream with OK right behind a last message; always the last reply.

    Whoever writes it keeps the two together: the gateway must never see the message and not yet the end.
    """

    last: BodyReply


Reply: TypeAlias = HeadersReply | BodyReply | TrailersReply | ImmediateReply | Finish | FinishWith
