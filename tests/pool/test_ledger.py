from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from extproc.pool.ledger import IdState, Ledger


def test_add_and_release_exactly_once() -> None:
    ledger = Ledger()
    assert ledger.state("d") is IdState.UNKNOWN
    assert ledger.add("d", "a", 100, 5.0, 600.0, "r")
    assert (*ledger.totals("a"), len(ledger)) == (1, 100, 0, 1)
    assert ledger.state("d") is IdState.OPEN
    entry = ledger.release("d")
    assert entry is not None
    assert (entry.endpoint_id, entry.uncached_tokens, entry.sent_at, entry.request_id) == ("a", 100, 5.0, "r")
    assert ledger.release("d") is None
    assert ledger.state("d") is IdState.ENDED
    assert (*ledger.totals("a"), len(ledger)) == (0, 0, 0, 0)


def test_an_id_is_never_entered_twice() -> None:
    ledger = Ledger()
    assert ledger.add("d", "a", 100, 0.0, 600.0)
    assert not ledger.add("d", "b", 100, 0.0, 600.0)
    ledger.release("d")
    assert not ledger.add("d", "a", 100, 0.0, 600.0)
    assert len(ledger) == 0


def test_negative_tokens_count_as_none() -> None:
    ledger = Ledger()
    ledger.add("d", "a", -5, 0.0, 600.0)
    assert ledger.totals("a")[1] == 0


def test_prefilled_takes_the_tokens_once() -> None:
    ledger = Ledger()
    ledger.add("d", "a", 100, 0.0, 600.0)
    ledger.add("e", "a", 10, 0.0, 600.0)
    entry = ledger.prefilled("d")
    assert entry is not None
    assert entry.prefilled
    assert ledger.prefilled("d") is None
    assert ledger.totals("a") == (2, 10, 0)
    ledger.release("d")
    assert ledger.prefilled("d") is None
    assert ledger.totals("a") == (1, 10, 0)


def test_leases_run_out_unless_renewed() -> None:
    ledger = Ledger()
    ledger.add("d", "a", 1, 0.0, 10.0)
    ledger.add("e", "a", 1, 1.0, 10.0)
    ledger.add("f", "a", 1, 2.0, 5.0)
    ledger.add("g", "a", 1, 2.0, 1.0)
    ledger.release("g")
    assert ledger.renew("d", 8.0)
    assert not ledger.renew("g", 8.0)
    assert ledger.expire(6.9) == []
    assert [entry.decision_id for entry in ledger.expire(12.0)] == ["f", "e"]
    assert ledger.state("e") is IdState.ENDED
    assert ledger.expire(17.9) == []
    assert [entry.decision_id for entry in ledger.expire(18.0)] == ["d"]


def test_orphan() -> None:
    ledger = Ledger()
    ledger.add("d", "a", 1, 0.0, 10.0)
    ledger.add("e", "a", 1, 5.0, 10.0)
    ledger.add("f", "b", 1, 0.0, 10.0)
    assert [entry.decision_id for entry in ledger.orphan("a", sent_before=5.0)] == ["d"]
    assert [entry.decision_id for entry in ledger.orphan("a")] == ["e"]
    assert ledger.orphan("a") == []
    assert ledger.count("b") == 1


def test_newest_first() -> None:
    ledger = Ledger()
    for number in range(3):
        ledger.add(str(number), "a", 1, float(number), 10.0)
    assert [entry.decision_id for entry in ledger.newest_first("a")] == ["2", "1", "0"]
    assert list(ledger.newest_first("b")) == []


def test_memory_stays_in_proportion() -> None:
    ledger = Ledger(remembered_ids=100)
    for number in range(5000):
        ledger.add(str(number), "a", 1, 0.0, 600.0)
        ledger.release(str(number))
    assert ledger.state("0") is IdState.UNKNOWN
    assert ledger.state("4999") is IdState.ENDED
    assert len(ledger._leases) <= 100
    assert len(ledger._ended) == 100


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "release", "renew", "expire", "prefilled", "orphan"]),
        st.integers(0, 8),
        st.integers(0, 2),
        st.integers(-3, 1000),
    ),
    max_size=120,
)


