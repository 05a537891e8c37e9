"""What is recognised, and how tokens are estimated, where texts are of many kinds: with a real tokenizer, through the whole Router."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest

from tests.prefix import tekken
from tests.prefix.tekken import DENSE, QUESTIONS, Fleet, Seen, requests_of

pytestmark = pytest.mark.long

Maker = Callable[[random.Random, int], str]


def documents_of(*kinds: Maker, each: int) -> list[tuple[str, str]]:
    rng = random.Random(3)
    return [(kind.__name__, kind(rng, rng.randrange(12_000, 24_000))) for kind in kinds for _ in range(each)]


def ask_about(fleet: Fleet, documents: Sequence[tuple[str, str]], *, short: float, count: int = 240) -> list[Seen]:
    """Questions to documents that come again and again, among short chats."""
    asked = requests_of(random.Random(7), count, short=short, documents=documents)
    return [fleet.ask(text, kind=kind, document=document) for kind, text, document in asked]


def ask_once(
    fleet: Fleet,
    kinds: Sequence[Maker],
    *,
    short: float,
    count: int = 240,
    hostile: Maker | None = None,
    share: float = 0.0,
    user: str = "",
    after: int = 0,
) -> list[Seen]:
    """Documents that come once each, among short chats and, `after` so many requests, one client's own texts."""
    rng, seen = random.Random(5), []
    for number in range(count):
        if hostile is not None and number >= after and rng.random() < share:
            fleet.ask(hostile(rng, rng.choice([400, 4000, 12_000])), user=user)
        elif rng.random() < short:
            fleet.ask(f"{rng.choice(QUESTIONS)} ({number})")
        else:
            kind = rng.choice(kinds)
            text = kind(rng, rng.randrange(4000, 16_000))
            seen.append(fleet.ask(f"{text}\n\n{rng.choice(QUESTIONS)}", kind=kind.__name__))
    return seen


def recognised(seen: Sequence[Seen]) -> float:
    """Of the requests whose document some engine holds, the share for which the index knew one that does."""
    held = [one for one in seen if one.holders]
    assert len(held) >= 30
    return sum(one.recognised for one in held) / len(held)


def errors(seen: Sequence[Seen]) -> dict[str, float]:
    """By kind of text: by how much the tokens of a prompt were misjudged, mean of absolute shares."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in seen:
        found[one.kind].append(abs(one.decision.prompt_tokens / one.prompt_tokens - 1))
    return {kind: statistics.fmean(of) for kind, of in found.items()}


REPEATED = {
    "half short chats": (0.5, documents_of(tekken.prose, each=12)),
    "many short chats": (0.8, documents_of(tekken.prose, each=8)),
    "prose and dense texts": (0.0, documents_of(tekken.prose, *DENSE, each=2)),
    "everything": (0.5, documents_of(tekken.prose, *DENSE, each=2)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_documents_that_engines_hold_are_recognised(name: str) -> None:
    short, documents = REPEATED[name]
    seen = ask_about(Fleet(), documents, short=short)[60:]
    long = [one for one in seen if one.document_bytes]
    assert recognised(long) >= 0.95
    assert max(errors(long).values()) < 0.05
    cached = [abs(one.decision.predicted_cached_tokens - one.cached_tokens) / one.prompt_tokens for one in long]
    assert statistics.fmean(cached) < 0.05


def test_the_template_takes_its_tokens_in_this_fleet() -> None:
    """The mixtures are those in which short chats are mostly template."""
    assert 25 <= len(tekken.chat_tokens("")) <= 40


@pytest.mark.parametrize(
    ("kinds", "short"),
    [((tekken.prose,), 0.5), ((tekken.prose,), 0.8), ((tekken.prose, *DENSE), 0.0), ((tekken.prose, *DENSE), 0.5)],
    ids=["half short chats", "many short chats", "prose and dense texts", "everything"],
)
def test_tokens_of_prompts_never_seen_before_are_estimated(kinds: Sequence[Maker], short: float) -> None:
    seen = ask_once(Fleet(), kinds, short=short)
    assert max(errors(seen[len(seen) // 4 :]).values()) < 0.15


def test_where_answers_name_no_tokens_the_engines_counters_teach() -> None:
    seen = ask_once(Fleet(tells_usage=False), (tekken.prose,), short=0.5, count=600)
    assert max(errors(seen[len(seen) // 2 :]).values()) < 0.15


@pytest.mark.parametrize(
    ("hostile", "share", "user"),
    [
        (tekken.gibberish, 0.1, ""),
        (tekken.gibberish, 0.3, ""),
        (tekken.gibberish, 0.5, "one of many"),
        (tekken.emoji, 0.5, ""),
        (tekken.spaces, 0.5, ""),
    ],
)
def test_a_client_cannot_move_the_estimates_of_others(hostile: Maker, share: float, user: str) -> None:
    kinds = (tekken.prose, tekken.code)
    seen = ask_once(Fleet(), kinds, short=0.3, count=300, hostile=hostile, share=share, user=user, after=60)
    assert max(errors(seen[len(seen) // 4 :]).values()) < 0.12


def test_where_nobody_has_a_name_half_of_the_requests_move_it_slowly() -> None:
    """At half of the requests no statistic tells who is honest: what is left is that it takes long, and is drawn back."""
    kinds = (tekken.prose, tekken.code)
    seen = ask_once(Fleet(), kinds, short=0.0, count=260, hostile=tekken.gibberish, share=0.5, after=60)
    assert max(errors(seen[60:]).values()) < 0.25


def test_prompts_that_never_hit_take_nothing_from_others() -> None:
    """As with prompt log probabilities: the engine says it had nothing, though it holds the document."""
    fleet, rng = Fleet(), random.Random(11)
    documents = documents_of(tekken.prose, each=10)
    ask_about(fleet, documents, short=0.3, count=100)
    seen = []
    for number in range(200):
        kind, document = rng.choice(documents)
        text = f"{document}\n\n{rng.choice(QUESTIONS)} {number}"
        odd = rng.random() < 0.3
        seen.append(fleet.ask(text, kind=kind, document=document, cached=0 if odd else None))
    assert recognised(seen) >= 0.95


def test_an_overestimated_capacity_is_corrected() -> None:
    """Engines hold a quarter of what they say: promises that break one after another make the index forget what is gone."""
    documents = documents_of(tekken.prose, each=40)

    def broken(fleet: Fleet) -> float:
        fleet.told_tokens = 4 * fleet.cache_tokens
        seen = ask_about(fleet, documents, short=0.0, count=400)[200:]
        promised = [one for one in seen if one.decision.predicted_cached_tokens > 1000]
        return sum(one.cached_tokens < one.decision.predicted_cached_tokens / 2 for one in promised) / len(seen)

    share = broken(Fleet(replicas=2, cache_tokens=40_000))
    assert share < 0.3
