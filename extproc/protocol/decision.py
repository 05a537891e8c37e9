"""Ask for a decision, and put the answer into the words of the wire."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from extproc.protocol.events import Direction
from extproc.protocol.replies import BodyReply, DynamicMetadata, HeadersReply
from extproc.protocol.seams import Ask, Routed
from extproc.protocol.settings import EXPLAIN_HEADER, SessionSettings

__all__ = ["SentDecision", "ask_of", "header_text"]

_EXPLAIN_WANTED: Final = frozenset({"1", "true"})
_UNSAFE: Final = re.compile(r"[^\x20-\x7e]+")
_HEADER_TEXT_CHARS: Final = 4096
"""Envoy refuses header edits beyond 80 KB with a 500, and most clients beyond 8 KB a line."""


def ask_of(
    headers: Mapping[str, str],
    body: bytes,
    complete: bool,
    subset: frozenset[str] | None,
    peer: str,
    settings: SessionSettings,
) -> Ask:
    """Put together what the core is asked."""
    return Ask(
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


def header_text(text: str) -> str:
    """Return `text` as one line of printable ASCII, cut to 4096 characters: a line break would be answered by a 500."""
    return _UNSAFE.sub(" ", text[:_HEADER_TEXT_CHARS])


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
        cls, routed: Routed, headers: Mapping[str, str], settings: SessionSettings, *, retriable: bool
    ) -> SentDecision:
        """Word a decision for the request with these headers; control headers that are there are removed.

        `retriable` goes into the metadata as `retry: true`, by which a route may allow retries: only where the request
        has ended without trailers, because Envoy 1.40 doubles the body of a retried request that ends in trailers
        (envoyproxy/envoy#45470).
        """
        destination = routed.destination
        own: dict[str, str | bool] = {"decision": routed.decision_id}
        if retriable:
            own["retry"] = True
        explain = routed.explain
        if explain:
            explain = own["explain"] = header_text(explain)
        return cls(
            id=routed.decision_id,
            explain=explain,
            set_headers=((settings.destination_header, destination), *routed.set_headers),
            remove_headers=(*(name for name in settings.control_headers if name in headers), *routed.remove_headers),
            dynamic_metadata={
                settings.destination_namespace: {
                    settings.destination_header: destination,
                    settings.decision_key: routed.decision_id,
                },
                settings.own_namespace: own,
            },
            clear_route_cache=settings.clear_route_cache,
        )

    @classmethod
    def unrouted(cls, headers: Mapping[str, str], settings: SessionSettings) -> SentDecision:
        """Word the absence of a decision: no client's own destination may stand in for ours."""
        names = (settings.destination_header, *settings.control_headers)
        return cls("", "", (), tuple(name for name in names if name in headers), None, False)

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
