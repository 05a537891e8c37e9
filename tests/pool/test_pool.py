from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import HealthConfig, InFlightConfig, PoolConfig, Seconds
from extproc.pool.ledger import IdState
from extproc.pool.pool import Pool, PoolChange, ScrapeChange
from extproc.pool.probation import FAIR, LEFT_OVER, REFUSING
from extproc.snapshots import column, memoized
from extproc.types import Decision, Endpoint, EndpointMetrics, EndpointSnapshot, Outcome, RequestKind

A = Endpoint("10.0.0.1", 8000, uid="a")
B = Endpoint("10.0.0.2", 8000, uid="b")
C = Endpoint("10.0.0.3", 8000)
D = Endpoint("10.0.0.4", 8000)
IDLE = EndpointMetrics(waiting=0.0, running=0.0, kv_cache_usage=0.0)


def _ids(snapshots: Sequence[EndpointSnapshot]) -> list[str]:
    return [snapshot.endpoint.id for snapshot in snapshots]


def pool_of(*endpoints: Endpoint, config: PoolConfig | None = None) -> Pool:
    pool = Pool(config or PoolConfig(), InFlightConfig())
    pool.set_endpoints(endpoints or (A, B, C, D), 0.0)
    return pool


def decision(name: str, endpoint: Endpoint = A, request_id: str = "") -> Decision:
    return Decision(
        id=name,
        endpoint=endpoint,
        fallbacks=(),
        strategy="weighted",
        scorers=(),
        candidates=(),
        filtered=(),
        note="",
        kind=RequestKind.CHAT,
        model="m",
        prompt_bytes=0,
        matched_bytes=0,
        prompt_tokens=0,
        predicted_cached_tokens=0,
        decided_at=0.0,
        request_id=request_id,
    )


def sent(pool: Pool, made: Decision, tokens: int, now: float) -> bool:
    return pool.sent(made.id, made.endpoint.id, tokens, now, made.request_id)


def snapshot(pool: Pool, endpoint: Endpoint = A, now: float = 0.0) -> EndpointSnapshot:
    return next(found for found in pool.snapshots(now) if found.endpoint.id == endpoint.id)


def fail(pool: Pool, name: str, now: float, endpoint: Endpoint = A, outcome: Outcome = Outcome.SERVER_ERROR) -> None:
    sent(pool, decision(name, endpoint, request_id=name), 1, now)
    pool.ended(name, outcome, now)


