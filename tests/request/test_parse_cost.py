from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request import parse_cost
from extproc.request.parse_cost import PART, RESPELLING, TOKEN_IDS, WHOLE, Prices, affordable
from tests.request import bodies

FREE = Prices(object=0, list=0, comma=0, string=0, escape=0, byte=0, limit_ns=0.5)


def counted(body: bytes, **price: float) -> float:
    """What the exact count makes of a text: the most that is spent before the limit stops it, to the unit."""
    low, high = 0, 1 << 24
    while low < high:
        middle = (low + high) // 2
        prices = FREE._replace(limit_ns=middle + 0.5, **price)
        if parse_cost._walked(body, prices, prices) == len(body):
            high = middle
        else:
            low = middle + 1
    return low


@pytest.mark.parametrize("prices", [WHOLE, TOKEN_IDS, PART, RESPELLING])
def test_short_bodies_are_not_counted(prices: Prices) -> None:
    body = b"{}" * (parse_cost.UNCOUNTED_BYTES // 2)
    assert affordable(body, prices) == len(body)
    assert affordable(body * 100, prices) < len(body * 100)


@pytest.mark.parametrize("unit", [b"{},", b"[1],", b'"a",', b"1,", b'{"a":"b"},', b"null,"])
def test_elements_bound_what_is_read(unit: bytes) -> None:
    body = unit * (4_000_000 // len(unit))
    whole, part = affordable(body, WHOLE), affordable(body, WHOLE, PART)
    assert 0 < part < whole < len(body)
    assert affordable(body[:part], PART) == part


@pytest.mark.parametrize("text", ["a, b {c} [d] ", 'he said \\"no\\", ', "\\\\", "\\n{,", "{\\\\", '\\\\\\",'])
def test_what_stands_in_strings_is_no_element(text: str) -> None:
    body = b'{"a":["' + text.encode() * 20_000 + b'",{"b":1}]}'
    json.loads(body)
    assert counted(body, object=1) == 2
    assert counted(body, list=1) == 1
    assert counted(body, comma=1) == 1


def test_prose_of_any_size_is_read_whole() -> None:
    body = b'{"prompt":"' + b'Well, "she" said; [1] {2}\\n'.replace(b'"', b'\\"') * 140_000 + b'"}'
    assert affordable(body, WHOLE) == len(body)


def _elements(value: Any) -> tuple[int, int, int]:
    if isinstance(value, dict):
        inner = [_elements(item) for item in value.values()]
        return 1 + sum(i[0] for i in inner), sum(i[1] for i in inner), sum(i[2] for i in inner) + max(0, len(value) - 1)
    if isinstance(value, list):
        inner = [_elements(item) for item in value]
        return sum(i[0] for i in inner), 1 + sum(i[1] for i in inner), sum(i[2] for i in inner) + max(0, len(value) - 1)
    return 0, 0, 0


@given(bodies.values, st.booleans(), st.integers(1, 9))
def test_the_exact_count_is_that_of_the_reader_wherever_slices_end(value: Any, plain: bool, size: int) -> None:
    body = json.dumps(value, ensure_ascii=plain).encode()
    before, parse_cost._SLICE_BYTES = parse_cost._SLICE_BYTES, size  # type: ignore[misc]
    try:
        found = counted(body, object=1), counted(body, list=1), counted(body, comma=1)
    finally:
        parse_cost._SLICE_BYTES = before  # type: ignore[misc]
    assert found == _elements(value)


def test_whole_numbers_of_many_digits_cost_by_their_length() -> None:
    long = b'{"a":[' + b",".join([b"7" * 4200] * 900) + b"]}"
    assert affordable(long, WHOLE) < len(long) / 2
    short = b'{"a":[' + b",".join([b"7" * 200] * 18_000) + b"]}"
    assert affordable(short, WHOLE) == len(short)
