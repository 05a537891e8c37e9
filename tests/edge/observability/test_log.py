"""The structured log: what a line looks like, and that a blocked output never blocks whoever logs."""

from __future__ import annotations

import json
import logging
import os
import random
import select
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.config.schema import DecisionLogConfig, LogConfig
from extproc.edge.observability.log import LineWriter, Log, render_json, render_text
from extproc.errors import NoEndpointError
from extproc.types import Finished, Outcome
from tests.edge.envoy_wire.decision_samples import decision


class Pipe:
    """A pipe, and everything written to it once the writing end is closed."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def lines(self) -> list[str]:
        os.close(self.writer)
        with os.fdopen(self.reader, "rb") as file:
            return file.read().decode().splitlines()

    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.Logger("extproc.test")  # noqa: LOG001 - a logger of this test alone
    yield made
    assert made.handlers == []


def log(pipe: Pipe, **config: Any) -> Log:
    return Log(LogConfig(**config), rng=random.Random(0), fd=pipe.writer, wall_clock=lambda: 1_700_000_000.25)


def test_a_decision_line(pipe: Pipe) -> None:
    made = log(pipe)
    made.decided(decision(), 61e-6, {})
    assert made.close()
    [document] = pipe.documents()
    assert document["time"] == "2023-11-14T22:13:20.250Z"
    assert (document["level"], document["event"], document["endpoint"]) == ("info", "decision", "10.0.0.1:8000")


def test_a_decision_line_as_text(pipe: Pipe) -> None:
    made = log(pipe, format="text")
    made.decided(decision(), 61e-6, {})
    assert made.close()
    [line] = pipe.lines()
    assert line.startswith("2023-11-14T22:13:20.250Z INFO    decision decision=0123456789abcdef request_id=req-1 ")
    assert ' note="longest prefix" ' in line


@pytest.mark.parametrize("kind", ["json", "text"])
def test_a_decision_line_leaves_out_what_nobody_knows(pipe: Pipe, kind: str) -> None:
    made = log(pipe, format=kind)
    made.decided(decision(candidates=(), chosen=None, model="\ud800"), 0, {})
    assert made.close()
    [line] = pipe.lines()
    assert "decision" in line
    assert "waiting" not in line
    assert "UNSET" not in line


def test_standard_logging_ends_up_here(pipe: Pipe, logger: logging.Logger) -> None:
    made = log(pipe)
    made.install(logger)
    logger.warning("file %s is bad", "x.yaml", extra={"problems": 3, "time": "not this"})
    logger.debug("not shown")
    try:
        int("broken")
    except ValueError:
        logger.exception("caught")
    assert made.close()
    first, second = pipe.documents()
    assert (first["event"], first["level"], first["logger"], first["problems"]) == (
        "file x.yaml is bad",
        "warning",
        "extproc.test",
        3,
    )
    assert second["traceback"].endswith("'broken'\n")


def test_a_writer_that_fails_goes_on_and_says_so(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    made = log(pipe)
    write, defects = made._writer._write, [ZeroDivisionError("a defect")]

    def sometimes(data: bytes) -> bool:
        if defects:
            raise defects.pop()
        return write(data)

    monkeypatch.setattr(made._writer, "_write", sometimes)
    made.decided(decision(), 0, {})
    assert made.close()  # which also ends the pause
    assert made.failures == 1
    assert not made.keeps_failing
    [told] = pipe.documents()
    assert (told["task"], told["level"]) == ("log", "error")
    assert "a defect" in told["traceback"]


def test_a_writer_that_always_fails_does_not_keep_the_process(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    made = log(pipe)
    monkeypatch.setattr(made._writer, "_write", lambda _: 1 // 0)
    made.decided(decision(), 0, {})
    assert made.close(20.0)
    assert made.keeps_failing
    assert pipe.documents() == []


def test_a_format_that_does_not_fit_is_logged_as_it_is(pipe: Pipe, logger: logging.Logger) -> None:
    made = log(pipe)
    made.install(logger)
    logger.info("%d apples", "many")
    assert made.close()
    assert pipe.documents()[0]["event"] == "%d apples"


def test_exc_info_without_an_exception(pipe: Pipe, logger: logging.Logger) -> None:
    made = log(pipe)
    made.install(logger)
    logger.error("plain", exc_info=True)  # noqa: LOG014 - the point
    assert made.close()
    assert "traceback" not in pipe.documents()[0]


def test_reconfiguration_counts_at_once(pipe: Pipe, logger: logging.Logger) -> None:
    made = log(pipe, level="error")
    made.install(logger)
    made.decided(decision(), 0, {})
    logger.warning("not shown")
    made.configure(LogConfig(level="debug"))
    logger.debug("shown")
    made.decided(decision(), 0, {})
    made.configure(LogConfig(decisions=DecisionLogConfig(enabled=False)))
    made.decided(decision(), 0, {})
    assert made.close()
    assert [document["event"] for document in pipe.documents()] == ["shown", "decision"]


def test_sampling(pipe: Pipe) -> None:
    made = log(pipe, decisions=DecisionLogConfig(sample=0.25))
    for _ in range(300):
        made.decided(decision(), 0, {})
    assert made.close()
    expected = random.Random(0)
    assert len(pipe.lines()) == sum(expected.random() < 0.25 for _ in range(300))


def test_the_root_logger_is_the_default(pipe: Pipe) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        made = log(pipe)
        made.install()
        assert len(root.handlers) == 1
        assert made.close()
        assert root.handlers == []
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_a_pipe_nobody_reads_stops_nobody(pipe: Pipe) -> None:
    while select.select([], [pipe.writer], [], 0)[1]:  # full from the start
        os.write(pipe.writer, b"x" * 4096)
    made = log(pipe, queue=100)
    for _ in range(20_000):
        made.decided(decision(), 0, {})
    assert made.dropped > 10_000
    assert not made.close(timeout_s=0.05)
    os.close(pipe.reader)  # the thread's write fails now, and it ends
    assert made.close(timeout_s=30)
    os.close(pipe.writer)


@pytest.mark.parametrize("kind", ["json", "text"])
def test_what_cannot_be_rendered_is_dropped_and_the_next_line_written(pipe: Pipe, kind: str) -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RecursionError

        __repr__ = __str__

    made = log(pipe, format=kind)
    made.install()
    try:
        logging.getLogger("a.library").warning("one", extra={"thing": Hostile()})
        logging.getLogger("a.library").warning("two")
    finally:
        assert made.close()
    assert made.dropped == 1
    [line] = pipe.lines()
    assert "two" in line


def test_lines_that_nobody_will_ever_read_are_counted(pipe: Pipe) -> None:
    os.close(pipe.reader)
    made = log(pipe)
    made.decided(decision(), 0, {})
    assert made.close()
    assert made.dropped == 1
    made.decided(decision(), 0, {})
    assert made.dropped == 2
    os.close(pipe.writer)


def test_a_slow_reader_gets_every_line_through_a_non_blocking_pipe(pipe: Pipe) -> None:
    os.set_blocking(pipe.writer, False)
    writer = LineWriter(pipe.writer, 10_000)
    for index in range(5000):
        assert writer.put({"time": 0, "level": "info", "event": str(index)})
    found: list[bytes] = []

    def read() -> None:
        with os.fdopen(pipe.reader, "rb") as file:
            found.extend(file)

    reader = threading.Thread(target=read)
    reader.start()
    assert writer.close(timeout_s=30)
    os.close(pipe.writer)
    reader.join()
    assert [json.loads(line)["event"] for line in found] == [str(index) for index in range(5000)]


def test_json_takes_everything() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    assert json.loads(render_json({"time": 0, "event": "a\nb", "x": Odd()})) == {
        "time": "1970-01-01T00:00:00.000Z",
        "event": "a\nb",
        "x": "odd",
    }
    assert json.loads(render_json({"time": 0, "event": "\ud800"}))["event"] == "\ud800"
    assert render_json({"time": 0, "event": "a\nb"}).count(b"\n") == 1


def test_text_stays_in_one_line() -> None:
    fields = {
        "time": 0,
        "level": "info",
        "event": "a\x1b[31m\nb c",
        "x": "",
        "y": "p\nq",
        "z": None,
        "n": 5,
        "l": [1, "a b"],
        "s": "\ud800",
    }
    assert render_text(fields) == (
        b'1970-01-01T00:00:00.000Z INFO    "a\\u001b[31m\\nb c" x="" y="p\\nq" z=null n=5 l=[1, "a b"] s="\\ud800"\n'
    )


@pytest.mark.parametrize(("level", "written"), [("debug", True), ("info", False)])
def test_a_refusal_is_logged_at_level_debug(
    pipe: Pipe, caplog: pytest.LogCaptureFixture, level: str, written: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    made = log(pipe, level=level)
    made.refused(NoEndpointError("none"), {"x-request-id": "r-1"})
    assert made.close()
    os.close(pipe.writer)
    os.close(pipe.reader)
    found = [vars(record) for record in caplog.records if record.message == "a request was refused"]
    assert [(one["status"], one["reason"], one["request_id"]) for one in found] == [
        (503, "no_endpoint", "r-1")
    ] * written


@pytest.mark.parametrize(
    ("outcome", "blocks", "events"),
    [
        (Outcome.OK, 0, []),
        (Outcome.CLIENT_ERROR, 0, []),
        (Outcome.RESET, 0, ["a request failed at its endpoint"]),
        (Outcome.OK, 3, ["the engine held less than the index promised; the index was corrected"]),
    ],
)
def test_what_is_logged_of_an_end(
    pipe: Pipe, caplog: pytest.LogCaptureFixture, outcome: Outcome, blocks: int, events: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    made = log(pipe)
    made.ended(Finished(decision(), outcome, None, 1.0, evicted_blocks=blocks))
    assert made.close()
    os.close(pipe.writer)
    os.close(pipe.reader)
    assert [record.message for record in caplog.records] == events
