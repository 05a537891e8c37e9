"""The invariants: what each answer, the shares of errors, and the picker itself are held to.

Everything here is arithmetic on what was recorded; nothing waits or reads a clock.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench.hard_days.clients import PATIENCE_S, PICKER, ROUND_ROBIN, Outcome, Record
from bench.hard_days.journal import Lag, Visit

__all__ = ["Acts", "Comparison", "Invariant", "Judge", "Span", "Violation", "compare", "extra_wait_s", "log_problems"]

WAIT_S = 1.0
"""Longer than its engine a request may take by so much."""
_SHARED_S = 2.0
"""A wait counts as the machine's if a request of round robin waited too long at most so much before or after."""
_TICK_S = 0.3
"""Clocks of acts and requests agree to about this: an act is told and takes effect."""


_PAUSED_S = 3.0
"""A machine that stood still for so long (a virtual one does) has used up a client's patience itself."""
_REOPENED_S = 1.5
"""Without a picker the profile tries for so long to find one before it answers 503 (`_stream_retry_policy`)."""
_CLOSED_LATE_S = 1.0
"""Envoy tells a client so much later that an answer broke off (`delayed_close_timeout`)."""


class Invariant(Enum):
    """What must be true of every run."""

    ANSWERS = "every response is whole or an honest error"
    ERRORS = "no higher share of errors than round robin"
    RETRIES = "no higher share of errors than round robin with the profile's retries"
    GAPS = "without a picker only for as long as there is none"
    LEDGER = "the ledger is back to zero"
    MEMORY = "memory and descriptors are back where they were"
    LOGS = "no traceback and no unexpected error in any log"
    WAITS = "no request waits longer than its engine plus a second"
    ALIVE = "every process lives, and does what it is told"
    HEALED = "everything heals"


@dataclass(frozen=True, slots=True)
class Violation:
    """One invariant broken once. `at_s`: seconds from the start of the run."""

    invariant: Invariant
    at_s: float
    what: str


@dataclass(slots=True)
class Span:
    """A stretch of time, of the monotonic clock; open at its end while it lasts."""

    begin_s: float
    end_s: float = math.inf
    what: str = ""

    def touches(self, begin_s: float, end_s: float) -> bool:
        """Whether the two have a moment in common."""
        return begin_s <= self.end_s + _TICK_S and end_s >= self.begin_s - _TICK_S


@dataclass(slots=True)
class Acts:
    """What was done to the picker and to Envoy that their clients may feel."""

    gaps: list[Span] = field(default_factory=list)
    """No picker was there, by our own doing: the profile answers 503 then."""
    empty: list[Span] = field(default_factory=list)
    """The endpoints file said that there are none."""
    proxy: list[Span] = field(default_factory=list)
    """An Envoy was going: connections end."""


# One request


def extra_wait_s(record: Record, visits: Iterable[Visit]) -> float:
    """Return how much longer a request took than the engines that had it, in seconds."""
    busy, last = 0.0, record.sent_s
    for visit in sorted(visits, key=lambda one: one.begin_s):
        begin, end = max(visit.begin_s, last), min(visit.end_s, record.done_s)
        if end > begin:
            busy += end - begin
            last = end
    return record.done_s - record.sent_s - busy


