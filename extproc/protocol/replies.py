"""What we send on one ext_proc stream, as plain values, and how body bytes and errors become replies.

The names follow `envoy.service.ext_proc.v3.ProcessingResponse`. The session decides which reply is sent when;
`edge.envoy_wire` encodes them. Structs for the reason given in `events`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, TypeAlias, final

import msgspec

from extproc.errors import RequestError
from extproc.protocol.events import Direction, RequestBody, RequestHeaders, RequestTrailers
from extproc.types import Decision

__all__ = [
    "DROP_REASON_HEADER",
    "BodyReply",
    "DecisionReply",
    "Finish",
    "FinishWith",
    "HeadersReply",
    "ImmediateReply",
    "Reply",
    "TrailersReply",
    "echo",
    "echo_all",
    "pieces",
    "refusal",
]

DROP_REASON_HEADER: Final = "x-extproc-drop-reason"
"""Response header with the reason of an answer of our own (`RequestError.reason`)."""


class DecisionReply(msgspec.Struct, frozen=True):
    """Let the request go on, to the endpoint of a decision, and replace or remove headers.

    Sent once per request, as the answer to the message on which it was decided. The destination is written as a header
    and as metadata, because gateways read one or the other; after trailers only metadata can be written.
    """

    answers: type[RequestHeaders | RequestBody | RequestTrailers]
    decision: Decision | None
    """None: somebody else has answered the request already; only headers are removed."""
    remove_headers: tuple[str, ...] = ()
    """In addition to those that the decision removes."""
    retriable: bool = False
    """Written as metadata `retry: true`, by which a route may allow retries."""
    explanation: str = ""
    """Written as metadata; empty: none."""
    data: bytes | None = None
    """Replaces a buffered body; None leaves it."""


class HeadersReply(msgspec.Struct, frozen=True):
    """Go on with the headers, edited; values overwrite what was there."""

    direction: Direction
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()


class BodyReply(msgspec.Struct, frozen=True):
    """Go on with the body: `data` is what the gateway passes on in full duplex; None, in other modes, leaves it as it is."""

    direction: Direction
    data: bytes | None = None
    end_of_stream: bool = False


class TrailersReply(msgspec.Struct, frozen=True):
    """Go on with the trailers as they are."""

    direction: Direction


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
    """Send a last message and end the stream with OK; always the last reply.

    The transport must write both in one piece: the gateway must never read the message without the end.
    """

    last: BodyReply


Reply: TypeAlias = DecisionReply | HeadersReply | BodyReply | TrailersReply | ImmediateReply | Finish | FinishWith


def refusal(error: RequestError) -> ImmediateReply:
    """Return the HTTP answer that stands for an error: status, JSON, drop reason and, on 429 and 503, `retry-after`.

    The JSON is the OpenAI API's error object, which client libraries of that API show to their user.
    """
    body = {"message": error.message, "type": error.error_type, "param": error.param, "code": error.reason}
    headers = [("content-type", "application/json"), (DROP_REASON_HEADER, error.reason)]
    if error.retry_after_s is not None:
        headers.append(("retry-after", str(error.retry_after_s)))
    return ImmediateReply(
        status=error.status,
        headers=tuple(headers),
        body=json.dumps({"error": body}).encode(),
        details=f"extproc_{error.reason}",
    )


def pieces(data: bytes, limit_bytes: int) -> Iterator[bytes]:
    """Yield `data` itself where it is small enough, else slices of at most `limit_bytes`; nothing for no data."""
    if len(data) <= limit_bytes:
        if data:
            yield data
        return
    for start in range(0, len(data), limit_bytes):
        yield data[start : start + limit_bytes]


def echo(direction: Direction, data: bytes, end_of_stream: bool, limit_bytes: int) -> list[Reply]:
    """Return replies that send one chunk back in pieces of at most `limit_bytes`; a smaller chunk is not copied.

    The last piece carries `end_of_stream`. No data is no reply, unless it ends the body. In full duplex the gateway keeps
    no copy of a body: what is not sent back is lost.
    """
    if len(data) <= limit_bytes:
        return [BodyReply(direction, data, end_of_stream)] if data or end_of_stream else []
    parts = list(pieces(data, limit_bytes))
    last = len(parts) - 1
    return [BodyReply(direction, part, end_of_stream and i == last) for i, part in enumerate(parts)]


def echo_all(direction: Direction, chunks: list[bytes], end_of_stream: bool, limit_bytes: int) -> list[Reply]:
    """Return replies that send chunks back in order, the last one with `end_of_stream`."""
    if len(chunks) < 2:
        return echo(direction, chunks[0] if chunks else b"", end_of_stream, limit_bytes)
    replies: list[Reply] = []
    last = len(chunks) - 1
    for index, chunk in enumerate(chunks):
        replies += echo(direction, chunk, end_of_stream and index == last, limit_bytes)
    return replies
