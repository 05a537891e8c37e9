"""The structured log: one JSON object or one line of text per event, through a bounded queue and a writer thread.

Logging never blocks the caller: an event is appended to a queue, and a thread renders and writes it. Where the output is
blocked (a full pipe, a slow disk) lines are dropped and counted. Standard logging is written here too (`Log.install`), with
the fields passed as `extra`. Decides format, level and sampling; the fields of a decision line are defined in `decisions`.
No event contains prompt text.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import msgspec

from extproc.config.schema import LogConfig
from extproc.edge.observability.decisions import TEXT_CHARACTERS, DecisionLine, decision_line
from extproc.edge.process.tasks import Restarts
from extproc.errors import RequestError
from extproc.protocol.interfaces import Observer
from extproc.types import Decision, Finished, Outcome

__all__ = ["LineWriter", "Log", "LogHandler", "render_json", "render_text"]

_BATCHING_DELAY_S: Final = 0.1
"""How long the thread collects lines before it writes them: waking it costs more than writing several lines."""
_BATCH_LINES: Final = 256
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_STANDARD: Final = frozenset({*vars(logging.LogRecord("", 0, "", 0, "", None, None)), "message", "asctime", "taskName"})
"""Attributes of every log record; any other was passed as `extra`."""

_log = logging.getLogger(__name__)
_OK: Final = Outcome.OK
_FAILURES: Final = frozenset({Outcome.SERVER_ERROR, Outcome.CONNECT_FAILURE, Outcome.RESET, Outcome.TIMEOUT})

_encode: Final = msgspec.json.Encoder(enc_hook=str).encode

Fields = Mapping[str, Any]
"""`time` (Unix seconds), `level`, `event`, and further fields of the event; JSON values."""


def render_json(event: Fields | DecisionLine) -> bytes:
    """Render one event as a JSON object in one line; what JSON cannot hold is rendered by `str`."""
    shown: DecisionLine | dict[str, Any]
    if isinstance(event, DecisionLine):
        assert not isinstance(event.time, str), "rendered once"
        event.time = _time_text(event.time)
        shown = event
    else:
        shown = {**event, "time": _time_text(event["time"])}
    try:
        return _encode(shown) + b"\n"
    except (UnicodeEncodeError, TypeError, ValueError):  # lone surrogates, keys that are no text, recursion
        return json.dumps({str(key): str(value) for key, value in _fields(shown).items()}).encode() + b"\n"


def _fields(event: Fields | DecisionLine) -> dict[str, Any]:
    if not isinstance(event, DecisionLine):
        return dict(event)
    return {key: value for key, value in msgspec.structs.asdict(event).items() if value is not msgspec.UNSET}


def render_text(event: Fields | DecisionLine) -> bytes:
    """Render one event as `time LEVEL event key=value ...` in one line; control characters are escaped."""
    rest = _fields(event)
    at, level, name = _time_text(rest.pop("time")), str(rest.pop("level")), str(rest.pop("event"))
    pairs = "".join(f" {key}={_plain(value)}" for key, value in rest.items())
    line = f"{at} {level.upper():7} {_plain(name, spaces=True)}{pairs}\n"
    return line.encode("utf-8", "backslashreplace")


def _plain(value: object, *, spaces: bool = False) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    safe = text.isprintable() and '"' not in text and (spaces or (text and " " not in text))
    return text if safe or not isinstance(value, str) else json.dumps(text)


def _time_text(at: float) -> str:
    second, millis = divmod(round(at * 1e6) // 1000, 1000)
    return f"{_second_text(second)}.{millis:03}Z"


@lru_cache(maxsize=4)
def _second_text(second: int) -> str:
    # Formatting a date costs as much as the rest of a line, and many lines share a second.
    return datetime.fromtimestamp(second, UTC).isoformat().replace("+00:00", "")


class LineWriter:
    """A bounded queue of events and the thread that writes them to a file descriptor.

    `put` never blocks. The descriptor is written to directly: a thread blocked in Python's own buffered `sys.stdout` would
    hold its lock when the interpreter ends.
    """

    def __init__(
        self,
        fd: int,
        capacity: int,
        render: Callable[[Fields | DecisionLine], bytes] = render_json,
        rng: random.Random | None = None,
    ) -> None:
        self.render = render
        self.failures = 0
        """How often the thread has failed and was started again."""
        self.dropped = 0
        """Lines dropped because the queue was full, or because they could not be rendered or written."""
        self._fd = fd
        self._capacity = capacity
        self._restarts = Restarts(rng or random.Random())
        self._events: deque[Fields | DecisionLine] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._closed = False
        """As `_closing`, but cheaper to read for every line."""
        self._thread = threading.Thread(target=self._run, name="extproc-log", daemon=True)
        self._thread.start()

    def put(self, event: Fields | DecisionLine) -> bool:
        """Queue one event, which must not be changed afterwards; False: dropped and counted."""
        if len(self._events) >= self._capacity or self._closed:
            self.dropped += 1
            return False
        self._events.append(event)
        if not self._wake.is_set():
            self._wake.set()
        return True

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and stop; False: the output was still blocked after `timeout_s` seconds."""
        self._closed = True
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def keeps_failing(self) -> bool:
        """Whether the thread fails again and again."""
        return self._restarts.keeps_failing(time.monotonic())

    def _run(self) -> None:
        """Write until closed; a defect costs the lines under way, and a pause (`edge.process.tasks` has no say over threads)."""
        while True:
            self._restarts.started(time.monotonic())
            try:
                self._write_all()
            except Exception:  # noqa: BLE001 - whatever it is, the log must go on
                self.failures += 1
                delay_s = self._restarts.failed(time.monotonic())
                self._events.append(
                    {
                        "time": time.time_ns() / 1e9,
                        "level": "error",
                        "event": "a background task has failed and is started again: report the traceback",
                        "task": "log",
                        "again_in_s": round(delay_s, 1),
                        "traceback": traceback.format_exc(),
                    }
                )
                self._wake.set()
                self._closing.wait(delay_s)
                if self._closing.is_set() and self._restarts.keeps_failing(time.monotonic()):
                    return
            else:
                return

    def _write_all(self) -> None:
        while not (self._closing.is_set() and not self._events):
            self._wake.wait()
            self._wake.clear()
            self._closing.wait(_BATCHING_DELAY_S)
            while self._events:
                batch = [self._events.popleft() for _ in range(min(len(self._events), _BATCH_LINES))]
                if not self._write(b"".join(map(self._rendered, batch))):
                    self.dropped += len(batch)

    def _rendered(self, event: Fields | DecisionLine) -> bytes:
        """Render one event, or nothing where that fails: a value that a library passes as `extra` must not end the log."""
        try:
            return self.render(event)
        except Exception:  # noqa: BLE001 - whatever a value's own methods raise
            self.dropped += 1
            return b""

    def _write(self, data: bytes) -> bool:
        """Write all of it, waiting as long as it takes; False: it cannot be written, the reader is gone."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # the descriptor is non-blocking (asyncio makes pipes so)
                select.select([], [self._fd], [], 1.0)
            except OSError:
                return False
        return True


class LogHandler(logging.Handler):
    """Passes standard log records on; fields given as `extra` become fields of the event."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record. Its text is made here, because arguments may change after this call."""
        try:
            event = record.getMessage()
        except (TypeError, ValueError):  # a format that does not fit its arguments must not stop a request
            event = str(record.msg)
        fields: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "event": event,
            "logger": record.name,
        }
        fields.update((key, value) for key, value in vars(record).items() if key not in _STANDARD and key not in fields)
        if record.exc_info and record.exc_info[0] is not None:
            fields["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        self._writer.put(fields)


class Log(Observer):
    """The picker's log on one file descriptor (standard output by default)."""

    def __init__(
        self,
        config: LogConfig,
        *,
        rng: random.Random,
        fd: int = 1,
        wall_clock: Callable[[], float] = lambda: time.time_ns() / 1e9,
    ) -> None:
        self._rng = rng
        self._wall_clock = wall_clock
        self._writer = LineWriter(fd, config.queue)
        self._handler = LogHandler(self._writer)
        self._logger: logging.Logger | None = None
        self.configure(config)

    @property
    def dropped(self) -> int:
        """Lines dropped since the start."""
        return self._writer.dropped

    @property
    def failures(self) -> int:
        """How often the writer has failed and was started again."""
        return self._writer.failures

    @property
    def keeps_failing(self) -> bool:
        """Whether the writer keeps failing."""
        return self._writer.keeps_failing

    def configure(self, config: LogConfig) -> None:
        """Apply level, format and sampling at once; the queue's size stays as it was at the start."""
        self._writer.render = render_json if config.format == "json" else render_text
        self._handler.setLevel(_LEVELS[config.level])
        if self._logger is not None:
            self._logger.setLevel(_LEVELS[config.level])
        self._level = _LEVELS[config.level]
        enabled = config.decisions.enabled and self._level <= logging.INFO
        self._sample = config.decisions.sample if enabled else 0.0

    def install(self, logger: logging.Logger | None = None) -> None:
        """Make this the only handler of a standard logger: the root logger, if none is given."""
        self._logger = logging.getLogger() if logger is None else logger
        self._logger.handlers[:] = [self._handler]
        self._logger.setLevel(self._level)

    def decided(self, decision: Decision, duration_s: float, headers: Mapping[str, str]) -> None:  # noqa: ARG002 - the observer's signature
        """Write one line for a decision, or none, as `log.decisions.sample` has it."""
        if self._sample < 1.0 and (self._sample <= 0.0 or self._rng.random() >= self._sample):
            return
        self._writer.put(decision_line(decision, duration_s, self._wall_clock()))

    def refused(self, error: RequestError, headers: Mapping[str, str]) -> None:
        """Log an answer of our own, at level debug: clients can cause any number of them."""
        if self._level <= logging.DEBUG:
            request_id = headers.get("x-request-id", "")[:TEXT_CHARACTERS]
            extra = {"status": error.status, "reason": error.reason, "request_id": request_id}
            _log.debug("a request was refused", extra=extra)

    def ended(self, finished: Finished) -> None:
        """Log a request that failed at its endpoint, and a correction of the prefix index."""
        outcome = finished.outcome
        if outcome is not _OK and outcome in _FAILURES:
            decision = finished.decision
            _log.warning(
                "a request failed at its endpoint",
                extra={
                    "decision": decision.id,
                    "request_id": decision.request_id[:TEXT_CHARACTERS],
                    "endpoint": finished.served_by or decision.endpoint.id,
                    "outcome": outcome.value,
                    "duration_s": round(finished.duration_s, 3),
                },
            )
        if finished.evicted_blocks:
            decision = finished.decision
            _log.info(
                "the engine held less than the index promised; the index was corrected",
                extra={"decision": decision.id, "endpoint": decision.endpoint.id, "blocks": finished.evicted_blocks},
            )

    def close(self, timeout_s: float = 2.0) -> bool:
        """Flush and stop; False: lines were still queued for a blocked output after `timeout_s`."""
        if self._logger is not None:
            self._logger.removeHandler(self._handler)
            self._logger = None
        return self._writer.close(timeout_s)
