import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.engine import Engine, EngineRequest, TokenEvent
from extproc.sim.presets import EngineConstants


def constants(blocks: int = 100, budget: int = 64, seqs: int = 8) -> EngineConstants:
    """Blocks of 4 tokens; a step takes 1 s, or prefill tokens / 10, plus 1/4 s per decoding request; one more block is the null block."""
    return EngineConstants(
        prefill_tokens_per_s=10,
        weight_read_s=1,
        step_overhead_s=0,
        decode_request_s=0.25,
        decode_context_token_s=0.125,
        kv_cache_tokens=4 * (blocks + 1),
        block_size=4,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
    )


def request(
    name: str, prompt: int, output: int = 1, *, prefix: str | None = None, lora: str | None = None
) -> EngineRequest:
    keys = [(prefix or name, index) for index in range((prompt + output) // 4)]
    return EngineRequest(name, prompt, output, keys, lora)


def step(engine: Engine, now: float = 0.0) -> tuple[float, list[TokenEvent]]:
    duration = engine.begin_step(now)
    assert duration is not None
    return duration, engine.end_step()


def run(engine: Engine) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.begin_step(0.0) is not None:
        events += engine.end_step()
    return events


def first_tokens(events: list[TokenEvent]) -> dict[str, int]:
    return {event.request_id: event.cached_tokens for event in events if event.output_tokens == 1}


def test_idle() -> None:
    engine = Engine(constants())
    assert engine.begin_step(0.0) is None
    assert engine.kv_cache_usage == 0


def test_one_request_from_start_to_end() -> None:
    engine = Engine(constants())
    engine.add(request("a", 20, 3))
    assert (engine.num_waiting, engine.num_running) == (1, 0)
    assert engine.begin_step(5.0) == 2.0  # 20 tokens at 10 tokens/s
    assert engine.step_tokens == 20
    assert (engine.num_waiting, engine.num_running) == (0, 1)
    assert engine.kv_cache_usage == pytest.approx(0.05)
    assert engine.end_step() == [TokenEvent("a", 1, 0, 5.0, 0, finished=False)]
    assert step(engine, 7.0) == (1 + 0.25 + 20 * 0.125, [TokenEvent("a", 2, 0, 5.0, 0, finished=False)])
    _, events = step(engine)
    assert events == [TokenEvent("a", 3, 0, 5.0, 0, finished=True)]
    assert engine.num_running == 0
    assert engine.kv_cache_usage == 0
    assert engine.begin_step(0.0) is None
    counters = engine.counters
    assert (counters.prompt_tokens, counters.generation_tokens, counters.finished_requests, counters.steps) == (
        20,
        3,
        1,
        3,
    )


@pytest.mark.parametrize(("prompt", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (23, 20)])
def test_hits_are_whole_blocks_and_never_the_last_token(prompt: int, cached: int) -> None:
    engine = Engine(constants())
    engine.add(request("a", prompt, prefix="p"))
    run(engine)
    engine.add(request("b", prompt, prefix="p"))
    assert first_tokens(run(engine)) == {"b": cached}
    assert engine.counters.prefix_cache_queries == 2 * prompt
    assert engine.counters.prefix_cache_hits == engine.counters.prompt_tokens_cached == cached


def test_requests_of_one_step_share_a_prefix() -> None:
    engine = Engine(constants())
    for name in "abc":
        engine.add(request(name, 10, prefix="p"))
    _, events = step(engine)
    assert first_tokens(events) == {"a": 0, "b": 8, "c": 8}


def test_generated_tokens_are_cached_but_for_the_last() -> None:
    engine = Engine(constants())
    engine.add(request("a", 6, 7, prefix="p"))
    run(engine)
    # 13 tokens; the KV of the last one was never computed, so 12 are cached.
    engine.add(request("b", 20, prefix="p"))
    assert first_tokens(run(engine)) == {"b": 12}


def test_prompts_are_computed_in_chunks_of_the_budget() -> None:
    engine = Engine(constants(budget=16))
    engine.add(request("a", 40))
    engine.add(request("b", 4))
    assert step(engine) == (1.6, [])
    assert step(engine) == (1.6, [])
    duration, events = step(engine)
    assert duration == pytest.approx(1.2)  # the last 8 of a and the 4 of b
    assert first_tokens(events) == {"a": 0, "b": 0}


def test_decodes_go_before_a_prefill_and_slow_down_with_it() -> None:
    engine = Engine(constants(budget=16))
    engine.add(request("a", 4, 3))
    step(engine)
    engine.add(request("b", 40))
    duration, events = step(engine)
    assert duration == pytest.approx(1.6 + 0.25 + 4 * 0.125)  # 1 decode token and 15 of b
    assert [event.request_id for event in events] == ["a"]


def test_no_more_than_max_num_seqs_run() -> None:
    engine = Engine(constants(seqs=2))
    for name in "abc":
        engine.add(request(name, 4, 2))
    step(engine)
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    assert len(run(engine)) == 4


def test_a_request_waits_until_its_whole_prompt_fits() -> None:
    engine = Engine(constants(blocks=10, budget=16))
    engine.add(request("a", 24, 3))
    step(engine)
    engine.add(request("b", 20))
    engine.add(request("c", 4))
    for _ in range(3):
        step(engine)
        assert (engine.num_running, engine.num_waiting) == ((1, 2) if engine.num_running else (0, 2))
    assert set(first_tokens(run(engine))) == {"b", "c"}


def test_new_prompts_displace_the_least_recently_used() -> None:
    engine = Engine(constants(blocks=10))
    for name in "ab":
        engine.add(request(name, 16))
        run(engine)
    engine.add(request("c", 16))  # 2 blocks are empty; the other 2 displace the tail of a
    run(engine)
    held = {name: len(engine.pool.match([(name, index) for index in range(4)], 4)) for name in "abc"}
    assert held == {"a": 2, "b": 4, "c": 4}


def test_the_latest_is_preempted_and_computed_again() -> None:
    engine = Engine(constants(blocks=5))
    engine.add(request("a", 8, 6))
    engine.add(request("b", 8, 6))
    events = run(engine)
    assert engine.counters.preemptions == 1
    last = {event.request_id: event for event in events if event.finished}
    assert last["a"].preemptions == 0
    assert last["b"].preemptions == 1
    assert [event.output_tokens for event in events if event.request_id == "b"] == [1, 2, 3, 4, 5, 6]
    assert list(last) == ["a", "b"]
    assert engine.counters.prefix_cache_queries == 16  # not counted again
    assert engine.pool.num_free == 5


def test_the_only_request_may_preempt_itself_never() -> None:
    engine = Engine(constants(blocks=5))
    engine.add(request("a", 8, 12))
    assert len(run(engine)) == 12
    assert engine.counters.preemptions == 0


def test_abort_waiting_running_and_within_a_step() -> None:
    engine = Engine(constants(seqs=2))
    for name in "abc":
        engine.add(request(name, 8, 4))
    engine.begin_step(0.0)
    assert engine.abort("c")
    assert engine.abort("a")
    assert not engine.abort("a")
    assert [event.request_id for event in engine.end_step()] == ["b"]
    assert engine.abort("b")
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.counters.aborted_requests == 3
    assert engine.begin_step(0.0) is None


def test_clear_is_a_restart() -> None:
    engine = Engine(constants())
    engine.add(request("a", 9, prefix="p"))
    run(engine)
    engine.add(request("b", 9, prefix="p"))
    engine.begin_step(0.0)
    assert engine.clear() == ["b"]
    assert engine.counters.prompt_tokens == 0
    with pytest.raises(RuntimeError):
        engine.end_step()
    engine.add(request("b", 9, prefix="p"))
    assert first_tokens(run(engine)) == {"b": 0}


def test_reset_prefix_cache() -> None:
    engine = Engine(constants())
    engine.add(request("a", 9, prefix="p"))
    run(engine)
    engine.reset_prefix_cache()
    engine.add(request("b", 9, prefix="p"))
    assert first_tokens(run(engine)) == {"b": 0}


def test_adapters_are_reported_by_state() -> None:
    engine = Engine(constants(seqs=3))
    for name, lora in zip("abcde", ["x", None, "x", "y", "y"], strict=True):
        engine.add(request(name, 4, 2, lora=lora))
    assert (engine.running_loras(), engine.waiting_loras()) == ([], ["x", "y"])
    step(engine)
    assert (engine.running_loras(), engine.waiting_loras()) == (["x"], ["y"])


def test_misuse() -> None:
    engine = Engine(constants(blocks=4))
    engine.add(request("a", 4))
    for bad in (request("a", 4), request("b", 0), request("b", 4, 0), request("b", 16)):
        with pytest.raises(ValueError):
            engine.add(bad)
    with pytest.raises(RuntimeError):
        engine.end_step()
    engine.begin_step(0.0)
    with pytest.raises(RuntimeError):
        engine.begin_step(0.0)


@given(st.randoms(use_true_random=False), st.integers(6, 30), st.integers(8, 40), st.integers(1, 5))
def test_whatever_happens_no_block_leaks_and_every_request_ends(
    rng: random.Random, blocks: int, budget: int, seqs: int
) -> None:
    engine = Engine(constants(blocks=blocks, budget=budget, seqs=seqs))
    alive: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for number in range(30):
        name = f"r{number}"
        prompt, output = rng.randint(1, 14), rng.randint(1, 8)
        engine.add(request(name, prompt, output, prefix=rng.choice(["p", "q", None])))
        alive[name] = output
        if rng.random() < 0.6 and engine.begin_step(0.0) is not None:
            if rng.random() < 0.3:
                gone = rng.choice(list(alive))
                assert engine.abort(gone)
                del alive[gone]
            assert engine.step_tokens <= budget
            assert engine.num_running <= seqs
            for event in engine.end_step():
                tokens[event.request_id] = tokens.get(event.request_id, 0) + 1
                assert tokens[event.request_id] == event.output_tokens
                assert event.finished == (event.output_tokens == alive[event.request_id])
                if event.finished:
                    del alive[event.request_id]
        assert engine.num_running + engine.num_waiting == len(alive)
        assert 0 <= engine.kv_cache_usage <= 1
    for event in run(engine):
        if event.finished:
            del alive[event.request_id]
    assert not alive
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.counters.prefix_cache_hits <= engine.counters.prefix_cache_queries
