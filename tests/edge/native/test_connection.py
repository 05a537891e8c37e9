from __future__ import annotations

import gc

import pytest

from extproc.edge.native import connection as native_connection
from extproc.errors import NoEndpointError
from extproc.http2.frames import PREFACE, ErrorCode, FrameType, Setting, frame, rst_stream, settings, window_update
from extproc.http2.grpc import Call, message_frame, open_call
from extproc.http2.headers import Field
from extproc.http2.limits import Limits
from tests.edge.native.harness import Stage, half_close, message, request_body, request_headers

PING = FrameType.PING


class TestCalls:
    def test_all_answers_of_one_read_leave_in_one_write(self) -> None:
        stage = Stage().start()
        data = []
        for stream_id in (1, 3, 5):
            data += [stage.call("process", stream_id), message(request_headers(), stream_id)]
            data += [message(request_body(b"x", end=True), stream_id), half_close(stream_id)]
        stage.say(*data)
        assert len(stage.socket.writes) == 1
        assert [heard.stream_id for heard in stage.heard()] == [1] * 4 + [3] * 4 + [5] * 4
        assert not stage.connection.streams
        assert stage.dialogue.counters.seen.count(("ended", "detached")) == 3

    def test_unknown_methods_and_other_protocols(self) -> None:
        stage = Stage().start()
        stage.say(stage.call("/no.Such/Thing"))
        assert stage.status()["grpc-status"] == "12"
        stage.say(
            stage.client.headers(3, [(":method", "GET"), (":scheme", "http"), (":path", "/")]), frame(0, 0, 3, b"junk")
        )
        assert stage.heard() == []
        stage.say(half_close(3))
        assert stage.status()[":status"] == "405"
        stage.say(stage.call("process", 5, ("grpc-timeout", "x")))
        assert stage.status()["grpc-status"] == "13"
        assert not stage.connection.streams

    def test_the_calls_own_deadline(self) -> None:
        stage = Stage().start()
        stage.say(stage.call("process", 1, ("grpc-timeout", "50m")), message(request_headers()))
        stage.loop.advance(0.06)
        assert stage.status()["grpc-status"] == "4"
        assert stage.dialogue.counters.seen[-1] == ("ended", "undecided")

    def test_messages_that_are_too_large_or_compressed_or_cut(self, caplog: pytest.LogCaptureFixture) -> None:
        stage = Stage(max_message_bytes=100).start()
        stage.say(stage.call("process"), message(bytes(101)))
        assert stage.status()["grpc-status"] == "8"
        stage.say(stage.call("process", 3, ("grpc-encoding", "gzip")), frame(0, 0, 3, b"\x01" + bytes(4)))
        assert stage.status()["grpc-accept-encoding"] == "identity"
        stage.say(stage.call("process", 5), frame(0, 1, 5, b"\x00"))
        assert stage.status()["grpc-status"] == "13"
        stage.say(stage.call("process", 7, ("grpc-timeout", "x")))
        kinds = ["grpc resource_exhausted", "grpc unimplemented", "grpc internal", "grpc internal"]
        assert [seen[1] for seen in stage.dialogue.counters.seen if seen[0] == "protocol_error"] == kinds
        assert [(record.getMessage(), getattr(record, "peer", "")) for record in caplog.records] == [
            ("a call was refused", "ipv4:10.1.1.1:5")
        ] * 4

    def test_refused_calls_are_counted_and_the_first_of_them_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        stage = Stage().start()
        for stream_id in range(1, 60, 2):
            stage.say(stage.call("process", stream_id), frame(0, 1, stream_id, b"\x00"))
        assert stage.dialogue.counters.seen.count(("protocol_error", "grpc internal")) == 30
        assert [getattr(record, "problem", "") for record in caplog.records] == [
            "the stream ends within a message"
        ] * 10

    def test_a_health_check_of_an_unknown_service_is_no_mistake(self, caplog: pytest.LogCaptureFixture) -> None:
        stage = Stage().start()
        stage.say(stage.call("check"), message(b"\x0a\x01x", end=True))
        assert stage.status()["grpc-status"] == "5"
        assert stage.dialogue.counters.seen == []
        assert caplog.records == []

    def test_a_block_that_comes_again_is_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read = []

        def counted(fields: tuple[Field, ...]) -> Call:
            read.append(fields)
            return open_call(fields)

        monkeypatch.setattr(native_connection, "open_call", counted)
        stage = Stage().start()
        for stream_id in range(1, 20, 2):
            stage.say(stage.call("process", stream_id))
        assert len(read) == 2  # the first has put its fields into the table
        other = Stage().start()
        other.say(other.call("process"))
        assert len(read) == 3

    def test_incomplete_messages_are_bounded_over_all_streams(self) -> None:
        stage = Stage(max_partial_bytes=15_000).start()
        part = message_frame(bytes(20_000))[:10_000]
        stage.say(stage.call("process", 1), stage.call("process", 3), frame(0, 0, 1, part))
        assert stage.context.partial_bytes == 10_000
        stage.say(frame(0, 0, 3, part))
        assert stage.status()["grpc-status"] == "8"
        assert stage.context.partial_bytes == 10_000
        stage.say(rst_stream(1, 8))
        assert stage.context.partial_bytes == 0

    def test_a_reset_lets_the_call_go(self) -> None:
        stage = Stage().start()
        stage.say(stage.call("process"), message(request_headers()), message(request_body(b"half")))
        assert stage.dialogue.budget.used_bytes
        stage.say(rst_stream(1, 8))
        assert stage.dialogue.budget.used_bytes == 0
        stage.say(stage.call("process", 3), window_update(3, 0))
        assert stage.dialogue.counters.seen[-2:] == [
            ("protocol_error", "http2 stream protocol_error"),
            ("ended", "undecided"),
        ]


