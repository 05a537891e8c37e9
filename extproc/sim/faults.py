"""Faults on demand: what a model server does wrong, for how many requests and on which paths.

Parses and counts them; `model_server` carries them out, because it has the connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

DEFAULT_PATH: Final = "/v1/"
"""Where an order names none: generation and the list of models."""


class FaultKind(Enum):
    """What goes wrong; the values are the words of POST /fault."""

    NONE = "none"
    """Nothing: end the fault in force."""
    SLOW = "slow"
    """Wait `seconds` before the request is read."""
    ERROR = "error"
    """Answer `status` in vLLM's error form."""
    RESET = "reset"
    """Reset the connection (RST), at once or after `after_tokens` streamed tokens."""
    CLOSE = "close"
    """Close the connection (FIN), at once or after `after_tokens` streamed tokens: no reset, and no end of the body."""
    TRICKLE = "trickle"
    """Stream, but let each token follow the one before by `seconds` at least."""
    ANSWER = "answer"
    """Answer 200 with `body`, for any request: for example a metrics page of nonsense."""
    HANG = "hang"
    """Read the request and never answer."""
    RESTART = "restart"
    """Once, now: cut all connections, lose cache and counters, refuse connections for `seconds`, come back as a new process."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as ordered. `count` requests meet it (None: all until the next order) whose path begins with `path`.

    A fault of another `path` stays in force beside it; where several could be met, the one of the longest path is.
    """

    kind: FaultKind
    seconds: float = 0.0
    """SLOW: delay. TRICKLE: time between two tokens. RESTART: time away. Real seconds, >= 0, not scaled by `speed`."""
    status: int = 500
    """ERROR: HTTP status, 400 to 599."""
    count: int | None = None
    after_tokens: int = 0
    """RESET, CLOSE: tokens to stream first, >= 0; 0 ends the connection before the answer begins."""
    path: str = DEFAULT_PATH
    """NONE: ends the fault of this path; an order without `path` ends all."""
    body: str = ""
    """ANSWER: what is said."""


class _Order(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /fault."""

    kind: FaultKind
    seconds: float = 0.0
    status: int = 500
    count: int | None = None
    after_tokens: int = 0
    path: str | None = None
    body: str = ""


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
    path = order.path if order.path is not None else "" if order.kind is FaultKind.NONE else DEFAULT_PATH
    return Fault(order.kind, order.seconds, order.status, order.count, order.after_tokens, path, order.body)


class FaultPlan:
    """The faults in force, one per path, and how many requests each still has to meet."""

    def __init__(self) -> None:
        self._faults: dict[str, Fault] = {}
        self._left: dict[str, int] = {}

    def order(self, fault: Fault) -> None:
        """Put a fault in force in place of the one of its path; NONE ends that one, or all if it has no path. RESTART ends all."""
        ending = [fault.path] if fault.path and fault.kind is not FaultKind.RESTART else list(self._faults)
        for path in ending:
            self._faults.pop(path, None)
            self._left.pop(path, None)
        if fault.kind in {FaultKind.NONE, FaultKind.RESTART}:
            return
        self._faults[fault.path] = fault
        if fault.count is not None:
            self._left[fault.path] = fault.count

    def meet(self, path: str) -> Fault | None:
        """Give the fault that a request on `path` meets, and count it."""
        meeting = [at for at in self._faults if path.startswith(at)]
        if not meeting:
            return None
        at = max(meeting, key=len)
        fault = self._faults[at]
        if at in self._left:
            self._left[at] -= 1
            if not self._left[at]:
                del self._faults[at], self._left[at]
        return fault
