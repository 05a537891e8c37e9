"""One HTTP/2 request with prior knowledge, if wanted with trailers: no HTTP client for Python sends those."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import h2.config
import h2.connection
import h2.events


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def h2_request(
    port: int, path: str, body: bytes, headers: Sequence[tuple[str, str]], *, trailers: bool
) -> Answer:
    """One HTTP/2 request with prior knowledge; with `trailers`, the body is ended by them and not by END_STREAM on data."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    connection.initiate_connection()
    pseudo = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", f"127.0.0.1:{port}")]
    connection.send_headers(1, [*pseudo, ("content-type", "application/json"), *headers])
    answer, sent, ended = Answer(0, {}, b""), 0, False
    try:
        while True:
            while sent < len(body) and connection.local_flow_control_window(1) > 0:
                room = min(
                    connection.local_flow_control_window(1), connection.max_outbound_frame_size, len(body) - sent
                )
                connection.send_data(1, body[sent : sent + room], end_stream=not trailers and sent + room == len(body))
                sent += room
            if sent == len(body) and trailers and not ended:
                connection.send_headers(1, [("x-checksum", "abc")], end_stream=True)
            ended = ended or sent == len(body)
            writer.write(connection.data_to_send())
            await writer.drain()
            data = await reader.read(65536)
            assert data, "connection closed"
            for event in connection.receive_data(data):
                match event:
                    case h2.events.ResponseReceived():
                        answer.headers = {str(k): str(v) for k, v in event.headers or []}
                        answer.status = int(answer.headers[":status"])
                    case h2.events.DataReceived():
                        answer.body += event.data or b""
                        connection.acknowledge_received_data(event.flow_controlled_length or 0, 1)
                    case h2.events.StreamEnded():
                        return answer
                    case h2.events.StreamReset():
                        raise AssertionError(f"stream reset: {event.error_code}")
    finally:
        writer.close()
