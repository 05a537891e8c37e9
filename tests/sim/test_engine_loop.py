import asyncio

import pytest

from extproc.sim.engine import Engine, EngineRequest, TokenEvent
from extproc.sim.engine_loop import EngineLoop
from extproc.sim.metrics import ServerMetrics
from extproc.sim.presets import EngineConstants

FAST = EngineConstants(
    prefill_tokens_per_s=1e6,
    weight_read_s=1e-4,
    step_overhead_s=0,
    decode_request_s=0,
    decode_context_token_s=0,
    kv_cache_tokens=1600,
)


class Sink:
    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.dropped = False
        self.done = asyncio.Event()

    def on_token(self, event: TokenEvent) -> None:
        self.events.append(event)
        if event.finished:
            self.done.set()

    def on_dropped(self) -> None:
        self.dropped = True
        self.done.set()


def make(constants: EngineConstants = FAST) -> EngineLoop:
    engine = Engine(constants)
    metrics = ServerMetrics(engine, loras=(), max_model_len=1000, started_s=0.0)
    return EngineLoop(engine, metrics, speed=1.0, unix_clock=lambda: 0.0)


async def test_tokens_arrive_and_are_measured() -> None:
    loop, sinks = make(), [Sink(), Sink()]
    for number, sink in enumerate(sinks):
        loop.submit(EngineRequest(f"r{number}", 40, 3, ["k"]), sink, "length")
    for sink in sinks:
        await sink.done.wait()
        assert [event.output_tokens for event in sink.events] == [1, 2, 3]
    metrics = loop.metrics
    assert metrics.finished["length"] == 2
    assert sum(metrics.time_to_first_token_s.counts) == 2
    assert sum(metrics.inter_token_s.counts) == 4
    assert sum(metrics.e2e_s.counts) == 2
    assert (metrics.prompt_tokens.sum, metrics.generation_tokens.sum, metrics.computed_tokens.sum) == (80, 6, 64)
    assert metrics.num_running == 0


async def test_an_engine_that_went_idle_wakes_up_for_the_next_request() -> None:
    loop = make()
    for number in range(3):
        sink = Sink()
        loop.submit(EngineRequest(f"r{number}", 5, 2, ()), sink, "stop")
        await sink.done.wait()
    assert loop.metrics.finished["stop"] == 3


async def test_abort_frees_at_once() -> None:
    slow = EngineConstants(
        prefill_tokens_per_s=1,
        weight_read_s=1000,
        step_overhead_s=0,
        decode_request_s=0,
        decode_context_token_s=0,
        kv_cache_tokens=1600,
    )
    loop, sink = make(slow), Sink()
    loop.submit(EngineRequest("r", 40, 1, ()), sink, "length")
    loop.abort("r")
    loop.abort("r")
    assert loop.metrics.finished["abort"] == 1
    assert loop.engine.kv_cache_usage == 0
    loop.submit(EngineRequest("s", 40, 1, ()), sink, "length")
    fresh = ServerMetrics(loop.engine, loras=(), max_model_len=1000, started_s=1.0)
    loop.restart(fresh)
    assert sink.dropped
    assert loop.metrics is fresh
    assert loop.engine.num_waiting == 0


async def test_a_starved_process_does_not_race_to_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sink = make(), Sink()
    monkeypatch.setattr("extproc.sim.engine_loop.MAX_LAG_S", 0.0)
    loop.submit(EngineRequest("r", 5, 4, ()), sink, "length")
    await sink.done.wait()
    assert len(sink.events) == 4


async def test_speed_must_be_positive() -> None:
    engine = Engine(FAST)
    metrics = ServerMetrics(engine, loras=(), max_model_len=1000, started_s=0.0)
    with pytest.raises(ValueError):
        EngineLoop(engine, metrics, speed=0, unix_clock=lambda: 0.0)
