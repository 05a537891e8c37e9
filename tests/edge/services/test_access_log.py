from __future__ import annotations

import pytest

from extproc.edge.services.access_log import AccessLogService
from extproc.protocol.outcome import LogEntry
from tests.edge.envoy_wire.test_access_log import Types, entry, message
from tests.protocol.dialogue import Counters


def test_the_log_of_a_peer_is_one_from_the_same_host() -> None:
    service = AccessLogService(lambda _: None, Counters())
    ends = [lambda: None, lambda: None]
    service.join(ends[0], "ipv4:10.0.0.1:1000")
    service.join(ends[1], "ipv6:[fd00::1]:1000")
    assert service.streams == 2
    assert service.logs_of("ipv4:10.0.0.1:2000")
    assert service.logs_of("ipv6:[fd00::1]:7")
    assert not service.logs_of("ipv4:10.0.0.2:1000")
    service.leave(ends[0])
    service.leave(ends[0])
    assert not service.logs_of("ipv4:10.0.0.1:1000")
    assert service.has_logged("ipv4:10.0.0.1:3000")
    assert not service.has_logged("ipv4:10.0.0.2:1000")
    assert service.streams == 1


class TestTake:
    def test_entries_go_to_the_sink_and_are_counted(self, caplog: pytest.LogCaptureFixture) -> None:
        counters = Counters()
        got: list[LogEntry] = []
        service = AccessLogService(got.append, counters)
        interim = entry("d2")
        interim.common_properties.access_log_type = Types.DownstreamPeriodic
        nameless = entry("")
        nameless.common_properties.access_log_type = Types.DownstreamPeriodic
        service.take(message(entry("d1"), entry(""), interim, nameless))
        service.take(b"\xff")
        assert [log.decision_id for log in got] == ["d1", "", "d2"]
        kinds = ["final", "uncorrelated", "interim", "uncorrelated", "malformed"]
        assert counters.seen == [("log_entry", kind) for kind in kinds]
        assert "not readable" in caplog.text

    def test_a_failing_sink_costs_one_entry(self, caplog: pytest.LogCaptureFixture) -> None:
        counters = Counters()
        got: list[str] = []

        def sink(log: LogEntry) -> None:
            got.append(log.decision_id)
            raise KeyError(log.decision_id)

        AccessLogService(sink, counters).take(message(entry("d1"), entry("d2")))
        assert got == ["d1", "d2"]
        assert counters.seen.count(("internal", "access_log")) == 2
        assert "was lost" in caplog.text

    def test_attempts_are_counted_and_passed_on(self) -> None:
        counters = Counters()
        got: list[LogEntry] = []
        attempt = entry("")
        attempt.common_properties.access_log_type = Types.UpstreamEnd
        AccessLogService(got.append, counters).take(message(attempt))
        assert [log.attempt for log in got] == [True]
        assert counters.seen == [("log_entry", "attempt")]
