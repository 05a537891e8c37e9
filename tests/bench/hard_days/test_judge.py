import json
from typing import Any

import pytest

from bench.hard_days.clients import PICKER, ROUND_ROBIN, Outcome, Record
from bench.hard_days.journal import Lag, Visit
from bench.hard_days.judge import Comparison, Invariant, Judge, Span, compare, extra_wait_s, log_problems


def record(turn: int = 1, way: str = PICKER, **fields: object) -> Record:
    found = Record(f"{turn}-{way}", way, turn, 100.0 + turn, sha256="good", done_s=101.0 + turn, status=200)
    found.outcome, found.cause = Outcome.WHOLE, "200"
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def visit(of: Record, engine: int = 0, **fields: Any) -> Visit:
    values: dict[str, Any] = {
        "begin_s": of.sent_s + 0.01,
        "end_s": of.done_s - 0.01,
        "status": 200,
        "sha256": "good",
    }
    return Visit(of.name, engine, **{**values, **fields})


def judged(one: Record, *visits: Visit, judge: Judge | None = None) -> list[tuple[Invariant, str]]:
    judge = judge or Judge(100.0)
    judge.keep(one)
    judge.journal(visits)
    judge.settle(1000.0)
    return [(found.invariant, found.what) for found in judge.violations]


def test_a_good_request_breaks_nothing() -> None:
    one = record()
    assert judged(one, visit(one)) == []


def test_flaws_of_answers() -> None:
    one = record(outcome=Outcome.FLAWED, flaw="without [DONE]")
    assert [found for found, _ in judged(one, visit(one))] == [Invariant.ANSWERS]
    one = record()
    assert "another body" in judged(one, visit(one, sha256="bad"))[0][1]
    assert "2 engines" in judged(one, visit(one), visit(one, engine=1))[0][1]
    # The first try failed and the second did not: that is a retry.
    assert judged(one, visit(one, status=503, end_s=one.sent_s + 0.02), visit(one, engine=1)) == []


def test_round_robins_own_flaws_are_not_ours() -> None:
    one = record(way=ROUND_ROBIN, outcome=Outcome.FLAWED, flaw="without [DONE]")
    assert judged(one, visit(one)) == []


@pytest.mark.parametrize(
    ("begun", "fields", "honest"),
    [
        (True, {"fault": "reset"}, True),
        (True, {"status": 0}, True),
        (True, {}, False),
        (False, {"fault": "reset"}, False),
    ],
)
def test_a_broken_connection_is_honest_where_an_engine_broke_off(
    begun: bool, fields: dict[str, Any], honest: bool
) -> None:
    one = record(outcome=Outcome.CUT, cause="cut off", begun=begun)
    assert (judged(one, visit(one, **fields)) == []) is honest


def test_a_broken_connection_is_honest_where_envoy_went() -> None:
    one = record(outcome=Outcome.CUT, cause="cut off")
    judge = Judge(100.0)
    judge.acts.proxy.append(Span(100.0, 103.0))
    assert judged(one, judge=judge) == []
    later = Judge(100.0)
    later.acts.proxy.append(Span(50.0, 60.0))
    assert judged(one, judge=later) != []


def test_refusals_that_no_engine_has_spoken() -> None:
    one = record(outcome=Outcome.REFUSED, status=400, cause="400 invalid_request")
    assert "good request was refused" in judged(one)[0][1]
    assert judged(one, visit(one, status=400)) == []
    # 5xx: the picker, or Envoy, says that there is nobody; whether too often is compared.
    assert judged(record(outcome=Outcome.REFUSED, status=503, cause="503")) == []


def test_a_request_that_nobody_has_seen() -> None:
    one = record(outcome=Outcome.TIMEOUT, status=0, done_s=116.0)
    found = judged(one)
    assert {invariant for invariant, _ in found} == {Invariant.ANSWERS, Invariant.WAITS}
    assert judged(one, visit(one, status=0, fault="hang")) == []


# Waiting


def test_the_wait_is_what_no_engine_accounts_for() -> None:
    one = record(sent_s=10.0, done_s=15.0)
    assert extra_wait_s(one, []) == 5.0
    assert extra_wait_s(one, [visit(one, begin_s=11.0, end_s=14.0)]) == pytest.approx(2.0)
    both = [visit(one, begin_s=12.0, end_s=20.0), visit(one, begin_s=11.0, end_s=13.0)]
    assert extra_wait_s(one, both) == pytest.approx(1.0)


def test_who_waits_too_long() -> None:
    one = record(done_s=104.0)
    late = visit(one, begin_s=102.5)
    found = judged(one, late)
    assert [invariant for invariant, _ in found] == [Invariant.WAITS]
    assert "engine 1 got it after 1.5 s" in found[0][1]
    assert judged(one, visit(one, begin_s=101.9)) == []


def test_a_wait_of_the_machine_is_not_the_pickers() -> None:
    one, other = record(done_s=104.0), record(way=ROUND_ROBIN, done_s=104.0)
    judge = Judge(100.0)
    judge.keep(other)
    assert judged(one, visit(one, begin_s=103.0), visit(other, begin_s=103.0), judge=judge) == []
    assert judge.shared_waits == 1
    # The engines' process, or the clients', was not served: what is beyond that counts.
    judge = Judge(100.0)
    judge.lag(Lag(102.6, 1.0))
    assert judged(one, visit(one, begin_s=102.9), judge=judge) == []
    judge = Judge(100.0)
    judge.lag(Lag(50.0, 1.0))
    assert judged(one, visit(one, begin_s=102.9), judge=judge) != []


def test_a_request_is_judged_when_its_engines_have_written() -> None:
    judge = Judge(100.0)
    one = record()
    judge.keep(one)
    judge.settle(one.done_s)
    judge.journal([visit(one, sha256="bad")])
    assert judge.violations == []
    judge.settle(one.done_s + 0.1)
    assert [found.at_s for found in judge.violations] == [1.0]


