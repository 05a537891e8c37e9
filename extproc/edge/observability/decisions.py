"""The documents and log lines of decisions and endpoints, and the last N decisions.

`pages` serves the documents, `log` writes the lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from extproc.protocol.interfaces import Observer
from extproc.request import bounded
from extproc.routing.explain import as_dict
from extproc.types import Decision, EndpointSnapshot, Finished

__all__ = [
    "TEXT_CHARACTERS",
    "DecisionLine",
    "RecentDecisions",
    "decision_document",
    "decision_line",
    "endpoint_document",
]

TEXT_CHARACTERS: Final = 200
"""Longest text of a client (model name, request id) in a log line or document."""


class DecisionLine(msgspec.Struct, gc=False):
    """The fields of a decision's log line, in the order they are written.

    A struct, because it is made on the event loop for every request, and of plain values, so that a blocked output keeps
    no decisions in memory.
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
    """Return a decision's log line, with signals of the chosen endpoint only. `time_s` is Unix time."""
    chosen = decision.chosen
    in_flight: int | UnsetType = UNSET
    waiting: float | UnsetType | None = UNSET
    age_s: float | UnsetType | None = UNSET
    if chosen is not None:
        in_flight, waiting, seen_at = chosen.in_flight, chosen.waiting, chosen.observed_at
        age_s = None if seen_at is None else decision.decided_at - seen_at
    return DecisionLine(
        time_s,
        "info",
        "decision",
        decision.id,
        decision.request_id[:TEXT_CHARACTERS],
        decision.endpoint.id,
        decision.strategy,
        decision.note,
        decision.kind._value_,  # `value` is a Python call
        decision.model[:TEXT_CHARACTERS],
        decision.prompt_bytes,
        decision.matched_bytes,
        decision.prompt_tokens,
        decision.predicted_cached_tokens,
        len(decision.candidates),
        len(decision.filtered),
        round(duration_s * 1e6),
        in_flight,
        waiting,
        age_s,
    )


def decision_document(decision: Decision, now: float) -> dict[str, Any]:
    """Return all that is known of a decision; `now` is on the clock of `decided_at`."""
    document = as_dict(decision)
    document["request_id"] = decision.request_id[:TEXT_CHARACTERS]
    document["model"] = decision.model[:TEXT_CHARACTERS]
    document["age_s"] = round(max(0.0, now - decision.decided_at), 3)
    return document


def endpoint_document(snapshot: EndpointSnapshot, now: float) -> dict[str, Any]:
    """Return what the picker assumes of one endpoint; `now` is on the clock of `observed_at`."""
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
        "health_score": snapshot.health_score,
        "demoted": snapshot.demoted,
        "probation": snapshot.probation,
        "scrape_failures": snapshot.scrape_failures,
    }


class _Remembered(msgspec.Struct, gc=False):
    """One decision and how it ended, once it has."""

    decision: Decision
    finished: Finished | None = None

    def document(self, now: float) -> dict[str, Any]:
        found = decision_document(self.decision, now)
        end = self.finished
        found["outcome"] = None if end is None else end.outcome.value
        if end is None:
            return found
        if end.served_by:
            found["served_by"] = end.served_by
        if end.tried:
            found["tried"] = {endpoint_id: outcome.value for endpoint_id, outcome in end.tried.items()}
        if end.usage is not None:
            found["usage"] = {
                "prompt_tokens": end.usage.prompt_tokens,
                "completion_tokens": end.usage.completion_tokens,
                "cached_tokens": end.usage.cached_tokens,
            }
        return found


class RecentDecisions(Observer):
    """The last `capacity` decisions, with their outcomes as far as known. Each call but `find` is O(1)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: deque[_Remembered] = deque(maxlen=capacity)
        self._unfinished: dict[str, _Remembered] = {}
        """By decision id. Only these: a dictionary of all entries would not stay in the CPU's caches."""

    def __len__(self) -> int:
        return len(self._entries)

    def resize(self, capacity: int) -> None:
        """Remember more or fewer from now on."""
        self._capacity = capacity
        self._entries = deque(self._entries, maxlen=capacity)

    def decided(self, decision: Decision, duration_s: float, headers: Mapping[str, str]) -> None:  # noqa: ARG002 - the observer's signature
        """Remember one more; the oldest is dropped where all places are taken."""
        entry = _Remembered(decision)
        self._entries.append(entry)
        unfinished = self._unfinished
        unfinished[decision.id] = entry
        if len(unfinished) > 2 * self._capacity:
            # More are under way than are remembered: drop those that are no longer in the list.
            self._unfinished = {one.decision.id: one for one in self._entries if one.finished is None}

    def ended(self, finished: Finished) -> None:
        """Remember how a decision's request ended."""
        entry = self._unfinished.pop(finished.decision.id, None)
        if entry is not None:
            entry.finished = finished

    def find(
        self, now: float, *, limit: int | None = None, endpoint: str | None = None, decision_id: str | None = None
    ) -> list[dict[str, Any]]:
        """Return documents, newest first.

        `endpoint` is an id or a name; `decision_id` may also be the request id, which clients know.
        """
        found: list[dict[str, Any]] = []
        if decision_id is not None:
            decision_id = bounded(decision_id)
        for entry in reversed(self._entries):
            if limit is not None and len(found) >= limit:
                break
            if endpoint is not None and endpoint not in {entry.decision.endpoint.id, entry.decision.endpoint.name}:
                continue
            if decision_id is not None and decision_id not in {entry.decision.id, entry.decision.request_id}:
                continue
            found.append(entry.document(now))
        return found

    def newest(self) -> Iterator[Decision]:
        """Iterate over the decisions, newest first."""
        return (entry.decision for entry in reversed(self._entries))
