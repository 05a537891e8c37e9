"""The shared nouns: what they derive, that they cannot change, and that what is unknown stays unknown."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from extproc.types import (
    Decision,
    Endpoint,
    EndpointMetrics,
    EndpointSnapshot,
    InferenceRequest,
    Outcome,
    PrefixMatch,
    RequestKind,
    Usage,
)


@pytest.mark.parametrize(
    ("address", "wanted"), [("10.0.0.1", "10.0.0.1:80"), ("2001:db8::1", "[2001:db8::1]:80"), ("::1", "[::1]:80")]
)
def test_an_endpoints_id_is_the_destination_headers_value(address: str, wanted: str) -> None:
    assert Endpoint(address, 80).id == wanted


def test_endpoints_are_equal_by_what_they_are_and_can_be_keys() -> None:
    one = Endpoint("10.0.0.1", 80, labels={"zone": "a"})
    assert one == Endpoint("10.0.0.1", 80, labels={"zone": "a"})
    assert one != Endpoint("10.0.0.1", 80, labels={"zone": "b"})
    assert one != Endpoint("10.0.0.1", 80, uid="u", labels={"zone": "a"})
    assert len({one, Endpoint("10.0.0.1", 80, labels={"zone": "a"})}) == 1


@pytest.mark.parametrize(
    "kind", [Decision, Endpoint, EndpointMetrics, EndpointSnapshot, InferenceRequest, PrefixMatch, Usage]
)
def test_data_is_frozen_and_slotted(kind: type) -> None:
    if dataclasses.is_dataclass(kind):
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert "__slots__" in vars(kind)
    else:
        assert issubclass(kind, msgspec.Struct)
        assert kind.__struct_config__.frozen


def test_what_nobody_said_is_unknown_not_zero() -> None:
    metrics = EndpointMetrics()
    assert (metrics.waiting, metrics.running, metrics.kv_cache_usage, metrics.cache_tokens) == (None,) * 4
    snapshot = EndpointSnapshot(Endpoint("10.0.0.1", 80))
    assert (snapshot.waiting, snapshot.observed_at, snapshot.models) == (None,) * 3
    assert Usage() == Usage(None, None, None)
    request = InferenceRequest()
    assert (request.kind, request.subset, request.max_tokens, request.complete) == (RequestKind.OTHER, None, None, True)


def test_defaults_are_not_shared() -> None:
    assert PrefixMatch().matched_bytes is not PrefixMatch().matched_bytes
    with pytest.raises(TypeError):
        Endpoint("10.0.0.1", 80).labels["x"] = "y"  # type: ignore[index]


@pytest.mark.parametrize("kind", [Outcome, RequestKind])
def test_enum_values_are_metric_labels(kind: type[Outcome | RequestKind]) -> None:
    assert all(one.value.isidentifier() and one.value.islower() for one in kind)


def test_fields_stand_in_the_order_in_which_they_are_filled() -> None:
    """`Scheduler.schedule` and `Pool._bind` fill these two by position, since keywords cost as much as the fields.

    A field that is added goes to the end, or into both the constructor's call and this list.
    """
    assert Decision.__struct_fields__ == (
        *("id", "endpoint", "fallbacks", "strategy", "scorers", "candidates", "filtered", "note", "kind", "model"),
        *("prompt_bytes", "matched_bytes", "prompt_tokens", "predicted_cached_tokens", "decided_at", "request_id"),
        *("config_generation", "explain", "chosen", "set_headers", "remove_headers", "body_splice"),
    )
    assert EndpointSnapshot.__struct_fields__ == (
        *("endpoint", "observed_at", "kv_cache_usage", "lora_running", "lora_waiting", "lora_max", "models"),
        *("demoted", "health_score", "scrape_failures", "probation"),
        *("waiting", "running", "in_flight", "in_flight_tokens", "guessed"),
    )


def test_a_decisions_destination_names_the_fallbacks_in_their_order() -> None:
    decision = Decision(
        id="d",
        endpoint=Endpoint("10.0.0.1", 80),
        fallbacks=(),
        strategy="random",
        scorers=(),
        candidates=(),
        filtered=(),
        note="",
        kind=RequestKind.CHAT,
        model="",
        prompt_bytes=0,
        matched_bytes=0,
        prompt_tokens=0,
        predicted_cached_tokens=0,
        decided_at=0.0,
    )
    assert decision.destination == "10.0.0.1:80"
    further = (Endpoint("::1", 80), Endpoint("10.0.0.3", 81))
    assert msgspec.structs.replace(decision, fallbacks=further).destination == "10.0.0.1:80,[::1]:80,10.0.0.3:81"
