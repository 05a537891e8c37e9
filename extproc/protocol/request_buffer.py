"""What has been read of one request and not been answered yet."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from extproc.protocol.body import BodyBuffer
from extproc.protocol.decision import route_request_of
from extproc.protocol.events import Metadata
from extproc.protocol.interfaces import RouteRequest
from extproc.protocol.settings import SessionSettings
from extproc.protocol.shared import SessionShared
from extproc.protocol.subset import parse_subset

__all__ = ["RequestBuffer"]

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class RequestBuffer(msgspec.Struct, eq=False):
    """Headers, body and subset hint until the decision, and how far the request has come; a struct as in `events`."""

    shared: SessionShared
    settings: SessionSettings
    headers: Mapping[str, str] = _NO_HEADERS
    body: BodyBuffer | None = None
    """None: no body is kept (there is none, or the gateway does not show it before the decision)."""
    subset: frozenset[str] | None = None
    ended: bool = False
    """An `end_of_stream` has been seen."""
    trailers: bool = False
    """The trailers have been seen."""
    owed_bodies: int = 0
    """Body messages, of modes that want one reply each, that came while the decision was held."""

    @property
    def retriable(self) -> bool:
        """Whether the request has ended, and without trailers."""
        return self.ended and not self.trailers

    @property
    def too_large(self) -> bool:
        """Whether the body exceeds what one request may hold."""
        return self.body is not None and self.body.size_bytes > self.settings.max_inspect_bytes

    def note_subset(self, metadata: Metadata | None) -> None:
        """Take the subset hint, if this message brings one (Envoy repeats it on every message)."""
        if metadata is not None:
            value = metadata.value(self.settings.subset_namespace, self.settings.subset_key)
            if value is not None:
                self.subset = parse_subset(value)

    def keep(self, data: bytes, overhead_bytes: int = 0, *, last: bool = False) -> None:
        """Hold body bytes; `overhead_bytes`: what else is held for this request from now on."""
        if self.body is None:
            self.body = BodyBuffer(self.shared.budget, overhead_bytes)
        if data:
            self.body.add(data, last=last)

    def chunks(self) -> list[bytes]:
        """Return the body held, as chunks."""
        return [] if self.body is None else self.body.chunks()

    def ask(self, peer: str, *, complete: bool) -> RouteRequest:
        """Put together what the core is asked; `complete` turns False where the body exceeds the inspection limit."""
        body = b"" if self.body is None else self.body.joined()
        if len(body) > self.settings.max_inspect_bytes:
            body, complete = body[: self.settings.max_inspect_bytes], False
            self.shared.observer.body_cut("inspect_limit")
        return route_request_of(self.headers, body, complete, self.subset, peer, self.settings)

    def drop(self) -> None:
        """Let go of everything; how far the request has come stays known."""
        if self.body is not None:
            self.body.release()
            self.body = None
        self.headers = _NO_HEADERS
        self.subset = None
