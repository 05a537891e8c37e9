from extproc.routing.record import CandidateRecord
from extproc.routing.strategies import Choice
from extproc.types import Candidate, Endpoint, EndpointSnapshot, PrefixMatch

A, B = Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000)
SNAPSHOTS = (EndpointSnapshot(A, 9.0, waiting=2.0, kv_cache_usage=0.5, in_flight=3), EndpointSnapshot(B))
CHOICE = Choice(0, "why", (("queue", 2.0), ("prefix", 1.0)), lambda: ([0.5, 0.25], [1.0, 0.0]), [2.0, 0.5])
ROWS = (
    Candidate(A.id, 2.0, (0.5, 1.0), 100, 3, 2.0, 0.5, 1.0),
    Candidate(B.id, 0.5, (0.25, 0.0), 0, 0, None, None, None),
)


def record(match: PrefixMatch | None = None) -> CandidateRecord:
    return CandidateRecord(SNAPSHOTS, CHOICE, match or PrefixMatch(200, {A.id: 100}), 10.0)


def test_rows_are_candidates() -> None:
    made = record()
    assert tuple(made) == ROWS
    assert all(isinstance(row, Candidate) for row in made)
    assert made[-1] == ROWS[1]
    assert made[:1] == ROWS[:1]


def test_it_is_a_value() -> None:
    assert record() == record() == ROWS
    assert record() != record(PrefixMatch())
    assert record() != ROWS[:1]
    assert hash(record()) == hash(ROWS)
    assert repr(record()) == repr(ROWS)


def test_its_length_is_known_before_any_row_is_made() -> None:
    assert len(record()) == 2


def test_a_strategy_without_scorers_has_rows_without_scores() -> None:
    bare = CandidateRecord(SNAPSHOTS, Choice(0, "why", (), tuple, [0.0, 0.0]), PrefixMatch(), 10.0)
    assert [row.scores for row in bare] == [(), ()]
