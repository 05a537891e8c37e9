"""Ask for a decision, and put the answer into the words of the wire."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, TypeAlias

import msgspec

from extproc.protocol.events import Direction, Metadata
from extproc.protocol.interfaces import RouteRequest, RouteResult
from extproc.protocol.replies import BodyReply, DynamicMetadata, HeadersReply
from extproc.protocol.settings import EXPLAIN_HEADER, SessionSettings

__all__ = [
    "DecisionMetadata",
    "Headers",
    "Recurring",
    "SentDecision",
    "header_text",
    "route_request_of",
    "served_by",
    "undecided_headers",
]

Headers: TypeAlias = tuple[tuple[str, str], ...]

_EXPLAIN_WANTED: Final = frozenset({"1", "true"})
_UNSAFE: Final = re.compile(r"[^\x20-\x7e]+")
_HEADER_TEXT_CHARS: Final = 4096
"""Envoy refuses header edits beyond 80 KB with a 500, and most clients beyond 8 KB a line."""


def route_request_of(
    headers: Mapping[str, str],
    body: bytes,
    complete: bool,
    subset: frozenset[str] | None,
    peer: str,
    settings: SessionSettings,
) -> RouteRequest:
    """Put together what the core is asked."""
    return RouteRequest(
        method=headers.get(":method", ""),
        path=headers.get(":path", ""),
        headers=headers,
        body=body,
        complete=complete,
        subset=subset,
        upgrade="upgrade" in headers,
        explain=settings.allow_explain and headers.get(EXPLAIN_HEADER, "").lower() in _EXPLAIN_WANTED,
        peer=peer,
    )


def served_by(metadata: Metadata | None, settings: SessionSettings) -> str | None:
    """Return the endpoint that answered, in the gateway's own words; None where it does not say."""
    value = None if metadata is None else metadata.value(settings.destination_namespace, settings.served_key)
    return value if isinstance(value, str) else None


def header_text(text: str) -> str:
    """Return `text` as one line of printable ASCII, cut to 4096 characters: a line break would be answered by a 500."""
    return _UNSAFE.sub(" ", text[:_HEADER_TEXT_CHARS])


def _control_headers_in(headers: Mapping[str, str], settings: SessionSettings) -> tuple[str, ...]:
    """Return those of a request's headers that are meant for a picker, in order of name; 0.2 us where there are none."""
    if headers.keys().isdisjoint(settings.control_headers):
        return ()
    return tuple(sorted(headers.keys() & settings.control_headers))


def undecided_headers(headers: Mapping[str, str], settings: SessionSettings) -> HeadersReply:
    """Let a request's headers go before the decision, without those meant for a picker: trailers leave no later place for that."""
    return HeadersReply(Direction.REQUEST, remove_headers=_control_headers_in(headers, settings))


class Recurring:
    """What recurs of a decision's wording; known by identity, so that an edge can keep what it has made of it."""

    __slots__ = (
        "decision_key",
        "destination",
        "destination_header",
        "destination_namespace",
        "own_namespace",
        "retriable",
        "set_headers",
    )

    def __init__(
        self, names: tuple[str, str, str, str], destination: str, set_headers: Headers, retriable: bool
    ) -> None:
        self.destination_namespace, self.destination_header, self.decision_key, self.own_namespace = names
        self.destination = destination
        self.set_headers = ((self.destination_header, destination), *set_headers)
        self.retriable = retriable


_recurring: Final = lru_cache(maxsize=4096)(Recurring)


class DecisionMetadata(Mapping[str, Mapping[str, str | bool]]):
    """The metadata of a decision without an explanation: what recurs, and the id; a mapping for whoever reads it."""

    __slots__ = ("decision_id", "recurring")

    def __init__(self, recurring: Recurring, decision_id: str) -> None:
        self.recurring = recurring
        self.decision_id = decision_id

    def plain(self) -> dict[str, dict[str, str | bool]]:
        """Return what is said."""
        same = self.recurring
        own: dict[str, str | bool] = {"decision": self.decision_id}
        if same.retriable:
            own["retry"] = True
        destination: dict[str, str | bool] = {
            same.destination_header: same.destination,
            same.decision_key: self.decision_id,
        }
        return {same.destination_namespace: destination, same.own_namespace: own}

    def __getitem__(self, namespace: str) -> Mapping[str, str | bool]:
        """Return what is said in one namespace. Raises KeyError."""
        return self.plain()[namespace]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the namespaces."""
        return iter(self.plain())

    def __len__(self) -> int:
        """Count the namespaces."""
        return len(self.plain())


class SentDecision(msgspec.Struct, frozen=True):
    """A decision as it goes to the gateway: as a header and as metadata, because gateways read one or the other.

    A struct for the reason that stands in `events`.
    """

    id: str
    explain: str
    set_headers: tuple[tuple[str, str], ...]
    remove_headers: tuple[str, ...]
    dynamic_metadata: DynamicMetadata | None
    clear_route_cache: bool

    @classmethod
    def of(
        cls, routed: RouteResult, headers: Mapping[str, str], settings: SessionSettings, *, retriable: bool
    ) -> SentDecision:
        """Word a decision for the request with these headers; control headers that are there are removed.

        `retriable` goes into the metadata as `retry: true`, by which a route may allow retries: only where the request
        has ended without trailers, because Envoy 1.40 doubles the body of a retried request that ends in trailers
        (envoyproxy/envoy#45470).
        """
        decision_id, explain = routed.decision_id, routed.explain
        names = (
            settings.destination_namespace,
            settings.destination_header,
            settings.decision_key,
            settings.own_namespace,
        )
        recurring = _recurring(names, routed.destination, routed.set_headers, retriable)
        metadata: DynamicMetadata = DecisionMetadata(recurring, decision_id)
        if explain:
            explain = header_text(explain)
            metadata = {**metadata, settings.own_namespace: {**metadata[settings.own_namespace], "explain": explain}}
        removed = routed.remove_headers
        if controls := _control_headers_in(headers, settings):
            removed = (*controls, *removed)
        return cls(decision_id, explain, recurring.set_headers, removed, metadata, settings.clear_route_cache)

    @classmethod
    def unrouted(cls, headers: Mapping[str, str], settings: SessionSettings) -> SentDecision:
        """Word the absence of a decision: no client's own destination may stand in for ours."""
        removed = _control_headers_in(headers, settings)
        if settings.destination_header in headers:
            removed = (settings.destination_header, *removed)
        return cls("", "", (), removed, None, False)

    def headers_reply(self) -> HeadersReply:
        """Carry the decision in the reply to the request's headers."""
        return HeadersReply(
            Direction.REQUEST, self.set_headers, self.remove_headers, self.dynamic_metadata, self.clear_route_cache
        )

    def body_reply(self, data: bytes | None) -> BodyReply:
        """Carry the decision in the reply to a buffered body; `data` replaces the body, None leaves it."""
        set_headers = self.set_headers
        if data is not None:
            # Envoy refuses a changed body whose length differs from the content-length set with it.
            set_headers = (*set_headers, ("content-length", str(len(data))))
        return BodyReply(
            Direction.REQUEST,
            data,
            False,
            False,
            set_headers,
            self.remove_headers,
            self.dynamic_metadata,
            self.clear_route_cache,
        )
