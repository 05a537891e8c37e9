"""One vLLM replica as a model: what its scheduler does step by step, and how long each step takes.

Decides which requests run in a step (vLLM V1: running requests first, then the waiting ones in order of arrival, within a token
budget, prefills in chunks), which KV blocks they use, what the prefix cache saves and who is preempted. Knows neither HTTP nor text:
a prompt is a number of tokens and one key per full block (`tokens.block_keys`). The clock is the caller's: `begin_step(now)` says how
long the step takes, the caller lets that time pass, really or virtually, and calls `end_step`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from extproc.sim.kv_blocks import BlockPool

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from extproc.sim.presets import EngineConstants


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate. Its output is fixed beforehand: the model decides when tokens come, not which."""

    request_id: str
    """Unique among the requests the engine currently has."""
    prompt_tokens: int
    """>= 1."""
    output_tokens: int
    """Tokens it will generate, >= 1."""
    block_keys: Sequence[Hashable]
    """One key per full block of prompt and then output, each standing for the whole prefix up to its end (chained), never None.
    Whatever separates caches (LoRA adapter, cache salt) is part of the keys. Blocks without a key are not cached."""
    lora: str | None = None
    """LoRA adapter in use; reported, and otherwise without effect on the model."""


class TokenEvent(NamedTuple):
    """A request has a new token at the end of a step; a tuple, because thousands are made each second."""

    request_id: str
    output_tokens: int
    """Tokens generated so far including this one; 1 is the first token."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache when the request was first scheduled."""
    scheduled_s: float
    """`now` of the step that first scheduled it."""
    preemptions: int
    finished: bool


@dataclass(slots=True)
class EngineCounters:
    """Totals since start or `clear`, as vLLM counts them: tokens unless the name says requests or steps."""

    prefix_cache_queries: int = 0
    """Prompt tokens of requests when first scheduled; a preempted request is not counted again."""
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that have reached their first token, cached ones included."""
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    steps: int = 0


class _Sequence:
    """State of one request. `target` tokens are known (prompt and what was generated); `computed` of them have their KV."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "computed",
        "generated",
        "gone",
        "preemptions",
        "remembered",
        "request",
        "scheduled_s",
        "target",
    )

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.target = request.prompt_tokens
        self.computed = 0
        self.generated = 0
        self.blocks: list[int] = []
        self.remembered = 0  # leading blocks already given to the prefix cache
        self.cached_tokens = 0
        self.scheduled_s: float | None = None
        self.preemptions = 0
        self.gone = False


