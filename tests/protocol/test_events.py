from __future__ import annotations

from extproc.protocol.events import PlainMetadata


def test_plain_metadata_knows_what_is_there() -> None:
    metadata = PlainMetadata({"a": {"b": [1]}})
    assert metadata.value("a", "b") == [1]
    assert metadata.value("a", "c") is None
    assert metadata.value("x", "b") is None