class TestEndpoints:
    def test_change(self) -> None:
        pool = Pool(PoolConfig(), InFlightConfig())
        assert pool.set_endpoints([], 0.0) == PoolChange()
        assert pool.snapshots(0.0) == ()
        change = pool.set_endpoints([A, B, A], 0.0)
        assert change == PoolChange(added=(A.id, B.id))
        assert pool.endpoints == (A, B)
        assert len(pool) == 2
        assert A.id in pool
        assert C.id not in pool
        change = pool.set_endpoints([C, A], 1.0)
        assert change == PoolChange(added=(C.id,), removed=(B.id,))
        assert [found.endpoint for found in pool.snapshots(1.0)] == [C, A]

    def test_the_same_list_changes_nothing(self) -> None:
        pool = pool_of()
        before = pool.snapshots(0.0)
        assert pool.set_endpoints([A, B, C, D], 1.0) == PoolChange()
        assert pool.snapshots(1.0) is before

    def test_requests_at_an_endpoint_that_leaves_run_on_and_end(self) -> None:
        pool = pool_of()
        for name in ("d", "e", "f"):
            sent(pool, decision(name), 10, 0.0)
        sent(pool, decision("g", B), 10, 0.0)
        change = pool.set_endpoints([B], 1.0)
        assert change == PoolChange(removed=(A.id, C.id, D.id))
        assert pool.in_flight == 4
        pool.prefilled("d")
        assert pool.ended("d", Outcome.RESET, 2.0) is not None
        assert pool.ended("e", Outcome.OK, 2.0) is not None
        assert [one.in_flight for one in pool.snapshots(2.0)] == [1]
        change = pool.set_endpoints([B, A], 3.0)
        assert change == PoolChange(added=(A.id,), returned=(A.id,))
        assert snapshot(pool, A, 3.0).in_flight == 1
        assert snapshot(pool, A, 3.0).health_score == 1.0  # the reset may have come of its leaving

    def test_what_is_known_of_an_endpoint_outlasts_a_look_up_that_misses_it(self) -> None:
        pool = pool_of()
        pool.observe(A.id, replace(IDLE, running=3.0), 0.5)
        pool.observe_models(A.id, {"m": None}, 0.5)
        for number in range(5):
            fail(pool, f"a{number}", 1.0)
            fail(pool, f"b{number}", 1.0, B, Outcome.BUSY)
        pool.set_endpoints([C, D], 2.0)
        pool.set_endpoints([A, Endpoint("10.0.0.2", 8000), C, D], 3.0)
        found = snapshot(pool, A, 3.0)
        assert (found.observed_at, found.running, found.models, found.demoted) == (0.5, 3.0, frozenset({"m"}), True)
        assert snapshot(pool, B, 3.0).probation is not None
        assert snapshot(pool, B, 3.0).endpoint.uid == "b"
        assert pool.snapshots(200.0)[0].health_score == 1.0

    def test_an_endpoint_that_stays_away_is_forgotten_with_its_requests(self) -> None:
        pool = pool_of()
        sent(pool, decision("d"), 10, 0.0)
        pool.set_endpoints([B], 1.0)
        assert pool.forget(120.0) == PoolChange()
        change = pool.forget(121.0)
        assert change.forgotten == (A.id, C.id, D.id)
        assert [entry.decision_id for entry in change.orphaned] == ["d"]
        assert pool.ended("d", Outcome.RESET, 122.0) is None
        assert pool.id_state("d") is IdState.ENDED
        assert pool.in_flight == 0
        assert pool.set_endpoints([A, B], 123.0) == PoolChange(added=(A.id,))

    def test_another_process_behind_an_address_that_was_away_is_a_new_endpoint(self) -> None:
        pool = pool_of()
        sent(pool, decision("d"), 10, 0.0)
        pool.set_endpoints([B], 1.0)
        change = pool.set_endpoints([replace(A, uid="a2"), B], 2.0)
        assert (change.added, change.returned, change.forgotten) == ((A.id,), (), (A.id,))
        assert [entry.decision_id for entry in change.orphaned] == ["d"]
        assert snapshot(pool, A, 2.0).in_flight == 0

    def test_endpoints_that_left_are_remembered_within_bounds(self) -> None:
        pool = Pool(PoolConfig(), InFlightConfig())
        crowd = [Endpoint(f"10.1.{number // 250}.{number % 250 + 1}", 8000) for number in range(1500)]
        pool.set_endpoints(crowd, 0.0)
        assert len(pool.set_endpoints([A], 1.0).forgotten) == 500
        assert len(pool.set_endpoints([*crowd, A], 2.0).returned) == 1000

    def test_another_uid_is_a_restart(self) -> None:
        pool = pool_of(A, C)
        pool.observe(A.id, IDLE, 0.0)
        pool.observe_models(A.id, {"m": None}, 0.0)
        fail(pool, "x", 0.0)
        sent(pool, decision("d"), 10, 0.0)
        change = pool.set_endpoints([replace(A, uid="a2"), C], 1.0)
        assert change.restarted == (A.id,)
        assert [entry.decision_id for entry in change.orphaned] == ["d"]
        found = snapshot(pool, A, 1.0)
        assert (found.observed_at, found.models, found.health_score, found.in_flight) == (None, None, 1.0, 0)

    def test_a_uid_that_comes_or_goes_is_none(self) -> None:
        pool = pool_of(A, C)
        pool.observe(A.id, IDLE, 0.5)
        change = pool.set_endpoints([replace(A, uid=""), replace(C, uid="c")], 1.0)
        assert change == PoolChange()
        assert snapshot(pool).observed_at == 0.5
        assert pool.set_endpoints([replace(A, uid="a2"), replace(C, uid="c")], 1.0).restarted == (A.id,)

    def test_what_is_known_stays(self) -> None:
        pool = pool_of(A, C)
        pool.observe(A.id, EndpointMetrics(waiting=3.0, running=1.0), 0.0)
        fail(pool, "x", 0.0)
        pool.set_endpoints([replace(A, name="new"), B], 0.0)
        found = snapshot(pool)
        assert (found.endpoint.name, found.waiting, found.health_score) == ("new", 3.0, 0.5)


