from __future__ import annotations

import json
import random
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config.schema import RoutingConfig, StrategyName
from extproc.routing.explain import COMPACT_BYTES, as_dict, brief, compact, sentence
from extproc.routing.scheduler import Scheduler
from extproc.types import Decision, EndpointSnapshot, InferenceRequest, PrefixMatch
from tests.routing.build import NOW, match, request, seen, snapshots, unseen


def decide(
    pool: list[EndpointSnapshot],
    held: PrefixMatch | None = None,
    what: InferenceRequest | None = None,
    *,
    strategy: StrategyName = "weighted",
) -> Decision:
    held = held or match(4120)
    return Scheduler(RoutingConfig(strategy=strategy, fallbacks=1)).schedule(
        what or request(),
        pool,
        held,
        rng=random.Random(0),
        now=NOW,
        decision_id="00000000000000ab",
        prompt_tokens=round(held.prompt_bytes / 4),
        generation=3,
    )


def test_the_sentence_names_what_speaks_for_the_choice_and_for_the_next_best() -> None:
    pool = [seen(1, in_flight=1), seen(3, in_flight=2, waiting=3.0, observed_at=NOW - 2), unseen(4, demoted=True)]
    assert sentence(decide(pool, match(4120, e3=3584))) == (
        "10.0.0.3:8000 holds 3,584 of 4,120 prompt bytes (87%) and has 2 requests in flight and 3 waiting, "
        "signals 2 s old (highest score); "
        "next best 10.0.0.1:8000 holds nothing of the prompt and has 1 request in flight; filtered out: 1 by health."
    )


def test_the_sentence_names_whose_prefix_was_given_up() -> None:
    pool = [seen(1), seen(2), seen(3, in_flight=40, in_flight_tokens=90_000, waiting=9.0)]
    said = sentence(decide(pool, match(4000, e3=1000)))
    assert "10.0.0.3:8000" not in said.partition("more is held by ")[0]
    assert said.endswith(
        "; more is held by 10.0.0.3:8000, which holds 1,000 of 4,000 prompt bytes (25%) "
        "and has 40 requests in flight and 9 waiting."
    )


def test_the_sentence_of_a_lonely_endpoint_without_prompt() -> None:
    assert sentence(decide([unseen(1)], match(0), request(prompts=()))) == (
        "10.0.0.1:8000 has 0 requests in flight, signals unknown (least load); no other endpoint was eligible."
    )


def test_the_header_begins_with_the_choice_and_shows_every_score() -> None:
    text = compact(decide([seen(1), seen(2)], match(8000, e2=8000)))
    assert text.startswith("weighted: highest score; 10.0.0.2:8000 total=")
    assert " prefix=0.80*" in text
    assert "10.0.0.1:8000 total=" in text


def test_the_header_is_bounded_and_says_what_it_leaves_out() -> None:
    pool = [seen(number) for number in range(1, 41)] + [seen(50, demoted=True)]
    text = compact(decide(pool))
    assert "; 35 more; filtered health=1" in text
    assert len(text) <= COMPACT_BYTES


def test_the_header_is_ascii_whatever_an_address_holds() -> None:
    pool = [seen(1, address="gpu-ü\n" + "x" * 3000)]
    text = compact(decide(pool))
    assert len(text) == COMPACT_BYTES
    assert "gpu-??x" in text


def test_the_record_holds_everything_and_is_json() -> None:
    record = as_dict(decide([seen(1), unseen(2), seen(3, demoted=True)], match(4120, e1=2060), request(model="m")))
    assert json.loads(json.dumps(record)) == record
    assert record["id"] == "00000000000000ab"
    assert record["endpoint"] == "10.0.0.1:8000"
    assert record["fallbacks"] == ["10.0.0.2:8000"]
    assert record["model"] == "m"
    assert record["predicted_cached_tokens"] == 515
    assert record["filtered"] == [{"endpoint": "10.0.0.3:8000", "filter": "health"}]
    assert record["config_generation"] == 3
    first, second = record["candidates"]
    assert set(first["scores"]) == set(record["weights"])
    assert first["signal_age_s"] == 0.0
    assert second["signal_age_s"] is None
    assert second["kv_cache_usage"] is None


@settings(deadline=None)
@given(snapshots(sane=True), st.dictionaries(st.sampled_from(["10.0.0.1:8000", "x"]), st.integers(0, 5000)))
def test_no_form_ever_holds_prompt_text(pool: list[EndpointSnapshot], held: dict[str, int]) -> None:
    decision = decide(pool, PrefixMatch(4120, held), request(prompts=(b"SECRET",), session_key="SECRET"))
    texts = (sentence(decision), compact(decision), json.dumps(as_dict(decision)))
    assert all("SECRET" not in text for text in texts)
    assert all("\n" not in text for text in texts)
    assert texts[1].isascii()
    assert len(texts[1]) <= COMPACT_BYTES


def test_the_brief_header_tells_neither_addresses_nor_matches() -> None:
    pool = [seen(1, in_flight=17), seen(2), unseen(4, demoted=True)]
    found = {brief(decide(pool, held)) for held in (match(8000), match(8000, e2=8000), match(8000, e1=512))}
    assert found == {"weighted: decision 00000000000000ab; one of 2; filtered health=1"}, "the same whoever holds what"


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 8000), st.sampled_from(get_args(StrategyName)))
def test_the_brief_header_never_depends_on_what_was_matched(count: int, held: int, strategy: StrategyName) -> None:
    pool = [seen(number, in_flight=number) for number in range(1, count + 1)]
    said = [
        brief(decide(pool, found, strategy=strategy))
        for found in (match(8000), match(8000, e1=held), match(8000, **{f"e{count}": 8000}))
    ]
    assert len(set(said)) == 1
    assert not any(one.endpoint.id in said[0] or one.endpoint.address in said[0] for one in pool)
    assert all(" " <= char <= "~" for char in said[0])
    assert len(said[0]) < COMPACT_BYTES
