"""What all sessions of a process share: the core, the budget, the settings for new sessions, and the counters."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from extproc.errors import InternalError, RequestError
from extproc.protocol.early_close import EarlyClose
from extproc.protocol.interfaces import Observer, PendingDecision, RequestHandler, RouteRequest
from extproc.protocol.request_buffer import BodyBudget
from extproc.protocol.settings import SessionSettings
from extproc.types import Decision

__all__ = ["SessionShared"]

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class SessionShared:
    """One object per process, handed to every session."""

    __slots__ = ("_warned", "budget", "early_close", "handler", "observer", "settings")

    def __init__(
        self,
        handler: RequestHandler,
        budget: BodyBudget,
        settings: SessionSettings | None = None,
        observer: Observer | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.handler = handler
        self.budget = budget
        self.settings = settings or SessionSettings()
        """May be replaced: sessions that begin afterwards use the new ones."""
        self.observer: Observer = observer or Observer()
        self.early_close = EarlyClose(self.observer, rng)
        self._warned = False

    def decide(self, request: RouteRequest, now: float) -> Decision | PendingDecision | RequestError:
        """Ask the core; errors come back as values, a defect of the core as InternalError."""
        try:
            return self.handler.decide(request, now)
        except RequestError as error:
            # What it was raised from, and where, leads by way of our callers' frames back to it: a cycle that would keep
            # the body, and the stream with it, until a full collection, which never comes by itself.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            return error
        except Exception:  # noqa: BLE001 - a defect of ours becomes a 500
            _log.exception("the decision failed")
            self.observer.internal_error("decide")
            return InternalError("The endpoint picker failed to decide.")

    def notify(self, where: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """Call the core where nobody waits for its answer: a defect there is logged and counted, and returns None."""
        try:
            return call(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, the stream goes on
            self._on_failure(where)
            return None

    def show(self, decision_id: str, data: bytes, end_of_stream: bool, now: float) -> None:
        """Show the core a piece of a response's body, as `tell` would: this one comes with every token."""
        try:
            self.handler.response_body(decision_id, data, end_of_stream, now)
        except Exception:  # noqa: BLE001 - as above
            self._on_failure("response_body")

    def _on_failure(self, where: str) -> None:
        _log.exception("the core failed to take note", extra={"where": where})
        self.observer.internal_error(where)

    def warn_streamed(self) -> None:
        """Say once per process that a gateway hides the body from the decision."""
        if not self._warned:
            self._warned = True
            _log.warning("a gateway streams request bodies (body mode STREAMED): decisions are made without the prompt")
