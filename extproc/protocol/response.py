"""The response direction of one stream: send everything back unchanged, and report status and body.

It knows nothing of the request; the session decides when and how its end is reported.
"""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.protocol.events import BodyMode, Direction, Metadata, ResponseBody, ResponseHeaders, ResponseTrailers
from extproc.protocol.replies import BodyReply, HeadersReply, Reply, TrailersReply, echo
from extproc.protocol.settings import DESTINATION_NAMESPACE, EXPLAIN_HEADER, SERVED_KEY
from extproc.protocol.shared import SessionShared
from extproc.protocol.tables import ResponseState

__all__ = ["ResponseMachine"]

_PASS: Final = BodyReply(Direction.RESPONSE)
_PLAIN_HEADERS: Final = HeadersReply(Direction.RESPONSE)
_TRAILERS: Final = TrailersReply(Direction.RESPONSE)


class ResponseMachine(msgspec.Struct, eq=False):
    """State of the response, and the replies to its messages; a struct for the reason given in `events`."""

    shared: SessionShared
    mode: BodyMode
    piece_bytes: int
    state: ResponseState = ResponseState.IDLE
    _trailers: bool = False
    _wants_body: bool = False

    def headers(self, event: ResponseHeaders, decision_id: str, explanation: str, now: float) -> list[Reply]:
        """Report the headers and answer them; an explanation is sent to the client here."""
        self.state = ResponseState.DONE if event.end_of_stream else ResponseState.FLOWING
        if decision_id:
            status = event.headers.get(":status", "")
            code = int(status) if status.isdecimal() else 0
            wants = self.shared.notify(
                "response_started",
                self.shared.handler.response_started,
                decision_id,
                code,
                event.headers,
                now,
                _served_by(event.metadata),
            )
            self._wants_body = bool(wants)
        return [HeadersReply(Direction.RESPONSE, ((EXPLAIN_HEADER, explanation),))] if explanation else [_PLAIN_HEADERS]

    def body(self, event: ResponseBody, decision_id: str) -> list[Reply]:
        """Send a piece of the body back."""
        end = event.end_of_stream
        if self._wants_body:
            self.shared.response_body(decision_id, event.data)
        # BUFFERED: the body is complete even without end_of_stream, which then comes with the trailers.
        self.state = ResponseState.DONE if end or self.mode is BodyMode.BUFFERED else ResponseState.FLOWING
        if self.mode is BodyMode.FULL_DUPLEX:
            return echo(Direction.RESPONSE, event.data, end, self.piece_bytes)
        return [_PASS]

    def pass_on(self, data: bytes, decision_id: str) -> bool:
        """Take a piece that can be sent back unchanged in one reply: in full duplex, after the body has begun; else False."""
        if (
            self.state is not ResponseState.FLOWING
            or self.mode is not BodyMode.FULL_DUPLEX
            or not 0 < len(data) <= self.piece_bytes
        ):
            return False
        if self._wants_body:
            self.shared.response_body(decision_id, data)
        return True

    def trailers(self, _event: ResponseTrailers) -> list[Reply]:
        """Answer the trailers once."""
        self.state = ResponseState.DONE
        if self._trailers:
            return []
        self._trailers = True
        return [_TRAILERS]


def _served_by(metadata: Metadata | None) -> str | None:
    """Return the endpoint that answered, as the gateway says; None where it does not say."""
    value = None if metadata is None else metadata.value(DESTINATION_NAMESPACE, SERVED_KEY)
    return value if isinstance(value, str) else None
