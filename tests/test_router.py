"""The whole core as a user of the library sees it: what is put in, what comes out, and that nothing is ever held twice."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.config.schema import (
    Config,
    InFlightConfig,
    LimitsConfig,
    PrefixConfig,
    RoutingConfig,
    Seconds,
    StrategyName,
)
from extproc.errors import NoEndpointError, OverloadedError
from extproc.pool.ledger import IdState
from extproc.prefix.blocks import hash_blocks, seed
from extproc.prefix.entries import BlockState, EvictionCause
from extproc.router import Finished, Router
from extproc.types import (
    Decision,
    Endpoint,
    EndpointMetrics,
    InferenceRequest,
    Outcome,
    RequestKind,
    RouteEffect,
    Usage,
)

A, B, C = (Endpoint(f"10.0.0.{number}", 8000) for number in (1, 2, 3))
LONG = b"".join(f"{number:08d}".encode() for number in range(1000)).translate(
    bytes.maketrans(b"0123456789", b"abcdefghij")
)
"""8,000 letters without repetition: about 2,000 tokens, and what a template adds."""


def ask(prompt: bytes = LONG, **fields: Any) -> InferenceRequest:
    return InferenceRequest(**{"kind": RequestKind.CHAT, "model": "m", "prompts": (prompt,), **fields})


class Bench:
    """A router with its ends in a list."""

    def __init__(self, *endpoints: Endpoint, config: Config | None = None, number: int = 1) -> None:
        self.ends: list[Finished] = []
        self.router = Router(config or Config(), rng=random.Random(number), on_released=self.ends.append)
        self.router.set_endpoints(endpoints, now=0.0)

    def expire(self, now: float) -> list[Finished]:
        """Let leases run out; return the ends that this brings."""
        before = len(self.ends)
        self.router.expire(now=now)
        return self.ends[before:]

    def in_flight(self, endpoint: Endpoint, now: float = 0.0) -> int:
        return next(one.in_flight for one in self.router.snapshots(now) if one.endpoint.id == endpoint.id)

    def held(self, endpoint: Endpoint, prompt: bytes = LONG) -> list[BlockState]:
        chain = hash_blocks(prompt, seed("m", ""), self.router._schedule)
        return self.router._index.states(endpoint.id, chain)

    def pending(self) -> int:
        """Blocks some request still vouches for."""
        return sum(len(holder.pending) for holder in self.router._index._holders.values())


def other(decision: Decision) -> Endpoint:
    return B if decision.endpoint.id == A.id else A


# Where requests go


@pytest.mark.parametrize("requests", [3, 30])
def test_an_endpoint_whose_page_never_answered_gets_its_fair_share_at_most(requests: int) -> None:
    went = 0
    for number in range(200):
        bench = Bench(A, B, number=number)
        bench.router.observe(A.id, EndpointMetrics(waiting=0.0, running=0.0, kv_cache_usage=0.0), now=1.0)
        bench.router.observe_failure(B.id, now=1.0)
        for place in range(requests):
            went += bench.router.route(ask(f"{place}".encode() * 30), now=1.0).endpoint == B
    assert went / (200 * requests) <= 0.52


def test_equal_prompts_stay_together_while_the_first_is_under_way() -> None:
    bench = Bench(A, B, C)
    first = bench.router.route(ask(), now=1.0)
    second = bench.router.route(ask(), now=1.0)
    assert second.endpoint == first.endpoint
    assert first.matched_bytes == 0
    assert second.matched_bytes == len(LONG) // 256 * 256
    assert second.predicted_cached_tokens == pytest.approx(second.matched_bytes / 4, rel=0.01)
    assert second.prompt_tokens == 2000
    assert bench.in_flight(first.endpoint) == 2


def test_different_prompts_spread() -> None:
    bench = Bench(A, B)
    chosen = {bench.router.route(ask(f"{number}".encode() * 2000), now=1.0).endpoint.id for number in (1, 2)}
    assert chosen == {A.id, B.id}


def test_model_and_salt_separate_prefixes() -> None:
    bench = Bench(A)
    bench.router.route(ask(), now=1.0)
    assert bench.router.route(ask(model="n"), now=1.0).matched_bytes == 0
    assert bench.router.route(ask(cache_salt="s"), now=1.0).matched_bytes == 0
    assert bench.router.route(ask(), now=1.0).matched_bytes > 0


def test_a_request_without_a_prompt_is_routed_by_load() -> None:
    bench = Bench(A, B)
    first = bench.router.route(InferenceRequest(), now=1.0)
    second = bench.router.route(InferenceRequest(), now=1.0)
    assert first.endpoint != second.endpoint
    assert first.prompt_bytes == 0
    assert bench.router.index_stats().lookups == 0
    bench.router.response_headers(first, now=1.5)
    bench.router.finished(first, Outcome.OK, now=2.0, usage=Usage(10, 2, 0))
    assert bench.router.in_flight == 1


def test_of_many_prompts_the_first_are_hashed() -> None:
    bench = Bench(A)
    prompts = tuple(f"{number}".encode() * 1000 for number in range(100, 140))
    decision = bench.router.route(InferenceRequest(prompts=prompts), now=1.0)
    again = bench.router.route(InferenceRequest(prompts=prompts), now=1.0)
    assert decision.prompt_bytes == sum(map(len, prompts))
    assert 0.7 < again.matched_bytes / again.prompt_bytes < 32 / 40


def test_nobody_to_choose_from_changes_nothing() -> None:
    bench = Bench()
    with pytest.raises(NoEndpointError):
        bench.router.route(ask(), now=1.0)
    assert bench.router.in_flight == 0
    assert bench.router.index_stats().blocks == 0


def test_beyond_the_limits_changes_nothing() -> None:
    bench = Bench(A, config=Config(routing=RoutingConfig(limits=LimitsConfig(in_flight=1))))
    decision = bench.router.route(ask(), now=1.0)
    with pytest.raises(OverloadedError):
        bench.router.route(ask(), now=1.0)
    assert bench.router.in_flight == 1
    bench.router.finished(decision, Outcome.OK, now=2.0)
    bench.router.route(ask(), now=2.0)


def test_equal_seeds_decide_alike() -> None:
    def run() -> list[tuple[str, str]]:
        bench = Bench(A, B, C)
        decisions = [bench.router.route(InferenceRequest(), now=float(number)) for number in range(50)]
        return [(decision.id, decision.endpoint.id) for decision in decisions]

    assert run() == run()
    assert len({decision_id for decision_id, _ in run()}) == 50


def test_of_a_large_pool_no_open_request_keeps_all_candidates() -> None:
    pool = [Endpoint(f"10.0.1.{number}", 8000) for number in range(1, 40)]
    bench = Bench(*pool)
    decision = bench.router.route(ask(), now=1.0)
    assert len(decision.candidates) == 39
    finished = bench.router.finished(decision, Outcome.OK, now=2.0)
    assert finished is not None
    assert finished.decision.candidates == ()
    assert finished.decision.id == decision.id


# Released exactly once, whichever way


def test_finished_releases_once() -> None:
    bench = Bench(A)
    decision = bench.router.route(ask(), now=1.0)
    assert bench.router.is_open(decision.id)
    assert bench.router.id_state(decision.id) is IdState.OPEN
    usage = Usage(2000, 5, 0)
    finished = bench.router.finished(decision, Outcome.OK, now=3.5, usage=usage)
    assert finished == Finished(decision, Outcome.OK, usage, 2.5)
    assert bench.router.finished(decision.id, Outcome.RESET, now=4.0) is None
    assert bench.ends == [], "what is returned is not told as well"
    assert bench.router.in_flight == bench.in_flight(A) == 0
    assert bench.router.id_state(decision.id) is IdState.ENDED
    assert bench.router.id_state("somebody else's") is IdState.UNKNOWN
    assert set(bench.held(A)) == {BlockState.CONFIRMED}


def test_a_lease_that_runs_out_releases_once() -> None:
    bench = Bench(A, config=Config(in_flight=InFlightConfig(lease=Seconds(10))))
    decision = bench.router.route(ask(), now=1.0)
    assert bench.expire(10.9) == []
    assert bench.router.renew(decision, now=10.9)
    assert bench.router.renew(decision.id, now=10.9)
    assert bench.expire(20.8) == []
    (finished,) = bench.expire(20.9)
    assert (finished.outcome, finished.duration_s) == (Outcome.LEASE_EXPIRED, 19.9)
    assert not bench.router.renew(decision, now=21.0)
    assert bench.router.finished(decision, Outcome.OK, now=21.0) is None
    assert bench.ends == [finished]
    assert bench.in_flight(A) == 0


def test_an_endpoint_that_leaves_for_one_look_up_keeps_its_requests_and_prefixes() -> None:
    bench = Bench(A, B)
    decision = bench.router.route(ask(), now=1.0)
    another = bench.router.route(ask(), now=1.0)
    stays = other(decision)
    change = bench.router.set_endpoints([stays], now=2.0)
    assert change.removed == (decision.endpoint.id,)
    assert bench.ends == []
    assert bench.router.in_flight == 2
    assert bench.router.route(ask(), now=2.5).endpoint == stays
    finished = bench.router.finished(decision, Outcome.OK, now=3.0)
    assert finished is not None
    assert finished.outcome is Outcome.OK
    bench.router.set_endpoints([A, B], now=4.0)
    assert bench.in_flight(decision.endpoint, 4.0) == 1
    assert set(bench.held(decision.endpoint)) == {BlockState.CONFIRMED}
    bench.router.finished(another, Outcome.OK, now=5.0)
    assert bench.in_flight(decision.endpoint, 5.0) == 0


def test_an_endpoint_that_stays_away_releases_its_requests_and_prefixes() -> None:
    bench = Bench(A, B)
    decision = bench.router.route(ask(), now=1.0)
    stays = other(decision)
    bench.router.set_endpoints([stays], now=2.0)
    bench.router.expire(now=100.0)
    assert bench.ends == []
    bench.router.expire(now=130.0)
    assert [end.outcome for end in bench.ends] == [Outcome.ENDPOINT_GONE]
    assert bench.router.in_flight == 0
    assert bench.router.finished(decision, Outcome.OK, now=131.0) is None
    bench.router.set_endpoints([A, B], now=132.0)
    assert bench.held(decision.endpoint) == []


def test_another_process_at_an_address_that_was_away_has_neither() -> None:
    one, two = (Endpoint("10.0.0.1", 8000, uid=uid) for uid in ("one", "two"))
    bench = Bench(one)
    bench.router.route(ask(), now=1.0)
    bench.router.set_endpoints([B], now=2.0)
    bench.router.set_endpoints([two, B], now=3.0)
    assert [end.outcome for end in bench.ends] == [Outcome.ENDPOINT_GONE]
    assert bench.held(two) == []
    assert bench.in_flight(two, 3.0) == 0


@pytest.mark.parametrize("strategy", ["weighted", "least-load", "prefix-cache"])
def test_an_endpoint_that_was_away_for_one_look_up_gets_its_fair_share_or_less(strategy: StrategyName) -> None:
    fleet = tuple(Endpoint(f"10.0.0.{number}", 8000) for number in (1, 2, 3, 4))
    bench = Bench(*fleet, config=Config(routing=RoutingConfig(strategy=strategy)))
    for number in range(48):
        bench.router.route(ask(f"{number}".encode() * 500), now=1.0)
    bench.router.set_endpoints(fleet[1:], now=2.0)
    bench.router.set_endpoints(fleet, now=7.0)
    chosen = [bench.router.route(ask(f"{number}".encode() * 500), now=7.0).endpoint for number in range(100, 140)]
    assert chosen.count(fleet[0]) <= 12


def test_a_restart_seen_by_uid_releases_and_forgets() -> None:
    bench = Bench(Endpoint("10.0.0.1", 8000, uid="one"))
    bench.router.route(ask(), now=1.0)
    change = bench.router.set_endpoints([Endpoint("10.0.0.1", 8000, uid="two")], now=2.0)
    assert change.restarted == (A.id,)
    assert [end.outcome for end in bench.ends] == [Outcome.ENDPOINT_GONE]
    assert bench.held(A) == []
    assert bench.router.route(ask(), now=3.0).matched_bytes == 0


def test_a_restart_seen_in_a_scrape_releases_what_was_sent_before_the_last_one() -> None:
    bench = Bench(A)
    page = EndpointMetrics(process_start_time_s=100.0)
    before = bench.router.route(ask(), now=1.0)
    assert not bench.router.observe(A.id, page, now=2.0)
    since = bench.router.route(ask(), now=3.0)
    assert bench.router.observe(A.id, EndpointMetrics(process_start_time_s=200.0), now=4.0)
    assert [end.decision.id for end in bench.ends] == [before.id]
    assert bench.held(A) == []
    assert bench.router.finished(since, Outcome.OK, now=5.0) is not None
    assert bench.in_flight(A) == 0
    assert bench.held(A) == [], "a confirmation of the process that is gone brings nothing back"


def test_a_restart_seen_only_by_counters_that_come_back_releases_what_was_sent_before_they_went() -> None:
    """As SGLang and TensorRT-LLM restart: no start time, and no counters until their first use."""
    bench = Bench(A)
    before = bench.router.route(ask(), now=1.0)
    assert not bench.router.observe(A.id, EndpointMetrics(waiting=0.0, prompt_tokens_total=5000.0), now=2.0)
    since = bench.router.route(ask(), now=3.0)
    assert not bench.router.observe(A.id, EndpointMetrics(waiting=0.0), now=4.0)
    later = bench.router.route(ask(), now=5.0)
    bench.router.observe_failure(A.id, now=6.0)
    assert bench.router.observe(A.id, EndpointMetrics(waiting=0.0, prompt_tokens_total=3.0), now=7.0)
    assert [end.decision.id for end in bench.ends] == [before.id]
    assert bench.held(A) == []
    for decision in (since, later):
        assert bench.router.finished(decision, Outcome.OK, now=8.0) is not None
    assert bench.in_flight(A) == 0


def test_scrapes_of_strangers_change_nothing() -> None:
    bench = Bench(A)
    assert not bench.router.observe("10.9.9.9:1", EndpointMetrics(cache_tokens=5), now=1.0)
    bench.router.observe_failure("10.9.9.9:1", now=1.0)
    bench.router.observe_models("10.9.9.9:1", {"x": None}, now=1.0)
    assert bench.router.known_models() == {}
    assert bench.router.index_stats().endpoints == 1


def test_what_is_scraped_and_listed_shows_in_snapshots() -> None:
    bench = Bench(A)
    bench.router.observe(A.id, EndpointMetrics(waiting=3, running=4, kv_cache_usage=0.5), now=1.0)
    bench.router.observe_failure(A.id, now=2.0)
    bench.router.observe_models(A.id, {"m": None, "lora": "m"}, now=2.0)
    (snapshot,) = bench.router.snapshots(2.0)
    assert (snapshot.waiting, snapshot.running, snapshot.kv_cache_usage) == (3, 4, 0.5)
    assert (snapshot.scrape_failures, snapshot.models) == (1, frozenset({"m", "lora"}))
    assert bench.router.known_models() == {"m": None, "lora": "m"}


def test_a_defect_between_ledger_and_index_costs_nothing_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(A)

    def broken(*_: object) -> object:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(bench.router._index, "add", broken)
        with pytest.raises(ZeroDivisionError):
            bench.router.route(ask(), now=1.0)
    assert bench.router.in_flight == 0
    assert bench.expire(10_000.0) == []
    assert bench.in_flight(A) == 0


# What an end says of the prefix


@pytest.mark.parametrize(
    ("outcome", "stays"),
    [
        (Outcome.OK, True),
        (Outcome.CLIENT_ERROR, False),
        (Outcome.BUSY, False),
        (Outcome.SERVER_ERROR, False),
        (Outcome.CONNECT_FAILURE, False),
        (Outcome.RESET, True),
        (Outcome.TIMEOUT, True),
        (Outcome.CLIENT_GONE, True),
        (Outcome.ABORTED, True),
    ],
)
def test_every_end_settles_the_prefix(outcome: Outcome, stays: bool) -> None:
    bench = Bench(A)
    bench.router.finished(bench.router.route(ask(), now=1.0), outcome, now=2.0)
    assert bool(bench.held(A)) is stays
    assert bench.pending() == 0, "nobody vouches any more: the request is over"


def test_a_lease_that_runs_out_settles_the_prefix() -> None:
    bench = Bench(A)
    bench.router.route(ask(), now=1.0)
    bench.router.expire(now=10_000.0)
    assert set(bench.held(A)) == {BlockState.CONFIRMED}
    assert bench.pending() == 0


def test_an_answer_that_has_begun_confirms_the_prefix() -> None:
    bench = Bench(A)
    decision = bench.router.route(ask(), now=1.0)
    assert set(bench.held(A)) == {BlockState.SPECULATIVE}
    assert bench.router.snapshots(1.0)[0].in_flight_tokens == 2000
    bench.router.response_headers(decision, now=2.0)
    bench.router.response_headers(decision.id, now=2.0)
    assert set(bench.held(A)) == {BlockState.CONFIRMED}
    assert bench.router.snapshots(2.0)[0].in_flight_tokens == 0
    bench.router.finished(decision, Outcome.SERVER_ERROR, now=3.0)
    assert bench.held(A), "it had answered, so the prompt was computed"
    bench.router.response_headers(decision, now=4.0)


def test_served_by_another_moves_the_prefix_and_blames_the_chosen() -> None:
    bench = Bench(A, B)
    decision = bench.router.route(ask(), now=1.0)
    finished = bench.router.finished(decision, Outcome.OK, now=2.0, served_by=other(decision).id)
    assert finished is not None
    assert finished.served_by == other(decision).id
    assert bench.held(decision.endpoint) == []
    assert set(bench.held(other(decision))) == {BlockState.CONFIRMED}
    scores = {one.endpoint.id: one.health_score for one in bench.router.snapshots(2.0)}
    assert scores[decision.endpoint.id] < 1.0 == scores[other(decision).id]


@pytest.mark.parametrize(("outcome", "served_by"), [(Outcome.RESET, "10.0.0.2:8000"), (Outcome.OK, "10.9.9.9:1")])
def test_served_by_another_that_failed_or_is_a_stranger(outcome: Outcome, served_by: str) -> None:
    bench = Bench(A, B)
    bench.router.observe(B.id, EndpointMetrics(waiting=50, running=50, kv_cache_usage=1.0), now=0.5)
    bench.router.observe(A.id, EndpointMetrics(waiting=0, running=0, kv_cache_usage=0.0), now=0.5)
    decision = bench.router.route(ask(), now=1.0)
    assert decision.endpoint == A
    bench.router.finished(decision, outcome, now=2.0, served_by=served_by)
    assert bench.held(A) == bench.held(B) == []


@pytest.mark.parametrize("guessed", [False, True])
def test_a_request_whose_end_nobody_reports_is_released_by_a_page_that_no_longer_shows_it(guessed: bool) -> None:
    bench = Bench(A)
    decision = bench.router.route(ask(), now=1.0)
    bench.router.unseen(decision, now=1.0, guessed=guessed)
    bench.router.unseen(decision, now=1.0, guessed=guessed)
    bench.router.observe(A.id, EndpointMetrics(waiting=0.0, running=1.0, kv_cache_usage=0.0), now=20.0)
    assert bench.router.is_open(decision.id)
    bench.router.observe(A.id, EndpointMetrics(waiting=0.0, running=0.0, kv_cache_usage=0.0), now=21.0)
    assert [end.outcome for end in bench.ends] == [Outcome.LEASE_EXPIRED]
    assert bench.in_flight(A, 21.0) == 0


# What usage teaches


def numbered(number: int) -> bytes:
    """Prompts of 8,000 letters, each another one from its first block on."""
    return bytes([97 + number % 26, 97 + number // 26 % 26]) * 4000


def had(bench: Bench, prompt: bytes, cached: int, *, at: float) -> Finished:
    """Ask at some time, and let the engine say how many of its 2,000 tokens it had."""
    usage = Usage(2000, 1, cached)
    finished = bench.router.finished(bench.router.route(ask(prompt), now=at), Outcome.OK, now=at + 0.1, usage=usage)
    assert finished is not None
    return finished


def test_one_broken_promise_takes_nothing_from_other_prompts() -> None:
    bench = Bench(A)
    for number in range(20):
        had(bench, numbered(number), 0, at=1.0 + number)
    assert had(bench, numbered(19), 0, at=30.0).evicted_blocks == 0
    for again in range(50):
        assert had(bench, numbered(19), 0, at=40.0 + again).evicted_blocks == 0, "the same prompt is one voice"
    assert all(bench.held(A, numbered(number)) for number in range(20))
    assert bench.router.index_stats().evicted[EvictionCause.CORRECTION] == 0


def test_promises_that_break_one_after_another_correct_the_index() -> None:
    bench = Bench(A)
    for number in range(40):
        had(bench, numbered(number), 0, at=1.0 + number)
    evicted = [had(bench, numbered(number), 0, at=60.0 + number).evicted_blocks for number in range(20, 29)]
    assert any(evicted)
    assert bench.held(A, numbered(0)) == bench.held(A, numbered(19)) == [], "used earlier than what has been lost"
    assert bench.held(A, numbered(28)) != [], "it has just been computed"
    assert bench.held(A, numbered(39)) != [], "used later"
    assert bench.router.index_stats().evicted[EvictionCause.CORRECTION] == sum(evicted)


def test_kept_promises_outweigh_a_client_whose_prompts_never_hit() -> None:
    bench = Bench(A)
    for number in range(40):
        had(bench, numbered(number), 0, at=1.0 + number)
    for number in range(20):
        had(bench, numbered(number), 0, at=50.0 + number)
        had(bench, numbered(20 + number), 1990, at=50.5 + number)
    assert all(bench.held(A, numbered(number)) for number in range(40))


def test_a_promise_is_compared_by_shares_however_wrong_the_tokens_were_estimated() -> None:
    bench = Bench(A)
    for number in range(20):
        bench.router.finished(bench.router.route(ask(numbered(number)), now=1.0 + number), Outcome.OK, now=1.5 + number)
    for number in range(20):
        decision = bench.router.route(ask(numbered(number)), now=40.0 + number)
        assert decision.predicted_cached_tokens > 1900
        usage = Usage(500, 1, 480)
        finished = bench.router.finished(decision, Outcome.OK, now=40.5 + number, usage=usage)
        assert finished is not None
        assert finished.evicted_blocks == 0
        # Another prior: what has been learned is forgotten.
        bench.router.reconfigure(
            Config(prefix=PrefixConfig(bytes_per_token=4.0 + (number + 1) / 1000)), now=41.0 + number
        )


@pytest.mark.parametrize(
    "usage",
    [
        Usage(2000, 1, None),
        Usage(2000, 1, 1900),
        Usage(2000, 1, 1500),
        Usage(None, None, 1990),
        Usage(0, 0, 1990),
    ],
)
def test_a_promise_that_was_nearly_kept_is_not_corrected(usage: Usage) -> None:
    bench = Bench(A)
    bench.router.finished(bench.router.route(ask(), now=1.0), Outcome.OK, now=2.0)
    finished = bench.router.finished(bench.router.route(ask(), now=3.0), Outcome.OK, now=4.0, usage=usage)
    assert finished is not None
    assert finished.evicted_blocks == 0


@pytest.mark.parametrize(
    ("shared", "tokens", "cached"),
    [(8000, 2000, 1200), (768, 2000, 0), (256, 1900, 0)],
    ids=["between broken and kept", "promised too little to judge", "promised hardly anything"],
)
def test_a_promise_that_says_too_little_is_not_judged(shared: int, tokens: int, cached: int) -> None:
    bench = Bench(A)
    bench.router.finished(bench.router.route(ask(LONG[:shared] + LONG[::-1]), now=1.0), Outcome.OK, now=2.0)
    second = bench.router.route(ask(), now=3.0)
    assert second.matched_bytes == shared // 256 * 256
    finished = bench.router.finished(second, Outcome.OK, now=4.0, usage=Usage(tokens, 1, cached))
    assert finished is not None
    assert finished.evicted_blocks == 0
    assert bench.router.index_stats().evicted[EvictionCause.CORRECTION] == 0


def test_the_word_of_another_endpoint_corrects_nothing() -> None:
    bench = Bench(A, B)
    first = bench.router.route(ask(), now=1.0)
    bench.router.finished(first, Outcome.OK, now=2.0)
    second = bench.router.route(ask(), now=3.0)
    assert second.endpoint == first.endpoint
    finished = bench.router.finished(second, Outcome.OK, now=4.0, usage=Usage(2000, 1, 0), served_by=other(second).id)
    assert finished is not None
    assert finished.evicted_blocks == 0


def test_bytes_per_token_are_learned_per_model() -> None:
    bench = Bench(A)
    assert bench.router.route(ask(b"a" * 8000), now=0.0).prompt_tokens == 2000
    for number in range(200):
        decision = bench.router.route(ask(numbered(number)[:4000]), now=1.0 + number)
        bench.router.finished(decision, Outcome.OK, now=1.5 + number, usage=Usage(2000, 1, 0))
    assert bench.router.route(ask(b"bq" * 4000), now=300.0).prompt_tokens == pytest.approx(4000, rel=0.03)
    unknown = bench.router.route(ask(b"bq" * 4000, model="unknown"), now=300.0)
    assert unknown.prompt_tokens == pytest.approx(4000, rel=0.03)


@pytest.mark.parametrize("request_", [ask(complete=False), InferenceRequest(prompts=(LONG, LONG), model="m")])
def test_a_prompt_not_seen_whole_teaches_nothing(request_: InferenceRequest) -> None:
    bench = Bench(A)
    for number in range(20):
        decision = bench.router.route(request_, now=float(number))
        bench.router.finished(decision, Outcome.OK, now=number + 0.5, usage=Usage(100, 1, 0))
    assert bench.router.route(ask(b"b" * 8000), now=300.0).prompt_tokens == 2000


def test_the_capacity_of_a_cache_comes_from_the_engine_then_the_configuration() -> None:
    bench = Bench(A, config=Config(prefix=PrefixConfig(capacity_tokens=1000)))
    index = bench.router._index
    assert index.capacity_bytes(A.id) == 4000
    bench.router.observe(A.id, EndpointMetrics(cache_tokens=500), now=1.0)
    assert index.capacity_bytes(A.id) == 2000
    bench.router.route(ask(), now=2.0)
    assert index.held_bytes(A.id) <= 2000
    assert Bench(A).router._index.capacity_bytes(A.id) == 4_000_000


# Another configuration


def test_reconfigure_counts_for_the_next_request() -> None:
    bench = Bench(A, B)
    decision = bench.router.route(ask(), now=1.0)
    assert (decision.strategy, decision.config_generation) == ("weighted", 1)
    changed = Config(routing=RoutingConfig(strategy="round-robin"))
    bench.router.reconfigure(changed, now=2.0)
    assert bench.router.config is changed
    assert bench.router.generation == 2
    after = bench.router.route(ask(), now=2.0)
    assert (after.strategy, after.config_generation) == ("round-robin", 2)
    assert bench.held(decision.endpoint), "the index stays"
    assert bench.router.finished(decision, Outcome.OK, now=3.0) is not None


def test_another_block_size_empties_the_index_and_keeps_the_ledger() -> None:
    bench = Bench(A, B)
    bench.router.observe(A.id, EndpointMetrics(cache_tokens=777), now=0.5)
    decision = bench.router.route(ask(), now=1.0)
    bench.router.reconfigure(Config(prefix=PrefixConfig(block_bytes=512)), now=2.0)
    assert bench.router.index_stats().blocks == 0
    assert bench.router._index.capacity_bytes(A.id) == 777 * 4
    assert bench.router._index.capacity_bytes(B.id) == 4_000_000
    assert bench.router.in_flight == 1
    bench.router.response_headers(decision, now=2.5)
    assert bench.router.finished(decision, Outcome.OK, now=3.0) is not None
    assert bench.router.index_stats().blocks == 0
    assert bench.router.route(ask(), now=4.0).matched_bytes == 0


def test_other_prefix_keys_keep_the_index() -> None:
    bench = Bench(A, B)
    before = bench.router.route(ask(), now=1.0)
    assert before.prompt_tokens == 2000
    bench.router.reconfigure(Config(prefix=PrefixConfig(bytes_per_token=2.0, capacity_tokens=5000)), now=2.0)
    assert bench.router._index.capacity_bytes(A.id) == 10_000
    after = bench.router.route(ask(), now=3.0)
    assert after.prompt_tokens == 4000
    assert after.matched_bytes > 0
    bench.router.reconfigure(Config(prefix=PrefixConfig(bytes_per_token=2.0, max_blocks=1000)), now=4.0)
    assert bench.router.index_stats().blocks == 0


# Any sequence of operations


# What another picker knows


def test_a_peers_decision_counts_here_and_its_prompt_is_found() -> None:
    ours, theirs = Bench(A, B), Bench(A, B, number=2)
    decision = theirs.router.route(ask(), now=1.0)
    effect = theirs.router.effect_of(decision)
    assert effect is not None
    assert effect.uncached_tokens == 2000
    assert ours.router.observe_effect(effect, now=1.1)
    assert not ours.router.observe_effect(effect, now=1.1), "told twice"
    assert ours.in_flight(decision.endpoint, 1.1) == 1
    assert ours.in_flight(other(decision), 1.1) == 0
    assert ours.router.in_flight == 0, "not ours to end"
    assert ours.router.route(ask(), now=1.2).matched_bytes == len(LONG) // 256 * 256
    assert ours.router.observe_effect(effect._replace(outcome=Outcome.OK), now=2.0)
    assert ours.in_flight(decision.endpoint, 2.0) == 1, "our own is still there"
    assert BlockState.CONFIRMED in ours.held(decision.endpoint)
    assert theirs.router.finished(decision, Outcome.OK, now=2.0)
    assert theirs.router.effect_of(decision.id) is None


def test_a_peers_failed_request_leaves_nothing() -> None:
    ours, theirs = Bench(A), Bench(A, number=2)
    effect = theirs.router.effect_of(theirs.router.route(ask(), now=1.0))
    assert effect is not None
    ours.router.observe_effect(effect, now=1.0)
    assert ours.router.observe_effect(effect._replace(chains=(), outcome=Outcome.CONNECT_FAILURE), now=1.5)
    assert (ours.in_flight(A), ours.held(A), ours.pending()) == (0, [], 0)


def test_an_end_heard_before_its_beginning_counts_once() -> None:
    ours, theirs = Bench(A), Bench(A, number=2)
    effect = theirs.router.effect_of(theirs.router.route(ask(), now=1.0))
    assert effect is not None
    assert ours.router.observe_effect(effect._replace(outcome=Outcome.OK), now=2.0)
    assert not ours.router.observe_effect(effect, now=2.1)
    assert ours.in_flight(A) == 0
    assert set(ours.held(A)) == {BlockState.CONFIRMED}


def test_a_failed_end_heard_before_its_beginning_leaves_nothing() -> None:
    ours, theirs = Bench(A), Bench(A, number=2)
    effect = theirs.router.effect_of(theirs.router.route(ask(), now=1.0))
    assert effect is not None
    assert ours.router.observe_effect(effect._replace(outcome=Outcome.RESET), now=2.0)
    assert (ours.in_flight(A), ours.held(A), ours.pending()) == (0, [], 0)


def test_news_of_other_block_sizes_own_decisions_or_strangers() -> None:
    ours, theirs = Bench(A), Bench(A, config=Config(prefix=PrefixConfig(block_bytes=512)), number=2)
    effect = theirs.router.effect_of(theirs.router.route(ask(), now=1.0))
    assert effect is not None
    assert ours.router.observe_effect(effect, now=1.0), "load is load"
    assert ours.in_flight(A) == 1
    assert ours.router.observe_effect(effect._replace(outcome=Outcome.OK), now=1.0)
    assert ours.in_flight(A) == 0
    assert ours.held(A) == []
    assert not ours.router.observe_effect(effect._replace(id="x", endpoint_id="10.9.9.9:1"), now=1.0)
    mine = ours.router.route(ask(), now=1.0)
    assert not ours.router.observe_effect(effect._replace(id=mine.id, outcome=Outcome.OK), now=1.0)
    assert ours.router.is_open(mine.id)


def test_a_peer_that_falls_silent_is_released_with_the_lease() -> None:
    bench, theirs = Bench(A, config=Config(in_flight=InFlightConfig(lease=Seconds(60)))), Bench(A, number=2)
    effect = theirs.router.effect_of(theirs.router.route(ask(), now=1.0))
    assert effect is not None
    bench.router.observe_effect(effect, now=1.0)
    bench.router.reconfigure(Config(), now=2.0)
    assert bench.expire(100.0) == [], "another picker's end is not ours to report"
    assert bench.in_flight(A, 100.0) == 0
    assert bench.pending() == 0
    assert not bench.router.observe_effect(effect._replace(outcome=Outcome.RESET), now=101.0)


def test_bytes_per_token_from_the_engines_counters_where_answers_are_silent() -> None:
    bench = Bench(A)
    bench.router.observe(A.id, EndpointMetrics(prompt_tokens_total=0.0, requests_total=0.0), now=0.5)
    for number in range(30):
        decision = bench.router.route(ask(numbered(number)[:4000]), now=1.0)
        bench.router.finished(decision, Outcome.OK, now=1.0)
    bench.router.observe(A.id, EndpointMetrics(prompt_tokens_total=60_000.0, requests_total=30.0), now=2.0)
    assert bench.router.route(ask(), now=3.0).prompt_tokens > 2000 * 1.5, "two bytes a token, not four"


class AnySequence(RuleBasedStateMachine):
    """Whatever happens in whatever order: what is open agrees everywhere, and every decision ends exactly once."""

    pool = (A, B, C)
    prompts = st.sampled_from([b"", b"a" * 700, b"a" * 3000, b"a" * 700 + b"b" * 2000, LONG])
    steps = st.sampled_from([0.0, 0.25, 1.0, 30.0])
    endpoint_ids = st.sampled_from([*(one.id for one in pool), "10.9.9.9:1"])

    @initialize(strategy=st.sampled_from(["weighted", "prefix-cache", "prefix-hash", "least-load", "round-robin"]))
    def start(self, strategy: Any) -> None:
        self.now = 0.0
        self.made: list[Decision] = []
        self.ended: list[str] = []
        """As `finished` has returned."""
        self.released: list[Finished] = []
        self.starts = dict.fromkeys([*(one.id for one in self.pool), "10.9.9.9:1"], 1.0)
        config = Config(
            routing=RoutingConfig(strategy=strategy),
            in_flight=InFlightConfig(lease=Seconds(60)),
            prefix=PrefixConfig(capacity_tokens=3000),
        )
        self.router = Router(config, rng=random.Random(0), on_released=self.released.append)
        self.router.set_endpoints(self.pool, now=0.0)

    @rule(prompt=prompts, step=steps, salt=st.sampled_from(["", "s"]))
    def route(self, prompt: bytes, step: float, salt: str) -> None:
        self.now += step
        request = InferenceRequest(prompts=(prompt,) if prompt else (), cache_salt=salt)
        if not self.router.snapshots(self.now):
            with pytest.raises(NoEndpointError):
                self.router.route(request, now=self.now)
            return
        decision = self.router.route(request, now=self.now)
        self.made.append(decision)
        assert decision.endpoint in [one.endpoint for one in self.router.snapshots(self.now)]

    @precondition(lambda self: self.made)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(Outcome),
        step=steps,
        served=st.one_of(st.just(""), endpoint_ids),
        usage=st.none() | st.builds(Usage, *[st.none() | st.integers(0, 4000)] * 3),
    )
    def finish(self, data: st.DataObject, outcome: Outcome, step: float, served: str, usage: Usage | None) -> None:
        self.now += step
        decision = data.draw(st.sampled_from(self.made))
        was_open = self.router.is_open(decision.id)
        finished = self.router.finished(decision, outcome, now=self.now, served_by=served, usage=usage)
        assert (finished is not None) is was_open
        if finished is not None:
            self.ended.append(finished.decision.id)
        assert not self.router.is_open(decision.id)

    @rule(
        number=st.integers(0, 5),
        endpoint_id=endpoint_ids,
        chains=st.sampled_from([(), ((1, 2, 3),), ((1, 2, 4, 5), (7,))]),
        outcome=st.none() | st.sampled_from(Outcome),
        step=steps,
    )
    def a_peer_says(
        self, number: int, endpoint_id: str, chains: tuple[tuple[int, ...], ...], outcome: Outcome | None, step: float
    ) -> None:
        self.now += step
        effect = RouteEffect(f"peer-{number}", endpoint_id, 256, chains, 100, outcome)
        self.router.observe_effect(effect, now=self.now)

    @precondition(lambda self: self.made)
    @rule(data=st.data(), step=steps)
    def answer_begins(self, data: st.DataObject, step: float) -> None:
        self.now += step
        self.router.response_headers(data.draw(st.sampled_from(self.made)), now=self.now)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        decision = data.draw(st.sampled_from(self.made))
        assert self.router.renew(decision, now=self.now) is self.router.is_open(decision.id)

    @rule(step=steps)
    def expire(self, step: float) -> None:
        self.now += step
        self.router.expire(now=self.now)

    @rule(wanted=st.lists(st.sampled_from(pool), unique=True), uid=st.sampled_from(["", "one", "two"]))
    def discover(self, wanted: list[Endpoint], uid: str) -> None:
        self.router.set_endpoints([Endpoint(one.address, one.port, uid=uid) for one in wanted], now=self.now)

    @rule(endpoint_id=endpoint_ids, restarts=st.booleans(), waiting=st.none() | st.floats(0, 1e6), step=steps)
    def scrape(self, endpoint_id: str, restarts: bool, waiting: float | None, step: float) -> None:
        self.now += step
        if restarts:
            self.starts[endpoint_id] += 100.0
        page = EndpointMetrics(waiting=waiting, running=waiting, process_start_time_s=self.starts[endpoint_id])
        self.router.observe(endpoint_id, page, now=self.now)

    @rule(block_bytes=st.sampled_from([128, 256]), lease=st.sampled_from([5.0, 60.0]))
    def reconfigure(self, block_bytes: int, lease: float) -> None:
        config = Config(
            routing=self.router.config.routing,
            prefix=PrefixConfig(block_bytes=block_bytes, capacity_tokens=2000),
            in_flight=InFlightConfig(lease=Seconds(lease)),
        )
        self.router.reconfigure(config, now=self.now)

    @invariant()
    def open_requests_agree(self) -> None:
        if not hasattr(self, "router"):
            return
        snapshots = self.router.snapshots(self.now)
        still_open = [one for one in self.made if self.router.is_open(one.id)]
        at = [one.endpoint.id for one in still_open] + [where for where, _ in self.router._of_others.values()]
        assert self.router.in_flight == len(still_open)
        listed = {one.endpoint.id for one in snapshots}
        assert sum(where in listed for where in at) == sum(one.in_flight for one in snapshots)
        for snapshot in snapshots:
            assert snapshot.in_flight == at.count(snapshot.endpoint.id)
            assert snapshot.in_flight_tokens >= 0
            assert snapshot.waiting is None or snapshot.waiting >= 0
            assert snapshot.running is None or snapshot.running >= 0
        ended = [*self.ended, *(end.decision.id for end in self.released)]
        assert len(ended) == len(set(ended)) == len(self.made) - len(still_open)
        assert {end.outcome for end in self.released} <= {Outcome.LEASE_EXPIRED, Outcome.ENDPOINT_GONE}

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        for decision in self.made:
            if self.router.finished(decision, Outcome.ABORTED, now=self.now):
                self.ended.append(decision.id)
        self.router.expire(now=self.now + 10_000)
        assert self.router.in_flight == 0
        ended = [*self.ended, *(end.decision.id for end in self.released)]
        assert sorted(ended) == sorted(one.id for one in self.made)
        for snapshot in self.router.snapshots(self.now):
            assert (snapshot.in_flight, snapshot.in_flight_tokens) == (0, 0)
        assert not any(holder.pending for holder in self.router._index._holders.values())


TestAnySequence = AnySequence.TestCase