class Judge:
    """Takes what was recorded, and says what was broken. Times are the monotonic clock's, violations' from `start_s`."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.acts = Acts()
        self.records: list[Record] = []
        self.waits_s: list[float] = []
        """Of the picker's requests: beyond their engines."""
        self.shared_waits = 0
        """So many waited too long while round robin's did, too."""
        self.violations: list[Violation] = []
        self.bodies: dict[str, str] = {}
        """SHA-256 of bodies that hostile clients sent whole, by the request's name."""
        self.unanswered: dict[str, tuple[float, str]] = {}
        """Hostile requests that were sent whole and had no answer: when, and what; those that an engine kept hanging are taken out."""
        self._visits: dict[str, list[Visit]] = {}
        self._lags: list[Lag] = []
        self._pending: list[Record] = []
        self._slow_others: deque[Record] = deque(maxlen=1000)

    def broken(self, invariant: Invariant, at_s: float, what: str) -> None:
        """Note a violation at a time of the monotonic clock."""
        self.violations.append(Violation(invariant, at_s - self.start_s, what))

    def keep(self, record: Record) -> None:
        """Take a record that is complete; it is judged by `settle`."""
        self.records.append(record)
        self._pending.append(record)

    def journal(self, entries: Iterable[Visit | Lag]) -> None:
        """Take what engines have written down."""
        for entry in entries:
            if isinstance(entry, Lag):
                self._lags.append(entry)
            else:
                sent = self.bodies.get(entry.name)
                if entry.fault:
                    self.unanswered.pop(entry.name, None)
                if sent is None:
                    self._visits.setdefault(entry.name, []).append(entry)
                elif sent and entry.sha256 and sent != entry.sha256:
                    self.broken(
                        Invariant.ANSWERS,
                        entry.begin_s,
                        f"request {entry.name}: engine {entry.engine + 1} got another body than was sent",
                    )

    def lag(self, lag: Lag) -> None:
        """Note that the clients' own process was not served for a while."""
        self._lags.append(lag)

    def settle(self, before_s: float) -> None:
        """Judge what was complete before `before_s`: late enough for its engines to have written down all."""
        ready = [record for record in self._pending if record.done_s < before_s]
        self._pending = [record for record in self._pending if record.done_s >= before_s]
        slow = []
        for record in ready:
            visits = self._visits.pop(record.name, [])
            extra_s = extra_wait_s(record, visits)
            if extra_s > WAIT_S + self._spared_s(record):
                slow.append((record, extra_s, visits))
            if record.way == PICKER:
                self.waits_s.append(extra_s)
                self._one(record, visits)
        self._slow_others += [record for record, _, _ in slow if record.way != PICKER]
        theirs = self._slow_others
        for record, extra_s, visits in slow:
            if record.way != PICKER:
                continue
            if any(one.sent_s - _SHARED_S < record.done_s and record.sent_s < one.done_s + _SHARED_S for one in theirs):
                self.shared_waits += 1
                continue
            where = (
                f"engine {visits[0].engine + 1} got it after {visits[0].begin_s - record.sent_s:.1f} s"
                if visits
                else "no engine has seen it"
            )
            took = record.done_s - record.sent_s
            self.broken(
                Invariant.WAITS,
                record.sent_s,
                f"request {record.name} took {took:.1f} s, {extra_s:.1f} s more than its engine ({where}; {record.cause})",
            )

    def _spared_s(self, record: Record) -> float:
        """Return what of a wait has a reason that is not the picker's."""
        spared_s = _CLOSED_LATE_S if record.outcome is Outcome.CUT else 0.0
        if any(span.touches(record.sent_s, record.done_s) for span in self.acts.gaps):
            spared_s += _REOPENED_S
        return spared_s + self.paused_s(record.sent_s, record.done_s)

    def _one(self, record: Record, visits: Sequence[Visit]) -> None:
        """Hold one answer that came by way of the picker to being whole or an honest error."""
        flaw = record.flaw
        wrong = [visit for visit in visits if visit.sha256 and record.sha256 and visit.sha256 != record.sha256]
        served = [visit for visit in visits if visit.status == 200]
        if wrong:
            flaw = f"engine {wrong[0].engine + 1} got another body than was sent"
        elif len(served) > 1:
            flaw = f"{len(served)} engines have answered it: {', '.join(str(one.engine + 1) for one in served)}"
        elif not flaw and record.outcome is Outcome.CUT:
            flaw = self._cut(record, visits)
        elif not flaw and record.outcome is Outcome.TIMEOUT and not visits and self._spared_s(record) < _PAUSED_S:
            flaw = f"no answer within {PATIENCE_S:.0f} s, and no engine has seen it"
        elif not flaw and 400 <= record.status < 500 and not any(visit.status == record.status for visit in visits):
            # An engine's own 4xx is an engine's fault.
            flaw = f"a good request was refused: {record.cause}"
        if flaw:
            self.broken(Invariant.ANSWERS, record.sent_s, f"request {record.name}: {flaw}")

    def _cut(self, record: Record, visits: Sequence[Visit]) -> str:
        """Say why a broken connection is not honest; empty where an engine or Envoy itself broke off."""
        if any(visit.fault or not visit.status for visit in visits) and record.begun:
            return ""
        if any(span.touches(record.sent_s, record.done_s) for span in self.acts.proxy):
            return ""
        return f"{record.cause}, and nobody had broken off"

    # Many requests

    def excused(self, record: Record) -> str:
        """Say why a failed request of the picker does not count against round robin; empty: it does."""
        if record.way != PICKER or not record.failed:
            return ""
        if "picker_unavailable" in record.cause:
            for span in self.acts.gaps:
                if span.touches(record.sent_s, record.done_s):
                    return "gap"
        if "picker_unavailable" in record.cause or "no_endpoint" in record.cause:
            for span in self.acts.empty:
                if span.touches(record.sent_s, record.done_s):
                    return "empty"
        return ""

    def no_answers(self) -> None:
        """Note every hostile request that nobody answered though no engine had a fault."""
        for name, (sent_s, what) in self.unanswered.items():
            self.broken(Invariant.WAITS, sent_s, f"request {name}: {what}")

    def paused_s(self, begin_s: float, end_s: float) -> float:
        """Return for how long in a stretch of time the clients' or the engines' process was not served."""
        found = (lag for lag in self._lags[-2000:] if lag.end_s > begin_s and lag.end_s - lag.seconds < end_s)
        return sum(lag.seconds for lag in found)

    def unexplained_gaps(self) -> None:
        """Note every answer that says there is no picker while there should have been one."""
        for record in self.records:
            if record.way == PICKER and "picker_unavailable" in record.cause and not self.excused(record):
                self.broken(
                    Invariant.GAPS, record.sent_s, f"request {record.name}: {record.cause} with a picker that runs"
                )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors of requests that were sent in the same turns, the picker's and another way's."""

    turns: int
    picker: int
    other: int
    only_picker: int
    """Turns in which the picker's request failed and the other did not."""
    only_other: int

    @property
    def limit(self) -> float:
        """By how many failed turns the picker may exceed the other by chance: four standard deviations of the turns that differ."""
        return 2.0 + 4.0 * math.sqrt(self.only_picker + self.only_other)

    @property
    def worse(self) -> bool:
        """Whether the picker lost more, and not by chance."""
        return self.only_picker - self.only_other > self.limit

    def shares(self) -> tuple[float, float]:
        """Return both shares of errors."""
        return (self.picker / self.turns, self.other / self.turns) if self.turns else (0.0, 0.0)


