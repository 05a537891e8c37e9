"""The response direction of one stream: give everything back, and tell the core what it shows.

It knows nothing of the request; whether and how the request is released is the session's concern.
"""

from __future__ import annotations

from typing import Final

from extproc.protocol.echo import echo
from extproc.protocol.events import BodyMode, Direction, ResponseBody, ResponseHeaders, ResponseTrailers
from extproc.protocol.replies import BodyReply, HeadersReply, Reply, TrailersReply
from extproc.protocol.settings import EXPLAIN_HEADER
from extproc.protocol.shared import SessionShared
from extproc.protocol.tables import ResponseState

__all__ = ["ResponseMachine"]

_PASS: Final = BodyReply(Direction.RESPONSE)
_PLAIN_HEADERS: Final = HeadersReply(Direction.RESPONSE)
_TRAILERS: Final = TrailersReply(Direction.RESPONSE)


class ResponseMachine:
    """State of the response, and the replies to its messages."""

    __slots__ = ("_shared", "_trailers", "_wants_body", "mode", "piece_bytes", "state")

    def __init__(self, shared: SessionShared, mode: BodyMode, piece_bytes: int) -> None:
        self._shared = shared
        self._trailers = False
        self._wants_body = False
        self.mode = mode
        self.piece_bytes = piece_bytes
        self.state = ResponseState.IDLE

    def headers(
        self, event: ResponseHeaders, decision_id: str, explain: str, served: str | None, now: float
    ) -> list[Reply]:
        """Tell the core, and answer; the explanation, if there is one, goes to the client here."""
        self.state = ResponseState.DONE if event.end_of_stream else ResponseState.FLOWING
        if decision_id:
            status = event.headers.get(":status", "")
            code = int(status) if status.isdecimal() else 0
            wants = self._shared.tell(
                "response_started", self._shared.core.response_started, decision_id, code, event.headers, now, served
            )
            self._wants_body = bool(wants)
        return [HeadersReply(Direction.RESPONSE, ((EXPLAIN_HEADER, explain),))] if explain else [_PLAIN_HEADERS]

    def body(self, event: ResponseBody, decision_id: str, now: float) -> list[Reply]:
        """Give a piece of the body back."""
        end = event.end_of_stream
        if self._wants_body:
            core = self._shared.core
            self._shared.tell("response_body", core.response_body, decision_id, event.data, end, now)
        # BUFFERED: the body is whole even without end_of_stream, which then comes with the trailers.
        self.state = ResponseState.DONE if end or self.mode is BodyMode.BUFFERED else ResponseState.FLOWING
        if self.mode is BodyMode.FULL_DUPLEX:
            return echo(Direction.RESPONSE, event.data, end, self.piece_bytes)
        return [_PASS]

    def trailers(self, _event: ResponseTrailers) -> list[Reply]:
        """Answer the first trailers; repeated ones are ignored."""
        self.state = ResponseState.DONE
        if self._trailers:
            return []
        self._trailers = True
        return [_TRAILERS]