class Engine:
    """A replica with empty cache and no requests.

    Steps alternate: `begin_step`, then `end_step`. `add`, `abort` and `clear` are allowed at any time, also between the two.
    Cost of a step: O(running requests + blocks of newly admitted prompts).
    """

    def __init__(self, constants: EngineConstants) -> None:
        self.constants = constants
        # vLLM keeps block 0 as the null block, so one block less is usable.
        self.pool = BlockPool(constants.num_gpu_blocks - 1)
        self.counters = EngineCounters()
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._scheduled: list[tuple[_Sequence, int]] | None = None

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, preempted ones included."""
        return len(self._waiting)

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of blocks held by running requests, 0 to 1; 0 when idle, however much is cached."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    @property
    def step_tokens(self) -> int:
        """Tokens scheduled in the step now under way, 0 between steps."""
        return sum(tokens for _, tokens in self._scheduled or ())

    def running_loras(self) -> list[str]:
        """Adapters of running requests, each once, in order of admission."""
        return list(dict.fromkeys(s.request.lora for s in self._running if s.request.lora is not None))

    def waiting_loras(self) -> list[str]:
        """Adapters of waiting requests, each once, in order of the queue."""
        return list(dict.fromkeys(s.request.lora for s in self._waiting if s.request.lora is not None))

    def fits(self, total_tokens: int) -> bool:
        """Whether a request of so many prompt and output tokens can ever run alone."""
        return self._blocks_for(total_tokens) <= self.pool.num_blocks

    def add(self, request: EngineRequest) -> None:
        """Queue a request; it is considered at the next `begin_step`.

        Raises ValueError for an id in use, for fewer than one prompt or output token, and for a request that the whole KV cache
        could not hold (vLLM refuses those before they reach the engine).
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is already in the engine")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a request needs at least one prompt and one output token")
        if not self.fits(request.prompt_tokens + request.output_tokens):
            raise ValueError("the request does not fit into the KV cache")
        sequence = _Sequence(request)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a request; its blocks become free at once. False when it is unknown or finished."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        sequence.gone = True
        # An empty list of blocks means waiting; a running request always holds some.
        if sequence.blocks:
            self._running.remove(sequence)
            self.pool.release(sequence.blocks)
        else:
            self._waiting.remove(sequence)
        self.counters.aborted_requests += 1
        return True

    def clear(self) -> list[str]:
        """Forget everything, as a restarted process would: requests, cache, counters, a step under way. Returns the dropped ids."""
        dropped = list(self._sequences)
        self.pool = BlockPool(self.pool.num_blocks)
        self.counters = EngineCounters()
        self._sequences.clear()
        self._waiting.clear()
        self._running.clear()
        self._scheduled = None
        return dropped

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes; running requests keep their blocks."""
        self.pool.forget_all()

    def begin_step(self, now: float) -> float | None:
        """Schedule one step and say how many seconds it takes; None when there is nothing to run.

        Full blocks enter the prefix cache here, so requests of the same step share them, as in vLLM. `now` is in seconds of the
        caller's clock and only reported back. Raises RuntimeError while a step is under way.
        """
        if self._scheduled is not None:
            raise RuntimeError("the previous step has not ended")
        scheduled: list[tuple[_Sequence, int]] = []
        budget, preempted = self._schedule_running(scheduled)
        if not preempted:
            self._admit(scheduled, budget, now)
        if not scheduled:
            return None
        self._scheduled = scheduled
        self.counters.steps += 1
        return self._duration_s(scheduled)

    def end_step(self) -> list[TokenEvent]:
        """End the step: every request whose known tokens are all computed has one token more. Events in order of admission.

        Raises RuntimeError when no step is under way. After `clear` in the middle of a step there is none.
        """
        scheduled = self._scheduled
        if scheduled is None:
            raise RuntimeError("no step is under way")
        self._scheduled = None
        events: list[TokenEvent] = []
        finished = False
        for sequence, tokens in scheduled:
            if sequence.gone:
                continue
            sequence.computed += tokens
            if sequence.computed == sequence.target:
                event = self._token(sequence)
                finished |= event.finished
                events.append(event)
        if finished:
            self._running = [sequence for sequence in self._running if not sequence.gone]
        return events

    def _token(self, sequence: _Sequence) -> TokenEvent:
        request, counters = sequence.request, self.counters
        sequence.generated += 1
        sequence.target += 1
        counters.generation_tokens += 1
        if sequence.generated == 1:
            counters.prompt_tokens += request.prompt_tokens
            counters.prompt_tokens_cached += sequence.cached_tokens
        finished = sequence.generated == request.output_tokens
        if finished:
            sequence.gone = True
            self.pool.release(sequence.blocks)
            del self._sequences[request.request_id]
            counters.finished_requests += 1
        scheduled_s = sequence.scheduled_s
        assert scheduled_s is not None
        return TokenEvent(
            request.request_id,
            sequence.generated,
            sequence.cached_tokens,
            scheduled_s,
            sequence.preemptions,
            finished,
        )

    def _schedule_running(self, scheduled: list[tuple[_Sequence, int]]) -> tuple[int, bool]:
        """Schedule what runs already. Returns the budget left and whether a request was preempted."""
        budget = self.constants.max_num_batched_tokens
        running, block_size = self._running, self.constants.block_size
        preempted = False
        position = 0
        while position < len(running) and budget:
            sequence = running[position]
            tokens = min(sequence.target - sequence.computed, budget)
            end = sequence.computed + tokens
            if len(sequence.blocks) * block_size < end:
                missing = self._blocks_for(end) - len(sequence.blocks)
                if missing > self.pool.num_free:
                    # The latest goes, possibly this one itself; what runs longest always gets on, so there is progress.
                    self._preempt(running.pop())
                    preempted = True
                    continue
                sequence.blocks += self.pool.allocate(missing)
            self._remember(sequence, end)
            scheduled.append((sequence, tokens))
            budget -= tokens
            position += 1
        return budget, preempted

    def _admit(self, scheduled: list[tuple[_Sequence, int]], budget: int, now: float) -> None:
        """Admit waiting requests in order until one does not fit."""
        waiting, running, pool = self._waiting, self._running, self.pool
        block_size, max_num_seqs = self.constants.block_size, self.constants.max_num_seqs
        while waiting and budget and len(running) < max_num_seqs:
            sequence = waiting[0]
            # The last token is always computed, else there would be nothing to sample from.
            hits = pool.match(sequence.request.block_keys, (sequence.target - 1) // block_size)
            # The whole sequence must fit although only a chunk is allocated: vLLM's scheduler_reserve_full_isl, on by default.
            if self._blocks_for(sequence.target) - len(hits) + pool.count_free(hits) > pool.num_free:
                return
            waiting.popleft()
            pool.claim(hits)
            cached = len(hits) * block_size
            tokens = min(sequence.target - cached, budget)
            sequence.blocks = hits + pool.allocate(self._blocks_for(cached + tokens) - len(hits))
            sequence.computed = cached
            sequence.remembered = len(hits)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
                sequence.cached_tokens = cached
                self.counters.prefix_cache_queries += sequence.request.prompt_tokens
                self.counters.prefix_cache_hits += cached
            self._remember(sequence, cached + tokens)
            running.append(sequence)
            scheduled.append((sequence, tokens))
            budget -= tokens

    def _preempt(self, sequence: _Sequence) -> None:
        """Take back a running request; it is computed again from its head, as far as the cache does not help."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.remembered = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(sequence)

    def _remember(self, sequence: _Sequence, end: int) -> None:
        """Give the prefix cache the blocks that are full once tokens up to `end` are computed."""
        keys = sequence.request.block_keys
        full = min(end // self.constants.block_size, len(keys))
        for index in range(sequence.remembered, full):
            self.pool.remember(sequence.blocks[index], keys[index])
        sequence.remembered = max(sequence.remembered, full)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.constants.block_size)

    def _duration_s(self, scheduled: list[tuple[_Sequence, int]]) -> float:
        constants = self.constants
        total_tokens = decoding = context_tokens = 0
        for sequence, tokens in scheduled:
            total_tokens += tokens
            if sequence.generated and tokens == 1:
                decoding += 1
                context_tokens += sequence.computed
        return (
            max(constants.weight_read_s, total_tokens / constants.prefill_tokens_per_s)
            + constants.step_overhead_s
            + constants.decode_request_s * decoding
            + constants.decode_context_token_s * context_tokens
        )
