from __future__ import annotations

from extproc.protocol.request_buffer import RequestBuffer
from extproc.protocol.settings import SessionSettings
from tests.protocol.dialogue import Dialogue, subset


def test_dropping_lets_everything_go_but_how_far_the_request_has_come() -> None:
    d = Dialogue()
    intake = RequestBuffer(d.shared, SessionSettings(max_inspect_bytes=2))
    intake.headers = {":method": "GET"}
    intake.note_subset(subset("a:1"))
    intake.keep(b"abc", 50)
    intake.ended = True
    assert intake.too_large
    ask = intake.ask("peer", complete=True)
    assert (ask.method, ask.body, ask.complete, ask.subset) == ("GET", b"ab", False, frozenset({"a:1"}))
    intake.drop()
    intake.drop()
    assert d.budget.used_bytes == 0
    assert (intake.chunks(), intake.subset, intake.retriable, intake.too_large) == ([], None, True, False)
    assert intake.headers == {}


def test_trailers_forbid_a_retry() -> None:
    intake = RequestBuffer(Dialogue().shared, SessionSettings())
    assert not intake.retriable
    intake.ended = intake.trailers = True
    assert not intake.retriable