class TestGarbage:
    """A collector that looks rarely finds nothing of a request: what were left in cycles could stay for ever."""

    @pytest.mark.parametrize(
        "kind", ["whole", "reset", "refused", "malformed", "routed nowhere", "check", "watch", "logs"]
    )
    def test_a_stream_leaves_no_cycles(self, kind: str, caplog: pytest.LogCaptureFixture) -> None:
        stage = Stage().start()
        if kind == "routed nowhere":
            stage.dialogue.handler.answer = lambda _ask: NoEndpointError("none")

        def stream(number: int) -> list[bytes]:
            opened = stage.call(kind if kind in {"check", "watch", "logs"} else "process", number)
            headers, body = message(request_headers(), number), message(request_body(b"x", end=True), number)
            rest = {
                "reset": [headers, rst_stream(number, 8)],
                "refused": [frame(0, 1, number, b"\x00")],
                "malformed": [message(b"\xff", number)],
                "check": [message(b"", number, end=True)],
                "watch": [message(b"", number), rst_stream(number, 8)],
                "logs": [message(b"", number, end=True)],
            }
            return [opened, *rest.get(kind, [headers, body, half_close(number)])]

        stage.say(*stream(1))
        caplog.clear()
        gc.collect()
        gc.disable()
        numbers = range(3, 43, 2)
        try:
            for number in numbers:
                stage.say(*stream(number))
            assert stage.heard() or kind in {"reset", "watch"}
            assert not stage.connection.streams
            caplog.clear()
            # Nothing of a stream; protobuf makes a class anew when it needs one whose last user has gone.
            assert gc.collect() < len(numbers)
        finally:
            gc.enable()


