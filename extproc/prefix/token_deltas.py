"""Token counts of prompts whose answers carry no usage, from the growth of the engines' own counters.

Decides over which window an endpoint's counters can be compared with our prompts; `tokens` learns from the comparison.
Streams without `stream_options.include_usage` are the common case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from extproc.prefix.text import Text

__all__ = ["Comparison", "TokenDeltas"]

_LEAST_REQUESTS: Final = 20
_PER_IN_FLIGHT: Final = 4
"""Requests compared for each one in flight: an engine counts a prompt at its first token and we at its end, so what is
under way at either edge is the error of the comparison."""
_FOREIGN_SHARE: Final = 0.1
"""Share of finished requests that may be foreign (another picker's, a health probe's) before a comparison is void."""


class Comparison(NamedTuple):
    """One fair comparison."""

    model: str | None
    """The model of all requests compared; None: several."""
    requests: int
    plain_bytes: dict[int, float]
    """By kind of text (`text.Text`)."""
    prompt_bytes: int
    prompt_tokens: int


@dataclass(slots=True)
class _Window:
    tokens_at_start: float
    requests_at_start: float
    requests: int = 0
    plain_bytes: dict[int, float] = field(default_factory=dict)
    prompt_bytes: int = 0
    reported: int = 0
    """Requests whose answers named their tokens, which were learned from already."""
    model: str | None = None
    void: bool = False


class TokenDeltas:
    """One open window per endpoint whose page has both counters."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def ended(self, endpoint_id: str, model: str, text: Text | None, *, reported: bool) -> None:
        """Count one answered request; without `text`, of which the tokens are to be learned, the window is void."""
        window = self._windows.get(endpoint_id)
        if window is None:
            return
        if text is None:
            window.void = True
            return
        window.model = model if window.model == model or not window.requests else None
        window.requests += 1
        window.plain_bytes[text.kind] = window.plain_bytes.get(text.kind, 0.0) + text.plain_bytes
        window.prompt_bytes += text.n_bytes
        window.reported += reported

    def forget(self, endpoint_id: str) -> None:
        """Drop the window of an endpoint that is gone or has restarted."""
        self._windows.pop(endpoint_id, None)

    def observed(
        self, endpoint_id: str, tokens_total: float | None, requests_total: float | None, in_flight: int
    ) -> Comparison | None:
        """Take an endpoint's counters (since its start) and our requests in flight there; return a comparison if one is due."""
        if tokens_total is None or requests_total is None:
            return None
        window = self._windows.get(endpoint_id)
        if window is None:
            self._windows[endpoint_id] = _Window(tokens_total, requests_total)
            return None
        if not window.void and window.requests < max(_LEAST_REQUESTS, _PER_IN_FLIGHT * in_flight):
            return None
        self._windows[endpoint_id] = _Window(tokens_total, requests_total)
        tokens, requests = tokens_total - window.tokens_at_start, requests_total - window.requests_at_start
        foreign = abs(requests - window.requests)
        if window.void or tokens <= 0 or foreign > _FOREIGN_SHARE * window.requests:
            return None
        if 2 * window.reported >= window.requests:
            return None
        return Comparison(window.model, window.requests, window.plain_bytes, window.prompt_bytes, int(tokens))
