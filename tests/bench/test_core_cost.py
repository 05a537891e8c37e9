import json
import random

import pytest

from bench.core_cost import Conversations, Timing, chat_body, decision, lines, metrics_page, reference_loop
from extproc.edge.scraping.signals import read_metrics
from extproc.request import parse


@pytest.mark.parametrize("body_bytes", [1000, 32_000])
def test_conversations_differ_and_have_the_size_asked_for(body_bytes: int) -> None:
    conversations = Conversations(body_bytes, histories=3, rng=random.Random(1))
    bodies = [conversations.next() for _ in range(20)]
    assert len(set(bodies)) == 20
    assert all(len(body) == body_bytes for body in bodies)
    prompts = [parse("/v1/chat/completions", body, content_type="application/json").prompts[0] for body in bodies]
    assert len({prompt[: body_bytes // 8] for prompt in prompts}) == 1


def test_a_body_is_filled_up_to_its_size() -> None:
    assert len(chat_body(("a", "b"), 400)) == 400
    assert json.loads(chat_body(("long" * 100,), 10))["messages"][0]["content"] == "long" * 100


def test_the_page_is_as_long_as_a_real_one_and_can_be_read() -> None:
    page = metrics_page()
    assert 60_000 < len(page) < 80_000
    assert read_metrics(page, "vllm").waiting == 0.0


def test_a_decision_is_measured_with_a_warm_index() -> None:
    case = decision(3, 1000, 100, batches=1)
    assert case["index_blocks"] >= 100
    assert all(isinstance(case[name], Timing) for name in ("parse_and_route", "finished", "with_metrics_and_log"))


def test_figures_are_told_in_one_line_each() -> None:
    case = {"endpoints": 10, "parse_and_route": {"median_us": 61.26, "min_us": 50.0}}
    assert lines({"small": case}) == ["small: parse and route 61.3 us (min 50.0) [10 endpoints]"]


def test_the_reference_loop_takes_time() -> None:
    assert reference_loop()["min_us"] > 0
