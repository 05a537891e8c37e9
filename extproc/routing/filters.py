"""Which endpoints may serve a request: subset hint, model, health, limits, in this order.

Each filter lists what it removed. The error for an empty result is decided here too, because only here the cause is known.
How the remaining endpoints compare is decided in `scorers`.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import TYPE_CHECKING

from extproc.errors import ModelNotFoundError, NoEndpointError, OverloadedError, SubsetEmptyError
from extproc.routing.signals import TRUSTED_S
from extproc.snapshots import Snapshots, any_snapshot, column, memoized, selected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extproc.config.schema import LimitsConfig, RoutingConfig
    from extproc.types import Endpoint, EndpointSnapshot, InferenceRequest

__all__ = ["HEALTH", "LIMITS", "MODEL", "SUBSET", "apply_filters"]

SUBSET = "subset"
MODEL = "model"
LIMITS = "limits"
HEALTH = "health"


def apply_filters(
    config: RoutingConfig, request: InferenceRequest, snapshots: Sequence[EndpointSnapshot], now: float
) -> tuple[Sequence[EndpointSnapshot], tuple[tuple[str, str], ...]]:
    """Apply all filters; return what remains, never empty and in pool order, and (endpoint id, filter name) of each removed.

    Where nothing is removed, `snapshots` itself is returned, with all that is memoized of it; where only demoted
    endpoints are, as is common in large pools, the rest is `selected` from it.
    Raises NoEndpointError for an empty pool, SubsetEmptyError, ModelNotFoundError (only with `unknown_model: reject`) and
    OverloadedError. Messages count endpoints and name none: clients see them.
    """
    if not snapshots:
        raise NoEndpointError("The pool has no endpoint.")
    limits = config.limits
    limited = limits.in_flight or limits.queue or limits.kv_cache
    if request.subset is None and not limited:
        # In most pools no endpoint is removed for its models: asked once for all, not per request.
        alike, served, demoted = memoized(snapshots, _served)
        if alike and (served is None or not request.model or request.model in served):
            if not demoted:
                return snapshots, ()
            if isinstance(snapshots, Snapshots):
                others = selected(snapshots, _is_not_demoted)
                return (others, demoted) if others else (snapshots, ())
    kept = snapshots
    removed: list[tuple[str, str]] = []
    if request.subset is not None:
        kept = _split(kept, _in_subset(request.subset, kept), SUBSET, removed)
        if not kept:
            raise SubsetEmptyError(_subset_message(request.subset, len(snapshots)))
    if request.model:
        kept = _with_model(config, request.model, kept, removed)
    if any([snapshot.demoted for snapshot in kept]):  # noqa: C419 - faster than a generator
        healthy: list[tuple[str, str]] = []
        # Better a broken endpoint than a refusal: it may have healed.
        kept_healthy = _split(kept, _is_not_demoted, HEALTH, healthy)
        if kept_healthy:
            kept = kept_healthy
            removed += healthy
    if limited:
        # After health: a broken endpoint is below its limits, and would get all requests that the others have no room for.
        within = _split(kept, _within(limits, now), LIMITS, removed)
        if not within:
            raise OverloadedError(_overload_message(limits, len(kept), removed))
        kept = within
    return kept, tuple(removed)


def _served(
    snapshots: Sequence[EndpointSnapshot],
) -> tuple[bool, frozenset[str] | None, tuple[tuple[str, str], ...]]:
    """Return whether all serve the same models, those of the first, and what is removed because it is demoted."""
    models = column(snapshots, _models)
    first = models[0]
    demoted: tuple[tuple[str, str], ...] = ()
    if any_snapshot(snapshots, _is_demoted):
        demoted = tuple([(snapshot.endpoint.id, HEALTH) for snapshot in snapshots if snapshot.demoted])
    # Counting is quick where it is the same set everywhere, which `pool` sees to.
    return models.count(first) == len(models), first, demoted


def _models(snapshot: EndpointSnapshot) -> frozenset[str] | None:
    return snapshot.models


def _is_demoted(snapshot: EndpointSnapshot) -> bool:
    return snapshot.demoted


def _is_not_demoted(snapshot: EndpointSnapshot) -> bool:
    return not snapshot.demoted


def _split(
    snapshots: Sequence[EndpointSnapshot],
    keep: Callable[[EndpointSnapshot], bool],
    name: str,
    removed: list[tuple[str, str]],
) -> Sequence[EndpointSnapshot]:
    kept = []
    for snapshot in snapshots:
        if keep(snapshot):
            kept.append(snapshot)
        else:
            removed.append((snapshot.endpoint.id, name))
    return kept if len(kept) < len(snapshots) else snapshots


def _with_model(
    config: RoutingConfig, model: str, snapshots: Sequence[EndpointSnapshot], removed: list[tuple[str, str]]
) -> Sequence[EndpointSnapshot]:
    """Keep endpoints that serve the model, base or adapter, or whose models are unknown."""
    known = [snapshot.models for snapshot in snapshots]
    # Most pools are uniform: then neither list has to be built.
    if all([models is None or model in models for models in known]):  # noqa: C419 - faster than a generator
        return snapshots
    gone: list[tuple[str, str]] = []
    kept = _split(snapshots, lambda snapshot: snapshot.models is None or model in snapshot.models, MODEL, gone)
    if kept:
        removed += gone
        return kept
    if config.unknown_model == "reject":
        raise ModelNotFoundError(
            f"None of the {len(snapshots)} endpoints serves the model `{model[:200]}`.", param="model"
        )
    return snapshots


def _within(limits: LimitsConfig, now: float) -> Callable[[EndpointSnapshot], bool]:
    """Return the test of one endpoint against the limits; signals that are unknown or too old are ignored."""
    in_flight, queue, kv_cache = limits.in_flight, limits.queue, limits.kv_cache

    def within(snapshot: EndpointSnapshot) -> bool:
        if in_flight and snapshot.in_flight - snapshot.guessed >= in_flight:
            return False
        if snapshot.observed_at is None or now - snapshot.observed_at > TRUSTED_S:
            return True
        if queue and snapshot.waiting is not None and snapshot.waiting >= queue:
            return False
        return not (kv_cache and snapshot.kv_cache_usage is not None and snapshot.kv_cache_usage >= kv_cache)

    return within


def _overload_message(limits: LimitsConfig, eligible: int, removed: Sequence[tuple[str, str]]) -> str:
    bounds = [
        text
        for limit, text in (
            (limits.in_flight, f"{limits.in_flight} requests in flight"),
            (limits.queue, f"{limits.queue} requests waiting"),
            (limits.kv_cache, f"{limits.kv_cache:.0%} of the KV cache in use"),
        )
        if limit
    ]
    failing = sum(name == HEALTH for _, name in removed)
    others = len(removed) - eligible - failing
    asides = [
        text
        for count, text in (
            (others, f"{others} more do not serve this request"),
            (failing, f"requests fail at {failing} more"),
        )
        if count
    ]
    aside = f" ({', '.join(asides)})" if asides else ""
    return f"All {eligible} eligible endpoints have reached a limit ({', '.join(bounds)}){aside}; try again later."


def _subset_message(subset: frozenset[str], pool: int) -> str:
    if not subset:
        return f"The gateway's subset hint is empty, so none of the {pool} endpoints may serve this request."
    return f"The gateway's subset hint names {len(subset)} addresses, and none of the {pool} endpoints is among them."


def _in_subset(subset: frozenset[str], snapshots: Sequence[EndpointSnapshot]) -> Callable[[EndpointSnapshot], bool]:
    """Build the test of one endpoint against a hint in any spelling."""
    exact = {snapshot.endpoint.id for snapshot in snapshots}
    exact.update([snapshot.endpoint.address for snapshot in snapshots])
    # Nearly every gateway spells addresses as we do; only what it spells otherwise is read closely.
    spelled: set[str] = set()
    for entry in subset - exact:
        spelled |= _spellings(entry)

    def member(snapshot: EndpointSnapshot) -> bool:
        endpoint = snapshot.endpoint
        if endpoint.id in subset or endpoint.address in subset:
            return True
        return bool(spelled) and not spelled.isdisjoint(_own_spellings(endpoint))

    return member


def _own_spellings(endpoint: Endpoint) -> tuple[str, str]:
    address = _canonical(endpoint.address)
    return address, f"{address} {endpoint.port}"


@lru_cache(maxsize=4096)
def _spellings(entry: str) -> frozenset[str]:
    """Read one entry of a hint as `address` or `address port` (with a space), every reading that makes sense.

    `2001:db8::1:8000` without brackets is an address, and an address with a port: both count.
    """
    entry = entry.strip()
    if entry.startswith("[") and entry.endswith("]"):
        return frozenset({_canonical(entry[1:-1])})
    host, _, port = entry.rpartition(":")
    readings = {_canonical(entry)}
    if host:
        readings.add(f"{_canonical(host.removeprefix('[').removesuffix(']'))} {port}")
    return frozenset(readings)


@lru_cache(maxsize=4096)
def _canonical(address: str) -> str:
    """Spell an IP address the one short way; anything else in lower case."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address.lower()
