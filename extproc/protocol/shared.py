"""What all sessions of a process share: handler, budget, settings for new sessions, observer."""

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
        """May be replaced: sessions that begin afterwards use the new value."""
        self.observer: Observer = observer or Observer()
        self.early_close = EarlyClose(self.observer, rng)
        self._warned = False

    def decide(self, request: RouteRequest, now: float) -> Decision | PendingDecision | RequestError:
        """Request a decision; errors are returned, an unexpected one as InternalError."""
        try:
            return self.handler.decide(request, now)
        except RequestError as error:
            # Traceback and cause refer to our callers' frames, which refer to the error: a cycle that would keep the body
            # and the stream in memory until a full collection, which never runs by itself.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            return error
        except Exception:  # noqa: BLE001 - an unexpected error becomes a 500
            _log.exception("a decision failed unexpectedly")
            self.observer.internal_error("decide")
            return InternalError("The endpoint picker failed to choose an endpoint.")

    def notify(self, where: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """Call the handler; an unexpected error is logged and counted, and None returned: the stream goes on."""
        try:
            return call(*args, **kwargs)
        except Exception:  # noqa: BLE001 - as above
            self._on_failure(where)
            return None

    def response_body(self, decision_id: str, data: bytes) -> None:
        """Pass a piece of a response's body to the handler, as `notify` would: called with every token."""
        try:
            self.handler.response_body(decision_id, data)
        except Exception:  # noqa: BLE001 - as above
            self._on_failure("response_body")

    def _on_failure(self, where: str) -> None:
        _log.exception("an event of a request could not be processed; its stream goes on", extra={"where": where})
        self.observer.internal_error(where)

    def warn_streamed(self) -> None:
        """Warn once per process that decisions are made without the body."""
        if not self._warned:
            self._warned = True
            _log.warning("a gateway sends bodies in mode STREAMED: decisions are made without the prompt")
