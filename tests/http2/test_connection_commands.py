from __future__ import annotations

from extproc.http2.events import DataReceived, RequestEnded, SendingResumed, StreamReset
from extproc.http2.frames import MAX_WINDOW, ErrorCode, FrameType, Setting, frame, rst_stream, settings, window_update
from extproc.http2.headers import encode_fields
from tests.http2.wire import Client, u32

OK = encode_fields((b":status", b"200"))
END = encode_fields((b"grpc-status", b"0"))


class TestAnswers:
    def test_headers_data_trailers(self) -> None:
        client = Client()
        client.say(client.headers(flags=5))
        connection = client.connection
        connection.send_headers(1, OK)
        connection.send_data(1, b"abc")
        connection.end_stream(1, END)
        headers, data, trailers = client.heard()
        assert (headers.flags, client.fields(headers.payload)) == (4, [(":status", "200")])
        assert (data.kind, data.flags, data.payload) == (FrameType.DATA, 0, b"abc")
        assert (trailers.flags, client.fields(trailers.payload)) == (5, [("grpc-status", "0")])
        assert connection.open_streams == 0
        connection.end_stream(1, END)
        assert client.heard() == []

    def test_an_answer_before_the_end_of_the_request_asks_for_no_more(self) -> None:
        client = Client()
        client.say(client.headers())
        client.connection.end_stream(1, END)
        assert [heard.kind for heard in client.heard()] == [FrameType.HEADERS, FrameType.RST_STREAM]

    def test_an_end_that_lingers_goes_on_listening(self) -> None:
        client = Client()
        client.say(client.headers(), client.headers(3))
        for stream_id in (1, 3):
            client.connection.send_headers(stream_id, OK)
            client.connection.end_stream(stream_id, END, linger=True)
        assert [heard.flags for heard in client.heard()] == [4, 5, 4, 5]
        assert client.say(frame(FrameType.DATA, 0, 1, b"late")) == [DataReceived(1, b"late")]
        client.connection.end_stream(1, END)
        assert client.heard() == []
        assert client.connection.open_streams == 2
        assert client.say(frame(FrameType.DATA, 1, 1)) == [RequestEnded(1)]
        assert client.say(rst_stream(3, ErrorCode.CANCEL)) == [StreamReset(3, ErrorCode.CANCEL, "")]
        assert client.connection.open_streams == 0
        assert client.heard() == []

    def test_a_lingering_stream_can_be_reset(self) -> None:
        client = Client()
        client.say(client.headers())
        client.connection.end_stream(1, END, linger=True)
        client.heard()
        client.connection.reset(1, ErrorCode.NO_ERROR)
        assert [heard.kind for heard in client.heard()] == [FrameType.RST_STREAM]
        assert client.connection.open_streams == 0

    def test_a_lingering_end_that_waits_for_a_window(self) -> None:
        client = Client()
        client.say(settings([(Setting.INITIAL_WINDOW_SIZE, 2)]), client.headers())
        client.connection.send_headers(1, OK)
        client.connection.send_data(1, b"abc")
        client.connection.end_stream(1, END, linger=True)
        assert client.connection.all_pending_bytes == 1
        assert client.say(frame(FrameType.DATA, 1, 1)) == [RequestEnded(1)]
        client.heard()
        assert client.connection.open_streams == 1
        client.say(window_update(1, 9))
        assert [heard.flags for heard in client.heard()] == [0, 5]
        assert client.connection.open_streams == client.connection.all_pending_bytes == 0

    def test_without_trailers(self) -> None:
        client = Client()
        client.say(client.headers(flags=5))
        client.connection.send_headers(1, OK)
        client.connection.end_stream(1, b"")
        _, end = client.heard()
        assert (end.kind, end.flags, end.payload) == (FrameType.DATA, 1, b"")


