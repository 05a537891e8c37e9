"""Faults on demand: what a model server is told to do wrong, to how many requests and on which paths.

Reads and counts; acting them out is `model_server`'s business, because only it has the connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec


class FaultKind(Enum):
    """What goes wrong; the values are the words of POST /fault."""

    NONE = "none"
    """Nothing: end the fault in force."""
    SLOW = "slow"
    """Wait `seconds` before the request is looked at."""
    ERROR = "error"
    """Answer `status` in vLLM's error form."""
    RESET = "reset"
    """Reset the connection (RST), at once or after `after_tokens` streamed tokens."""
    HANG = "hang"
    """Read the request and never answer."""
    RESTART = "restart"
    """Once, now: cut all connections, lose cache and counters, refuse connections for `seconds`, come back as a new process."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as ordered. `count` requests meet it (None: all until the next order) whose path begins with `path`."""

    kind: FaultKind
    seconds: float = 0.0
    """SLOW: delay. RESTART: time away. Real seconds, >= 0, not scaled by `speed`."""
    status: int = 500
    """ERROR: HTTP status, 400 to 599."""
    count: int | None = None
    after_tokens: int = 0
    """RESET: tokens to stream first, >= 0; 0 resets before the answer begins."""
    path: str = "/v1/"


class _Order(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /fault."""

    kind: FaultKind
    seconds: float = 0.0
    status: int = 500
    count: int | None = None
    after_tokens: int = 0
    path: str = "/v1/"


def parse_fault(body: bytes) -> Fault:
    """Read the body of POST /fault. Raises ValueError with the reason for anything that is not a fault."""
    try:
        order = msgspec.json.decode(body, type=_Order)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if not 0 <= order.seconds < float("inf"):
        raise ValueError("seconds must not be negative")
    if not 400 <= order.status <= 599:
        raise ValueError("status must be 400 to 599")
    if (order.count is not None and order.count < 1) or order.after_tokens < 0:
        raise ValueError("count must be at least 1, after_tokens at least 0")
    return Fault(order.kind, order.seconds, order.status, order.count, order.after_tokens, order.path)


class FaultPlan:
    """The fault in force, if any, and how many requests it still has to meet."""

    def __init__(self) -> None:
        self._fault: Fault | None = None
        self._left: int | None = None

    def order(self, fault: Fault) -> None:
        """Put a fault in force in place of the one before; NONE and RESTART leave none in force."""
        lasting = fault.kind not in {FaultKind.NONE, FaultKind.RESTART}
        self._fault = fault if lasting else None
        self._left = fault.count if lasting else None

    def meet(self, path: str) -> Fault | None:
        """Give the fault that a request on `path` meets, and count it."""
        fault = self._fault
        if fault is None or not path.startswith(fault.path):
            return None
        if self._left is not None:
            self._left -= 1
            if not self._left:
                self._fault = None
        return fault