class TestBackPressure:
    def test_a_peer_that_does_not_read_is_not_read(self) -> None:
        stage = Stage().start()
        stage.connection.pause_writing()
        assert not stage.socket.reading
        stage.connection.resume_writing()
        assert stage.socket.reading

    def test_a_stream_whose_answers_wait_gets_no_more_room(self) -> None:
        stage = Stage(max_partial_bytes=1 << 23).start()
        stage.say(settings([(Setting.INITIAL_WINDOW_SIZE, 0)]))
        stage.say(stage.call("process"), message(request_headers()))
        body = request_body(bytes(16_000))
        sent = 0
        while True:
            stage.say(message(body))
            sent += len(body) + 5
            if stage.connection.streams[1].call.paused:  # type: ignore[union-attr]
                break
            assert sent < 20_000_000
        stage.heard()
        assert stage.context.unsent_bytes > 0
        stage.say(message(body), message(body))
        assert stage.context.partial_bytes >= 2 * len(body)
        assert not [heard for heard in stage.heard() if heard.kind == FrameType.WINDOW_UPDATE and heard.stream_id]
        stage.say(window_update(0, 1 << 30), window_update(1, 1 << 30))
        assert not stage.connection.streams[1].call.paused  # type: ignore[union-attr]
        stage.say(message(request_body(b"", end=True)), half_close())
        assert not stage.connection.streams
        assert stage.context.partial_bytes == stage.context.unsent_bytes == 0

    @pytest.mark.parametrize(("blocked", "state"), [(False, "closed"), (True, "aborted")])
    def test_answers_that_are_not_read_are_bounded(self, blocked: bool, state: str) -> None:
        stage = Stage(max_partial_bytes=50_000).start()
        stage.say(settings([(Setting.INITIAL_WINDOW_SIZE, 0)]))
        if blocked:
            stage.connection.pause_writing()
        for stream_id in range(1, 40, 2):
            stage.say(stage.call("process", stream_id), message(request_headers(), stream_id))
            stage.say(message(request_body(bytes(8000), end=True), stream_id), half_close(stream_id))
        assert stage.socket.state == state
        assert stage.context.unsent_bytes == 0
        assert stage.heard()[-1].payload[4:8] == ErrorCode.ENHANCE_YOUR_CALM.to_bytes(4, "big")
        assert ("protocol_error", "http2 enhance_your_calm") in stage.dialogue.counters.seen

    def test_the_connection_with_the_largest_part_goes(self) -> None:
        stage = Stage(max_partial_bytes=50_000).start()
        other = Stage()
        stage.context.connections[other.connection] = None
        stage.context.unsent_bytes = 120_000
        stage.say(settings([(Setting.INITIAL_WINDOW_SIZE, 0)]))
        stage.say(stage.call("process"), message(request_headers()))
        stage.say(message(request_body(bytes(8000), end=True)))
        assert stage.socket.state == "open"


class TestFailures:
    def test_a_peer_that_breaks_the_rules(self, caplog: pytest.LogCaptureFixture) -> None:
        stage = Stage().start()
        stage.say(stage.call("process"), message(request_headers()), message(request_body(b"half")))
        stage.heard()
        stage.say(frame(PING, 0, 1, bytes(8)))
        assert stage.heard()[-1].kind == FrameType.GOAWAY
        assert stage.socket.state == "closed"
        assert stage.dialogue.budget.used_bytes == 0
        assert ("protocol_error", "http2 protocol_error") in stage.dialogue.counters.seen
        assert "broke the rules of HTTP/2" in caplog.text
        stage.say(b"more")
        stage.connection.pause_writing()
        stage.connection.resume_writing()
        stage.loop.advance(60)
        assert stage.socket.state == "aborted"

    def test_a_lost_connection_lets_everything_go(self) -> None:
        stage = Stage().start()
        gone: list[int] = []
        stage.context.on_gone = lambda: gone.append(1)
        stage.say(
            stage.call("process"), message(request_headers()), message(request_body(b"half")), stage.call("watch", 3)
        )
        stage.connection.connection_lost(None)
        assert stage.dialogue.budget.used_bytes == 0
        assert not stage.context.connections
        assert gone == [1]
        assert all(timer.cancelled for timer in stage.loop.timers)

    def test_mistakes_within_streams_are_counted_and_the_first_of_them_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        stage = Stage(limits=Limits(concurrent_streams=1)).start()
        stage.say(stage.call("process"), *(stage.call("process", 3 + 2 * n) for n in range(30)))
        assert stage.dialogue.counters.seen.count(("protocol_error", "http2 stream refused_stream")) == 30
        assert [getattr(record, "peer", "") for record in caplog.records] == ["ipv4:10.1.1.1:5"] * 10
        stage.say(frame(PING, 0, 1, bytes(8)))
        assert len(caplog.records) == 11  # the end of the connection is always told

    def test_a_peer_that_has_gone_before_it_is_told(self) -> None:
        stage = Stage().start()
        stage.socket.gone = True
        stage.connection.terminate()
        assert stage.socket.state == "aborted"

    def test_goaway_with_an_error_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        stage = Stage().start()
        stage.say(frame(FrameType.GOAWAY, 0, 0, bytes(7) + b"\x02"), frame(FrameType.GOAWAY, 0, 0, bytes(8)))
        assert caplog.text.count("ended its connection with an error") == 1