class TestWindows:
    def test_sending_stops_and_goes_on_in_order(self) -> None:
        client = Client()
        client.say(settings([(Setting.INITIAL_WINDOW_SIZE, 5)]), client.headers(flags=5))
        client.heard()
        connection = client.connection
        connection.send_data(1, b"abc")
        connection.send_data(1, b"defg")
        connection.end_stream(1, END)
        assert b"".join(heard.payload for heard in client.heard()) == b"abcde"
        assert connection.pending_bytes(1) == 2
        assert client.say(window_update(1, 1)) == []
        assert [heard.payload for heard in client.heard()] == [b"f"]
        assert client.say(settings([(Setting.INITIAL_WINDOW_SIZE, 6)])) == []
        _ack, last, trailers = client.heard()
        assert (last.payload, trailers.flags) == (b"g", 5)
        assert connection.pending_bytes(1) == 0

    def test_a_window_may_fall_below_zero(self) -> None:
        client = Client()
        client.say(settings([(Setting.INITIAL_WINDOW_SIZE, 5)]), client.headers())
        client.connection.send_data(1, b"abcde")
        client.say(settings([(Setting.INITIAL_WINDOW_SIZE, 2)]))
        client.connection.send_data(1, b"fg")
        client.heard()
        client.say(window_update(1, 3))
        assert client.heard() == []
        assert client.say(window_update(1, 9)) == [SendingResumed(1)]
        assert [heard.payload for heard in client.heard()] == [b"fg"]

    def test_the_connections_window_serves_whoever_waited_longest(self) -> None:
        client = Client()
        client.say(settings([(Setting.INITIAL_WINDOW_SIZE, 1 << 20)]), client.headers(1), client.headers(3))
        client.connection.send_data(1, bytes(65_535))
        client.connection.send_data(3, b"first")
        client.connection.send_data(1, b"second")
        client.heard()
        assert client.say(window_update(0, 6)) == [SendingResumed(3)]
        assert [(heard.stream_id, heard.payload) for heard in client.heard()] == [(3, b"first"), (1, b"s")]
        client.connection.send_data(3, b"third")
        client.heard()
        assert client.say(window_update(0, 1)) == []
        assert [(heard.stream_id, heard.payload) for heard in client.heard()] == [(1, b"e")]
        assert client.say(window_update(0, 60)) == [SendingResumed(1), SendingResumed(3)]

    def test_large_answers_are_cut_to_the_peers_frame_size(self) -> None:
        client = Client()
        client.say(client.headers())
        client.connection.send_data(1, bytes(40_000))
        assert [len(heard.payload) for heard in client.heard()] == [16_384, 16_384, 7_232]
        client.connection.end_stream(1, encode_fields((b"x", bytes(20_000))))
        kinds = [(heard.kind, heard.flags) for heard in client.heard()[:2]]
        assert kinds == [(FrameType.HEADERS, 1), (FrameType.CONTINUATION, 4)]

    def test_what_waits_is_dropped_with_its_stream(self) -> None:
        client = Client()
        client.say(settings([(Setting.INITIAL_WINDOW_SIZE, 0)]), client.headers())
        client.connection.send_data(1, b"never")
        client.connection.reset(1, ErrorCode.CANCEL)
        client.heard()
        client.say(window_update(0, 10))
        assert client.heard() == []


class TestLeaving:
    def test_in_two_steps(self) -> None:
        client = Client()
        connection = client.connection
        client.say(client.headers(1))
        connection.shut_down()
        connection.shut_down()
        first, ping = client.heard()
        assert (first.kind, first.payload) == (FrameType.GOAWAY, u32(MAX_WINDOW) + u32(0))
        client.say(client.headers(3))  # under way when the peer had not heard yet
        assert connection.open_streams == 2
        assert client.say(frame(FrameType.PING, 1, 0, ping.payload)) == []
        (second,) = client.heard()
        assert second.payload == u32(3) + u32(0)
        assert client.resets(client.headers(5), stream_id=5) is ErrorCode.REFUSED_STREAM
        connection.end_stream(1, END)
        assert not connection.finished
        connection.end_stream(3, END)
        assert connection.finished

    def test_a_peer_that_does_not_answer(self) -> None:
        client = Client()
        client.connection.shut_down()
        assert not client.connection.refuses_streams
        client.connection.refuse_streams()
        assert client.connection.refuses_streams
        client.connection.refuse_streams()
        assert [heard.kind for heard in client.heard()].count(FrameType.GOAWAY) == 2
        assert client.connection.finished

    def test_at_once(self) -> None:
        client = Client()
        client.say(client.headers())
        client.connection.fail(ErrorCode.NO_ERROR, "bye")
        (goaway,) = client.heard()
        assert goaway.payload == u32(1) + u32(0) + b"bye"
        assert client.connection.open_streams == 0

    def test_a_failure_after_the_last_call_promises_no_stream_again(self) -> None:
        """RFC 9113 6.8: the last stream identifier must not grow."""
        client = Client()
        client.say(client.headers(1))
        client.connection.refuse_streams()
        (first,) = client.heard()
        assert client.resets(client.headers(3), stream_id=3) is ErrorCode.REFUSED_STREAM
        client.connection.fail(ErrorCode.PROTOCOL_ERROR, "bye")
        (second,) = client.heard()
        assert (first.payload, second.payload) == (u32(1) + u32(0), u32(1) + u32(1) + b"bye")

    def test_ping(self) -> None:
        client = Client()
        client.connection.ping(b"12345678")
        assert [(heard.kind, heard.flags) for heard in client.heard()] == [(FrameType.PING, 0)]
