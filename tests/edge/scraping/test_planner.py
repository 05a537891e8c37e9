"""The scrape planner, without a network and on a clock of the test's own."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from msgspec import structs

from extproc.config.schema import ScrapeConfig
from extproc.edge.scraping.failures import ScrapeFailedError, ScrapeFailure
from extproc.edge.scraping.planner import BATCH, NEAR_S, PageKind, ScrapePlanner, Target
from extproc.edge.scraping.scrape_interval import FIRST_CPU_S
from extproc.types import Endpoint, EndpointMetrics

IDLE = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n"
BUSY = b"vllm:num_requests_waiting 2\nvllm:num_requests_running 3\n"
PADDING = b"# what nobody reads\n" * 100
MODELS = b'{"data": [{"id": "tiny", "parent": null}, {"id": "alpha", "parent": "tiny"}]}'
NEVER = float("inf")
WHOLE, SELECTED = PageKind.WHOLE, PageKind.SELECTED
CONFIG = ScrapeConfig(select=False, cost_factor=0)
TIMEOUT = ScrapeFailedError(ScrapeFailure.TIMEOUT, "no answer in time")
STATUS = ScrapeFailedError(ScrapeFailure.STATUS, "status 404")
A, B = (Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000))

Answer = bytes | ScrapeFailedError


class Fleet:
    """Engines, a clock, and a planner that is asked as the scraper asks it. Also the sink: records what it is told."""

    def __init__(self, *endpoints: Endpoint, config: ScrapeConfig = CONFIG, answer: Answer = IDLE) -> None:
        self.now = 1000.0
        self.answer: Callable[[PageKind], Answer] = lambda _: answer
        self.page_s = 0.001
        self.cpu_s = 0.0001
        self.restart = False
        self.asked: list[tuple[str, PageKind]] = []
        self.observed: list[tuple[str, EndpointMetrics, float]] = []
        self.failures: list[tuple[str, ScrapeFailure]] = []
        self.models: list[tuple[str, Mapping[str, str | None]]] = []
        self.planner = ScrapePlanner(config, "vllm", self, random.Random(1))
        self.planner.set_endpoints(endpoints, self.now)

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> bool:
        self.observed.append((endpoint_id, metrics, now))
        return self.restart

    def observe_failure(self, endpoint_id: str, reason: ScrapeFailure, now: float) -> None:
        self.failures.append((endpoint_id, reason))

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:
        self.models.append((endpoint_id, models))

    def due(self, *, batch: bool = True) -> list[Target]:
        """Let the time pass until somebody is due."""
        self.now = max(self.now, self.planner.next_due_at)
        return self.planner.take_due(self.now, batch=batch)

    def scrape(self, target: Target) -> None:
        """Scrape one endpoint from its first question to the plan of the next scrape."""
        now, kind = self.now, None
        kind = self.planner.begin(target, now)
        while kind is not None:
            self.asked.append((target.endpoint.id, kind))
            now += self.page_s
            answer = self.answer(kind)
            if isinstance(answer, bytes):
                kind = self.planner.answered(target, answer, now)
            else:
                kind = self.planner.failed(target, answer, now)
        self.planner.finish(target, self.cpu_s)
        if self.page_s * 10 > self.planner.next_due_at - self.now:
            self.now = now

    def turn(self, *, batch: bool = True) -> list[str]:
        """Scrape all that are due next; return their ids."""
        targets = self.due(batch=batch)
        for target in targets:
            self.scrape(target)
        return [target.endpoint.id for target in targets]

    def wait_s(self) -> float:
        """Tell how long it is until somebody is due."""
        return self.planner.next_due_at - self.now


def pool(count: int) -> list[Endpoint]:
    return [Endpoint(f"10.0.{number // 100}.{number % 100 + 1}", 8000) for number in range(count)]


# When


def test_a_busy_endpoint_is_scraped_more_often_than_an_idle_one() -> None:
    fleet = Fleet(A)
    fleet.turn()
    assert 4.0 < fleet.wait_s() <= 5.0
    fleet.answer = lambda _: BUSY
    fleet.turn()
    assert 0.2 < fleet.wait_s() <= 0.25
    assert [(name, metrics.running) for name, metrics, _ in fleet.observed] == [(A.id, 0.0), (A.id, 3.0)]
    assert fleet.observed[0][1].scrape_s == pytest.approx(0.001)


def test_a_target_is_not_due_again_before_its_scrape_has_ended() -> None:
    fleet = Fleet(A)
    (target,) = fleet.due()
    assert fleet.planner.next_due_at == NEVER
    assert not fleet.planner.mark_busy(A.id, fleet.now)
    assert fleet.planner.take_due(fleet.now + 1e6) == []
    fleet.scrape(target)
    assert fleet.planner.next_due_at < NEVER


def test_close_deadlines_count_as_due() -> None:
    fleet = Fleet(A)
    fleet.turn()
    due_at = fleet.planner.next_due_at
    assert fleet.planner.take_due(due_at - 2 * NEAR_S) == []
    assert len(fleet.planner.take_due(due_at - NEAR_S / 2)) == 1


def test_a_request_wakes_an_idle_endpoint_and_only_that() -> None:
    fleet = Fleet(A, B)
    while len(fleet.observed) < 2:
        fleet.turn()
    fleet.now += 0.1
    assert fleet.planner.mark_busy(A.id, fleet.now)
    assert not fleet.planner.mark_busy(A.id, fleet.now), "it is due already"
    assert not fleet.planner.mark_busy("10.9.9.9:1", fleet.now)
    assert fleet.wait_s() <= 0.25
    assert fleet.turn() == [A.id]
    # The request was a moment ago, and the engine's gauges may not show it yet.
    assert fleet.wait_s() <= 0.25
    fleet.now += 3.0
    assert fleet.turn() == [A.id]
    assert fleet.wait_s() > 1.0


def test_a_request_during_a_scrape_makes_the_next_interval_a_busy_one() -> None:
    fleet = Fleet(A)
    (target,) = fleet.due()
    fleet.planner.mark_busy(A.id, fleet.now)
    fleet.scrape(target)
    assert fleet.wait_s() <= 0.25


def test_a_slow_page_is_asked_for_more_rarely() -> None:
    fleet = Fleet(A, config=ScrapeConfig(select=False), answer=BUSY)
    fleet.page_s = 0.02
    (target,) = fleet.due()
    fleet.scrape(target)
    # From start to start 30 times what a scrape takes: assumed to be 10 ms, now found to be 20.
    assert target.scrape_s == pytest.approx(0.013)
    assert fleet.planner.next_due_at - target.ended_at == pytest.approx(29 * 0.013)


def test_first_scrapes_are_spread_as_the_budget_allows() -> None:
    assert Fleet(A).wait_s() == 0.0
    fleet = Fleet(*pool(100))
    begin, taken = fleet.now, 0
    while taken < 100:
        taken += len(fleet.due(batch=False))
    assert 0.5 * 99 * FIRST_CPU_S / CONFIG.budget < fleet.now - begin <= 99 * FIRST_CPU_S / CONFIG.budget


def test_the_budget_stretches_the_intervals() -> None:
    fleet = Fleet(*pool(3), answer=BUSY)
    fleet.cpu_s = 0.1
    for _ in range(30):
        fleet.turn()
    # Three times 0.1 s of CPU some four times a second, where 0.3 s are allowed.
    assert 3.5 < fleet.planner.stretch < 5.0
    begin, seen = fleet.now, len(fleet.observed)
    for _ in range(100):
        fleet.turn()
    cores = (len(fleet.observed) - seen) * fleet.cpu_s / (fleet.now - begin)
    assert 0.8 * CONFIG.budget < cores <= 1.01 * CONFIG.budget
    fleet.planner.set_endpoints(pool(1), fleet.now)
    assert 1.0 < fleet.planner.stretch < 2.0
    fleet.planner.set_endpoints((), fleet.now)
    assert fleet.planner.stretch == 1.0


# In batches


def idle_fleet(count: int, answer: Answer = IDLE) -> Fleet:
    """A pool of which everybody has been scraped, within a second."""
    fleet = Fleet(*pool(count), answer=answer)
    while len(fleet.observed) + len(fleet.failures) < count:
        fleet.turn(batch=False)
    return fleet


def test_others_whose_interval_is_nearly_over_go_along() -> None:
    fleet = idle_fleet(10)
    assert len(fleet.turn()) > 5
    times = [len(fleet.turn()) for _ in range(6)]
    assert 10 in times, "they come to be due together"
    assert len(fleet.due(batch=False)) < 10


def test_a_batch_has_a_greatest_size() -> None:
    fleet = idle_fleet(50)
    fleet.now += 4.4
    assert [len(fleet.planner.take_due(fleet.now)) for _ in range(2)] == [BATCH, BATCH]
    fleet.now += 1.0
    assert [len(fleet.planner.take_due(fleet.now, batch=False)) for _ in range(3)] == [BATCH, 2, 0]


def test_one_whose_interval_has_just_begun_stays_where_it_is() -> None:
    fleet = Fleet(A)
    fleet.turn()
    fleet.now += 2.5
    fleet.planner.set_endpoints((A, B), fleet.now)
    assert fleet.turn() == [B.id]
    assert fleet.turn() == [A.id]


def test_one_by_one_where_batches_are_not_wanted() -> None:
    fleet = idle_fleet(10)
    assert [len(fleet.turn(batch=False)) for _ in range(40)].count(1) > 30


def test_a_failing_endpoint_keeps_its_backoff() -> None:
    fleet = Fleet(A, B, answer=TIMEOUT)
    while len(fleet.failures) < 2:
        fleet.turn()
    due_at = fleet.planner.next_due_at
    assert due_at - fleet.now > 5.0
    assert not fleet.planner.mark_busy(A.id, fleet.now)
    assert not fleet.planner.mark_busy(B.id, fleet.now)
    assert fleet.planner.next_due_at == due_at
    fleet.now = due_at
    assert len(fleet.turn()) == 1, "nor does the other go along"


# Endpoints and configuration


def test_endpoints_come_and_go() -> None:
    fleet = Fleet(A)
    (target,) = fleet.due()
    assert fleet.planner.set_endpoints((replace(A, name="a"), B), fleet.now) == []
    assert target.endpoint.name == "a"
    assert not target.removed
    fleet.scrape(target)
    assert fleet.planner.set_endpoints((replace(A, uid="new"),), fleet.now)[0] is target
    assert target.removed
    (another,) = fleet.due()
    assert another is not target
    fleet.planner.set_endpoints((), fleet.now)
    assert fleet.planner.next_due_at == NEVER
    assert fleet.planner.take_due(1e9) == []


def test_what_is_found_of_an_endpoint_that_was_removed_is_dropped() -> None:
    for answer in (BUSY, TIMEOUT):
        fleet = Fleet(A, answer=answer)
        (target,) = fleet.due()
        fleet.planner.set_endpoints((), fleet.now)
        fleet.scrape(target)
        assert not fleet.planner.take_models(target, fleet.now)
        fleet.planner.models_answered(target, MODELS, fleet.now)
        assert (fleet.observed, fleet.models, fleet.failures) == ([], [], [])
        assert fleet.planner.next_due_at == NEVER
        assert fleet.planner.stretch == 1.0


def test_scraping_is_switched_off_and_on() -> None:
    fleet = Fleet(A, answer=BUSY, config=structs.replace(CONFIG, budget=1e-6))
    fleet.turn()
    assert fleet.planner.stretch > 100
    fleet.planner.reconfigure(ScrapeConfig(enabled=False), "vllm", fleet.now)
    assert fleet.planner.next_due_at == NEVER
    assert fleet.planner.stretch == 1.0
    assert not fleet.planner.mark_busy(A.id, fleet.now)
    fleet.planner.reconfigure(CONFIG, "vllm", fleet.now)
    assert fleet.turn() == [A.id]


def test_another_engine_is_read_by_its_own_names() -> None:
    fleet = Fleet(A, answer=b"trtllm_num_requests_waiting 9\n")
    fleet.turn()
    assert fleet.failures == [(A.id, ScrapeFailure.PARSE)]
    fleet.planner.reconfigure(CONFIG, "trtllm", fleet.now)
    assert fleet.turn() == [A.id], "at once: a backoff ends with the configuration"
    assert fleet.observed[0][1].waiting == 9


# Failures


def test_failure_and_recovery_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet(A, answer=STATUS)
    for _ in range(3):
        fleet.turn()
    fleet.answer = lambda _: IDLE
    for _ in range(2):
        fleet.turn()
    assert fleet.failures == [(A.id, ScrapeFailure.STATUS)] * 3
    told = [(record.levelname, record.message, vars(record)["endpoint"]) for record in caplog.records]
    assert told == [("WARNING", "scrape fails", A.id), ("INFO", "scrape recovered", A.id)]
    assert vars(caplog.records[0])["reason"] == "status"
    assert vars(caplog.records[0])["detail"] == "status 404"
    assert vars(caplog.records[1])["failures"] == 3


# Which page


def selecting(kind: PageKind) -> bytes:
    return BUSY if kind is SELECTED else BUSY + PADDING


SELECT = structs.replace(CONFIG, select=True)


def test_an_engine_that_selects_is_asked_for_its_whole_page_once() -> None:
    fleet = Fleet(A, config=SELECT)
    fleet.answer = selecting
    for _ in range(4):
        assert fleet.planner.selects(A.id) is (len(fleet.asked) > 1)
        fleet.turn()
    assert [kind for _, kind in fleet.asked] == [WHOLE, SELECTED, SELECTED, SELECTED]
    assert not fleet.planner.selects("10.9.9.9:1")


@pytest.mark.parametrize(
    ("answer", "why"),
    [(BUSY + PADDING, "bytes, the whole page"), (STATUS, "status 404"), (b"<html>", "no signal of engine vllm")],
)
def test_where_selecting_fails_the_whole_page_comes_in_the_same_scrape(
    answer: Answer, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet(A, config=SELECT)
    fleet.answer = lambda kind: answer if kind is SELECTED else BUSY + PADDING
    for _ in range(4):
        fleet.turn()
    assert [kind for _, kind in fleet.asked] == [WHOLE, SELECTED, WHOLE, WHOLE, WHOLE]
    assert (len(fleet.observed), fleet.failures) == (4, [])
    # The duration of a scrape is that of both pages.
    assert [round(metrics.scrape_s, 6) for _, metrics, _ in fleet.observed] == [0.001, 0.002, 0.001, 0.001]
    (record,) = caplog.records
    assert record.message == "no selected metrics page from this engine: whole pages for now"
    assert why in vars(record)["detail"]


def test_only_the_whole_page_decides_whether_a_scrape_has_failed() -> None:
    fleet = Fleet(A, config=SELECT)
    fleet.answer = selecting
    for _ in range(3):
        fleet.turn()
    fleet.answer = lambda _: TIMEOUT
    fleet.turn()
    assert fleet.failures == [(A.id, ScrapeFailure.TIMEOUT)]
    assert [kind for _, kind in fleet.asked[3:]] == [SELECTED, WHOLE]
    assert not fleet.planner.selects(A.id), "it has to show it again"


def test_after_a_restart_the_whole_page_comes_first() -> None:
    fleet = Fleet(A, config=SELECT)
    fleet.answer = selecting
    for number in range(5):
        fleet.restart = number == 2
        fleet.turn()
    assert [kind for _, kind in fleet.asked] == [WHOLE, SELECTED, SELECTED, WHOLE, SELECTED]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("others", [0, 9])
def test_no_signal_gets_too_old(knows: bool, others: int) -> None:
    """At most 250 ms with pages of 5 ms, also in the scrape that tries in vain to select."""
    fleet = Fleet(*pool(1 + others), config=structs.replace(SELECT, cost_factor=0))
    fleet.page_s = 0.005
    fleet.answer = lambda kind: selecting(kind) if knows or kind is WHOLE else STATUS
    for _ in range(200):
        fleet.turn()
    for endpoint in pool(1 + others):
        assert fleet.planner.selects(endpoint.id) is knows
        ended_at = [now for name, _, now in fleet.observed if name == endpoint.id]
        assert len(ended_at) > 10
        assert max(later - earlier for earlier, later in itertools.pairwise(ended_at)) <= 0.25


# The list of models


def test_models_are_asked_for_rarely_and_again_after_a_restart() -> None:
    fleet = Fleet(A)
    (target,) = fleet.due()
    assert not fleet.planner.take_models(target, fleet.now), "nothing is known of the endpoint yet"
    fleet.scrape(target)
    assert fleet.planner.take_models(target, fleet.now)
    assert not fleet.planner.take_models(target, fleet.now)
    fleet.planner.models_answered(target, MODELS, fleet.now)
    assert fleet.models == [(A.id, {"tiny": None, "alpha": "tiny"})]
    assert fleet.planner.take_models(target, fleet.now + CONFIG.models_interval)
    fleet.restart = True
    fleet.turn()
    assert fleet.planner.take_models(target, fleet.now)
    fleet.planner.reconfigure(structs.replace(CONFIG, models_path=""), "vllm", fleet.now)
    assert not fleet.planner.take_models(target, fleet.now)


def test_an_endpoint_that_cannot_be_reached_is_not_asked_for_its_models() -> None:
    for answer, wanted in ((TIMEOUT, False), (STATUS, True), (b"<html>", True)):
        fleet = Fleet(A, answer=answer)
        (target,) = fleet.due()
        fleet.scrape(target)
        assert fleet.planner.take_models(target, fleet.now) is wanted


def test_models_that_are_unknown_are_a_matter_of_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fleet = Fleet(A)
    (target,) = fleet.due()
    fleet.planner.models_answered(target, b"<html>", fleet.now)
    fleet.planner.models_failed(target, TIMEOUT)
    assert [(record.message, vars(record)["reason"]) for record in caplog.records] == [
        ("models unknown", "parse"),
        ("models unknown", "timeout"),
    ]
    assert (fleet.models, fleet.failures) == ([], [])
