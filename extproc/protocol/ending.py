"""Say what the end of a stream means for the request it carried, where the response's end was not seen on it."""

from __future__ import annotations

from collections.abc import Callable

from extproc.protocol.events import BodyMode
from extproc.protocol.interfaces import StreamEnd
from extproc.protocol.tables import RequestState, ResponseState

__all__ = ["stream_end"]


def stream_end(
    request: RequestState,
    response: ResponseState,
    response_mode: BodyMode,
    configured: bool,
    by_log: Callable[[], bool],
) -> StreamEnd:
    """Return how a decided request's stream ended.

    `configured`: the gateway said its body modes, so `response_mode` is its word and not our default. `by_log` is asked
    only where the access log makes a difference.
    """
    if request is not RequestState.DONE:
        # Decided and under way, but not all of it was seen: an upload cut short, an early answer, an upgraded connection.
        by_log_alone = configured and response_mode is BodyMode.NONE and response is ResponseState.IDLE
        return StreamEnd.DETACHED if by_log_alone and by_log() else StreamEnd.ABORTED
    if response is ResponseState.DONE:
        # The response ended before we had decided: somebody else answered, and nothing went to our endpoint.
        return StreamEnd.ABORTED
    if response is ResponseState.FLOWING:
        if response_mode is not BodyMode.NONE:
            return StreamEnd.ABORTED
        # Envoy closes the stream once the response's headers are answered; the body's end is not for us to see, and a
        # status is better than a lease that holds the slot for minutes.
        return StreamEnd.DETACHED if by_log() else StreamEnd.COMPLETED
    if configured and response_mode is not BodyMode.NONE and not by_log():
        return StreamEnd.ABORTED
    return StreamEnd.DETACHED
