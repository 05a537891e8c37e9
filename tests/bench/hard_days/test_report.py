from bench.hard_days.clients import PICKER, RETRYING, ROUND_ROBIN, WAYS, Outcome, Record
from bench.hard_days.judge import Invariant, Judge, compare
from bench.hard_days.report import aims, compare_all, episodes, figures, healed, lines
from bench.hard_days.schedule import KINDS, Fault, Times

TIMES = Times(5.0, 50.0, 90.0)
FAULTS = [Fault(20.0, 10.0, KINDS["error-500"], (0, 1))]


def run_of(*, failing: str = "", begin_s: float = 20.0, end_s: float = 30.0) -> Judge:
    """Ten turns a second for 90 s; requests of one way fail for a while."""
    judge = Judge(1000.0)
    for turn in range(900):
        sent_s = 1000.0 + turn / 10
        for way in WAYS:
            one = Record(f"{turn}", way, turn, sent_s, done_s=sent_s + 0.1, status=200, engine=f"engine-{turn % 8 + 1}")
            failed = way == failing and begin_s <= turn / 10 < end_s
            one.outcome, one.cause = (Outcome.REFUSED, "500 x") if failed else (Outcome.WHOLE, "200")
            judge.records.append(one)
    return judge


def broken(judge: Judge) -> set[Invariant]:
    return {one.invariant for one in judge.violations}


def test_nothing_wrong() -> None:
    judge = run_of(failing=ROUND_ROBIN)
    compared = compare_all(judge, FAULTS, TIMES)
    assert healed(judge, TIMES)
    assert broken(judge) == set()
    assert all(aim["met"] for aim in aims(judge, compared))
    found = figures(judge, compared)
    assert found["ways"][ROUND_ROBIN]["failed"] == 100
    assert found["ways"][PICKER] == {"requests": 900, "failed": 0, "share": 0.0, "causes": {}}
    assert found["faults"]["error-500"] == {"turns": 111, PICKER: 0.0, ROUND_ROBIN: 0.9009, RETRYING: 0.0}
    assert "BROKEN" not in "\n".join(lines(found, aims(judge, compared)))


def test_a_short_black_hole_is_seen_everywhere_it_shows() -> None:
    judge = run_of(failing=PICKER)
    compared = compare_all(judge, FAULTS, TIMES)
    said = [one.what for one in judge.violations]
    assert any("whole run" in text for text in said)
    assert any("while there was error-500" in text for text in said)
    assert any("10 s from here" in text for text in said)
    assert broken(judge) == {Invariant.ERRORS, Invariant.RETRIES}
    found = aims(judge, compared)
    assert {aim["name"] for aim in found if not aim["met"]} == {
        Invariant.ERRORS.value,
        Invariant.RETRIES.value,
        f"share of errors, against {ROUND_ROBIN}",
        f"share of errors, against {RETRYING}",
    }
    text = "\n".join(lines(figures(judge, compared), found))
    assert f"BROKEN {Invariant.ERRORS.value}" in text
    assert "while there was error-500" in text


def test_round_robin_alone_is_compared_in_stretches_and_retries_in_the_whole() -> None:
    judge = run_of(failing=PICKER, begin_s=22, end_s=24.5)
    compare_all(judge, FAULTS, TIMES)
    assert broken(judge) >= {Invariant.ERRORS}


def test_errors_long_after_the_last_fault() -> None:
    judge = run_of(failing=PICKER, begin_s=85, end_s=86)
    healed(judge, TIMES)
    assert broken(judge) == {Invariant.HEALED}
    judge = run_of(failing=PICKER, begin_s=55, end_s=70)
    healed(judge, TIMES)
    assert broken(judge) == set()


def test_an_engine_that_gets_nothing_any_more() -> None:
    judge = run_of()
    for record in judge.records:
        if record.sent_s > 1060.0 and record.engine == "engine-3":
            record.engine = "engine-4"
    healed(judge, TIMES)
    assert [one.what for one in judge.violations] == ["engine-3 has had no request in 10 s, 30 s after the last fault"]


def test_many_violations_are_cut_short_in_print_alone() -> None:
    judge = run_of()
    for number in range(100):
        judge.broken(Invariant.WAITS, 1000.0 + 3 * number, f"number {number}")
    compared = compare_all(judge, FAULTS, TIMES)
    found = figures(judge, compared)
    assert len(found["violations"]) == 100
    text = lines(found, aims(judge, compared))
    assert text[-1] == "and 60 more, in the JSON file"


def test_what_breaks_for_one_request_after_the_other_is_told_once() -> None:
    judge = Judge(1000.0)
    for at_s in (1011.0, 1010.0, 1012.5, 1030.0):
        judge.broken(Invariant.WAITS, at_s, f"waited at {at_s:.0f}")
    judge.broken(Invariant.ALIVE, 1011.5, "gone")
    judge.broken(Invariant.ALIVE, 1011.6, "gone again")
    told = episodes(
        figures(judge, {"all": {ROUND_ROBIN: compare(judge), RETRYING: compare(judge, RETRYING)}})["violations"]
    )
    assert [text.partition(": ")[2] for text in told] == [
        "waited at 1010 (and 2 more until 12.5 s)",
        "gone",
        "gone again",
        "waited at 1030",
    ]
