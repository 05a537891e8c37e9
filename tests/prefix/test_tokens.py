"""What is learned of tokens, report by report. Mixtures with a real tokenizer are in `test_mixtures.py`."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from extproc.prefix.text import Text, measure
from extproc.prefix.tokens import TokenEstimates

WORDS = measure((b"\xfaplain words and nothing else " * 300,))
SHORT = measure((b"\xfahow are you today",))


def of(text: Text, per_byte: float, template: int = 0) -> int:
    """Tokens of a text to an engine that makes so many of each plain byte."""
    return round(text.plain_bytes * per_byte) + template


class Clock:
    def __init__(self, estimates: TokenEstimates) -> None:
        self.estimates = estimates
        self.now = 0.0

    def learn(self, model: str, text: Text, tokens: int, times: int = 1, user: str = "") -> None:
        for _ in range(times):
            self.now += 0.1
            self.estimates.learn(model, text, tokens, now=self.now, user=user)


def test_the_prior_holds_until_something_is_reported() -> None:
    estimates = TokenEstimates(4.0)
    assert estimates.of("m", WORDS) == pytest.approx(WORDS.plain_bytes / 4, abs=9)
    assert estimates.cache_bytes_per_token == 4.0


def test_prompts_that_weigh_nothing_teach_nothing() -> None:
    estimates = TokenEstimates(4.0)
    before = estimates.of("m", WORDS)
    estimates.learn_sum("m", {WORDS.kind: 0.0}, 4000, 60, requests=1)
    estimates.learn("m", measure((b"\xc3" * 4000,)), 60, now=1.0)
    assert estimates.of("m", WORDS) == before


def test_a_model_is_learned_on_its_own_and_unseen_ones_follow_all() -> None:
    estimates = TokenEstimates(4.0)
    clock = Clock(estimates)
    clock.learn("dense", WORDS, of(WORDS, 0.5), 200)
    assert estimates.of("dense", WORDS) == pytest.approx(of(WORDS, 0.5), rel=0.03)
    assert estimates.of("unseen", WORDS) == pytest.approx(of(WORDS, 0.5), rel=0.05)
    clock.learn("sparse", WORDS, of(WORDS, 0.15), 100)
    assert estimates.of("sparse", WORDS) == pytest.approx(of(WORDS, 0.15), rel=0.05)
    assert estimates.of("dense", WORDS) == pytest.approx(of(WORDS, 0.5), rel=0.03)


def test_the_template_is_learned_as_what_it_is() -> None:
    estimates = TokenEstimates(4.0)
    clock = Clock(estimates)
    for _ in range(150):
        clock.learn("m", SHORT, of(SHORT, 0.22, 34))
        clock.learn("m", WORDS, of(WORDS, 0.22, 34))
    assert estimates.template_of("m") == pytest.approx(34, abs=3)
    assert estimates.of("m", WORDS) == pytest.approx(of(WORDS, 0.22, 34), rel=0.02)
    assert estimates.of("m", SHORT) == pytest.approx(of(SHORT, 0.22, 34), rel=0.1)


def test_short_chats_alone_do_not_spoil_the_first_long_prompt() -> None:
    estimates = TokenEstimates(4.0)
    Clock(estimates).learn("m", SHORT, of(SHORT, 0.25, 60), 500)
    assert estimates.of("m", WORDS) == pytest.approx(of(WORDS, 0.25, 60), rel=0.15)


def test_one_kind_of_text_says_little_of_another() -> None:
    estimates = TokenEstimates(4.0)
    clock = Clock(estimates)
    clock.learn("m", WORDS, of(WORDS, 0.22), 100)
    digits = measure((b"\xfa" + b"0123456789" * 500,))
    clock.learn("m", digits, of(digits, 0.08), 300)
    assert estimates.of("m", WORDS) == pytest.approx(of(WORDS, 0.22), rel=0.03)
    assert estimates.of("m", digits) == pytest.approx(of(digits, 0.08), rel=0.1)


def test_a_beginning_that_was_reported_on_is_known_the_next_time() -> None:
    estimates = TokenEstimates(4.0)
    chain, other = array("Q", range(40)), array("Q", range(100, 140))
    Clock(estimates).learn("m", WORDS, of(WORDS, 0.22), 20)
    estimates.learn("m", WORDS, of(WORDS, 0.9), now=10.0, chain=chain)
    assert estimates.of("m", WORDS, chain) == pytest.approx(of(WORDS, 0.9), rel=0.02)
    assert estimates.of("m", WORDS, other) < of(WORDS, 0.9) * 0.8
    for number in range(9000):
        estimates.learn("m", WORDS, of(WORDS, 0.3), now=20.0, chain=array("Q", range(number, number + 9)))
    assert len(estimates._beginnings) <= 8192


@pytest.mark.parametrize("tokens", [0, -1, 10**9])
def test_what_cannot_be_one_text_prompt_teaches_nothing(tokens: int) -> None:
    estimates = TokenEstimates(4.0)
    before = estimates.of("m", WORDS)
    estimates.learn("m", WORDS, tokens, now=1.0)
    estimates.learn_sum("m", {WORDS.kind: WORDS.plain_bytes}, WORDS.n_bytes, tokens, requests=20)
    assert estimates.of("m", WORDS) == before
    estimates.learn("m", msgspec.structs.replace(WORDS, teaches=False), 9, now=1.0)
    assert estimates.of("m", WORDS) == before


def test_token_ids_are_known_exactly() -> None:
    estimates = TokenEstimates(4.0)
    Clock(estimates).learn("m", WORDS, of(WORDS, 0.6), 50)
    assert estimates.of("m", measure((b"\xf9" + bytes(4 * 1234),))) == 1234


def test_names_chosen_by_clients_cannot_grow_the_table_without_bound() -> None:
    estimates = TokenEstimates(4.0)
    for number in range(1500):
        estimates.learn(f"model-{number}", WORDS, 2000, now=float(number))
    estimates.learn("m" * 5000, WORDS, 2000, now=1e6)
    assert len(estimates._models) == 1000
    for number in range(500):
        estimates.learn("model-1", WORDS, 2000, now=1e6 + number, user=f"{number}" * 100)
    assert len(estimates._named) <= 64
    assert max(map(len, estimates._named)) <= 64


def test_one_odd_report_moves_little_once_some_have_come() -> None:
    estimates = TokenEstimates(4.0)
    clock = Clock(estimates)
    clock.learn("m", WORDS, of(WORDS, 0.22), 50)
    clock.learn("m", WORDS, of(WORDS, 2.0))
    assert estimates.of("m", WORDS) == pytest.approx(of(WORDS, 0.22), rel=0.02)


@pytest.mark.parametrize(
    ("share", "user", "bound"), [(0.1, "", 0.03), (0.3, "", 0.08), (0.5, "", 0.25), (0.5, "x", 0.08)]
)
def test_a_client_moves_the_estimate_of_others_little(share: float, user: str, bound: float) -> None:
    estimates = TokenEstimates(4.5)
    clock = Clock(estimates)
    clock.learn("m", WORDS, of(WORDS, 0.22), 100)
    turn = 0.0
    for _ in range(2000):
        turn += share
        if turn >= 1.0:
            turn -= 1.0
            clock.learn("m", WORDS, of(WORDS, 0.8), user=user)
        else:
            clock.learn("m", WORDS, of(WORDS, 0.22))
    assert estimates.of("m", WORDS) == pytest.approx(of(WORDS, 0.22), rel=bound)


def test_a_burst_is_one_voice() -> None:
    estimates = TokenEstimates(4.5)
    clock = Clock(estimates)
    clock.learn("m", WORDS, of(WORDS, 0.22), 150)
    for number in range(1000):
        estimates.learn("m", WORDS, of(WORDS, 0.8), now=clock.now + number * 1e-5)
    assert estimates.of("m", WORDS) == pytest.approx(of(WORDS, 0.22), rel=0.03)


def test_the_cache_is_converted_by_what_fills_it() -> None:
    """Half of the requests are short and mostly template, but the tokens are those of the long ones."""
    estimates = TokenEstimates(4.0)
    clock = Clock(estimates)
    for _ in range(300):
        clock.learn("m", SHORT, of(SHORT, 0.22, 34))
        clock.learn("m", WORDS, of(WORDS, 0.22, 34))
    assert estimates.cache_bytes_per_token == pytest.approx(WORDS.n_bytes / of(WORDS, 0.22, 34), rel=0.1)
    clock.learn("m", measure((b" " * 1_000_000,)), 20_000, 300)
    assert estimates.cache_bytes_per_token <= 16


def test_sums_teach_the_same() -> None:
    estimates = TokenEstimates(4.0)
    for short in (1, 19, 10, 20, 5, 20, 15) * 12:
        long = 20 - short
        tokens = short * of(SHORT, 0.22, 34) + long * of(WORDS, 0.22, 34)
        plain = short * SHORT.plain_bytes + long * WORDS.plain_bytes
        n_bytes = short * SHORT.n_bytes + long * WORDS.n_bytes
        estimates.learn_sum("m", {WORDS.kind: plain}, n_bytes, tokens, requests=20)
    assert estimates.of("m", WORDS) == pytest.approx(of(WORDS, 0.22, 34), rel=0.03)
    assert estimates.template_of("m") == pytest.approx(34, abs=8)
    estimates.learn_sum(None, {WORDS.kind: 20_000.0, 8: 400.0}, 21_600, 20_400, requests=20)
    assert estimates.of("m", WORDS) == pytest.approx(of(WORDS, 0.22, 34), rel=0.03)
