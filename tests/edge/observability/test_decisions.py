"""How decisions are shown, and the last N."""

from __future__ import annotations

import msgspec

from extproc.edge.observability.decisions import RecentDecisions, decision_document, decision_line, endpoint_document
from extproc.types import Endpoint, EndpointSnapshot, Finished, Outcome, Usage
from tests.edge.envoy_wire.decision_samples import A, B, decision


def test_the_line_has_no_list_of_candidates() -> None:
    line = decision_line(decision(), 61.4e-6, 5.0)
    assert (line.time, line.level, line.event) == (5.0, "info", "decision")
    assert (line.decision, line.endpoint) == ("0123456789abcdef", "10.0.0.1:8000")
    assert (line.candidates, line.filtered, line.duration_us) == (2, 1, 61)
    assert (line.in_flight, line.waiting, line.signal_age_s) == (3, 1.0, 0.5)


def test_the_line_of_a_decision_whose_endpoint_is_no_candidate() -> None:
    assert "in_flight" not in msgspec.to_builtins(decision_line(decision(candidates=(), chosen=None), 0, 0))
    assert decision_line(decision(endpoint=B, chosen=EndpointSnapshot(B)), 0, 0).in_flight == 0


def test_the_document_has_everything() -> None:
    document = decision_document(decision(), now=12.5)
    assert document["age_s"] == 2.5
    assert document["fallbacks"] == ["10.0.0.2:8000"]
    assert document["weights"] == {"prefix": 3.0, "queue": 2.0}
    assert document["candidates"][0]["scores"] == {"prefix": 0.5, "queue": 1.0}
    assert document["filtered"] == [{"endpoint": "10.0.0.3:8000", "filter": "health"}]
    assert msgspec.json.decode(msgspec.json.encode(document)) == document


def test_what_clients_write_is_cut() -> None:
    long = decision(model="m" * 10**6, request_id="r" * 10**6)
    assert len(msgspec.json.encode(decision_document(long, 0))) < 3000
    assert len(msgspec.json.encode(decision_line(long, 0, 0))) < 2000


def test_endpoints() -> None:
    snapshot = EndpointSnapshot(
        Endpoint("10.0.0.1", 8000, "gpu-1", labels={"zone": "a"}),
        observed_at=8.0,
        waiting=1.5,
        models=frozenset({"b", "a"}),
        lora_running=frozenset({"x"}),
    )
    document = endpoint_document(snapshot, now=10.0)
    assert (document["signal_age_s"], document["models"], document["labels"]) == (2.0, ["a", "b"], {"zone": "a"})
    assert endpoint_document(EndpointSnapshot(B), now=10.0)["signal_age_s"] is None
    assert endpoint_document(EndpointSnapshot(B), now=10.0)["models"] is None
    assert msgspec.json.decode(msgspec.json.encode(document)) == document


def test_the_last_decisions_newest_first() -> None:
    recent = RecentDecisions(2)
    for index in range(4):
        recent.decided(decision(id=f"id{index}", request_id=f"r{index}", endpoint=A if index % 2 else B), 0, {})
    assert len(recent) == 2
    assert [found["id"] for found in recent.find(0)] == ["id3", "id2"]
    assert [found.id for found in recent.newest()] == ["id3", "id2"]
    assert [found["id"] for found in recent.find(0, limit=1)] == ["id3"]
    assert [found["id"] for found in recent.find(0, endpoint=B.id)] == ["id2"]
    assert [found["id"] for found in recent.find(0, endpoint="gpu-2")] == ["id2"]
    assert [found["id"] for found in recent.find(0, decision_id="id2")] == ["id2"]
    assert [found["id"] for found in recent.find(0, decision_id="r2")] == ["id2"]
    assert recent.find(0, decision_id="id0") == []
    recent.resize(1)
    assert [found["id"] for found in recent.find(0)] == ["id3"]


def test_nothing_is_remembered_with_no_room() -> None:
    recent = RecentDecisions(0)
    recent.decided(decision(), 0, {})
    assert recent.find(0) == []


def test_outcomes_are_added_as_they_become_known() -> None:
    recent = RecentDecisions(2)
    recent.decided(decision(), 0, {})
    assert recent.find(0)[0]["outcome"] is None
    assert "usage" not in recent.find(0)[0]
    recent.ended(Finished(decision(), Outcome.OK, Usage(10, 5, 7), 1.0))
    recent.ended(Finished(decision(id="unknown"), Outcome.OK, None, 1.0))
    found = recent.find(0)[0]
    assert found["outcome"] == "ok"
    assert found["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 7}
    assert "served_by" not in found
    recent.decided(decision(id="id2"), 0, {})
    recent.ended(Finished(decision(id="id2"), Outcome.OK, None, 1.0, served_by="10.0.0.9:8000"))
    assert recent.find(0)[0]["served_by"] == "10.0.0.9:8000"


def test_requests_under_way_keep_no_decision_that_is_forgotten() -> None:
    recent = RecentDecisions(3)
    for number in range(100):
        recent.decided(decision(id=f"id{number}"), 0, {})
    assert len(recent._unfinished) <= 6
    for number in range(100):
        recent.ended(Finished(decision(id=f"id{number}"), Outcome.OK, None, 1.0))
    assert [found["outcome"] for found in recent.find(0)] == ["ok"] * 3
    assert recent._unfinished == {}
