from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config.schema import LimitsConfig, RoutingConfig
from extproc.errors import (
    ModelNotFoundError,
    NoEligibleEndpointError,
    NoEndpointError,
    OverloadedError,
    RequestError,
    SubsetEmptyError,
)
from extproc.routing.filters import apply_filters
from extproc.snapshots import Snapshots
from extproc.types import EndpointSnapshot, InferenceRequest
from tests.routing.build import NOW, request, seen, snapshots, unseen

CONFIG = RoutingConfig()


def ids(pool: list[EndpointSnapshot], what: InferenceRequest, config: RoutingConfig = CONFIG) -> list[str]:
    return [snapshot.endpoint.id for snapshot in apply_filters(config, what, pool, NOW)[0]]


def test_an_empty_pool_is_its_own_error() -> None:
    with pytest.raises(NoEndpointError, match="no endpoint"):
        apply_filters(CONFIG, request(), [], NOW)


def test_nothing_to_filter_keeps_the_pool_as_it_is() -> None:
    pool = [seen(1), unseen(2)]
    kept, removed = apply_filters(CONFIG, request(model="m"), pool, NOW)
    assert kept is pool
    assert removed == ()


@pytest.mark.parametrize("entry", ["10.0.0.2:8000", "10.0.0.2", " 10.0.0.2:8000 ", "10.0.0.2 "], ids=repr)
def test_a_subset_hint_keeps_what_it_names(entry: str) -> None:
    kept, removed = apply_filters(CONFIG, request(subset=frozenset({entry})), [seen(1), seen(2), seen(3)], NOW)
    assert [snapshot.endpoint.id for snapshot in kept] == ["10.0.0.2:8000"]
    assert removed == (("10.0.0.1:8000", "subset"), ("10.0.0.3:8000", "subset"))


def test_a_bare_address_means_all_its_ports_and_a_port_only_that_one() -> None:
    pool = [seen(1, port=8000), seen(1, port=8001), seen(2)]
    assert ids(pool, request(subset=frozenset({"10.0.0.1"}))) == ["10.0.0.1:8000", "10.0.0.1:8001"]
    assert ids(pool, request(subset=frozenset({"10.0.0.1:8001"}))) == ["10.0.0.1:8001"]


@pytest.mark.parametrize(
    "entry",
    [
        "[2001:db8::1]:8000",
        "2001:db8::1",
        "[2001:db8::1]",
        "2001:db8::1:8000",
        "[2001:DB8:0:0:0:0:0:1]:8000",
        "2001:0db8::0001",
    ],
)
def test_ipv6_in_every_spelling(entry: str) -> None:
    pool = [seen(1), seen(0, address="2001:db8::1"), seen(0, address="2001:db8::2")]
    assert ids(pool, request(subset=frozenset({entry}))) == ["[2001:db8::1]:8000"]


def test_an_ipv6_hint_with_another_port_names_nobody() -> None:
    with pytest.raises(SubsetEmptyError):
        ids([seen(0, address="2001:db8::1")], request(subset=frozenset({"[2001:db8::1]:8001"})))


def test_host_names_are_compared_without_case() -> None:
    assert ids([seen(0, address="gpu-1.local")], request(subset=frozenset({"GPU-1.local:8000"})))


@pytest.mark.parametrize(
    ("subset", "words"),
    [
        (frozenset[str](), "hint is empty, so none of the 1 endpoints"),
        (frozenset({"10.9.9.9"}), "names 1 addresses, and none of the 1 endpoints"),
    ],
)
def test_a_hint_that_leaves_nobody_is_503(subset: frozenset[str], words: str) -> None:
    with pytest.raises(SubsetEmptyError, match=words) as caught:
        ids([seen(1)], request(subset=subset))
    assert isinstance(caught.value, NoEligibleEndpointError)
    assert caught.value.status == 503


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_may_stand_in_a_hint(entry: str) -> None:
    with suppress(SubsetEmptyError):
        assert len(ids([seen(1), seen(0, address="::1")], request(subset=frozenset({entry})))) == 1


def test_models_known_not_to_be_there_are_removed_and_unknown_ones_stay() -> None:
    pool = [seen(1, models=frozenset({"base", "adapter"})), seen(2, models=frozenset({"base"})), seen(3)]
    kept, removed = apply_filters(CONFIG, request(model="adapter"), pool, NOW)
    assert [snapshot.endpoint.id for snapshot in kept] == ["10.0.0.1:8000", "10.0.0.3:8000"]
    assert removed == (("10.0.0.2:8000", "model"),)


def test_a_request_without_model_is_not_filtered_by_model() -> None:
    assert len(ids([seen(1, models=frozenset({"m"})), seen(2)], request(model=""))) == 2


def test_a_model_that_nobody_has_is_the_engines_to_refuse() -> None:
    pool = [seen(1, models=frozenset({"m"})), seen(2, models=frozenset({"n"}))]
    kept, removed = apply_filters(CONFIG, request(model="x"), pool, NOW)
    assert len(kept) == 2
    assert removed == ()


def test_or_ours_if_so_configured() -> None:
    config = RoutingConfig(unknown_model="reject")
    with pytest.raises(ModelNotFoundError, match="None of the 1 endpoints serves the model `x`") as caught:
        ids([seen(1, models=frozenset({"m"}))], request(model="x"), config)
    assert caught.value.param == "model"
    assert len(ids([seen(1, models=frozenset({"m"})), seen(2)], request(model="x"), config)) == 1


