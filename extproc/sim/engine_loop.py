"""Runs an engine in real time on the asyncio loop, and measures what its clients see.

One timer at most: it fires when the step under way ends, hands the new tokens to their sinks and begins the next step. An idle engine
has none. What a sink does with a token (collect it, write it to a socket) is decided in `answers`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.sim.engine import Engine, EngineRequest, TokenEvent
    from extproc.sim.metrics import ServerMetrics

MAX_LAG_S = 0.1
"""Steps follow each other at their computed times, so that timer latency does not add up; a process that has fallen further behind
than this (it was starved or suspended) starts anew from the present instead of racing to catch up."""


class TokenSink(Protocol):
    """Receives a request's tokens. Called from the engine's timer: must not block, must not raise."""

    def on_token(self, event: TokenEvent) -> None:
        """Take one token."""

    def on_dropped(self) -> None:
        """Note that the engine has lost the request (restart, shutdown); no token follows."""


@dataclass(slots=True)
class _Live:
    sink: TokenSink
    request: EngineRequest
    finished_reason: str
    arrived_s: float
    first_s: float = 0.0
    last_s: float = 0.0


class EngineLoop:
    """Drives `engine` with time running `speed` times faster than real; `unix_clock` gives Unix seconds for the metrics.

    The measured times are those of the wall, as a client sees them. Used from one event loop only.
    """

    def __init__(
        self, engine: Engine, metrics: ServerMetrics, *, speed: float, unix_clock: Callable[[], float]
    ) -> None:
        if speed <= 0:
            raise ValueError("speed must be positive")
        self.engine = engine
        self.metrics = metrics
        self._speed = speed
        self._unix_clock = unix_clock
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, _Live] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._step_end_s = 0.0  # loop time

    def submit(self, request: EngineRequest, sink: TokenSink, finished_reason: str) -> None:
        """Queue a request; an idle engine begins its step at once. Raises ValueError as `Engine.add` does."""
        self.engine.add(request)
        now = self._loop.time()
        self._live[request.request_id] = _Live(sink, request, finished_reason, now)
        if self._timer is None:
            self._begin_step(now)

    def abort(self, request_id: str) -> None:
        """Drop a request whose client has gone; nothing happens when it has finished."""
        if self._live.pop(request_id, None) is not None and self.engine.abort(request_id):
            self.metrics.finished["abort"] += 1
            self.metrics.take_gauges(self._unix_clock())

    def restart(self, metrics: ServerMetrics) -> None:
        """Lose all requests, the cache and the counters; continue with `metrics`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.engine.clear()
        self.metrics = metrics
        live, self._live = self._live, {}
        for entry in live.values():
            entry.sink.on_dropped()

    def _begin_step(self, start_s: float) -> None:
        duration_s = self.engine.begin_step(start_s)
        if duration_s is None:
            self._timer = None
            return
        self.metrics.iteration_tokens.observe(self.engine.step_tokens)
        self._step_end_s = start_s + duration_s / self._speed
        self._timer = self._loop.call_at(self._step_end_s, self._end_step)

    def _end_step(self) -> None:
        now = self._loop.time()
        events = self.engine.end_step()
        self.metrics.take_gauges(self._unix_clock())
        live = self._live
        for event in events:
            entry = live[event.request_id]
            self._measure(entry, event, now)
            if event.finished:
                del live[event.request_id]
            entry.sink.on_token(event)
        start_s = self._step_end_s
        self._begin_step(start_s if now - start_s < MAX_LAG_S else now)

    def _measure(self, entry: _Live, event: TokenEvent, now: float) -> None:
        metrics = self.metrics
        if event.output_tokens == 1:
            metrics.time_to_first_token_s.observe(now - entry.arrived_s)
            entry.first_s = now
        else:
            metrics.inter_token_s.observe(now - entry.last_s)
        entry.last_s = now
        if not event.finished:
            return
        request = entry.request
        metrics.finished[entry.finished_reason] += 1
        metrics.e2e_s.observe(now - entry.arrived_s)
        metrics.queue_s.observe(max(event.scheduled_s - entry.arrived_s, 0.0))
        metrics.inference_s.observe(now - event.scheduled_s)
        metrics.prefill_s.observe(entry.first_s - event.scheduled_s)
        metrics.decode_s.observe(now - entry.first_s)
        if event.output_tokens > 1:
            metrics.time_per_output_token_s.observe((now - entry.first_s) / (event.output_tokens - 1))
        metrics.prompt_tokens.observe(request.prompt_tokens)
        metrics.generation_tokens.observe(event.output_tokens)
        metrics.max_tokens.observe(request.output_tokens)
        metrics.computed_tokens.observe(request.prompt_tokens - event.cached_tokens)
        metrics.preemptions.observe(event.preemptions)
        metrics.choices.observe(1)
