"""Why a scrape failed: the reason, which is a metric label, and the exception that carries it."""

from __future__ import annotations

import enum

__all__ = ["ScrapeFailedError", "ScrapeFailure"]


class ScrapeFailure(enum.Enum):
    """Why a scrape failed; the value is a metric label."""

    TIMEOUT = "timeout"
    CONNECT = "connect"
    """No connection, it broke before the answer was complete, or the answer is not HTTP."""
    STATUS = "status"
    """A status other than 200, redirects included."""
    TLS = "tls"
    PARSE = "parse"
    """A page without any signal of the configured engine, or a compressed one."""
    TOO_LARGE = "too_large"

    @property
    def unreachable(self) -> bool:
        """Whether the endpoint did not answer at all, so that nothing else is asked of it."""
        return self in {ScrapeFailure.CONNECT, ScrapeFailure.TIMEOUT, ScrapeFailure.TLS}


class ScrapeFailedError(Exception):
    """A scrape that gave no signals; the message says what happened."""

    def __init__(self, reason: ScrapeFailure, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
