"""Count the bytes of request bodies held by all sessions together."""

from __future__ import annotations

__all__ = ["BodyBudget"]


class BodyBudget:
    """A process-wide count with a limit that is asked about, not enforced: who exceeds it decides at once.

    A byte that has arrived is in memory anyway, so `charge` never refuses; the session that crosses the limit lets go of
    its body in the same call.
    """

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """May be changed while sessions run."""
        self.used_bytes = 0

    @property
    def exceeded(self) -> bool:
        """Whether more is held than the limit allows."""
        return self.used_bytes > self.limit_bytes

    def charge(self, size_bytes: int) -> None:
        """Count bytes that are being held."""
        self.used_bytes += size_bytes

    def refund(self, size_bytes: int) -> None:
        """Count bytes that were let go."""
        self.used_bytes -= size_bytes