def compare(judge: Judge, other: str = ROUND_ROBIN, spans: Sequence[Span] = ()) -> Comparison:
    """Compare the picker with another way over the turns sent within `spans` (none: all), without those excused."""
    failed: dict[int, dict[str, bool]] = {}
    for record in judge.records:
        if record.way not in {PICKER, other} or judge.excused(record):
            continue
        if not spans or any(span.begin_s <= record.sent_s <= span.end_s for span in spans):
            failed.setdefault(record.turn, {})[record.way] = record.failed
    pairs = [(ways[PICKER], ways[other]) for ways in failed.values() if len(ways) == 2]
    counted = Counter(pairs)
    return Comparison(
        len(pairs),
        sum(ours for ours, _ in pairs),
        sum(theirs for _, theirs in pairs),
        counted[True, False],
        counted[False, True],
    )


# Logs


def log_problems(name: str, text: str, *, refused_configs: int = 0) -> list[str]:
    """Return the lines of a log that must not be there. `refused_configs`: so often the picker may say that one was bad."""
    found: list[str] = []
    if "Traceback (most recent call last)" in text:
        begin = text.index("Traceback (most recent call last)")
        found.append(f"{name}: traceback: {text[max(0, begin - 200) : begin + 1500]}")
    for line in text.splitlines():
        if name.startswith("picker"):
            try:
                event: dict[str, Any] = json.loads(line)
            except ValueError:
                found.append(f"{name}: a line that is no event: {line[:300]}")
                continue
            if str(event.get("level", "")).lower() in {"error", "critical", "fatal"}:
                if "configuration was refused" in line and refused_configs > 0:
                    refused_configs -= 1
                else:
                    found.append(f"{name}: {line[:600]}")
        elif name.startswith("envoy"):
            if "[critical]" in line or "[error]" in line or "assert failure" in line:
                found.append(f"{name}: {line[:600]}")
        elif line.strip() and not found:  # of a process that has nothing to say, the first line tells enough
            found.append(f"{name}: {line[:300]}")
    return found
