import json

import pytest

from bench.hard_days.clients import ClientRequest, Outcome, Record, asks, part_flaw, read_answer
from extproc.sim import tokens

TEXT = " bal bel bil"
STREAM = ClientRequest("/v1/completions", b"", TEXT, stream=True)
WHOLE = ClientRequest("/v1/chat/completions", b"", TEXT, stream=False)
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def error(kind: str = "engine_unavailable", message: str = "no") -> bytes:
    return json.dumps({"error": {"message": message, "type": kind}}).encode()


def read(ask: ClientRequest, status: int, body: bytes, **headers: str) -> Record:
    record = Record("1-0", "picker", 1, 0.0, status=status, begun=True)
    read_answer(record, ask, {name.replace("_", "-"): value for name, value in headers.items()}, body)
    return record


@pytest.mark.parametrize(
    ("body", "outcome", "said"),
    [
        (event(TEXT[:4]) + event(TEXT[4:]) + DONE, Outcome.WHOLE, ""),
        (event(TEXT[:4]) + event(TEXT[4:]), Outcome.FLAWED, "without [DONE]"),
        (event(TEXT[:4]) + DONE, Outcome.FLAWED, "another text"),
        (event(TEXT) + event(TEXT) + DONE, Outcome.FLAWED, "another text"),
        (event(TEXT)[:-9] + b"\n\n" + DONE, Outcome.FLAWED, "cannot be read"),
        (b"", Outcome.FLAWED, "without [DONE]"),
        (event(TEXT[:4]) + b'data: {"error": {"type": "InternalServerError"}}\n\n' + DONE, Outcome.REFUSED, ""),
    ],
)
def test_streams(body: bytes, outcome: Outcome, said: str) -> None:
    record = read(STREAM, 200, body)
    assert record.outcome is outcome
    assert said in record.flaw
    assert bool(record.flaw) == (outcome is Outcome.FLAWED)


@pytest.mark.parametrize(
    ("body", "flaw"),
    [
        (json.dumps({"choices": [{"message": {"content": TEXT}}]}).encode(), ""),
        (json.dumps({"choices": [{"text": TEXT}]}).encode(), ""),
        (json.dumps({"choices": [{"text": TEXT[:-1]}]}).encode(), "another text"),
        (json.dumps({"choices": [{"text": TEXT}]}).encode()[:-5], "no complete answer"),
        (b"", "no complete answer"),
        (b'{"choices": []}', "no complete answer"),
    ],
)
def test_whole_answers(body: bytes, flaw: str) -> None:
    record = read(WHOLE, 200, body)
    assert flaw in record.flaw
    assert (record.outcome is Outcome.WHOLE) == (not flaw)


@pytest.mark.parametrize(
    ("status", "body", "headers", "flaw"),
    [
        (503, error("picker_unavailable"), {"retry_after": "1"}, ""),
        (503, error("picker_unavailable"), {}, "without retry-after"),
        (429, error("rate_limit_error"), {"x_extproc_drop_reason": "overloaded"}, "without retry-after"),
        (500, error("InternalServerError"), {}, ""),
        (500, b"", {}, "without an error object"),
        (502, b"<html>", {}, "without an error object"),
        (500, error("InternalServerError", " "), {}, "empty message"),
        (302, b"", {}, "nobody has asked for"),
    ],
)
def test_errors_are_honest_or_not(status: int, body: bytes, headers: dict[str, str], flaw: str) -> None:
    record = read(STREAM, status, body, **headers)
    assert flaw in record.flaw
    assert bool(flaw) == bool(record.flaw)
    assert record.outcome is (Outcome.FLAWED if flaw else Outcome.REFUSED)
    assert record.failed


def test_the_reason_of_a_refusal_is_its_cause() -> None:
    record = read(STREAM, 503, error("service_unavailable"), x_extproc_drop_reason="no_endpoint", retry_after="5")
    assert record.cause == "503 no_endpoint"


def test_a_broken_stream_has_the_right_text_as_far_as_it_goes() -> None:
    record = Record("1-0", "picker", 1, 0.0, status=200)
    assert part_flaw(record, STREAM, event(TEXT[:4]) + event(TEXT[4:8])[:12]) == ""
    assert part_flaw(record, STREAM, b"") == ""
    assert "another text" in part_flaw(record, STREAM, event(TEXT[4:]))
    assert "cannot be read" in part_flaw(record, STREAM, b"data: {x\n\n")
    assert part_flaw(record, WHOLE, b"x") == ""


def test_a_seed_gives_the_same_requests_of_one_kind_each_way() -> None:
    first, second = asks(3), asks(3)
    kinds = set()
    for _ in range(60):
        turn = first(3)
        assert turn == second(3)
        assert len({one.body for one in turn}) == 3
        assert len({(one.path, one.stream, one.chunked, len(one.text)) for one in turn}) == 1
        kinds.add((turn[0].path, turn[0].stream, turn[0].chunked))
    assert len(kinds) >= 5


def test_the_expected_text_is_what_the_engine_says() -> None:
    for _ in range(20):
        ask = asks(5)(1)[0]
        fields = json.loads(ask.body)
        if "prompt" in fields:
            prompt = tokens.prompt_tokens(fields["prompt"])
        else:
            prompt = tokens.chat_tokens(fields["messages"], None)
        assert ask.text == tokens.output_tokens(prompt, fields["max_tokens"]).decode()