class TestUnsent:
    def test_answers_that_wait_for_a_window_are_in_the_budget(self) -> None:
        stage = Stage().start()
        budget = stage.dialogue.budget
        stage.say(settings([(Setting.INITIAL_WINDOW_SIZE, 0)]))
        for stream_id in (1, 3):
            stage.say(stage.call("process", stream_id), message(request_headers(), stream_id))
            stage.say(message(request_body(bytes(8000), end=True), stream_id), half_close(stream_id))
        assert not stage.connection.streams  # the requests are over for the picker, their answers are not
        assert 16_000 < budget.used_bytes < 17_000
        stage.say(window_update(1, 100_000))
        assert 8_000 < budget.used_bytes < 8_500
        stage.say(rst_stream(3, ErrorCode.CANCEL))
        assert budget.used_bytes == 0

    def test_so_are_those_that_wait_for_the_socket(self) -> None:
        stage = Stage().start()
        budget = stage.dialogue.budget
        stage.socket.unsent_bytes = 2_000_000
        stage.connection.pause_writing()
        assert budget.used_bytes == 2_000_000
        stage.socket.unsent_bytes = 3_000_000
        stage.connection.flush()
        assert budget.used_bytes == 3_000_000
        stage.connection.resume_writing()
        assert budget.used_bytes == 0
        stage.connection.pause_writing()
        stage.connection.connection_lost(None)
        assert budget.used_bytes == 0


class TestAge:
    def test_a_connection_that_is_too_old_is_asked_to_come_back(self) -> None:
        stage = Stage(max_age_s=100.0, age_jitter=0.1, keepalive_s=1000.0).start()
        stage.say(
            stage.call("process", 1), message(request_headers(), 1), stage.call("logs", 3), stage.call("watch", 5)
        )
        stage.say(message(b"", 3), message(b"", 5))
        stage.heard()
        stage.loop.advance(89.9)
        assert stage.heard() == []
        assert stage.logs.streams == 1
        stage.loop.advance(20.2)
        heard = stage.heard()
        assert heard[0].kind == FrameType.GOAWAY
        # What never ends by itself is ended; a log entry that is under way is still taken.
        assert {found.stream_id for found in heard if found.kind == FrameType.HEADERS and found.flags & 1} == {3, 5}
        assert sorted(stage.connection.streams) == [1, 3]
        stage.say(message(b"", 3), rst_stream(3, ErrorCode.CANCEL))
        assert stage.logs.streams == 0
        stage.say(message(request_body(b"x", end=True), 1), half_close(1))
        stage.loop.advance(10.0)
        assert stage.socket.state != "open"

    def test_nothing_follows_the_end_of_an_aged_access_log(self) -> None:
        stage = Stage(max_age_s=100.0, keepalive_s=1000.0).start()
        stage.say(stage.call("logs", 3), message(b"", 3))
        stage.loop.advance(111.0)
        stage.heard()
        stage.logs.close()
        assert [found.kind for found in stage.heard()] == [FrameType.RST_STREAM]
        assert stage.logs.streams == 0

    @pytest.mark.parametrize("jitter", [0.0, 0.5])
    def test_the_age_differs_as_much_as_it_was_told_to(self, jitter: float) -> None:
        ages = []
        for seed in range(20):
            stage = Stage(max_age_s=100.0, age_jitter=jitter)
            stage.context.rng.seed(seed)
            stage.connection.connection_made(stage.socket)  # type: ignore[arg-type]
            ages.append(next(timer.due for timer in stage.loop.timers[::-1] if timer.due >= 50))
        assert (max(ages) - min(ages) > 30) is bool(jitter)
        assert all(50 <= age <= 150 for age in ages)

    def test_without_an_age_it_lives_on(self) -> None:
        stage = Stage(keepalive_s=1e9).start()
        stage.loop.advance(1e6)
        assert stage.heard() == []