class TestSignals:
    def test_never_scraped_is_unknown(self) -> None:
        pool = pool_of()
        sent(pool, decision("d"), 10, 0.0)
        found = snapshot(pool)
        assert (found.observed_at, found.waiting, found.running, found.kv_cache_usage) == (None, None, None, None)
        assert (found.in_flight, found.in_flight_tokens) == (1, 10)
        assert pool.metrics(A.id) is None

    def test_observed(self) -> None:
        pool = pool_of()
        pool.observe_failure(A.id, 0.0)
        pool.observe_failure(A.id, 1.0)
        assert snapshot(pool).scrape_failures == 2
        metrics = EndpointMetrics(
            waiting=2.0,
            running=4.0,
            kv_cache_usage=0.5,
            lora_running=frozenset({"x"}),
            lora_waiting=frozenset({"y"}),
            lora_max=2,
        )
        assert pool.observe(A.id, metrics, 3.0).restarted is False
        found = snapshot(pool)
        assert found == EndpointSnapshot(
            endpoint=A,
            observed_at=3.0,
            waiting=2.0,
            running=4.0,
            kv_cache_usage=0.5,
            lora_running=frozenset({"x"}),
            lora_waiting=frozenset({"y"}),
            lora_max=2,
        )
        assert pool.metrics(A.id) is metrics

    def test_the_ledger_corrects_between_scrapes(self) -> None:
        pool = pool_of()
        sent(pool, decision("old"), 10, 0.0)
        pool.observe(A.id, EndpointMetrics(waiting=2.0, running=3.0), 10.0)
        sent(pool, decision("new"), 10, 10.1)
        sent(pool, decision("newer"), 10, 10.1)
        assert (snapshot(pool).waiting, snapshot(pool).running) == (4, 3)
        pool.ended("old", Outcome.OK, 10.2)
        assert (snapshot(pool).waiting, snapshot(pool).running) == (4, 2)
        pool.prefilled("new")
        pool.prefilled("new")
        assert (snapshot(pool).waiting, snapshot(pool).running) == (3, 3)
        assert snapshot(pool).in_flight_tokens == 10
        pool.ended("new", Outcome.OK, 10.3)
        assert (snapshot(pool).waiting, snapshot(pool).running) == (3, 2)
        pool.ended("newer", Outcome.OK, 10.3)
        assert (snapshot(pool).waiting, snapshot(pool).running) == (2, 2)

    def test_prefilled_before_the_scrape_moves_nothing(self) -> None:
        pool = pool_of()
        sent(pool, decision("d"), 10, 0.0)
        pool.observe(A.id, EndpointMetrics(waiting=1.0, running=0.0), 1.0)
        pool.prefilled("d")
        assert (snapshot(pool).waiting, snapshot(pool).running) == (1, 0)
        assert snapshot(pool).in_flight_tokens == 0

    def test_gauges_that_lag(self) -> None:
        pool = pool_of()
        sent(pool, decision("stuck"), 10, 0.0)
        for number in range(40):
            sent(pool, decision(str(number)), 10, 100.0)
        pool.observe(A.id, replace(IDLE, scrape_s=0.01), 100.05)
        assert (snapshot(pool).waiting, snapshot(pool).running) == (40, 1)

    def test_a_page_without_load(self) -> None:
        pool = pool_of()
        pool.observe(A.id, EndpointMetrics(), 1.0)
        sent(pool, decision("d"), 10, 1.0)
        assert (snapshot(pool).waiting, snapshot(pool).running) == (None, None)

    def test_restart_releases_what_the_old_process_had(self) -> None:
        pool = pool_of()
        sent(pool, decision("lost"), 10, 0.0)
        pool.observe_models(A.id, {"m": None}, 0.0)
        pool.observe(A.id, replace(IDLE, process_start_time_s=100.0), 1.0)
        sent(pool, decision("unsure"), 10, 2.0)
        change = pool.observe(A.id, replace(IDLE, process_start_time_s=900.0), 60.0)
        assert change.restarted
        assert [entry.decision_id for entry in change.orphaned] == ["lost"]
        found = snapshot(pool)
        assert (found.in_flight, found.models) == (1, None)
        assert pool.observe(A.id, replace(IDLE, process_start_time_s=900.0), 61.0).restarted is False

    def test_another_engine_in_the_configuration_is_no_restart(self) -> None:
        """Its counters have the same names here, and other values."""
        pool = pool_of()
        pool.observe(A.id, replace(IDLE, prompt_tokens_total=5000.0), 1.0)
        pool.reconfigure(PoolConfig(engine="sglang"), InFlightConfig(), 2.0)
        assert not pool.observe(A.id, replace(IDLE, prompt_tokens_total=3.0), 3.0).restarted
        pool.reconfigure(PoolConfig(engine="sglang", models=["m"]), InFlightConfig(), 4.0)
        assert pool.observe(A.id, replace(IDLE, prompt_tokens_total=2.0), 5.0).restarted

    def test_late_news_of_endpoints_that_left(self) -> None:
        pool = pool_of(A)
        before = pool.snapshots(0.0)
        assert pool.observe(B.id, IDLE, 0.0) == ScrapeChange()
        pool.observe_failure(B.id, 0.0)
        pool.observe_models(B.id, {"m": None}, 0.0)
        pool.prefilled("d")
        assert sent(pool, decision("d", B), 1, 0.0) is False
        assert pool.snapshots(0.0) is before


