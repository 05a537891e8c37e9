from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.edge.scraping.signals import read_metrics
from extproc.pool.restarts import Lifetime
from extproc.types import EndpointMetrics

STARTED_S = 1_795_228_943.4


def restarts(*pages: EndpointMetrics) -> list[int]:
    """Tell which of the pages, one a second, are another process's."""
    lifetime = Lifetime()
    return [number for number, page in enumerate(pages) if lifetime.observe(page, float(number)) is not None]


def counted(*tokens: float | None) -> list[EndpointMetrics]:
    return [EndpointMetrics(waiting=0.0, prompt_tokens_total=one) for one in tokens]


def started(*seconds: float | None) -> list[EndpointMetrics]:
    return [EndpointMetrics(waiting=0.0, process_start_time_s=None if s is None else STARTED_S + s) for s in seconds]


@pytest.mark.parametrize(
    ("pages", "found"),
    [
        (counted(5000, 5000, 5001), []),
        (counted(5000, 3), [1]),
        (counted(5000, None, 3), [2]),
        (counted(5000, None, 5001), []),
        (counted(5000, None, 5001, None, 5002), []),
        (counted(5000, None, None, 3), [2]),
        (counted(5000, None, None, None, 3, 2), [2, 5]),
        (counted(None, None, None, 3), []),
        (counted(0, None, None, 0, 3), []),
        (counted(5000, None, 3, None, 5), [2]),
    ],
)
def test_counters_that_fall_or_are_gone(pages: Sequence[EndpointMetrics], found: list[int]) -> None:
    assert restarts(*pages) == found


def test_a_counter_counts_though_others_go_on() -> None:
    """A family of another label set vanishes for a while; the rest is there all the time."""
    full = EndpointMetrics(prompt_tokens_total=5000.0, requests_total=10.0, prefix_hits_total=400.0)
    without = replace(full, prefix_hits_total=None, requests_total=11.0)
    assert restarts(full, without, without, without, replace(full, requests_total=12.0)) == []
    assert restarts(full, without, without, replace(full, requests_total=12.0, prefix_hits_total=3.0)) == [3]


def test_all_gone_at_once_means_nothing_where_the_start_time_is_there() -> None:
    pages = [
        EndpointMetrics(prompt_tokens_total=tokens, process_start_time_s=STARTED_S) for tokens in (9.0, None, None, 9.0)
    ]
    assert restarts(*pages) == []


@pytest.mark.parametrize(
    ("pages", "found"),
    [
        (started(0, 0, 0), []),
        (started(0, None, 0), []),
        (started(0, None, 30), [2]),
        (started(0, 30, 30), [1]),
        (started(0, -30), [1]),
        (started(0, 0.02), [1]),
        (started(0, 0.73, 0.73, 1.5), [1, 3]),
        (started(0, 1, 0, 1), []),
        (started(0, 0.4, 0.7, 0.5, 0.9, 1.1), [1]),
        (started(0, 0.4, 0.7, 0.5, 30, 30.4), [1, 4, 5]),
    ],
    ids=str,
)
def test_another_start_time(pages: Sequence[EndpointMetrics], found: list[int]) -> None:
    """Within a second too, but not by the boot time's whole seconds, nor where it never stays the same."""
    assert restarts(*pages) == found


def test_when_the_process_that_is_gone_was_last_seen() -> None:
    """What was sent after that may be with the new one."""
    lifetime = Lifetime()
    said = [lifetime.observe(page, 10.0 * number) for number, page in enumerate(counted(4000, 5000, None, 3, 7, 2))]
    assert said == [None, None, None, 10.0, None, 40.0]


SGLANG = """\
sglang:num_queue_reqs{{model_name="m"}} 0.0
sglang:num_running_reqs{{model_name="m"}} {running}
sglang:token_usage{{model_name="m"}} 0.0
{counters}"""
COUNTERS = """\
sglang:prompt_tokens_total{{model_name="m"}} {tokens}
sglang:generation_tokens_total{{model_name="m"}} {tokens}
sglang:cached_tokens_total{{model_name="m",cache_source="device"}} {tokens}
sglang:num_requests_total{{model_name="m"}} {tokens}
"""


def test_sglang_in_multiprocess_mode() -> None:
    def page(tokens: float | None, running: float = 0.0) -> EndpointMetrics:
        counters = "" if tokens is None else COUNTERS.format(tokens=tokens)
        return read_metrics(SGLANG.format(running=running, counters=counters).encode(), "sglang")

    assert restarts(page(None), page(5000.0), page(5000.0), page(None, 1.0), page(3.0)) == [4]


def test_tensorrt_llm_in_multiprocess_mode() -> None:
    def page(done: str) -> EndpointMetrics:
        text = (
            f'trtllm_num_requests_waiting{{model_name="m"}} 0\ntrtllm_num_requests_running{{model_name="m"}} 1\n{done}'
        )
        return read_metrics(text.encode(), "trtllm")

    many = 'trtllm_request_success_total{finished_reason="stop"} 5000\n'
    few = 'trtllm_request_success_total{finished_reason="length"} 3\n'
    assert restarts(page(""), page(many), page(""), page(few)) == [3]


COUNTS = st.none() | st.integers(0, 5)


@given(st.lists(st.tuples(COUNTS, COUNTS, COUNTS), max_size=30), st.booleans())
def test_what_only_grows_never_restarts_with_its_start_time(
    growth: list[tuple[int | None, int | None, int | None]], has_start: bool
) -> None:
    """Pages may leave anything out, and start times too; without them, not everything twice in a row."""
    totals = [0, 0, 0]
    pages = []
    for step in growth:
        totals = [total + (more or 0) for total, more in zip(totals, step, strict=True)]
        shown = [None if more is None else float(total) for total, more in zip(totals, step, strict=True)]
        if not has_start and None in shown:
            shown = [float(total) for total in totals]
        pages.append(
            EndpointMetrics(
                prompt_tokens_total=shown[0],
                generation_tokens_total=shown[1],
                requests_total=shown[2],
                process_start_time_s=STARTED_S if has_start else None,
            )
        )
    assert restarts(*pages) == []