@given(STEPS)
def test_agrees_with_a_plain_dictionary_and_comes_back_to_zero(steps: list[tuple[str, int, int, int]]) -> None:
    ledger = Ledger()
    model: dict[str, list[object]] = {}
    used: set[str] = set()
    now = 0.0
    for action, number, place, amount in steps:
        decision, endpoint = f"d{number}", f"e{place}"
        now += 1.0
        match action:
            case "add":
                fresh = decision not in used
                assert ledger.add(decision, endpoint, amount, now, 10.0) == fresh
                if fresh:
                    used.add(decision)
                    model[decision] = [endpoint, max(amount, 0), now + 10.0]
            case "release":
                assert (ledger.release(decision) is not None) == (model.pop(decision, None) is not None)
            case "renew":
                assert ledger.renew(decision, now) == (decision in model)
                if decision in model:
                    model[decision][2] = now + 10.0
            case "prefilled":
                ledger.prefilled(decision)
                if decision in model:
                    model[decision][1] = 0
            case "orphan":
                gone = {name for name, (where, _, _) in model.items() if where == endpoint}
                assert {entry.decision_id for entry in ledger.orphan(endpoint)} == gone
                for name in gone:
                    del model[name]
            case _:
                gone = {name for name, (_, _, until) in model.items() if isinstance(until, float) and until <= now}
                assert {entry.decision_id for entry in ledger.expire(now)} == gone
                for name in gone:
                    del model[name]
        counts = Counter(str(where) for where, _, _ in model.values())
        for name in ("e0", "e1", "e2"):
            assert ledger.count(name) == counts[name]
            tokens = [tokens for where, tokens, _ in model.values() if where == name]
            assert ledger.totals(name)[1] == sum(value for value in tokens if isinstance(value, int))
        assert len(ledger) == len(model)
    for decision in list(model):
        assert ledger.release(decision) is not None
    assert [sum(ledger.totals(name)) for name in ("e0", "e1", "e2")] == [0, 0, 0]
    assert [ledger.orphan(name) for name in ("e0", "e1", "e2")] == [[], [], []]
    assert ledger._accounts == {}


def test_requests_whose_end_nobody_tells_go_when_the_engine_has_them_no_more() -> None:
    ledger = Ledger()
    for number in range(6):
        ledger.add(f"d{number}", "a", 10, float(number), 600.0)
        if number != 1:
            assert ledger.unseen(f"d{number}", number + 1.0, guessed=number < 3) is not None
    assert ledger.unseen("d0", 9.0, guessed=True) is None
    assert ledger.unseen("nobody", 9.0, guessed=True) is None
    assert ledger.totals("a") == (6, 60, 2)
    assert ledger.excess("b", 0.0, sent_before=9.0, unseen_before=9.0) == []
    # Nobody has been without a reporter for long enough.
    assert ledger.excess("a", 3.0, sent_before=5.0, unseen_before=1.0) == []
    # Five are old enough to be on the page, which shows three: the two oldest of which nobody would tell are over.
    assert [entry.decision_id for entry in ledger.excess("a", 3.0, sent_before=5.0, unseen_before=9.0)] == ["d0", "d2"]
    assert ledger.totals("a") == (4, 40, 0)
    assert ledger.excess("a", 3.0, sent_before=5.0, unseen_before=9.0) == []
    # Never one whose end will be told.
    gone = ledger.excess("a", 0.0, sent_before=9.0, unseen_before=9.0)
    assert [entry.decision_id for entry in gone] == ["d3", "d4", "d5"]
    assert ledger.excess("a", 0.0, sent_before=9.0, unseen_before=9.0) == []
    assert ledger.totals("a") == (1, 10, 0)