class TestModels:
    def test_unknown_until_listed(self) -> None:
        pool = pool_of()
        pool.observe(A.id, replace(IDLE, lora_max=1, lora_running=frozenset({"x"})), 0.0)
        assert snapshot(pool).models is None
        pool.observe_models(A.id, {"m": None, "y": "m"}, 0.0)
        assert snapshot(pool).models == frozenset({"m", "x", "y"})
        pool.observe(A.id, replace(IDLE, lora_max=1, lora_waiting=frozenset({"z"})), 0.0)
        assert snapshot(pool).models == frozenset({"m", "y", "z"})
        pool.observe_models(A.id, {}, 0.0)
        assert snapshot(pool).models is None
        pool.observe_models(A.id, {}, 0.0)

    def test_the_configuration_beats_the_list_and_discovery_beats_both(self) -> None:
        told = replace(B, models=frozenset({"b"}))
        pool = pool_of(A, told, config=PoolConfig(models=["c"]))
        pool.observe_models(A.id, {"m": None}, 0.0)
        pool.observe_models(B.id, {"m": "n"}, 0.0)
        assert snapshot(pool, A).models == frozenset({"c"})
        assert snapshot(pool, told).models == frozenset({"b"})
        known = pool.known_models()
        assert known == {"c": None, "b": None, "m": "n"}
        assert pool.known_models() is known


class TestRequests:
    def test_released_once(self) -> None:
        pool = pool_of()
        assert sent(pool, decision("d"), 10, 0.0)
        assert not sent(pool, decision("d"), 10, 0.0)
        assert pool.in_flight == 1
        assert pool.ended("d", Outcome.OK, 1.0) is not None
        assert pool.ended("d", Outcome.OK, 1.0) is None
        assert pool.id_state("d") is IdState.ENDED
        assert pool.id_state("e") is IdState.UNKNOWN
        assert (snapshot(pool).in_flight, snapshot(pool).in_flight_tokens) == (0, 0)

    def test_leases(self) -> None:
        pool = pool_of()
        pool.observe(A.id, IDLE, 0.0)
        sent(pool, decision("d"), 10, 1.0)
        assert pool.renew("d", 300.0)
        assert pool.expire(899.0) == []
        assert [entry.decision_id for entry in pool.expire(900.0)] == ["d"]
        assert not pool.renew("d", 900.0)
        found = snapshot(pool, now=900.0)
        assert (found.in_flight, found.waiting, found.running, found.health_score) == (0, 0, 0, 1.0)