def test_the_bodies_of_hostile_clients_are_compared_too() -> None:
    judge = Judge(100.0)
    judge.bodies = {"hostile-1": "good", "hostile-2": ""}
    judge.journal(
        [Visit("hostile-1", 0, 101.0, 102.0, 400, "", "good"), Visit("hostile-2", 0, 101.0, 102.0, 0, "", "x")]
    )
    assert judge.violations == []
    judge.journal([Visit("hostile-1", 0, 101.0, 102.0, 400, "", "doubled")])
    assert [found.invariant for found in judge.violations] == [Invariant.ANSWERS]


def test_a_hostile_request_that_nobody_answers_unless_an_engine_hangs() -> None:
    judge = Judge(100.0)
    judge.unanswered = {"hostile-1": (103.0, "no answer"), "hostile-2": (104.0, "no answer")}
    judge.journal([Visit("hostile-1", 0, 103.0, 123.0, 0, "hang"), Visit("hostile-2", 0, 104.0, 124.0)])
    judge.no_answers()
    assert [(found.invariant, found.at_s) for found in judge.violations] == [(Invariant.WAITS, 4.0)]


def test_a_machine_that_stood_still_has_used_up_the_clients_patience() -> None:
    one = record(outcome=Outcome.TIMEOUT, status=0, done_s=116.0)
    judge = Judge(100.0)
    judge.lag(Lag(115.0, 14.0))
    assert judge.paused_s(100.0, 116.0) == 14.0
    assert judge.paused_s(115.5, 116.0) == 0.0
    assert judged(one, judge=judge) == []


# Shares of errors


def pairs(both: int, only_picker: int, only_other: int, good: int) -> Judge:
    judge = Judge(100.0)
    turn = 0
    for count, ours, theirs in (
        (both, True, True),
        (only_picker, True, False),
        (only_other, False, True),
        (good, False, False),
    ):
        for _ in range(count):
            turn += 1
            for way, failed in ((PICKER, ours), (ROUND_ROBIN, theirs)):
                judge.keep(record(turn, way, outcome=Outcome.REFUSED if failed else Outcome.WHOLE))
    return judge


def test_comparison() -> None:
    found = compare(pairs(5, 10, 20, 65))
    assert found == Comparison(100, 15, 25, 10, 20)
    assert not found.worse
    assert found.shares() == (0.15, 0.25)


@pytest.mark.parametrize(
    ("only_picker", "only_other", "worse"),
    [(0, 0, False), (5, 0, False), (84, 25, True), (30, 0, True), (120, 100, False), (20, 200, False)],
)
def test_worse_is_more_than_chance(only_picker: int, only_other: int, worse: bool) -> None:
    """The black hole that the comparison is there for, 84 % against 25, is seen in a hundred turns."""
    assert compare(pairs(0, only_picker, only_other, 50)).worse is worse


def test_turns_in_a_span_alone() -> None:
    judge = pairs(0, 10, 0, 10)
    assert compare(judge, spans=[Span(100.5, 105.5)]).turns == 5
    assert compare(judge, spans=[Span(90.0, 99.0)]).shares() == (0.0, 0.0)


def test_a_gap_is_counted_by_itself_and_only_where_it_was() -> None:
    judge = Judge(100.0)
    judge.acts.gaps.append(Span(102.0, 104.0))
    within = record(3, outcome=Outcome.REFUSED, status=503, cause="503 picker_unavailable")
    outside = record(30, outcome=Outcome.REFUSED, status=503, cause="503 picker_unavailable")
    engine = record(3, outcome=Outcome.REFUSED, status=503, cause="503 InternalServerError")
    assert [judge.excused(one) for one in (within, outside, engine)] == ["gap", "", ""]
    judge.records = [within, outside, engine]
    judge.unexplained_gaps()
    assert [(found.invariant, found.at_s) for found in judge.violations] == [(Invariant.GAPS, 30.0)]
    judge.records.append(record(3, ROUND_ROBIN))
    assert compare(judge).turns == 1, "the engine's error alone; the answers of the gap are not compared"


def test_an_empty_endpoints_file_is_obeyed() -> None:
    judge = Judge(100.0)
    judge.acts.empty.append(Span(102.0, 104.0))
    assert judge.excused(record(3, outcome=Outcome.REFUSED, cause="503 no_endpoint")) == "empty"
    assert judge.excused(record(9, outcome=Outcome.REFUSED, cause="503 no_endpoint")) == ""
    assert judge.excused(record(3)) == ""


# Logs


def test_logs() -> None:
    line = json.dumps({"level": "info", "event": "started"})
    refused = json.dumps({"level": "error", "event": "the changed configuration was refused; the last good one stays"})
    broke = json.dumps({"level": "error", "event": "a background task failed"})
    assert log_problems("picker-1", f"{line}\n{refused}\n", refused_configs=1) == []
    assert len(log_problems("picker-1", f"{refused}\n{refused}\n", refused_configs=1)) == 1
    assert len(log_problems("picker-1", f"{line}\n{broke}\n")) == 1
    assert len(log_problems("picker-1", "Task exception was never retrieved\n")) == 1
    trace = json.dumps({"level": "warning", "error": "Traceback (most recent call last)\nboom"})
    assert "boom" in log_problems("picker-1", trace)[0]
    assert log_problems("envoy", "[2026-01-01][1][warning][main] x\n") == []
    assert len(log_problems("envoy", "[2026-01-01][1][critical][assert] assert failure: x\n")) == 1
    assert log_problems("engines", "") == []
    assert len(log_problems("engines", "Error handling request\nmore\n")) == 1
