"""How decisions and endpoints are shown: as JSON documents on the admin page, as one line in the log; and the last N.

Plain dictionaries in, plain dictionaries out; serving and writing them is the concern of `http` and `log`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from extproc.routing.explain import as_dict
from extproc.vocabulary import Decision, EndpointSnapshot, Outcome, Usage

__all__ = ["DecisionLine", "RecentDecisions", "decision_document", "decision_line", "endpoint_document"]

_TEXT_CHARACTERS: Final = 200
"""What a client wrote (model name, request id) is cut: logs and pages are no place for megabytes."""


class DecisionLine(msgspec.Struct, gc=False):
    """The fields of a decision's log line, in the order they are written: where, why, and on which knowledge.

    A struct of plain values, because it is made on the event loop for every request: 1.5 us, where a dictionary took 4. It
    holds nothing of the decision, so that a blocked output keeps no snapshots alive.
    """

    time: float | str
    """Unix seconds; as text once it is rendered."""
    level: str
    event: str
    decision: str
    request_id: str
    endpoint: str
    strategy: str
    note: str
    kind: str
    model: str
    prompt_bytes: int
    matched_bytes: int
    prompt_tokens: int
    predicted_cached_tokens: int
    candidates: int
    filtered: int
    duration_us: int
    in_flight: int | UnsetType = UNSET
    waiting: float | UnsetType | None = UNSET
    signal_age_s: float | UnsetType | None = UNSET


def decision_line(decision: Decision, duration_s: float, time_s: float) -> DecisionLine:
    """Return a decision's log line; no candidates but the chosen. `time_s` is Unix time."""
    chosen = decision.chosen
    return DecisionLine(
        time_s,
        "info",
        "decision",
        decision.id,
        decision.request_id[:_TEXT_CHARACTERS],
        decision.endpoint.id,
        decision.strategy,
        decision.note,
        decision.kind.value,
        decision.model[:_TEXT_CHARACTERS],
        decision.prompt_bytes,
        decision.matched_bytes,
        decision.prompt_tokens,
        decision.predicted_cached_tokens,
        len(decision.candidates),
        len(decision.filtered),
        round(duration_s * 1e6),
        UNSET if chosen is None else chosen.in_flight,
        UNSET if chosen is None else chosen.waiting,
        UNSET if chosen is None else chosen.signal_age_s,
    )


def decision_document(decision: Decision, now: float) -> dict[str, Any]:
    """Return everything a decision says of itself; `now` is on the clock of `decided_at`."""
    document = as_dict(decision)
    document["request_id"] = decision.request_id[:_TEXT_CHARACTERS]
    document["model"] = decision.model[:_TEXT_CHARACTERS]
    document["age_s"] = round(max(0.0, now - decision.decided_at), 3)
    return document


def endpoint_document(snapshot: EndpointSnapshot, now: float) -> dict[str, Any]:
    """Return what the picker believes of one endpoint; `now` is on the clock of `observed_at`."""
    endpoint = snapshot.endpoint
    age_s = None if snapshot.observed_at is None else round(max(0.0, now - snapshot.observed_at), 3)
    return {
        "endpoint": endpoint.id,
        "name": endpoint.name,
        "labels": dict(endpoint.labels),
        "models": None if snapshot.models is None else sorted(snapshot.models),
        "signal_age_s": age_s,
        "waiting": snapshot.waiting,
        "running": snapshot.running,
        "kv_cache_usage": snapshot.kv_cache_usage,
        "in_flight": snapshot.in_flight,
        "in_flight_tokens": snapshot.in_flight_tokens,
        "lora_running": sorted(snapshot.lora_running),
        "lora_waiting": sorted(snapshot.lora_waiting),
        "lora_max": snapshot.lora_max,
        "standing": snapshot.standing,
        "demoted": snapshot.demoted,
        "scrape_failures": snapshot.scrape_failures,
    }


class _Remembered:
    """One decision and how it ended, once it has."""

    __slots__ = ("decision", "outcome", "served_by", "usage")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.outcome: Outcome | None = None
        self.served_by = ""
        self.usage: Usage | None = None

    def document(self, now: float) -> dict[str, Any]:
        found = decision_document(self.decision, now)
        found["outcome"] = None if self.outcome is None else self.outcome.value
        if self.served_by:
            found["served_by"] = self.served_by
        if self.usage is not None:
            found["usage"] = {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "cached_tokens": self.usage.cached_tokens,
            }
        return found


class RecentDecisions:
    """The last `capacity` decisions, with their outcomes as far as known. Each call but `find` is O(1), 0.3 us."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Not a dict: taking its oldest entry costs more the longer it has been used like that (5 us at 10,000).
        self._by_id: OrderedDict[str, _Remembered] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def resize(self, capacity: int) -> None:
        """Remember more or fewer from now on."""
        self._capacity = capacity
        self._shrink()

    def add(self, decision: Decision) -> None:
        """Remember one more; the oldest goes where there is no room."""
        self._by_id[decision.id] = _Remembered(decision)
        self._shrink()

    def finished(self, decision_id: str, outcome: Outcome, usage: Usage | None = None, served_by: str = "") -> None:
        """Note how a decision's request ended, and which other endpoint answered it, if it is still remembered."""
        entry = self._by_id.get(decision_id)
        if entry is not None:
            entry.outcome, entry.usage, entry.served_by = outcome, usage, served_by

    def find(
        self, now: float, *, limit: int | None = None, endpoint: str | None = None, decision_id: str | None = None
    ) -> list[dict[str, Any]]:
        """Return documents, newest first.

        `endpoint` is an id or a name; `decision_id` may also be the request id, which clients know.
        """
        found: list[dict[str, Any]] = []
        for entry in reversed(self._by_id.values()):
            if limit is not None and len(found) >= limit:
                break
            if endpoint is not None and endpoint not in {entry.decision.endpoint.id, entry.decision.endpoint.name}:
                continue
            if decision_id is not None and decision_id not in {entry.decision.id, entry.decision.request_id}:
                continue
            found.append(entry.document(now))
        return found

    def newest(self) -> Iterator[Decision]:
        """Walk the decisions themselves, newest first."""
        return (entry.decision for entry in reversed(self._by_id.values()))

    def _shrink(self) -> None:
        while len(self._by_id) > self._capacity:
            self._by_id.popitem(last=False)
