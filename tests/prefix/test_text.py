"""Kinds of text, and how long a text is in bytes of plain text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from extproc.prefix import text as kinds
from extproc.prefix.text import KINDS, Text, measure
from extproc.request.canonical import MESSAGE, OTHER, TOKENS, prompts_of
from tests.prefix import tekken


def chat(text: str) -> bytes:
    return b"\xfa\xffuser\xfe" + text.encode()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (tekken.prose, kinds.PLAIN),
        (tekken.german, kinds.LATIN),
        (tekken.rows, kinds.DIGITS),
        (lambda rng, n: '{"name": ["value", {"other": null}]},\n' * (n // 38), kinds.MARKUP),
        (tekken.chinese, kinds.WIDE),
        (tekken.base64_text, kinds.CAPITALS),
        (tekken.emoji, kinds.WIDE),
        (tekken.spaces, kinds.BLANK),
        (lambda rng, n: "Запрос поступает на узел. " * (n // 40), kinds.TWO_BYTE),
        (lambda rng, n: rng.randbytes(n // 2).hex(), kinds.DIGITS),
    ],
)
@pytest.mark.parametrize("n_bytes", [1100, 2000, 30_000, 1_000_000])
def test_kinds_are_told_apart_at_any_length(make: Callable[[random.Random, int], str], kind: int, n_bytes: int) -> None:
    assert measure((chat(make(random.Random(1), n_bytes)),)).kind == kind


def test_plain_prose_is_as_long_as_it_is_and_dense_text_longer() -> None:
    rng = random.Random(2)
    prose = measure((chat(tekken.prose(rng, 20_000)),))
    assert prose.plain_bytes == pytest.approx(prose.n_bytes, rel=0.1)
    assert measure((b"a" * 8000,)).plain_bytes == pytest.approx(8000)
    assert measure((chat(tekken.base64_text(rng, 20_000)),)).plain_bytes > 1.5 * 20_000


def test_short_prompts_are_not_looked_at() -> None:
    text = measure((chat("0123456789" * 50),))
    assert (text.kind, text.plain_bytes, text.sample) == (kinds.SHORT, 507, b"")


def test_where_nothing_weighs_anything_shares_are_those_of_bytes() -> None:
    text = measure((b"\xc3" * 4000,))  # no text in any encoding we weigh
    assert (text.plain_bytes, text.share(1000)) == (0.0, 0.25)


@given(st.integers(1024, 300_000))
def test_a_sample_measures_like_the_whole(n_bytes: int) -> None:
    prompt = (b"Some words in lower case, a Name, and 12 numbers.\n" * (n_bytes // 40 + 1))[:n_bytes]
    measured = measure((prompt,))
    whole = kinds._weigh(prompt)[1]
    assert measured.plain_bytes == pytest.approx(whole, rel=0.25)
    assert len(measured.sample) <= 1024


def test_token_ids_are_counted_not_estimated() -> None:
    for ids in ([1, 2, 3], list(range(5000))):
        text = measure(prompts_of(Raw(json.dumps(ids).encode())))
        assert (text.kind, text.plain_bytes, text.teaches) == (kinds.IDS, len(ids), False)
    two = measure(prompts_of(Raw(b"[[1, 2], [3, 4, 5]]")))
    assert (two.kind, two.plain_bytes) == (kinds.IDS, 5)


def test_what_is_no_text_teaches_nothing() -> None:
    assert measure((chat("hello"),)).teaches
    assert not measure((chat("hello") + OTHER + b"image/png:0123",)).teaches
    assert not measure((chat("hello"), chat("world"))).teaches


def test_markers_are_those_of_the_canonical_prompt() -> None:
    assert TOKENS == kinds._TOKEN_IDS
    assert OTHER == kinds._MEDIA
    assert MESSAGE[0] > 0xF4, "counts as a mark of its own, not as a letter"


def test_of_several_prompts_all_are_measured() -> None:
    one, many = measure((b"\xf8" + b"a" * 1999,)), measure((b"\xf8" + b"a" * 1999,) * 100)
    assert many.n_bytes == 100 * one.n_bytes
    assert many.plain_bytes == pytest.approx(100 * one.plain_bytes, rel=0.05)
    assert many.prompts == 100


def test_the_share_of_a_prefix_is_counted_in_tokens_not_in_bytes() -> None:
    rng = random.Random(3)
    prose, dense = tekken.prose(rng, 20_000), tekken.base64_text(rng, 5000)
    text = measure((chat(prose + dense),))
    truth = len(tekken.chat_tokens(prose)) / len(tekken.chat_tokens(prose + dense))
    assert truth < 0.6
    assert text.share(20_000) == pytest.approx(truth, abs=0.12)
    assert (text.share(0), text.share(10**6)) == (0.0, 1.0)
    assert measure((chat("a" * 993),)).share(500) == pytest.approx(0.5)


@given(st.lists(st.binary(max_size=5000), min_size=1, max_size=3))
def test_any_bytes_have_a_finite_length_and_shares_within_bounds(prompts: list[bytes]) -> None:
    text: Text = measure(prompts)
    assert 0 <= text.kind < KINDS
    assert 0 <= text.plain_bytes <= 6 * text.n_bytes + 1
    for part in (0, 1, 100, 4096, text.n_bytes):
        assert 0 <= text.share(part) <= 1
