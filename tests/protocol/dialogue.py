"""A scripted handler and short words for events and replies, so that a test reads like a dialogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from extproc.errors import RequestError
from extproc.protocol.early_close import Gateway
from extproc.protocol.events import (
    BodyMode,
    Direction,
    Event,
    HalfClosed,
    ProtocolConfig,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from extproc.protocol.interfaces import Observer, PendingDecision, RouteRequest, StreamEnd
from extproc.protocol.replies import BodyReply, DecisionReply, FinishWith, HeadersReply, Reply, TrailersReply
from extproc.protocol.request_buffer import BodyBudget
from extproc.protocol.session import Session
from extproc.protocol.settings import SessionSettings
from extproc.protocol.shared import SessionShared
from extproc.types import Decision, Endpoint, RequestKind

DESTINATION = "x-gateway-destination-endpoint"
CHAT = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}


@dataclass(frozen=True)
class PlainMetadata:
    """Metadata of plain values: `{namespace: {key: value}}`."""

    namespaces: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def value(self, namespace: str, key: str) -> object | None:
        return self.namespaces.get(namespace, {}).get(key)


def chosen(destination: str = "10.0.0.1:8000", decision_id: str = "d1", **more: Any) -> Decision:
    """Make a decision for an endpoint."""
    address, _, port = destination.rpartition(":")
    fields: dict[str, Any] = {
        "fallbacks": (),
        "strategy": "weighted",
        "scorers": (),
        "candidates": (),
        "filtered": (),
        "note": "",
        "kind": RequestKind.CHAT,
        "model": "m",
        "prompt_bytes": 0,
        "matched_bytes": 0,
        "prompt_tokens": 0,
        "predicted_cached_tokens": 0,
        "decided_at": 0.0,
    }
    return Decision(id=decision_id, endpoint=Endpoint(address, int(port)), **{**fields, **more})


@dataclass
class ScriptedHandler:
    """Answers `decide` with `answer` and writes down everything it is told."""

    answer: Decision | PendingDecision | RequestError | Exception | Callable[[RouteRequest], Any] = field(
        default_factory=chosen
    )
    explained: str = "because"
    by_log: bool = False
    wants_body: bool = False
    failing: str = ""
    asks: list[RouteRequest] = field(default_factory=list)
    told: list[tuple[Any, ...]] = field(default_factory=list)

    def decide(self, request: RouteRequest, now: float) -> Any:
        self.asks.append(request)
        answer = self.answer(request) if callable(self.answer) else self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _note(self, what: str, *details: Any) -> None:
        self.told.append((what, *details))
        if self.failing == what:
            raise ZeroDivisionError

    def explanation(self, decision: Decision) -> str:
        if self.failing == "explanation":
            raise ZeroDivisionError
        return self.explained

    def withdraw(self, pending: PendingDecision, now: float) -> None:
        self._note("withdraw", now)

    def access_log_connected(self, peer: str) -> bool:
        if self.failing == "access_log_connected":
            raise ZeroDivisionError
        return self.by_log

    def response_started(
        self, decision_id: str, status: int, headers: Mapping[str, str], now: float, served: str | None
    ) -> bool:
        self._note("started", decision_id, status, served)
        return self.wants_body

    def response_body(self, decision_id: str, data: bytes) -> None:
        self._note("body", decision_id, data)

    def ended(self, decision_id: str, how: StreamEnd, peer: str, now: float) -> None:
        self._note("ended", decision_id, how)

    @property
    def ends(self) -> list[StreamEnd]:
        return [entry[2] for entry in self.told if entry[0] == "ended"]


class Counters(Observer):
    """Writes down what is counted."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def stream_opened(self) -> None:
        self.seen.append(("opened",))

    def stream_ended(self, how: str) -> None:
        self.seen.append(("ended", how))

    def refused(self, error: RequestError, headers: Mapping[str, str]) -> None:
        self.seen.append(("refused", error.status, error.reason))

    def protocol_error(self, kind: str) -> None:
        self.seen.append(("protocol_error", kind))

    def deadline_passed(self) -> None:
        self.seen.append(("deadline",))

    def late_response(self, kind: str) -> None:
        self.seen.append(("late", kind))

    def body_cut(self, why: str) -> None:
        self.seen.append(("cut", why))

    def internal_error(self, where: str) -> None:
        self.seen.append(("internal", where))

    def access_log_streams(self, count: int) -> None:
        self.seen.append(("log_streams", count))

    def access_log_entry(self, kind: str) -> None:
        self.seen.append(("log_entry", kind))


@dataclass
class Dialogue:
    """One session with its surroundings; `say` sends events at a time and returns all replies."""

    handler: ScriptedHandler = field(default_factory=ScriptedHandler)
    settings: SessionSettings = field(default_factory=SessionSettings)
    budget: BodyBudget = field(default_factory=lambda: BodyBudget(1 << 30))
    counters: Counters = field(default_factory=Counters)
    gateway: Gateway = Gateway.UNKNOWN

    def __post_init__(self) -> None:
        self.shared = SessionShared(self.handler, self.budget, self.settings, self.counters)
        self.session = Session(self.shared, "peer", self.gateway)

    def say(self, *events: Event, now: float = 0.0) -> list[Reply]:
        return [reply for event in events for reply in self.session.receive(event, now)]


FDS = ProtocolConfig(BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX)
DIRECT = ProtocolConfig(BodyMode.FULL_DUPLEX, BodyMode.NONE)
HALF_CLOSED = HalfClosed()
TRAILERS = RequestTrailers()
PASS = BodyReply(Direction.REQUEST)
TRAILERS_PASS = TrailersReply(Direction.REQUEST)


def config(request: BodyMode, response: BodyMode = BodyMode.NONE) -> ProtocolConfig:
    return ProtocolConfig(request, response)


def headers(
    protocol: ProtocolConfig | None = DIRECT, *, end: bool = False, hint: object = None, **extra: str
) -> RequestHeaders:
    metadata = None if hint is None else subset(hint)
    named = {name.replace("_", "-"): value for name, value in extra.items()}
    return RequestHeaders({**CHAT, **named}, end, protocol, metadata, 100)


def subset(value: object) -> PlainMetadata:
    return PlainMetadata({"envoy.lb.subset_hint": {f"{DESTINATION}-subset": value}})


def body(data: bytes = b"", *, end: bool = False) -> RequestBody:
    return RequestBody(data, end)


def decision(
    *,
    retry: bool = True,
    remove: tuple[str, ...] = (),
    made: Decision | None = None,
    explain: str = "",
    answers: Any = RequestHeaders,
    data: bytes | None = None,
) -> DecisionReply:
    """Return the reply that carries a decision."""
    return DecisionReply(answers, made or chosen(), remove, retry, explain, data)


def piece(data: bytes, *, end: bool = False, direction: Direction = Direction.REQUEST) -> BodyReply:
    return BodyReply(direction, data, end)


def response(status: str = "200", *, end: bool = False, **extra: str) -> ResponseHeaders:
    return ResponseHeaders({":status": status, **extra}, end)


def response_body(data: bytes = b"", *, end: bool = False) -> ResponseBody:
    return ResponseBody(data, end)


LAST = FinishWith(BodyReply(Direction.REQUEST, b"", True))
RESPONSE_TRAILERS = ResponseTrailers()
RESPONSE_HEADERS_PASS = HeadersReply(Direction.RESPONSE)
RESPONSE_PASS = BodyReply(Direction.RESPONSE)
RESPONSE_TRAILERS_PASS = TrailersReply(Direction.RESPONSE)
