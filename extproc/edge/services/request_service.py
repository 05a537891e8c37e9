"""Connects sessions and the access log to the Router: parses requests, routes them, and ends each of them once.

Sessions call it as their `RequestHandler`; the access log passes its entries to `on_log_entry`. What happens to requests
is passed to one `Observer`, to which metrics, log and remembered decisions subscribe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from extproc.config.schema import Config
from extproc.edge.services.estimated_completions import EstimatedCompletions
from extproc.pool.ledger import IdState
from extproc.protocol.interfaces import Observer, PendingDecision, RouteRequest, StreamEnd
from extproc.protocol.outcome import LogEntry, is_local_reply, log_outcome, served_elsewhere, stream_outcome
from extproc.request import UsageReader, bounded, parse
from extproc.router import Router
from extproc.routing.explain import brief, compact
from extproc.types import Decision, Finished, InferenceRequest, Outcome, RequestKind, Usage

__all__ = ["RequestService"]

_log = logging.getLogger(__name__)

_OK: Final = Outcome.OK
_DETACHED: Final = StreamEnd.DETACHED
"""Module-level names: before Python 3.12 an enum member is slow to look up."""
_NO_ATTEMPTS: Final[Mapping[str, Outcome]] = {}
_MOST_ATTEMPTS: Final = 8
"""Attempts remembered of one request; our Envoy profiles make at most four."""
_BODILESS: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


@dataclass(slots=True)
class _Response:
    """What is known of a response that passes the picker."""

    status: int
    local: bool
    served: str
    usage: UsageReader | None


class RequestService:
    """Implements `protocol.interfaces.RequestHandler` and takes the access log, over one Router."""

    def __init__(
        self,
        router: Router,
        observer: Observer,
        *,
        log_connected: Callable[[str], bool],
        log_seen: Callable[[str], bool] | None = None,
        mark_busy: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Become the one to whom `router` reports the ends that it finds by itself.

        `log_connected` says whether the access log of a peer (its address on an ext_proc stream) is connected, `log_seen`
        whether it is or was (default: the same); `mark_busy` is called with the id of each endpoint that gets a request.
        """
        self._router = router
        self._observer = observer
        self._log_connected = log_connected
        self._log_seen = log_seen or log_connected
        self._mark_busy = mark_busy
        self._clock = clock
        self._responses: dict[str, _Response] = {}
        self._estimated = EstimatedCompletions()
        self._ignored: set[str] = set()
        self._by_request: dict[str, str] = {}
        self._tried: dict[str, dict[str, Outcome]] = {}
        """By decision: how failed attempts ended, by endpoint; only of requests under way."""
        router.on_released = self._on_released
        self.configure(router.config)

    def configure(self, config: Config) -> None:
        """Take what concerns requests from a configuration."""
        self._session_header = config.routing.session_header.lower()
        self._lease_s = float(config.in_flight.lease)
        self._explained = brief if config.explain.header == "brief" else compact

    # protocol.interfaces.RequestHandler

    def decide(self, request: RouteRequest, now: float) -> Decision:
        """Parse and route one request; raises RequestError."""
        started = perf_counter()
        decision = self._router.route(self._parse(request), now=now)
        duration_s = perf_counter() - started
        self._observer.decided(decision, duration_s, request.headers)
        self._mark_busy(decision.endpoint.id)
        if decision.request_id:
            self._by_request[decision.request_id] = decision.id
        return decision

    def explanation(self, decision: Decision) -> str:
        """Return the explanation for the client, in the configured form."""
        return self._explained(decision)

    def withdraw(self, pending: PendingDecision, now: float) -> None:
        """Do nothing: `decide` returns every decision itself."""

    def access_log_connected(self, peer: str) -> bool:
        """Return whether this peer's access log is connected."""
        return self._log_connected(peer)

    def response_started(
        self, decision_id: str, status: int, headers: Mapping[str, str], now: float, served: str | None
    ) -> bool:
        """Process the response's headers; return True where its body may contain the engine's usage."""
        if not self._router.is_open(decision_id):
            return False
        local = is_local_reply(headers)
        good = 200 <= status < 300
        reader = UsageReader(headers.get("content-type", "")) if good and not local else None
        self._responses[decision_id] = _Response(status, local, served or "", reader)
        self._observer.response_started(decision_id, status)
        if good:
            self._router.response_headers(decision_id, now=now)
        return reader is not None

    def response_body(self, decision_id: str, data: bytes) -> None:
        """Search for the engine's usage."""
        response = self._responses.get(decision_id)
        if response is not None and response.usage is not None:
            response.usage.feed(data)

    def ended(self, decision_id: str, how: StreamEnd, peer: str, now: float) -> None:
        """End the request if its stream has shown the end; otherwise the access log will, or else the end is estimated."""
        response = self._responses.pop(decision_id, None)
        if response is None:
            outcome = None if how is _DETACHED else stream_outcome(how, 0, local=False)
        else:
            outcome = stream_outcome(how, response.status, local=response.local)
        if outcome is None:
            if not self._log_seen(peer):
                self._estimated.expect(decision_id, now)
                self._router.unseen(decision_id, now=now, guessed=self._estimated.guesses)
        elif response is None:
            self._finish(decision_id, outcome, now)
        else:
            usage = response.usage.result() if response.usage is not None else None
            self._finish(decision_id, outcome, now, usage, "" if response.local else response.served)

    def expire(self, now: float) -> None:
        """Release requests whose end nobody reports, after their estimated duration; call it about once a second."""
        for decision_id in self._estimated.due(now):
            if (finished := self._router.finished(decision_id, Outcome.LEASE_EXPIRED, now=now)) is not None:
                self._forget(finished)

    # Envoy's access log

    def on_log_entry(self, entry: LogEntry) -> None:
        """Process one entry: a final one ends its request, an interim one renews its lease."""
        now = self._clock()
        if entry.attempt:
            self._note_attempt(entry)
            return
        if not entry.decision_id:
            self._end_unsent(entry, now)
            return
        outcome = log_outcome(entry)
        if outcome is None:
            self._router.renew(entry.decision_id, now=now)
            return
        served = ""
        if outcome is _OK or outcome is not Outcome.CONNECT_FAILURE:
            served = entry.served or entry.upstream
        tried = self._tried.get(entry.decision_id, _NO_ATTEMPTS) if self._tried else _NO_ATTEMPTS
        finished = self._finish(entry.decision_id, outcome, now, entry.usage, served, tried)
        if finished is None:
            # Several pickers: the log of one Envoy worker goes to one of them, whichever has decided.
            state = self._router.id_state(entry.decision_id)
            self._observer.access_log_entry("late" if state is IdState.ENDED else "foreign")
        elif served and entry.attempts <= 1 and served_elsewhere(entry, finished.decision.endpoint.id):
            self._warn_ignored(finished.decision.endpoint.id, served)

    def _note_attempt(self, entry: LogEntry) -> None:
        """Remember how an attempt of a request under way ended: the final entry names only the endpoint of the last one.

        With a forged request id a client can at most cause a failure of another request to be attributed to a wrong endpoint.
        """
        decision_id = entry.decision_id or self._by_request.get(bounded(entry.request_id), "")
        outcome = log_outcome(entry)
        if entry.upstream and outcome is not None and outcome is not _OK and self._router.is_open(decision_id):
            tried = self._tried.setdefault(decision_id, {})
            if len(tried) < _MOST_ATTEMPTS:
                tried[entry.upstream] = outcome

    def _end_unsent(self, entry: LogEntry, now: float) -> None:
        """End the request of an entry that does not name its decision: the gateway ended it before our answer arrived.

        Without this, a client that disconnects in that moment would occupy its slot until the lease runs out. A request
        id can be forged, which ends the other request's accounting, no more: no health score changes.
        """
        decision_id = self._by_request.get(bounded(entry.request_id), "")
        if decision_id:
            gone = log_outcome(entry) is Outcome.CLIENT_GONE
            self._finish(decision_id, Outcome.CLIENT_GONE if gone else Outcome.ABORTED, now)

    def _warn_ignored(self, chosen: str, served: str) -> None:
        """Warn once per endpoint that the gateway sent its request elsewhere without trying it."""
        if chosen not in self._ignored and len(self._ignored) < 1000:
            self._ignored.add(chosen)
            _log.warning(
                "the gateway ignored the chosen endpoint: add it to the gateway's cluster",
                extra={"endpoint": chosen, "served": served},
            )

    # Ends

    def _finish(
        self,
        decision_id: str,
        outcome: Outcome,
        now: float,
        usage: Usage | None = None,
        served_by: str = "",
        tried: Mapping[str, Outcome] = _NO_ATTEMPTS,
    ) -> Finished | None:
        """End a request; None where it is not open."""
        finished = self._router.finished(decision_id, outcome, now=now, usage=usage, served_by=served_by, tried=tried)
        if finished is not None:
            if finished.outcome is _OK:
                self._estimated.learn(finished.duration_s)
            self._forget(finished)
        return finished

    def _on_released(self, finished: Finished) -> None:
        """Process an end that the router has found by itself."""
        if finished.outcome is Outcome.LEASE_EXPIRED and finished.duration_s < self._lease_s:
            # An engine's metrics page has shown that it has ended.
            self._estimated.learn_bound(finished.duration_s)
        self._forget(finished)

    def _forget(self, finished: Finished) -> None:
        """Forget a request that has ended, and report its end."""
        decision = finished.decision
        if self._by_request.get(decision.request_id) == decision.id:
            del self._by_request[decision.request_id]
        if self._tried:
            self._tried.pop(decision.id, None)
        self._observer.ended(finished)

    # Within

    def _parse(self, request: RouteRequest) -> InferenceRequest:
        headers = request.headers
        session_key = headers.get(self._session_header, "")
        request_id = headers.get("x-request-id", "")
        if request.upgrade or request.method in _BODILESS or (not request.body and not request.complete):
            # Nothing to parse: no body by definition, or a gateway that does not send it.
            return InferenceRequest(
                RequestKind.OTHER,
                session_key=bounded(session_key),
                subset=request.subset,
                request_id=bounded(request_id),
                complete=False,
                explain=request.explain,
            )
        parsed = parse(
            request.path,
            request.body,
            content_type=headers.get("content-type", ""),
            content_encoding=headers.get("content-encoding", ""),
            complete=request.complete,
            session_key=session_key,
            subset=request.subset,
            request_id=request_id,
            explain=request.explain,
        )
        if request.complete and not parsed.complete:
            self._observer.body_cut("elements")
        return parsed
