"""The ledger of decisions in flight: each request's endpoint, its uncached tokens, and the end of its lease.

Decides whether a request has been released (exactly once) and which ids have ended before. What the end of a request
means for its endpoint's health (`health`) and for the estimated load (`load`) is decided in `pool`.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

__all__ = ["REMEMBERED_IDS", "Entry", "IdState", "Ledger"]

REMEMBERED_IDS = 10_000
"""Ended ids kept: at 1,000 requests/s those of ten seconds; Envoy flushes access log entries after 1 s."""


_SPARE_LEASES: Final = 64
"""Leases of ended requests that may stay in the heap before it is compacted."""


class IdState(enum.Enum):
    """What the ledger knows of a decision id."""

    OPEN = "open"
    ENDED = "ended"
    """Released before; the access log entry is a duplicate or late."""
    UNKNOWN = "unknown"
    """Another picker's decision, or ended too long ago."""


class Entry(msgspec.Struct, gc=False):
    """One request in flight; only the ledger changes it."""

    decision_id: str
    endpoint_id: str
    uncached_tokens: int
    """Prompt tokens the endpoint has to compute, as estimated at the decision."""
    sent_at: float
    request_id: str
    lease_s: float
    expires_at: float
    prefilled: bool = False
    """Its prompt is known to have been computed."""
    unseen_at: float | None = None
    """When it became known that nobody will report its end; None: somebody will."""
    guessed: bool = False
    """Nothing is known of how long such requests take either."""


@dataclass(slots=True)
class _Account:
    """One endpoint's requests, oldest first, and sums over them."""

    entries: dict[str, Entry]
    tokens: int = 0
    """Prompt tokens not yet computed."""
    unseen: int = 0
    guessed: int = 0