class TestHealth:
    def test_demoted_and_healed(self) -> None:
        pool = pool_of()
        fail(pool, "1", 0.0)
        assert not snapshot(pool).demoted
        fail(pool, "2", 0.0)
        assert snapshot(pool).demoted
        assert snapshot(pool).health_score == 0.25
        before = pool.snapshots(0.1)
        assert pool.snapshots(0.2) is before
        assert snapshot(pool, now=9.0).health_score == pytest.approx(1 - 0.75 * 0.5**0.9)
        assert not snapshot(pool, now=9.0).demoted
        assert snapshot(pool, now=200.0).health_score == 1.0
        assert pool.snapshots(300.0) is pool.snapshots(400.0)

    def test_where_many_ail_a_failure_costs_one_endpoint_and_all_are_judged_soon(self) -> None:
        many = [Endpoint("10.1.0.1", port) for port in range(8000, 8200)]
        pool = pool_of(*many)
        for number, endpoint in enumerate(many[:80]):
            fail(pool, f"a{number}", 0.0, endpoint)
        pool.snapshots(0.1)
        before = pool.snapshots(0.11)
        fail(pool, "b", 0.12, many[0])
        after = pool.snapshots(0.13)
        assert [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new] == [0]
        assert after[0].health_score < before[0].health_score
        assert not after[0].demoted
        assert pool.snapshots(0.2)[0].demoted

    def test_a_request_that_another_endpoint_answered_ends_that_ones_probation(self) -> None:
        pool = pool_of()
        for number in range(8):
            fail(pool, f"fail{number}", 0.0, B, Outcome.CLIENT_ERROR)
        assert snapshot(pool, B).probation is not None
        for number in range(8):
            sent(pool, decision(f"ok{number}", A, f"ok{number}"), 0, 1.0)
            pool.ended(f"ok{number}", Outcome.OK, 1.0, served_by=B.id)
        assert snapshot(pool, B, 1.0).probation is None
        assert snapshot(pool, A, 1.0).health_score < 1.0, "it could not be reached"

    def test_what_says_nothing(self) -> None:
        pool = pool_of()
        for number, outcome in enumerate(
            (Outcome.CLIENT_ERROR, Outcome.BUSY, Outcome.CLIENT_GONE, Outcome.ABORTED, Outcome.OK) * 3
        ):
            fail(pool, str(number), 0.0, outcome=outcome)
        assert snapshot(pool).health_score == 1.0
        assert snapshot(pool).probation is None

    def test_requests_that_are_refused_put_on_probation_and_successes_end_it(self) -> None:
        pool = pool_of()
        for number in range(4):
            assert snapshot(pool).probation is None
            fail(pool, str(number), 0.0, outcome=Outcome.CLIENT_ERROR if number % 2 else Outcome.BUSY)
        assert snapshot(pool).probation == FAIR
        assert snapshot(pool).health_score == 1.0
        for number in range(200):
            fail(pool, f"more {number}", number / 10, outcome=Outcome.CLIENT_ERROR)
        assert snapshot(pool, now=20.0).probation == REFUSING
        assert snapshot(pool, B, now=20.0).probation is None
        for number in range(4):
            fail(pool, f"good {number}", 20.0, outcome=Outcome.OK)
        assert snapshot(pool, now=20.0).probation is None
        before = pool.snapshots(20.0)
        assert pool.snapshots(1000.0) is before

    def test_a_probation_lapses_with_time(self) -> None:
        pool = pool_of()
        for number in range(10):
            fail(pool, str(number), 0.0, outcome=Outcome.BUSY)
        assert snapshot(pool, now=29.0).probation == FAIR
        assert snapshot(pool, now=31.0).probation is None

    def test_a_refused_request_that_is_repeated_counts_once(self) -> None:
        pool = pool_of()
        for number in range(10):
            sent(pool, decision(str(number), request_id="same"), 1, 0.0)
            pool.ended(str(number), Outcome.CLIENT_ERROR, 0.0)
        assert snapshot(pool).probation is None

    def test_who_failed_twice_is_tried_with_care_once_it_is_demoted_no_longer(self) -> None:
        pool = pool_of()
        fail(pool, "1", 0.0)
        fail(pool, "2", 0.0)
        assert snapshot(pool, now=0.0).demoted
        found = snapshot(pool, now=9.0)
        assert (found.demoted, found.probation) == (False, REFUSING)
        assert snapshot(pool, now=25.0).probation is None
        fail(pool, "3", 25.0)
        fail(pool, "4", 25.0, outcome=Outcome.OK)
        assert snapshot(pool, now=25.0).probation is None

    def test_whoever_may_not_be_demoted_is_on_probation(self) -> None:
        pool = pool_of()
        for endpoint in (A, B, C):
            for number in range(3):
                fail(pool, f"{endpoint.id}{number}", 0.0, endpoint)
        found = pool.snapshots(0.0)
        assert sum(one.demoted for one in found) == 2
        assert [one.probation for one in found if not one.demoted] == [LEFT_OVER, None]

    def test_success_heals(self) -> None:
        pool = pool_of()
        fail(pool, "1", 0.0)
        fail(pool, "2", 0.0, outcome=Outcome.OK)
        assert snapshot(pool).health_score == 0.75

    def test_repeats_of_one_request_count_once(self) -> None:
        pool = pool_of()
        for name in ("1", "2", "3"):
            sent(pool, decision(name, request_id="same"), 1, 0.0)
            pool.ended(name, Outcome.SERVER_ERROR, 0.0)
        assert snapshot(pool).health_score == 0.5

    def test_half_of_the_pool_at_most(self) -> None:
        pool = pool_of()
        for endpoint in (A, B, C, D):
            for number in range(3):
                fail(pool, f"{endpoint.id}{number}", 0.0, endpoint)
        assert sum(found.demoted for found in pool.snapshots(0.0)) == 2
        alone = pool_of(A)
        for number in range(5):
            fail(alone, str(number), 0.0)
        assert not snapshot(alone).demoted

    def test_failed_scrapes_alone_never_demote_but_make_failures_weigh_more(self) -> None:
        pool = pool_of()
        pool.observe(A.id, IDLE, 0.0)
        for _ in range(20):
            pool.observe_failure(A.id, 1.0)
            pool.observe_failure(B.id, 1.0)
        assert snapshot(pool).health_score == 1.0
        fail(pool, "a", 1.0)
        assert snapshot(pool, now=1.0).demoted
        # B was never scraped: it may simply have no metrics page.
        fail(pool, "b", 1.0, B)
        assert not snapshot(pool, B, 1.0).demoted

    def test_served_by_another(self) -> None:
        pool = pool_of()
        for name in ("1", "2"):
            sent(pool, decision(name, request_id=name), 1, 0.0)
            pool.ended(name, Outcome.OK, 0.0, served_by=B.id)
        assert snapshot(pool).health_score == 0.25
        assert snapshot(pool, B).health_score == 1.0
        sent(pool, decision("3", request_id="3"), 1, 0.0)
        pool.ended("3", Outcome.SERVER_ERROR, 0.0, served_by=B.id)
        assert snapshot(pool, B).health_score == 0.5
        sent(pool, decision("4", request_id="4"), 1, 0.0)
        pool.ended("4", Outcome.OK, 0.0, served_by="10.9.9.9:1")
        sent(pool, decision("5", request_id="5"), 1, 0.0)
        pool.ended("5", Outcome.OK, 0.0, served_by=A.id)

    def test_what_nobody_reports_is_released_by_pages_and_not_counted_by_limits(self) -> None:
        pool = pool_of()
        pool.unseen("unknown", 0.0, guessed=True)
        for name, guessed in (("d", True), ("e", False)):
            sent(pool, decision(name), 1, 0.0)
            pool.unseen(name, 0.0, guessed=guessed)
        assert (snapshot(pool).in_flight, snapshot(pool).guessed) == (2, 1)
        assert pool.observe(A.id, IDLE, 2.9).excess == []
        assert [entry.decision_id for entry in pool.observe(A.id, IDLE, 3.1).excess] == ["d", "e"]
        assert snapshot(pool, now=3.1).in_flight == 0

    def test_earlier_attempts_are_judged_by_how_they_ended(self) -> None:
        pool = pool_of()
        sent(pool, decision("1", request_id="1"), 1, 0.0)
        pool.ended("1", Outcome.OK, 0.0, served_by=B.id, tried={A.id: Outcome.BUSY})
        assert snapshot(pool).health_score == snapshot(pool, B).health_score == 1.0
        sent(pool, decision("2", request_id="2"), 1, 0.0)
        pool.ended("2", Outcome.BUSY, 0.0, served_by=A.id, tried={A.id: Outcome.BUSY})
        assert snapshot(pool).health_score == 1.0
        sent(pool, decision("3", request_id="3"), 1, 0.0)
        pool.ended("3", Outcome.CONNECT_FAILURE, 0.0, tried={A.id: Outcome.BUSY, B.id: Outcome.CONNECT_FAILURE})
        assert (snapshot(pool).health_score, snapshot(pool, B).health_score) == (1.0, 0.5)
        sent(pool, decision("4", request_id="4"), 1, 0.0)
        pool.ended("4", Outcome.OK, 0.0, served_by="10.9.9.9:1", tried={B.id: Outcome.CONNECT_FAILURE})
        assert (snapshot(pool).health_score, snapshot(pool, B).health_score) == (0.5, 0.25), "nothing was told of A"