class TestTime:
    def test_a_slow_preface(self, caplog: pytest.LogCaptureFixture) -> None:
        stage = Stage()
        stage.say(b"PRI * HTTP")
        stage.heard()
        stage.loop.advance(10)
        assert stage.socket.state == "closed"
        assert stage.heard()[-1].payload[4:8] == ErrorCode.SETTINGS_TIMEOUT.to_bytes(4, "big")
        assert ("protocol_error", "http2 settings_timeout") in stage.dialogue.counters.seen
        stage.loop.advance(10)
        assert stage.socket.state == "aborted"
        assert "no HTTP/2 preface in time" in [getattr(record, "problem", "") for record in caplog.records]

    @pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", PREFACE + bytes(9), PREFACE + b"\x00"])
    def test_a_connection_that_is_over_is_not_found_wanting_again(
        self, said: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        stage = Stage(keepalive_s=3.0, keepalive_timeout_s=1.0, preface_s=5.0)
        stage.say(said)
        stage.loop.advance(100.0)
        assert stage.socket.state == "aborted"
        assert len([seen for seen in stage.dialogue.counters.seen if seen[0] == "protocol_error"]) == 1
        assert len(caplog.records) == 1
        assert [heard.kind for heard in stage.heard()].count(FrameType.GOAWAY) == 1

    def test_a_silent_peer_is_asked_and_a_dead_one_dropped(self, caplog: pytest.LogCaptureFixture) -> None:
        stage = Stage().start()
        stage.loop.advance(61)
        assert stage.heard() == []  # it had spoken since
        stage.loop.advance(60)
        (ping,) = stage.heard()
        stage.say(frame(PING, 1, 0, ping.payload))
        stage.loop.advance(21)
        assert stage.socket.state == "open"
        stage.loop.advance(60 + 20)
        assert [heard.kind for heard in stage.heard()] == [PING, FrameType.GOAWAY]
        assert stage.socket.state == "aborted"
        assert ("protocol_error", "http2 no_answer") in stage.dialogue.counters.seen
        assert "no answer to PING" in [getattr(record, "problem", "") for record in caplog.records]

    def test_a_timer_that_fails_is_set_again(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        stage = Stage().start()
        with monkeypatch.context() as patch:
            patch.setattr(stage.connection.http2, "ping", lambda _: 1 // 0)
            stage.loop.advance(122)
        assert ("internal", "timer") in stage.dialogue.counters.seen
        assert "ZeroDivisionError" in caplog.text
        stage.loop.advance(60 + 60 + 20)
        assert stage.socket.state == "aborted", "a dead peer is dropped all the same"

    def test_a_frame_that_does_not_end(self, caplog: pytest.LogCaptureFixture) -> None:
        stage = Stage().start()
        stage.loop.advance(61)
        for _ in range(3):
            stage.say(b"\x00")
            stage.loop.advance(30)
        assert stage.socket.state == "aborted"
        assert "a frame that does not end" in [getattr(record, "problem", "") for record in caplog.records]

    def test_age(self) -> None:
        stage = Stage(max_age_s=1000.0).start()
        stage.say(stage.call("process"), message(request_headers()))
        for _ in range(23):
            stage.loop.advance(50)
            stage.say(frame(PING, 0, 0, bytes(8)))
        assert [heard.kind for heard in stage.heard()].count(FrameType.GOAWAY) == 2
        assert stage.socket.state == "open"
        stage.say(message(request_body(b"x", end=True)), half_close())
        assert stage.socket.state == "closed"

    def test_the_peer_answers_the_last_call(self) -> None:
        stage = Stage().start()
        stage.connection.shut_down()
        _, ping = stage.heard()
        stage.say(frame(PING, 1, 0, ping.payload))
        assert stage.socket.state == "closed"

    @pytest.mark.parametrize(("tls", "state"), [(None, "closed"), ("a socket", "closed with a word of TLS")])
    def test_cut(self, tls: str | None, state: str) -> None:
        stage = Stage().start()
        stage.socket.tls = tls
        stage.say(stage.call("process"), message(request_headers()))
        stage.connection.terminate()
        stage.connection.terminate()
        assert stage.socket.state == state
        stage.say(b"more")  # read, so that our last words arrive, and ignored
        stage.connection.abort()
        assert stage.socket.state == "aborted"
        assert stage.heard()[-1].payload[4:8] == ErrorCode.NO_ERROR.to_bytes(4, "big")


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (("1.2.3.4", 5), "ipv4:1.2.3.4:5"),
        (("::ffff:1.2.3.4", 5, 0, 0), "ipv4:1.2.3.4:5"),
        (("::1", 5, 0, 0), "ipv6:[::1]:5"),
        (None, "unknown"),
    ],
)
def test_peers_are_spelled_as_grpc_does(address: object, name: str) -> None:
    assert Stage(peer=address).connection.peer == name