class Ledger:
    """Requests in flight, by decision and by endpoint. O(1) but for `expire`, `orphan` and `excess`."""

    def __init__(self, *, remembered_ids: int = REMEMBERED_IDS) -> None:
        self._open: dict[str, Entry] = {}
        self._accounts: dict[str, _Account] = {}
        self._leases: list[tuple[float, str]] = []
        """Heap of (no later than the lease's end, id); `expire` skips ids that have ended or were renewed meanwhile."""
        # Not a dict: taking its oldest entry becomes slower with every entry that was taken before.
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._remembered_ids = remembered_ids

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self, decision_id: str, endpoint_id: str, uncached_tokens: int, now: float, lease_s: float, request_id: str = ""
    ) -> bool:
        """Enter a request that was sent; return False, and change nothing, if the id is open or has ended."""
        if decision_id in self._open or decision_id in self._ended:
            return False
        uncached_tokens = max(uncached_tokens, 0)
        expires_at = now + lease_s
        entry = Entry(decision_id, endpoint_id, uncached_tokens, now, request_id, lease_s, expires_at)
        self._open[decision_id] = entry
        account = self._accounts.get(endpoint_id)
        if account is None:
            account = self._accounts[endpoint_id] = _Account({})
        account.entries[decision_id] = entry
        account.tokens += uncached_tokens
        heappush(self._leases, (expires_at, decision_id))
        return True

    def release(self, decision_id: str) -> Entry | None:
        """Remove a request that has ended; None if it is not open (`state` says why)."""
        entry = self._open.pop(decision_id, None)
        if entry is None:
            return None
        account = self._accounts[entry.endpoint_id]
        del account.entries[decision_id]
        if not entry.prefilled:
            account.tokens -= entry.uncached_tokens
        if entry.unseen_at is not None:
            account.unseen -= 1
            account.guessed -= entry.guessed
        self._ended[decision_id] = None
        if len(self._ended) > self._remembered_ids:
            self._ended.popitem(last=False)
        if len(self._leases) > 2 * len(self._open) + _SPARE_LEASES:
            self._compact()
        return entry

    def prefilled(self, decision_id: str) -> Entry | None:
        """Note that a request's prompt has been computed; return its entry, None if that was noted before or it is not open."""
        entry = self._open.get(decision_id)
        if entry is None or entry.prefilled:
            return None
        entry.prefilled = True
        self._accounts[entry.endpoint_id].tokens -= entry.uncached_tokens
        return entry

    def unseen(self, decision_id: str, now: float, *, guessed: bool) -> Entry | None:
        """Note that nobody will report a request's end; return its entry, None if that was noted before or it is not open."""
        entry = self._open.get(decision_id)
        if entry is None or entry.unseen_at is not None:
            return None
        entry.unseen_at, entry.guessed = now, guessed
        account = self._accounts[entry.endpoint_id]
        account.unseen += 1
        account.guessed += guessed
        return entry

    def excess(self, endpoint_id: str, most: float, *, sent_before: float, unseen_before: float) -> list[Entry]:
        """Release what exceeds `most` of the requests sent to an endpoint before a time, oldest first.

        Only requests whose end nobody will report, as was noted before `unseen_before`. O(requests there), O(1) where there
        are no such requests.
        """
        account = self._accounts.get(endpoint_id)
        if account is None or not account.unseen:
            return []
        old = [entry for entry in account.entries.values() if entry.sent_at < sent_before]
        releasable = [entry for entry in old if entry.unseen_at is not None and entry.unseen_at < unseen_before]
        over = releasable[: max(int(len(old) - most), 0)]
        for entry in over:
            self.release(entry.decision_id)
        return over

    def renew(self, decision_id: str, now: float) -> bool:
        """Restart a request's lease; False if it is not open."""
        entry = self._open.get(decision_id)
        if entry is None:
            return False
        # Never shortened: `expire` looks here when the time in the heap has come.
        entry.expires_at = max(entry.expires_at, now + entry.lease_s)
        return True

    def expire(self, now: float) -> list[Entry]:
        """Release every request whose lease has run out, earliest first. O(log n) for each lease that ends."""
        expired: list[Entry] = []
        while self._leases and self._leases[0][0] <= now:
            _, decision_id = heappop(self._leases)
            entry = self._open.get(decision_id)
            if entry is None:
                continue
            if entry.expires_at > now:
                heappush(self._leases, (entry.expires_at, decision_id))
            else:
                self.release(decision_id)
                expired.append(entry)
        return expired

    def orphan(self, endpoint_id: str, *, sent_before: float | None = None) -> list[Entry]:
        """Release an endpoint's requests, oldest first: all, or those sent before a time. O(requests there)."""
        account = self._accounts.get(endpoint_id)
        if account is None:
            return []
        orphaned = [entry for entry in account.entries.values() if sent_before is None or entry.sent_at < sent_before]
        for entry in orphaned:
            self.release(entry.decision_id)
        if not account.entries:
            # Otherwise kept, because most endpoints get their next request soon; one that is gone must leave nothing.
            del self._accounts[endpoint_id]
        return orphaned

    def count(self, endpoint_id: str) -> int:
        """Count the requests in flight at an endpoint."""
        account = self._accounts.get(endpoint_id)
        return len(account.entries) if account else 0

    def totals(self, endpoint_id: str) -> tuple[int, int, int]:
        """Return the number of requests at an endpoint, the prompt tokens still to be computed, and the number guessed."""
        account = self._accounts.get(endpoint_id)
        return (0, 0, 0) if account is None else (len(account.entries), account.tokens, account.guessed)

    def newest_first(self, endpoint_id: str) -> Iterator[Entry]:
        """Iterate over an endpoint's requests, last sent first; the ledger must not change meanwhile."""
        account = self._accounts.get(endpoint_id)
        return iter(()) if account is None else reversed(account.entries.values())

    def state(self, decision_id: str) -> IdState:
        """Return what is known of an id."""
        if decision_id in self._open:
            return IdState.OPEN
        return IdState.ENDED if decision_id in self._ended else IdState.UNKNOWN

    def _compact(self) -> None:
        """Keep the heap in proportion to what is open: leases last ten minutes, most requests seconds."""
        self._leases = [(entry.expires_at, decision_id) for decision_id, entry in self._open.items()]
        heapify(self._leases)
