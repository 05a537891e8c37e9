"""The `h2` library as the other side: whatever it says we understand, and it accepts whatever we answer."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.http2.connection import Connection
from extproc.http2.events import ConnectionFailed, DataReceived, RequestEnded, RequestReceived, StreamReset
from extproc.http2.headers import encode_fields
from extproc.http2.limits import Limits
from tests.http2.wire import REQUEST

OK = encode_fields((b":status", b"200"))
END = encode_fields((b"grpc-status", b"0"))


class Pair:
    """A client of the `h2` library and our connection, with an application that echoes."""

    def __init__(self, window: int) -> None:
        self.client: Any = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.client.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.server = Connection(Limits(stream_window=1000, connection_window=70_000), 0.0)
        self.sent: dict[int, bytes] = defaultdict(bytes)
        self.taken: dict[int, bytes] = defaultdict(bytes)
        self.echoed: dict[int, bytes] = defaultdict(bytes)
        self.ended: set[int] = set()
        self.answered: set[int] = set()
        self.gone: set[int] = set()
        self.client.initiate_connection()

    def pump(self, cut: int) -> None:
        """Carry bytes both ways, in pieces of `cut`, until nobody has anything to say."""
        while True:
            there, back = self.client.data_to_send(), self.server.output()
            if not there and not back:
                return
            for start in range(0, len(there), cut):
                self._serve(there[start : start + cut])
            for event in self.client.receive_data(back):
                self._hear(event)

    def _serve(self, data: bytes) -> None:
        for event in self.server.receive(data, 0.0):
            match event:
                case RequestReceived():
                    assert dict(event.block.fields) == {name.encode(): value.encode() for name, value in REQUEST}
                    self.server.send_headers(event.stream_id, OK)
                case DataReceived():
                    self.taken[event.stream_id] += event.data
                    self.server.send_data(event.stream_id, event.data)
                    self.server.acknowledge(event.stream_id, len(event.data))
                case RequestEnded():
                    self.server.end_stream(event.stream_id, END)
                case StreamReset():
                    assert event.stream_id in self.gone
                case ConnectionFailed():
                    pytest.fail(event.reason)

    def _hear(self, event: Any) -> None:
        match event:
            case h2.events.DataReceived():
                self.echoed[event.stream_id] += event.data
                if event.flow_controlled_length:
                    # By hand: the library itself lets a small window run dry and waits for data that may not come.
                    self.client.increment_flow_control_window(event.flow_controlled_length)
                    with contextlib.suppress(h2.exceptions.StreamClosedError):
                        self.client.increment_flow_control_window(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self.answered.add(event.stream_id)
            case h2.events.StreamReset() | h2.events.ConnectionTerminated():
                pytest.fail(str(event))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("open", "data", "data", "data", "end", "reset", "ping", "window")),
        st.integers(0, 5),
        st.integers(1, 3000),
        st.integers(0, 9),
    ),
    max_size=40,
)


@settings(deadline=None)
@example([("open", 0, 1, 0), ("data", 0, 1, 0), ("window", 0, 1, 0), ("data", 0, 1, 0), ("end", 0, 1, 0)], 1, 4)
@given(ACTIONS, st.integers(1, 5000), st.integers(1, 70_000))
def test_random_scripts_of_a_client(actions: list[tuple[str, int, int, int]], cut: int, window: int) -> None:
    pair = Pair(window)
    pair.pump(cut)
    open_ids: list[int] = []
    for what, which, size, padding in actions:
        stream_id = open_ids[which % len(open_ids)] if open_ids else 0
        if what == "open":
            open_ids.append(pair.client.get_next_available_stream_id())
            pair.client.send_headers(open_ids[-1], REQUEST)
        elif what == "ping":
            pair.client.ping(bytes(8))
        elif what == "window":
            pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: size})
        elif not stream_id:
            continue
        elif what == "data":
            room = min(size, pair.client.local_flow_control_window(stream_id) - padding - 1)
            if room > 0:
                data = bytes([which + 65]) * room
                pair.client.send_data(stream_id, data, pad_length=padding or None)
                pair.sent[stream_id] += data
        elif what == "end":
            pair.client.end_stream(stream_id)
            pair.ended.add(stream_id)
            open_ids.remove(stream_id)
        elif what == "reset":
            pair.gone.add(stream_id)
            pair.client.reset_stream(stream_id)
            open_ids.remove(stream_id)
        pair.pump(cut)
    for stream_id in pair.ended:
        assert pair.taken[stream_id] == pair.sent[stream_id] == pair.echoed[stream_id]
    assert pair.answered == pair.ended
    assert pair.server.open_streams == len(open_ids)


def h2spec() -> str | None:
    """Return the binary: the one that is named, the one on the path, or one in a folder `tools` beside the checkout."""
    beside = sorted(Path(__file__).resolve().parents[3].glob("*/tools/h2spec"))
    return os.environ.get("EXTPROC_H2SPEC") or shutil.which("h2spec") or (str(beside[0]) if beside else None)


@pytest.mark.skipif(
    h2spec() is None,
    reason="h2spec is neither named by EXTPROC_H2SPEC nor on the path nor in ../*/tools: "
    "go install github.com/summerwind/h2spec/cmd/h2spec@latest",
)
@pytest.mark.parametrize("mode", ["plaintext", "self-signed"])
async def test_h2spec(mode: Any) -> None:
    import asyncio

    from extproc.config.schema import TlsConfig
    from extproc.edge.native.server import NativeServer
    from tests.edge.grpcio.harness import server_config
    from tests.protocol.dialogue import Dialogue

    server = NativeServer(server_config(TlsConfig(mode=mode)), Dialogue().shared, lambda _entry: None)
    await server.start()
    argv = ["-h", "127.0.0.1", "-p", str(server.grpc_port), "--timeout", "5", "generic", "http2", "hpack"]
    argv += [] if mode == "plaintext" else ["-t", "-k"]
    process = await asyncio.create_subprocess_exec(
        str(h2spec()), *argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    await server.stop(0, 0)
    assert process.returncode == 0, output.decode()
    assert b" 0 skipped, 0 failed" in output