class TestSnapshots:
    def test_only_what_changed_is_built_anew(self) -> None:
        pool = pool_of()
        before = pool.snapshots(0.0)
        assert pool.snapshots(5.0) is before
        sent(pool, decision("d", B), 1, 6.0)
        after = pool.snapshots(6.0)
        assert [old is new for old, new in zip(before, after, strict=True)] == [True, False, True, True]

    def test_what_is_memoized_lasts_while_only_the_load_changes(self) -> None:
        pool = pool_of()
        ids = memoized(pool.snapshots(0.0), _ids)
        sent(pool, decision("d"), 1, 1.0)
        assert memoized(pool.snapshots(1.0), _ids) is ids
        pool.prefilled("d")
        pool.ended("d", Outcome.OK, 2.0)
        assert memoized(pool.snapshots(2.0), _ids) is ids
        for change in (
            lambda: pool.observe(A.id, IDLE, 3.0),
            lambda: pool.observe_failure(A.id, 3.0),
            lambda: pool.observe_models(A.id, {"m": None}, 3.0),
            lambda: fail(pool, "f", 3.0),
            lambda: pool.set_endpoints([A, B], 3.0),
        ):
            before = memoized(pool.snapshots(3.0), _ids)
            change()
            assert memoized(pool.snapshots(3.0), _ids) is not before

    def test_a_scrape_leaves_what_was_worked_out_of_the_others(self) -> None:
        pool = pool_of()
        asked: list[str] = []

        def noted(one: EndpointSnapshot) -> float | None:
            asked.append(one.endpoint.id)
            return one.observed_at

        column(pool.snapshots(0.0), noted)
        asked.clear()
        for now, change in (
            (1.0, lambda: pool.observe(B.id, IDLE, 1.0)),
            (2.0, lambda: pool.observe_failure(B.id, 2.0)),
            (3.0, lambda: fail(pool, "f", 3.0, B)),
        ):
            change()
            column(pool.snapshots(now), noted)
            assert set(asked) == {B.id}
            asked.clear()

    def test_a_changed_list_leaves_those_that_stay_as_they_are(self) -> None:
        pool = pool_of(A, B, C)
        pool.observe(A.id, IDLE, 1.0)
        before = {one.endpoint.id: one for one in pool.snapshots(1.0)}
        pool.observe(B.id, IDLE, 2.0)
        sent(pool, decision("d", C), 1, 2.0)
        named = replace(C, name="c")
        pool.set_endpoints([D, A, B, named], 2.0)
        d, a, b, c = pool.snapshots(2.0)
        assert a is before[A.id]
        assert (d.endpoint, b.endpoint, c.endpoint) == (D, B, named)
        assert (b.observed_at, c.in_flight) == (2.0, 1), "what was to be brought up to date still is"
        pool.set_endpoints([A, replace(B, uid="another")], 3.0)
        a, b = pool.snapshots(3.0)
        assert a is before[A.id]
        assert b.observed_at is None

    def test_equal_names_are_one_object(self) -> None:
        pool = pool_of(A, B, C)
        for one in (A, B, C):
            pool.observe_models(one.id, {"m": None} if one is not C else {"other": None}, 0.0)
        a, b, c = (one.models for one in pool.snapshots(0.0))
        assert a is b
        assert a == frozenset({"m"})
        assert c == frozenset({"other"})

    def test_reconfigure(self) -> None:
        pool = pool_of()
        fail(pool, "1", 0.0)
        config = PoolConfig(models=["m"], health=HealthConfig(demote_below=0.9))
        pool.reconfigure(config, InFlightConfig(lease=Seconds(5)), 0.0)
        assert snapshot(pool).demoted
        assert snapshot(pool, B).models == frozenset({"m"})
        sent(pool, decision("d"), 1, 0.0)
        assert [entry.decision_id for entry in pool.expire(5.0)] == ["d"]
        pool.reconfigure(PoolConfig(health=HealthConfig(half_life=Seconds(0))), InFlightConfig(), 0.0)
        assert snapshot(pool).health_score == 1.0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["sent", "sent", "ended", "prefilled", "observe", "restart", "fail", "endpoints", "forget", "expire"]
        ),
        st.integers(0, 10),
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from(Outcome),
    ),
    max_size=80,
)


