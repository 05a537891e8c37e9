from __future__ import annotations

from extproc.http2.events import DataReceived, RequestEnded


def test_events_are_values() -> None:
    assert DataReceived(1, b"a") == DataReceived(1, b"a")
    assert RequestEnded(3).stream_id == 3
