"""The core behind sessions and the access log: what each message of the wire makes of a request's life."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.config.schema import Config, ExplainConfig, LimitsConfig, LogConfig, RoutingConfig
from extproc.edge.observability.decisions import RecentDecisions
from extproc.edge.observability.log import Log
from extproc.edge.observability.telemetry import Telemetry
from extproc.edge.services.request_service import RequestService
from extproc.errors import InvalidRequestError, NoEndpointError
from extproc.protocol.interfaces import Observer, Observers, PendingDecision, RouteRequest, StreamEnd
from extproc.protocol.outcome import LogEntry, LogFlag
from extproc.router import Finished, Router
from extproc.types import Endpoint, EndpointMetrics, Outcome, Usage

PEER = "ipv4:127.0.0.1:1"
A, B = Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000)
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 2000}]}).encode()
UPSTREAM = {"content-type": "application/json", "x-envoy-upstream-service-time": "5"}
USAGE = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}}'


def ask(**fields: Any) -> RouteRequest:
    known: dict[str, Any] = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": {"content-type": "application/json", "x-request-id": "r-1"},
        "body": CHAT,
        "complete": True,
        "subset": None,
        "upgrade": False,
        "explain": False,
    }
    return RouteRequest(**{**known, **fields})


class Bench(Observer):
    """A core over a real router, with everything it tells people."""

    def __init__(self, log: Log, config: Config | None = None) -> None:
        self.now = 10.0
        self.log_connected = False
        self.busy: list[str] = []
        self.ends: list[Finished] = []
        self.telemetry = Telemetry()
        self.telemetry.set_endpoints([A.id, B.id])
        self.recent = RecentDecisions(100)
        self.router = Router(config or Config(), rng=random.Random(1))
        self.router.set_endpoints([A, B], now=0.0)
        self.service = RequestService(
            self.router,
            Observers(self.telemetry, self.recent, log, self),
            log_connected=lambda _peer: self.log_connected,
            mark_busy=self.busy.append,
            clock=lambda: self.now,
        )

    def ended(self, finished: Finished) -> None:
        self.ends.append(finished)

    def outcomes(self) -> list[Outcome]:
        return [end.outcome for end in self.ends]

    def decide(self, **fields: Any) -> Any:
        return self.service.decide(ask(**fields), self.now)

    def count(self, name: str, **labels: str) -> float:
        value = self.telemetry.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value


@pytest.fixture
def log() -> Iterator[Log]:
    out = os.open(os.devnull, os.O_WRONLY)
    log = Log(LogConfig(), rng=random.Random(0), fd=out)
    yield log
    log.close()
    os.close(out)


@pytest.fixture
def bench(log: Log) -> Bench:
    return Bench(log)


LONG = 4_000_000


FIELDS: dict[str, tuple[str, str]] = {
    "model": ("/v1/chat/completions", '{"model": "%s"}'),
    "user": ("/v1/chat/completions", '{"user": "%s"}'),
    "cache_salt": ("/v1/chat/completions", '{"model": "m", "cache_salt": "%s"}'),
    "user_id": ("/v1/messages", '{"model": "m", "metadata": {"user_id": "%s"}}'),
    "stream": ("/v1/messages", '{"stream": "%s"}'),
    "unknown": ("/v1/chat/completions", '{"%s": 1}'),
    "unknown_kind": ("", '{"%s": 1}'),
    "not_json": ("/v1/chat/completions", '{"model": "%s'),
    "wrong": ("/v1/chat/completions", '{"messages": "%s"}'),
    "deep": ("/v1/chat/completions", '{"%s": ' + "[" * 2000 + "]" * 2000 + "}"),
}
HEADERS = ["x-session-id", "x-request-id", "content-type", "content-encoding", "path", "method"]


class TestMemory:
    """What is kept of a request after its decision, whatever its client writes."""

    @pytest.mark.parametrize("field", [*FIELDS, *HEADERS])
    def test_no_name_fills_the_memory(self, bench: Bench, field: str) -> None:
        requests = 3
        for _ in range(5):
            bench.decide(body=b"{}", headers={})
        gc.collect()
        tracemalloc.start()
        try:
            for place in range(requests):
                bench.ends.clear()
                self._decide(bench, field, f"{place}" + "é" * (LONG // 2))
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept / requests < 8192  # 4 kB, and what grows by doubling

    def test_neither_do_many_of_them_open_and_ended(self, bench: Bench) -> None:
        self._kept_each(bench, "n")  # what is kept once, whoever asks
        short = self._kept_each(bench, "n")
        assert self._kept_each(bench, "n" * 30_000) < short + 1024
        assert len(bench.recent) == 100

    def _kept_each(self, bench: Bench, name: str) -> float:
        requests = 150
        gc.collect()
        tracemalloc.start()
        try:
            for place in range(requests):
                body = {"model": f"{place}{name}", "user": name, "cache_salt": name}
                headers = {"x-request-id": f"{place}{name}", "x-session-id": name, "content-type": "application/json"}
                routed = bench.decide(body=json.dumps(body).encode(), headers=headers)
                if place % 2:
                    bench.router.finished(routed.id, Outcome.OK, now=bench.now)
            gc.collect()
            return tracemalloc.get_traced_memory()[0] / requests
        finally:
            tracemalloc.stop()

    def test_a_long_request_id_is_still_that_request(self, bench: Bench) -> None:
        long = "r" * 5000
        routed = bench.decide(headers={"x-request-id": long})
        assert [found["id"] for found in bench.recent.find(0.0, decision_id=long)] == [routed.id]
        bench.service.on_log_entry(LogEntry(decision_id="", interim=False, status=0, details="", request_id=long))
        assert bench.outcomes() == [Outcome.ABORTED]

    def _decide(self, bench: Bench, field: str, text: str) -> None:
        fields: dict[str, Any] = {"headers": {"content-type": "application/json"}, "body": b'{"model": "m"}'}
        if field in FIELDS:
            fields["path"], template = FIELDS[field]
            fields["body"] = (template % text).encode()
        elif field in {"path", "method"}:
            fields[field] = text
        else:
            fields["headers"] = {field: text}
        with contextlib.suppress(InvalidRequestError):
            bench.decide(**fields)


class TestHeavyBodies:
    def test_one_that_is_read_in_part_is_counted(self, bench: Bench) -> None:
        bench.decide()
        assert bench.count("extproc_bodies_cut_total", why="elements") == 0
        bench.decide(body=b'{"model":"m","messages":[' + b"{}," * 100_000 + b"{}]}")
        assert bench.count("extproc_bodies_cut_total", why="elements") == 1


class TestUnseenEnds:
    def test_a_stream_that_we_ended_is_released_by_estimate(self, bench: Bench) -> None:
        first = bench.decide()
        bench.service.ended(first.id, StreamEnd.CLOSED_EARLY, PEER, bench.now)
        bench.service.expire(bench.now + 29.0)
        assert bench.outcomes() == []
        bench.service.expire(bench.now + 31.0)
        assert bench.outcomes() == [Outcome.LEASE_EXPIRED]
        assert bench.router.in_flight == 0
        bench.service.expire(bench.now + 100.0)
        assert len(bench.ends) == 1

    def test_the_estimate_is_what_others_took(self, bench: Bench) -> None:
        seen = bench.decide()
        bench.now += 2.0
        bench.service.response_started(seen.id, 200, UPSTREAM, bench.now, None)
        bench.service.ended(seen.id, StreamEnd.COMPLETED, PEER, bench.now)
        left = bench.decide().id
        bench.service.ended(left, StreamEnd.CLOSED_EARLY, PEER, bench.now)
        bench.service.expire(bench.now + 2.1)
        assert bench.outcomes() == [Outcome.OK, Outcome.LEASE_EXPIRED]

    @pytest.mark.parametrize("scraped", [True, False])
    def test_short_requests_without_any_word_of_their_ends_are_not_refused(self, log: Log, scraped: bool) -> None:
        """25 requests a second of 10 ms each, on two engines: what is counted is what scrapes show, and 4 s."""
        bench = Bench(log, Config(routing=RoutingConfig(limits=LimitsConfig(in_flight=64))))
        idle = EndpointMetrics(waiting=0.0, running=0.0, kv_cache_usage=0.0)
        most = 0
        for number in range(25 * 120):
            bench.now = 10.0 + number / 25
            routed = bench.decide()
            bench.service.ended(routed.id, StreamEnd.DETACHED, PEER, bench.now)
            if number % 10 == 0 and scraped:
                for endpoint in (A, B):
                    bench.router.observe(endpoint.id, idle, now=bench.now)
            if number % 25 == 0:
                bench.router.expire(now=bench.now)
                bench.service.expire(bench.now)
            most = max(most, bench.router.in_flight)
        assert most <= (25 * 4 if scraped else 25 * 32)
        if scraped:
            assert all(one.guessed == 0 for one in bench.router.snapshots(bench.now))

    def test_what_an_engine_still_has_stays_in_flight(self, bench: Bench) -> None:
        bench.router.set_endpoints([A], now=bench.now)
        for _ in range(8):
            bench.service.ended(bench.decide().id, StreamEnd.CLOSED_EARLY, PEER, bench.now)
        here = bench.router.snapshots(bench.now)[0].in_flight
        busy = EndpointMetrics(waiting=1.0, running=here - 2.0)
        for after in (0.5, 2.9):
            # Too early: an access log that opens with its first flush may report the end.
            bench.router.observe(A.id, busy, now=bench.now + after)
            assert bench.router.snapshots(bench.now)[0].in_flight == here
        bench.router.observe(A.id, busy, now=bench.now + 5.0)
        assert bench.router.snapshots(bench.now)[0].in_flight == here - 1
        assert bench.outcomes() == [Outcome.LEASE_EXPIRED]
        # A page that does not tell both says nothing of how many there are.
        bench.router.observe(A.id, EndpointMetrics(running=0.0), now=bench.now + 6.0)
        assert bench.router.snapshots(bench.now)[0].in_flight == here - 1

    def test_where_the_log_reports_ends_nothing_is_estimated(self, bench: Bench) -> None:
        bench.log_connected = True
        routed = bench.decide()
        bench.service.ended(routed.id, StreamEnd.CLOSED_EARLY, PEER, bench.now)
        bench.service.expire(bench.now + 500.0)
        assert bench.outcomes() == []
        bench.service.on_log_entry(LogEntry(routed.id, status=200, details="via_upstream", upstream=routed.destination))
        assert bench.outcomes() == [Outcome.OK]

    def test_a_late_entry_of_the_log_after_the_estimate_releases_nothing_twice(self, bench: Bench) -> None:
        routed = bench.decide()
        bench.service.ended(routed.id, StreamEnd.CLOSED_EARLY, PEER, bench.now)
        bench.service.expire(bench.now + 31.0)
        bench.service.on_log_entry(LogEntry(routed.id, status=200, details="via_upstream", upstream=routed.destination))
        assert len(bench.ends) == 1


# Decisions


def test_a_decision_is_counted_logged_and_remembered(bench: Bench) -> None:
    routed = bench.decide()
    assert routed.destination in {A.id, B.id}
    assert (routed.set_headers, routed.remove_headers, routed.body_splice, routed.explain) == ((), (), None, False)
    assert bench.count("extproc_decisions_total", endpoint=routed.destination, strategy="weighted") == 1
    assert bench.busy == [routed.destination]
    (remembered,) = bench.recent.find(bench.now)
    assert (remembered["id"], remembered["request_id"], remembered["outcome"]) == (routed.id, "r-1", None)
    assert remembered["kind"] == "chat"
    assert remembered["prompt_bytes"] > 10_000


def test_fallbacks_follow_the_destination(log: Log) -> None:
    routed = Bench(log, Config(routing=RoutingConfig(fallbacks=1))).decide()
    assert sorted(routed.destination.split(",")) == [A.id, B.id]
    assert routed.destination.split(",")[0] == routed.endpoint.id


def test_explanations_are_worded_as_configured(bench: Bench) -> None:
    explained = bench.service.explanation(bench.decide(explain=True))
    assert explained.startswith("weighted: ")
    assert A.id in explained
    assert B.id in explained
    bench.service.configure(Config(explain=ExplainConfig(header="brief")))
    made = bench.decide(explain=True)
    assert bench.service.explanation(made) == f"weighted: decision {made.id}; one of 2"
    assert not bench.decide().explain


def test_a_refusal_passes_through_and_leaves_nothing(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError):
        bench.decide(body=b"[]")
    bench.router.set_endpoints([], now=1.0)
    with pytest.raises(NoEndpointError):
        bench.decide()
    assert bench.router.in_flight == 0
    assert not bench.recent.find(0.0)
    assert not bench.busy


@pytest.mark.parametrize(
    "fields",
    [
        {"upgrade": True},
        {"method": "GET"},
        {"method": "DELETE", "body": b"not json"},
        {"body": b"", "complete": False},
    ],
)
def test_what_has_no_body_to_read_is_routed_by_load(bench: Bench, fields: dict[str, Any]) -> None:
    routed = bench.decide(**{"body": b"", **fields})
    assert routed.kind.value == "other"
    assert routed.request_id == "r-1"
    assert routed.prompt_bytes == 0


def test_without_pseudo_headers_the_body_tells(bench: Bench) -> None:
    assert bench.decide(method="", path="").kind.value == "chat"


def test_a_compressed_body_is_not_looked_into(bench: Bench) -> None:
    routed = bench.decide(headers={"content-encoding": "gzip"}, body=b"\x1f\x8b")
    assert routed.prompt_bytes == 0


def test_the_session_key_comes_from_the_configured_header(log: Log) -> None:
    bench = Bench(log, Config(routing=RoutingConfig(strategy="session", session_header="X-Chat")))
    bodies = [json.dumps({"messages": [{"role": "user", "content": f"{n}"}]}).encode() for n in range(8)]
    assert len({bench.decide(headers={"x-chat": "key"}, body=body).destination for body in bodies}) == 1
    other = Config(routing=RoutingConfig(strategy="session", session_header="x-other"))
    bench.router.reconfigure(other, now=11.0)
    bench.service.configure(other)
    (end,) = {bench.decide(headers={"x-other": "key"}, method="GET", body=b"").destination for _ in range(8)}
    assert end in {A.id, B.id}
    by_load = [bench.decide(headers={"x-chat": "key"}, body=body).destination for body in bodies]
    assert end not in by_load


def test_nothing_is_ever_held(bench: Bench) -> None:
    bench.service.withdraw(PendingDecision(), bench.now)
    assert not bench.service.access_log_connected("ipv4:10.1.1.1:2")
    bench.log_connected = True
    assert bench.service.access_log_connected("ipv4:10.1.1.1:2")


# The response phase


def test_a_response_with_usage_ends_the_request(bench: Bench) -> None:
    routed = bench.decide()
    assert bench.service.response_started(routed.id, 200, UPSTREAM, 11.0, None)
    assert bench.router.snapshots(11.0)[0].in_flight_tokens == 0
    bench.service.response_body(routed.id, USAGE[:20])
    bench.service.response_body(routed.id, USAGE[20:])
    bench.service.ended(routed.id, StreamEnd.COMPLETED, PEER, 12.0)
    (end,) = bench.ends
    assert (end.outcome, end.usage) == (Outcome.OK, Usage(9, 2, 4))
    assert bench.count("extproc_requests_total", endpoint=routed.destination, strategy="weighted", outcome="ok") == 1
    assert bench.recent.find(12.0)[0]["outcome"] == "ok"
    bench.service.ended(routed.id, StreamEnd.COMPLETED, PEER, 13.0)
    assert len(bench.ends) == 1


def test_an_error_of_the_endpoint_counts_against_it(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    routed = bench.decide()
    assert not bench.service.response_started(routed.id, 500, UPSTREAM, 11.0, None)
    bench.service.response_body(routed.id, b"oops")
    bench.service.ended(routed.id, StreamEnd.COMPLETED, PEER, 12.0)
    assert bench.outcomes() == [Outcome.SERVER_ERROR]
    (record,) = caplog.records
    assert record.message == "a request failed at its endpoint"
    assert (vars(record)["endpoint"], vars(record)["outcome"]) == (routed.destination, "server_error")


def test_a_local_reply_is_not_the_endpoints_answer(bench: Bench) -> None:
    routed = bench.decide()
    elsewhere = B.id if routed.destination == A.id else A.id
    assert not bench.service.response_started(routed.id, 200, {}, 11.0, elsewhere)
    bench.service.ended(routed.id, StreamEnd.COMPLETED, PEER, 12.0)
    assert bench.outcomes() == [Outcome.OK]
    assert all(one.health_score == 1.0 for one in bench.router.snapshots(12.0))


def test_a_response_from_another_endpoint_moves_the_blame(bench: Bench) -> None:
    routed = bench.decide()
    elsewhere = B.id if routed.destination == A.id else A.id
    bench.service.response_started(routed.id, 200, UPSTREAM, 11.0, elsewhere)
    bench.service.ended(routed.id, StreamEnd.COMPLETED, PEER, 12.0)
    scores = {one.endpoint.id: one.health_score for one in bench.router.snapshots(12.0)}
    assert scores[routed.destination] < 1.0 == scores[elsewhere]


def test_a_stream_that_shows_no_response(bench: Bench) -> None:
    detached, aborted = bench.decide(), bench.decide()
    bench.service.ended(detached.id, StreamEnd.DETACHED, PEER, 11.0)
    assert bench.router.is_open(detached.id)
    bench.service.ended(aborted.id, StreamEnd.ABORTED, PEER, 11.0)
    assert bench.outcomes() == [Outcome.ABORTED]


def test_a_stream_that_closes_after_the_response_headers_leaves_the_end_to_the_log(bench: Bench) -> None:
    routed = bench.decide()
    bench.service.response_started(routed.id, 200, UPSTREAM, 11.0, None)
    bench.service.ended(routed.id, StreamEnd.DETACHED, PEER, 11.5)
    assert bench.ends == []
    bench.service.on_log_entry(LogEntry(routed.id, status=200, upstream=routed.destination))
    assert bench.outcomes() == [Outcome.OK]


def test_a_response_of_a_request_that_has_ended_is_not_looked_at(bench: Bench) -> None:
    routed = bench.decide()
    bench.service.on_log_entry(LogEntry(routed.id, status=200, upstream=routed.destination))
    assert not bench.service.response_started(routed.id, 200, UPSTREAM, 11.0, None)
    bench.service.response_body(routed.id, USAGE)
    bench.service.ended(routed.id, StreamEnd.COMPLETED, PEER, 11.0)
    assert len(bench.ends) == 1


# The access log


def test_a_final_entry_ends_the_request_with_the_engines_usage(bench: Bench) -> None:
    routed = bench.decide()
    bench.now = 12.0
    bench.service.on_log_entry(LogEntry(routed.id, interim=True))
    assert bench.ends == []
    entry = LogEntry(routed.id, status=200, served=routed.destination, usage=Usage(9, 2, 4), attempts=1)
    bench.service.on_log_entry(entry)
    (end,) = bench.ends
    assert (end.outcome, end.usage, end.duration_s) == (Outcome.OK, Usage(9, 2, 4), 2.0)
    bench.service.on_log_entry(entry)
    bench.service.on_log_entry(LogEntry("f" * 16, status=200))
    assert bench.count("extproc_access_log_entries_total", kind="late") == 1
    assert bench.count("extproc_access_log_entries_total", kind="foreign") == 1


def test_a_refused_connection_is_the_chosen_endpoints_whoever_was_tried_last(bench: Bench) -> None:
    routed = bench.decide()
    elsewhere = B.id if routed.destination == A.id else A.id
    flags = frozenset({LogFlag.UPSTREAM_CONNECTION_FAILURE})
    bench.service.on_log_entry(LogEntry(routed.id, status=503, flags=flags, served=elsewhere, attempts=2))
    assert bench.outcomes() == [Outcome.CONNECT_FAILURE]
    scores = {one.endpoint.id: one.health_score for one in bench.router.snapshots(12.0)}
    assert scores[routed.destination] < 1.0 == scores[elsewhere]


def refused(request_id: str, endpoint_id: str, *flags: LogFlag, status: int = 0) -> LogEntry:
    return LogEntry(
        "", attempt=True, status=status, flags=frozenset(flags), upstream=endpoint_id, request_id=request_id
    )


@pytest.mark.parametrize("request_id", ["r1", "r" * 5000])
def test_an_engine_whose_503_was_retried_is_busy_and_not_unreachable(bench: Bench, request_id: str) -> None:
    routed = bench.decide(headers={"x-request-id": request_id})
    elsewhere = B.id if routed.destination == A.id else A.id
    bench.service.on_log_entry(refused(request_id, routed.destination, status=503))
    assert bench.ends == []
    bench.service.on_log_entry(LogEntry(routed.id, status=200, served=elsewhere, attempts=2))
    (end,) = bench.ends
    assert (end.outcome, end.served_by, end.tried) == (Outcome.OK, elsewhere, {routed.destination: Outcome.BUSY})
    assert {one.health_score for one in bench.router.snapshots(12.0)} == {1.0}
    assert bench.recent.find(12.0)[0]["tried"] == {routed.destination: "busy"}


def test_every_endpoint_that_could_not_be_reached_is_counted_against(bench: Bench) -> None:
    routed = bench.decide(headers={"x-request-id": "r1"})
    flag = LogFlag.UPSTREAM_CONNECTION_FAILURE
    for endpoint in (A, B):
        bench.service.on_log_entry(refused("r1", endpoint.id, flag))
    bench.service.on_log_entry(LogEntry(routed.id, status=503, flags=frozenset({flag}), attempts=2))
    assert bench.outcomes() == [Outcome.CONNECT_FAILURE]
    assert all(one.health_score < 0.6 for one in bench.router.snapshots(12.0))


def test_an_attempt_of_a_request_that_is_not_under_way_is_not_kept(bench: Bench) -> None:
    routed = bench.decide(headers={"x-request-id": "r1"})
    bench.service.on_log_entry(LogEntry(routed.id, status=200, served=routed.destination, attempts=1))
    for entry in (refused("r1", A.id, status=503), refused("", A.id, status=503), refused("r1", "", status=503)):
        bench.service.on_log_entry(entry)
    bench.service.on_log_entry(LogEntry(routed.id, attempt=True, status=503, upstream=A.id))
    assert bench.service._tried == {}
    routed = bench.decide(headers={"x-request-id": "r2"})
    for number in range(100):
        bench.service.on_log_entry(refused("r2", f"10.0.1.{number}:1", status=503))
    assert len(bench.service._tried[routed.id]) < 10
    bench.service.on_log_entry(LogEntry(routed.id, status=200, served=routed.destination, attempts=1))
    assert bench.service._tried == {}


def test_a_gateway_that_passes_over_an_endpoint_is_told_of_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(4):
        routed = bench.decide()
        elsewhere = B.id if routed.destination == A.id else A.id
        bench.service.on_log_entry(LogEntry(routed.id, status=200, upstream=elsewhere, attempts=1))
    warned = [vars(record)["endpoint"] for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(warned) == sorted(set(warned))
    assert warned
    retried = bench.decide()
    bench.service.on_log_entry(LogEntry(retried.id, status=200, upstream="10.9.9.9:1", attempts=2))
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == len(warned)


@pytest.mark.parametrize(
    ("flag", "outcome"),
    [
        (LogFlag.DOWNSTREAM_CONNECTION_TERMINATION, Outcome.CLIENT_GONE),
        (LogFlag.UPSTREAM_CONNECTION_FAILURE, Outcome.ABORTED),
    ],
)
def test_a_client_that_left_before_our_answer_got_there_is_known_by_its_request_id(
    bench: Bench, flag: LogFlag, outcome: Outcome
) -> None:
    bench.decide()
    again = bench.decide()  # a second request of the same id
    entry = LogEntry("", flags=frozenset({flag}), request_id="r-1")
    bench.service.on_log_entry(LogEntry("", request_id="r-2"))
    bench.service.on_log_entry(LogEntry(""))
    assert bench.ends == []
    bench.service.on_log_entry(entry)
    bench.service.on_log_entry(entry)
    (end,) = bench.ends
    assert (end.decision.id, end.outcome) == (again.id, outcome)
    assert {one.health_score for one in bench.router.snapshots(12.0)} == {1.0}


def test_a_request_without_an_id_is_ended_by_its_decision(bench: Bench) -> None:
    routed = bench.decide(headers={})
    bench.service.on_log_entry(LogEntry("", status=200))
    assert bench.ends == []
    bench.service.on_log_entry(LogEntry(routed.id, status=200))
    assert bench.outcomes() == [Outcome.OK]


# What is told to people


def test_a_lease_that_ran_out_is_counted(bench: Bench) -> None:
    bench.decide()
    bench.router.expire(now=10_000.0)
    assert bench.outcomes() == [Outcome.LEASE_EXPIRED]
    assert bench.count("extproc_leases_expired_total") == 1


def test_a_correction_of_the_index_is_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench.router.set_endpoints([A], now=10.0)
    # Promises of different prompts break one after another.
    words = [f"{letter}ord".encode() for letter in "abcdefghijklmnop"]
    for word, cached in [*((word, None) for word in words), *((word, 0) for word in words[8:])]:
        routed = bench.decide(body=CHAT.replace(b"word", word))
        bench.now += 1
        usage = Usage(2500, 1, cached)
        bench.service.on_log_entry(LogEntry(routed.id, status=200, served=A.id, usage=usage, attempts=1))
    (told,) = [record for record in caplog.records if "index was corrected" in record.message]
    assert vars(told)["blocks"] > 0
    assert vars(told)["endpoint"] == A.id