@given(EVENTS)
def test_any_history(events: list[tuple[str, int, int, int, Outcome]]) -> None:
    everybody = (A, B, C, D)
    pool = pool_of()
    under_way: dict[str, Endpoint] = {}
    now = 0.0
    for event, number, place, amount, outcome in events:
        now += 0.3
        endpoint = everybody[place]
        name = f"d{number}"
        match event:
            case "sent":
                if sent(pool, decision(name, endpoint, request_id=name), amount, now):
                    under_way[name] = endpoint
            case "ended":
                assert (pool.ended(name, outcome, now) is not None) == (under_way.pop(name, None) is not None)
            case "prefilled":
                pool.prefilled(name)
            case "observe" | "restart":
                start = float(amount * 10) if event == "restart" else None
                page = EndpointMetrics(waiting=amount, running=number, process_start_time_s=start)
                for entry in pool.observe(endpoint.id, page, now).orphaned:
                    del under_way[entry.decision_id]
            case "fail":
                pool.observe_failure(endpoint.id, now)
            case "endpoints":
                for entry in pool.set_endpoints(everybody[place : place + amount], now).orphaned:
                    del under_way[entry.decision_id]
            case "forget":
                for entry in pool.forget(now + amount * 50.0).orphaned:
                    del under_way[entry.decision_id]
            case _:
                assert pool.expire(now) == []
        found = pool.snapshots(now)
        assert tuple(one.endpoint for one in found) == pool.endpoints
        assert sum(one.demoted for one in found) <= len(found) / 2
        for one in found:
            ours = sum(where.id == one.endpoint.id for where in under_way.values())
            assert one.in_flight == ours
            assert one.in_flight_tokens >= 0
            assert 0.0 <= one.health_score <= 1.0
            if one.waiting is not None and one.running is not None:
                assert min(one.waiting, one.running) >= 0
                assert one.waiting + one.running >= ours
        assert pool.in_flight == len(under_way)
    pool.forget(now + 1000.0)
    pool.expire(now + 1000.0)
    assert pool.in_flight == 0
    assert all((one.in_flight, one.in_flight_tokens) == (0, 0) for one in pool.snapshots(now))
