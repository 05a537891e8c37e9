"""State behind Envoy's gRPC access log: which hosts send one, and where its entries go.

The access log says how requests ended whose response does not pass through the picker. Nothing is decided here: entries
go to a sink, and what they mean is decided in `protocol.outcome`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from extproc.edge.envoy_wire.access_log import decode_entries
from extproc.protocol.early_close import peer_host
from extproc.protocol.interfaces import Observer
from extproc.protocol.outcome import LogEntry

__all__ = ["AccessLogService", "LogSink"]

LogSink = Callable[[LogEntry], None]

_log = logging.getLogger(__name__)
_MOST_HOSTS: Final = 10_000
"""Hosts remembered; requests of further ones are released by estimate once their log is gone."""


class AccessLogService:
    """Counts the open access log streams by host, and passes their entries on."""

    def __init__(self, sink: LogSink, observer: Observer) -> None:
        self._sink = sink
        self._observer = observer
        self._streams: dict[Callable[[], None], str] = {}
        self._hosts: Counter[str] = Counter()
        self._known: set[str] = set()
        self.closed = False
        """Whether `close` was called: streams that open later must end at once."""

    @property
    def streams(self) -> int:
        """Access log streams that are open; Envoy opens one per worker, with its first entry."""
        return len(self._streams)

    def logs_of(self, peer: str) -> bool:
        """Whether a stream from the same host as `peer` (`ipv4:address:port`) is open; ports differ."""
        return peer_host(peer) in self._hosts

    def has_logged(self, peer: str) -> bool:
        """Whether a stream from the same host as `peer` is open or was before."""
        return peer_host(peer) in self._known

    def close(self) -> None:
        """Call `end` of every open stream: Envoy never ends them, and an open call would delay the server's stop."""
        self.closed = True
        for end in tuple(self._streams):
            end()

    def join(self, end: Callable[[], None], peer: str) -> None:
        """Count a stream that has opened; `end` is called by `close`."""
        self._streams[end] = peer
        self._count(1, peer)

    def leave(self, end: Callable[[], None]) -> None:
        """Count a stream that has ended; no-op when repeated."""
        peer = self._streams.pop(end, None)
        if peer is not None:
            self._count(-1, peer)

    def _count(self, change: int, peer: str) -> None:
        host = peer_host(peer)
        self._hosts[host] += change
        if len(self._known) < _MOST_HOSTS:
            self._known.add(host)
        if not self._hosts[host]:
            del self._hosts[host]
        self._observer.access_log_streams(self.streams)

    def take(self, data: bytes) -> None:
        """Pass on the entries of one message; one that cannot be read, or a sink that raises, does not end the stream."""
        try:
            entries = decode_entries(data)
        except DecodeError:
            self._observer.access_log_entry("malformed")
            _log.warning("an access log message is not readable", extra={"message_bytes": len(data)})
            return
        for entry in entries:
            self._pass_on(entry)

    def _pass_on(self, entry: LogEntry) -> None:
        if entry.attempt:
            self._observer.access_log_entry("attempt")
        elif not entry.decision_id:
            self._observer.access_log_entry("uncorrelated")
            if entry.interim:
                return
        else:
            self._observer.access_log_entry("interim" if entry.interim else "final")
        try:
            self._sink(entry)
        except Exception:  # noqa: BLE001 - the next entry may still be taken
            self._observer.internal_error("access_log")
            _log.exception("an access log entry was lost", extra={"decision": entry.decision_id})