@pytest.mark.parametrize(
    ("limits", "beyond", "words"),
    [
        (LimitsConfig(in_flight=4), {"in_flight": 4}, "4 requests in flight"),
        (LimitsConfig(queue=4), {"waiting": 4.0}, "4 requests waiting"),
        (LimitsConfig(kv_cache=0.9), {"kv_cache_usage": 0.9}, "90% of the KV cache"),
    ],
)
def test_limits_remove_endpoints_and_refuse_when_all_are_beyond(
    limits: LimitsConfig, beyond: dict[str, Any], words: str
) -> None:
    config = RoutingConfig(limits=limits)
    full = seen(1, **beyond)
    kept, removed = apply_filters(config, request(), [full, seen(2)], NOW)
    assert [snapshot.endpoint.id for snapshot in kept] == ["10.0.0.2:8000"]
    assert removed == (("10.0.0.1:8000", "limits"),)
    with pytest.raises(OverloadedError, match=words) as caught:
        ids([full], request(), config)
    assert caught.value.status == 429


def test_a_refusal_says_who_could_not_serve_anyway() -> None:
    config = RoutingConfig(limits=LimitsConfig(in_flight=1))
    pool = [seen(1, in_flight=1), seen(2)]
    with pytest.raises(OverloadedError, match=r"All 1 eligible .* \(1 more do not serve this request\)"):
        ids(pool, request(subset=frozenset({"10.0.0.1"})), config)


@pytest.mark.parametrize("age", [None, 60.0])
def test_old_or_missing_signals_refuse_nothing(age: float | None) -> None:
    config = RoutingConfig(limits=LimitsConfig(queue=1, kv_cache=0.5))
    observed_at = None if age is None else NOW - age
    pool = [
        seen(1, observed_at=observed_at, waiting=9.0, kv_cache_usage=1.0),
        seen(2, waiting=None, kv_cache_usage=None),
    ]
    assert len(ids(pool, request(), config)) == 2


def test_demoted_endpoints_are_kept_only_when_nothing_else_is_left() -> None:
    kept, removed = apply_filters(CONFIG, request(), [seen(1, demoted=True), seen(2)], NOW)
    assert [snapshot.endpoint.id for snapshot in kept] == ["10.0.0.2:8000"]
    assert removed == (("10.0.0.1:8000", "health"),)
    kept, removed = apply_filters(CONFIG, request(), [seen(1, demoted=True), seen(2, demoted=True)], NOW)
    assert len(kept) == 2
    assert removed == ()


def test_a_demoted_endpoint_does_not_get_what_the_others_have_no_room_for() -> None:
    config = RoutingConfig(limits=LimitsConfig(in_flight=1))
    with pytest.raises(OverloadedError, match=r"All 1 eligible .*\(requests fail at 1 more\)"):
        ids([seen(1, demoted=True), seen(2, in_flight=1)], request(), config)
    assert ids([seen(1, demoted=True), seen(2)], request(), config) == ["10.0.0.2:8000"]


def test_a_limit_does_not_count_requests_of_which_nothing_is_known() -> None:
    config = RoutingConfig(limits=LimitsConfig(in_flight=10))
    pool = [seen(1, in_flight=40, guessed=31), seen(2, in_flight=40, guessed=30)]
    assert ids(pool, request(), config) == ["10.0.0.1:8000"]


def test_where_all_are_demoted_their_limits_count() -> None:
    config = RoutingConfig(limits=LimitsConfig(in_flight=1))
    pool = [seen(1, demoted=True), seen(2, demoted=True, in_flight=1)]
    assert ids(pool, request(), config) == ["10.0.0.1:8000"]


@settings(deadline=None)
@given(snapshots(), st.sampled_from(["", "m", "x"]), st.none() | st.just(frozenset({"10.0.0.1", "10.0.0.2:8000"})))
def test_every_endpoint_is_kept_or_named_once_and_never_none_kept(
    pool: list[EndpointSnapshot], model: str, subset: frozenset[str] | None
) -> None:
    config = RoutingConfig(limits=LimitsConfig(in_flight=10, queue=10), unknown_model="reject")
    try:
        kept, removed = apply_filters(config, request(model=model, subset=subset), pool, NOW)
    except RequestError:
        return
    assert kept
    assert sorted([s.endpoint.id for s in kept] + [name for name, _ in removed]) == sorted(s.endpoint.id for s in pool)


@settings(deadline=None)
@given(snapshots(), st.sampled_from(["", "m", "a"]))
def test_what_is_remembered_of_a_pool_filters_as_a_list_of_it_does(pool: list[EndpointSnapshot], model: str) -> None:
    whole = Snapshots(pool)
    for _ in range(2):
        kept, removed = apply_filters(RoutingConfig(), request(model=model), whole, NOW)
        assert (list(kept), removed) == _as_lists(*apply_filters(RoutingConfig(), request(model=model), pool, NOW))


def _as_lists(kept: Sequence[EndpointSnapshot], removed: tuple[tuple[str, str], ...]) -> tuple[object, object]:
    return list(kept), removed


def test_without_its_demoted_endpoints_a_pool_remembers_what_was_worked_out() -> None:
    """Of 1,000 endpoints somebody is nearly always demoted."""
    whole = Snapshots(
        [
            seen(1, models=frozenset({"m"})),
            seen(2, models=frozenset({"m"}), demoted=True),
            seen(3, models=frozenset({"m"})),
        ]
    )
    kept, removed = apply_filters(RoutingConfig(), request(model="m"), whole, NOW)
    assert removed == (("10.0.0.2:8000", "health"),)
    assert isinstance(kept, Snapshots)
    again, _ = apply_filters(RoutingConfig(), request(model="m"), whole, NOW)
    assert again is kept
    everybody, none = apply_filters(RoutingConfig(), request(model="m"), Snapshots(whole[1:2]), NOW)
    assert (list(everybody), none) == ([whole[1]], ())
