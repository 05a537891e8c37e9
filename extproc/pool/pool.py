"""All endpoints: what was scraped, our own requests in flight and passive health, joined into immutable snapshots.

Decides what the picker believes of each endpoint at `now`. It does not scrape (`edge.scraping.scraper`), knows nothing of
prefixes (`prefix`) and chooses no endpoint (`routing`). Calls that name an endpoint or decision that is gone change
nothing, because scrapes and log entries may arrive late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from extproc.config.schema import InFlightConfig, PoolConfig
from extproc.pool.health import (
    FAILURE_STEP,
    FAILURE_STEP_UNSCRAPABLE,
    HEALTHY,
    Health,
    SeenFailures,
    Verdict,
    demoted,
    verdict,
)
from extproc.pool.ledger import Entry, IdState, Ledger
from extproc.pool.load import GAUGE_LAG_S, LoadEstimate
from extproc.pool.probation import LEFT_OVER, REFUSING, RefusalHistory
from extproc.pool.restarts import Lifetime
from extproc.snapshots import Snapshots
from extproc.types import Endpoint, EndpointMetrics, EndpointSnapshot, Outcome

__all__ = ["Pool", "PoolChange", "ScrapeChange"]

_NOT_TRIED: Mapping[str, Outcome] = MappingProxyType({})
_UNREACHED = Outcome.CONNECT_FAILURE
_REFRESHES_PER_HALF_LIFE = 20
"""How often health scores in snapshots are updated while endpoints heal: they lag by at most 3.5 % of the badness."""
_MANY_DEGRADED = 50
_REVIEW_INTERVAL_S = 0.05
"""With more degraded endpoints than that, all of them are reviewed at most this often: the cost grows with their number."""


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What a new list of endpoints changed."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    restarted: tuple[str, ...] = ()
    """Still there, but another process: another uid at the same address."""
    returned: tuple[str, ...] = ()
    """Of those added, the ones that left less than two minutes ago and seem to be the same process: their state is kept."""
    forgotten: tuple[str, ...] = ()
    """Left longer ago, or came back as another process: their state is gone."""
    orphaned: tuple[Entry, ...] = ()
    """Our requests at forgotten and restarted endpoints; they have been released."""


class ScrapeChange(NamedTuple):
    """What a metrics page changed."""

    restarted: bool = False
    """The engine has restarted since the last page."""
    orphaned: Sequence[Entry] = ()
    """Our requests that were sent to the process that is gone; they have been released."""
    excess: Sequence[Entry] = ()
    """Our requests that the engine no longer has, and whose end nobody reports; they have been released."""


@dataclass(slots=True)
class _Member:
    """The state of one endpoint."""

    endpoint: Endpoint
    load: LoadEstimate = field(default_factory=LoadEstimate)
    metrics: EndpointMetrics | None = None
    observed_at: float | None = None
    scrape_failures: int = 0
    models: Mapping[str, str | None] | None = None
    """From `/v1/models`: name -> parent; None: not known."""
    names: frozenset[str] | None = None
    """What it serves, from all sources; None: unknown."""
    lifetime: Lifetime = field(default_factory=Lifetime)
    health: Health = HEALTHY
    refusals: RefusalHistory = field(default_factory=RefusalHistory)
    probation: float | None = None
    snapshot_of: Callable[[float | None, float | None, int, int, int], EndpointSnapshot] | None = None
    """Builds the snapshot from waiting, running, in flight, tokens in flight and guessed; all other fields are bound.
    None: to be bound anew."""


class Pool:
    """State of all endpoints. Not thread-safe; every call is synchronous and short."""

    def __init__(self, config: PoolConfig, in_flight: InFlightConfig) -> None:
        self._config = config
        self._lease_s = float(in_flight.lease)
        self._members: dict[str, _Member] = {}
        self._departed: dict[str, tuple[float, _Member]] = {}
        """Endpoints that have left the list, with the time at which they are forgotten, in order of leaving."""
        self._order: dict[str, int] = {}
        self._ledger = Ledger()
        self._seen_failures = SeenFailures()
        self._seen_refusals = SeenFailures()
        self._degraded: set[str] = set()
        """Endpoints whose health score is below 1 or that are on probation: they are reviewed as time passes."""
        self._demoted: frozenset[str] = frozenset()
        self._refresh_at = 0.0
        self._stale: set[str] = set()
        """Endpoints whose snapshot has to be bound and built anew."""
        self._load_changed: set[str] = set()
        """Endpoints of which only the load changed: what `routing` has memoized of the rest stays."""
        self._snapshots = Snapshots()
        self._known_models: Mapping[str, str | None] | None = None

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, endpoint_id: object) -> bool:
        return endpoint_id in self._members

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints, in the order of discovery."""
        return tuple(member.endpoint for member in self._members.values())

    @property
    def in_flight(self) -> int:
        """Requests of ours under way, over all endpoints."""
        return len(self._ledger)

    def in_flight_at(self, endpoint_id: str) -> int:
        """Count the requests of ours under way at one endpoint."""
        return self._ledger.count(endpoint_id)

    # Discovery and configuration

    def set_endpoints(self, endpoints: Sequence[Endpoint], now: float) -> PoolChange:
        """Replace the list of endpoints; what is known of those that stay is kept. A second one of an id is ignored."""
        wanted: dict[str, Endpoint] = {}
        for endpoint in endpoints:
            wanted.setdefault(endpoint.id, endpoint)
        if tuple(wanted.values()) == self.endpoints:
            return PoolChange()
        removed = tuple(name for name in self._members if name not in wanted)
        added = tuple(name for name in wanted if name not in self._members)
        restarted = tuple(
            name
            for name, member in self._members.items()
            if name in wanted and _is_another(member.endpoint, wanted[name])
        )
        self._departed.update({name: (now + _KEPT_S, self._members[name]) for name in removed})
        back = {name: departed[1] for name in added if (departed := self._departed.pop(name, None)) is not None}
        returned = {name: member for name, member in back.items() if not _is_another(member.endpoint, wanted[name])}
        forgotten = (*[name for name in back if name not in returned], *self._forget(now))
        orphaned = [entry for name in (*forgotten, *restarted) for entry in self._ledger.orphan(name)]
        members: dict[str, _Member] = {}
        changed: list[_Member] = []
        rows: list[EndpointSnapshot] = []
        new = frozenset(restarted)
        for name, endpoint in wanted.items():
            member = self._members.get(name) or returned.get(name)
            if member is None or name in new:
                member = _Member(endpoint)
                changed.append(member)
            elif name in returned or (endpoint is not member.endpoint and endpoint != member.endpoint):
                member.endpoint = _with_uid(endpoint, member.endpoint)
                changed.append(member)
            members[name] = member
            before = self._order.get(name)
            rows.append(EndpointSnapshot(endpoint) if before is None else self._snapshots[before])
        self._members = members
        self._order = {name: index for index, name in enumerate(members)}
        self._degraded = {
            name for name in (*self._degraded, *returned) if name in members and _is_degraded(members[name])
        }
        self._known_models = None
        for member in changed:
            self._learn_names(member)
        self._stale = {name for name in self._stale if name in members}
        self._stale.update([member.endpoint.id for member in changed])
        self._load_changed = {name for name in self._load_changed if name in members}
        self._snapshots = Snapshots(rows)
        self._review_all(now)
        return PoolChange(added, removed, restarted, tuple(returned), forgotten, tuple(orphaned))

    def forget(self, now: float) -> PoolChange:
        """Forget the endpoints that left too long ago, with what is still under way there; call it about once a second."""
        forgotten = tuple(self._forget(now))
        orphaned = [entry for name in forgotten for entry in self._ledger.orphan(name)]
        return PoolChange(forgotten=forgotten, orphaned=tuple(orphaned))

    def _forget(self, now: float) -> list[str]:
        departed = self._departed
        forgotten: list[str] = []
        for name, (until, _) in departed.items():
            if until > now and len(departed) - len(forgotten) <= _MOST_DEPARTED:
                break
            forgotten.append(name)
        for name in forgotten:
            del departed[name]
        return forgotten

    def reconfigure(self, config: PoolConfig, in_flight: InFlightConfig, now: float) -> None:
        """Apply another configuration; leases that run keep their length, everything else counts at once."""
        if config.engine != self._config.engine:
            for member in self._members.values():
                member.lifetime = Lifetime()  # other counters by the same names
        self._config = config
        self._lease_s = float(in_flight.lease)
        self._known_models = None
        self._review_all(now)
        for member in self._members.values():
            self._learn_names(member)
        self._snapshots = Snapshots([EndpointSnapshot(member.endpoint) for member in self._members.values()])
        self._stale = set(self._members)
        self._load_changed.clear()

    # Signals

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> ScrapeChange:
        """Take in one scrape that ended at `now`.

        After a restart, requests sent before the last scrape of the previous process are released. (Those sent since
        may be with the new process; their end comes by the access log or the lease.)
        """
        member = self._members.get(endpoint_id)
        if member is None:
            return ScrapeChange()
        orphaned: Sequence[Entry] = ()
        excess: Sequence[Entry] = ()
        last_seen_at = member.lifetime.observe(metrics, now)
        restarted = last_seen_at is not None
        if restarted:
            orphaned = self._ledger.orphan(endpoint_id, sent_before=last_seen_at)
            member.models = None
            self._known_models = None
        member.metrics = metrics
        member.observed_at = now
        member.scrape_failures = 0
        shown_since = now - metrics.scrape_s - GAUGE_LAG_S
        if metrics.waiting is not None and metrics.running is not None:
            excess = self._ledger.excess(
                endpoint_id,
                metrics.waiting + metrics.running,
                sent_before=shown_since,
                unseen_before=now - _LOG_CONNECTS_S,
            )
        young = 0
        for entry in self._ledger.newest_first(endpoint_id):
            if entry.sent_at < shown_since:
                break
            young += 1
        member.load.scraped(metrics.waiting, metrics.running, in_flight=self._ledger.count(endpoint_id), young=young)
        if metrics.lora_max is not None or restarted:
            self._learn_names(member)
        self._stale.add(endpoint_id)
        return ScrapeChange(restarted, orphaned, excess)

    def observe_failure(self, endpoint_id: str, now: float) -> None:  # noqa: ARG002 - all of `observe*` take the time
        """Note a scrape that failed; the last page stays in use and ages."""
        member = self._members.get(endpoint_id)
        if member is not None:
            member.scrape_failures += 1
            self._stale.add(endpoint_id)

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:  # noqa: ARG002 - as above
        """Take in the models an endpoint lists, name -> parent (None: base model); an empty list means unknown."""
        member = self._members.get(endpoint_id)
        if member is not None and models != (member.models or {}):
            member.models = MappingProxyType(dict(models)) if models else None
            self._learn_names(member)
            self._known_models = None
            self._stale.add(endpoint_id)

    def metrics(self, endpoint_id: str) -> EndpointMetrics | None:
        """Return the last page read from an endpoint; None: none yet, or no such endpoint."""
        member = self._members.get(endpoint_id)
        return member.metrics if member else None

    def known_models(self) -> Mapping[str, str | None]:
        """Return all models and adapters known anywhere in the pool: name -> parent (None: base model, or unknown)."""
        if self._known_models is None:
            known: dict[str, str | None] = dict.fromkeys(self._config.models)
            for member in self._members.values():
                known.update(dict.fromkeys(member.endpoint.models or ()))
            for member in self._members.values():
                known.update(member.models or {})
            self._known_models = MappingProxyType(known)
        return self._known_models

    # Requests

    def sent(self, decision_id: str, endpoint_id: str, uncached_tokens: int, now: float, request_id: str = "") -> bool:
        """Enter a decision, of any picker, as in flight; False where its endpoint is gone or its id is known already. O(1)."""
        member = self._members.get(endpoint_id)
        if member is None or not self._ledger.add(
            decision_id, endpoint_id, uncached_tokens, now, self._lease_s, request_id
        ):
            return False
        member.load.sent()
        self._load_changed.add(endpoint_id)
        return True

    def prefilled(self, decision_id: str) -> None:
        """Note the first byte of a response: its prompt has been computed. Idempotent."""
        entry = self._ledger.prefilled(decision_id)
        if entry is not None:
            member = self._members.get(entry.endpoint_id)
            if member is None:
                member = self._departed[entry.endpoint_id][1]
            else:
                self._load_changed.add(entry.endpoint_id)
            if _is_new(entry, member):
                member.load.started()

    def unseen(self, decision_id: str, now: float, *, guessed: bool) -> None:
        """Note that nobody will report a request's end; `guessed`: nor is anything known of how long such requests take."""
        entry = self._ledger.unseen(decision_id, now, guessed=guessed)
        if entry is not None and guessed and entry.endpoint_id in self._members:
            self._load_changed.add(entry.endpoint_id)

    def ended(
        self,
        decision_id: str,
        outcome: Outcome,
        now: float,
        *,
        served_by: str = "",
        tried: Mapping[str, Outcome] = _NOT_TRIED,
    ) -> Entry | None:
        """Release a request, exactly once; None if it is not open (`id_state` says why).

        `served_by` is the endpoint that answered in the end, where the proxy says so: if it is not the chosen one,
        `outcome` is that endpoint's. `tried` is how earlier attempts ended; if it does not name the chosen one, that one
        could not be reached.
        """
        entry = self._ledger.release(decision_id)
        if entry is None:
            return None
        member = self._remove_load(entry, was_waiting=not entry.prefilled)
        if tried or (served_by and served_by != entry.endpoint_id):
            ends = {entry.endpoint_id: _UNREACHED, **tried}
            if served_by:
                ends[served_by] = outcome
            for name, how in ends.items():
                self._judge(name, entry.request_id, how, now)
        elif member is None:
            # The endpoint is not in the list now: its requests may end because of that.
            return entry
        elif outcome is not _OK:
            self._judge(entry.endpoint_id, entry.request_id, outcome, now)
        elif member.refusals.succeeded(now) or member.health is not HEALTHY:
            self._heal(member, now)
        return entry

    def renew(self, decision_id: str, now: float) -> bool:
        """Restart a request's lease (a periodic log entry came); False where it is not open."""
        return self._ledger.renew(decision_id, now)

    def expire(self, now: float) -> list[Entry]:
        """Release requests whose lease has run out; their endpoints' health is not affected."""
        expired = self._ledger.expire(now)
        for entry in expired:
            # After a whole lease it is long past its prefill, or never arrived.
            self._remove_load(entry, was_waiting=False)
        return expired

    def id_state(self, decision_id: str) -> IdState:
        """Tell an open decision from one that ended not long ago and from one that is not ours."""
        return self._ledger.state(decision_id)

    # Snapshots

    def snapshots(self, now: float) -> Snapshots:
        """Return one snapshot per endpoint, in the order of discovery; the same objects until something changes.

        Builds only the snapshots of endpoints that changed since the last call; columns memoized of the others stay.
        """
        if self._degraded and now >= self._refresh_at:
            self._review_all(now)
        if self._stale or self._load_changed:
            for name in self._stale:
                self._members[name].snapshot_of = None
            changes: dict[int, EndpointSnapshot] = {}
            for name in self._load_changed | self._stale if self._stale else self._load_changed:
                changes[self._order[name]] = self._build(name, now)
            before = self._snapshots
            self._snapshots = before.changed(changes) if self._stale else before.with_load(changes)
            self._stale.clear()
            self._load_changed.clear()
        return self._snapshots

    def _build(self, name: str, now: float) -> EndpointSnapshot:
        member = self._members[name]
        return (member.snapshot_of or self._bind(member, now))(*member.load.estimate(), *self._ledger.totals(name))

    def _bind(
        self, member: _Member, now: float
    ) -> Callable[[float | None, float | None, int, int, int], EndpointSnapshot]:
        """Bind the fields of a snapshot that no decision changes, because every request builds two snapshots."""
        name = member.endpoint.id
        metrics = member.metrics or _NO_METRICS
        member.snapshot_of = partial(
            EndpointSnapshot,  # in the order of its fields, which a test pins
            member.endpoint,
            member.observed_at,
            metrics.kv_cache_usage,
            metrics.lora_running or _NO_NAMES,
            metrics.lora_waiting or _NO_NAMES,
            metrics.lora_max,
            member.names,
            name in self._demoted,
            member.health.score(now, self._config.health.half_life) if name in self._degraded else 1.0,
            member.scrape_failures,
            member.probation,
        )
        return member.snapshot_of

    def _learn_names(self, member: _Member) -> None:
        """Determine what an endpoint serves: from discovery, else from the configuration, else from the endpoint itself."""
        if member.endpoint.models is not None:
            member.names = member.endpoint.models
        elif self._config.models:
            member.names = frozenset(self._config.models)
        elif member.models is not None:
            # An adapter that was loaded after the list was read appears in the metrics first.
            metrics = member.metrics or _NO_METRICS
            in_use = (metrics.lora_running or _NO_NAMES) | (metrics.lora_waiting or _NO_NAMES)
            member.names = in_use.union(member.models)
        else:
            member.names = None
        # Share the set where it is equal, as it mostly is: comparing identical objects is fast (`routing.filters`).
        first = next(iter(self._members.values())).names
        if member.names == first:
            member.names = first

    def _remove_load(self, entry: Entry, *, was_waiting: bool) -> _Member | None:
        """Subtract a request from its endpoint's load; return the endpoint, None where it is no longer in the list."""
        member = self._members.get(entry.endpoint_id)
        if member is None:
            departed = self._departed[entry.endpoint_id][1]
            departed.load.ended(was_waiting=was_waiting and _is_new(entry, departed))
            return None
        member.load.ended(was_waiting=was_waiting and _is_new(entry, member))
        self._load_changed.add(entry.endpoint_id)
        return member

    def _judge(self, endpoint_id: str, request_id: str, outcome: Outcome, now: float) -> None:
        """Count one outcome for an endpoint's health."""
        member = self._members.get(endpoint_id)
        judged = verdict(outcome)
        if member is None or judged is Verdict.NOTHING:
            return
        if judged is Verdict.GOOD:
            if member.refusals.succeeded(now) or member.health is not HEALTHY:
                self._heal(member, now)
        elif judged is Verdict.REFUSED:
            if self._seen_refusals.first(request_id, judged, endpoint_id):
                member.refusals.failed(now)
                self._review(member, now)
        elif self._seen_failures.first(request_id, judged, endpoint_id):
            # Scrapes used to work: an endpoint that was never scraped may simply have no metrics page.
            failing = member.scrape_failures > 0 and member.metrics is not None
            step = FAILURE_STEP_UNSCRAPABLE if failing else FAILURE_STEP
            member.health = member.health.failed(now, float(self._config.health.half_life), step=step)
            member.refusals.failed(now)
            self._degraded.add(endpoint_id)
            self._review_after(member, now)

    def _heal(self, member: _Member, now: float) -> None:
        """Raise the health score after a success, which `refusals` has counted already."""
        if member.health is not HEALTHY:
            member.health = member.health.succeeded(now, float(self._config.health.half_life))
            self._stale.add(member.endpoint.id)
            self._review_after(member, now)
        else:
            self._review(member, now)

    def _review_after(self, member: _Member, now: float) -> None:
        """Review all degraded endpoints after one's score has changed; if they are many, this one now and the others soon."""
        if len(self._degraded) <= _MANY_DEGRADED:
            self._review_all(now)
        else:
            self._review(member, now)
            self._refresh_at = min(self._refresh_at, now + _REVIEW_INTERVAL_S)

    def _review_all(self, now: float) -> None:
        """Update demotions and all degraded endpoints at `now`."""
        half_life_s = float(self._config.health.half_life)
        degraded = [self._members[name] for name in self._degraded]
        scores = {member.endpoint.id: member.health.score(now, half_life_s) for member in degraded}
        before, self._demoted = self._demoted, demoted(scores, len(self._members), self._config.health)
        self._stale |= (before ^ self._demoted) & self._members.keys()
        for member in degraded:
            self._review(member, now)
        self._refresh_at = now + half_life_s / _REFRESHES_PER_HALF_LIFE

    def _review(self, member: _Member, now: float) -> None:
        """Update one endpoint's health score, its probation, and whether it is degraded. O(1)."""
        name = member.endpoint.id
        share = member.refusals.share(now)
        if member.health is not HEALTHY:
            self._stale.add(name)
            score = member.health.score(now, float(self._config.health.half_life))
            if score == 1.0:
                member.health = HEALTHY
            elif score < self._config.health.demote_below and name not in self._demoted:
                share = LEFT_OVER
            elif score < _PROVEN and member.refusals.failures > 1:
                share = REFUSING
        if share != member.probation:
            member.probation = share
            self._stale.add(name)
        if _is_degraded(member):
            if not self._degraded:
                self._refresh_at = now
            self._degraded.add(name)
        else:
            self._degraded.discard(name)


_OK = Outcome.OK
"""By a name of the module: before Python 3.12 looking up a member of an enum is slow."""
_PROVEN = 0.8
"""Health score to which time alone brings back an endpoint that has failed twice in a row, without a success since."""
_KEPT_S = 120.0
"""How long the state of an endpoint that left is kept: a look-up may miss it once, or readiness may flap under overload."""
_MOST_DEPARTED = 1000
_LOG_CONNECTS_S = 3.0
"""How long a request has to be without a reporter before a page releases it. Envoy opens its access log stream with its
first flush, 1 s after it started: until then its requests seem to have no reporter, but their entries will come."""
_NO_METRICS = EndpointMetrics()
_NO_NAMES: frozenset[str] = frozenset()


def _is_another(before: Endpoint, after: Endpoint) -> bool:
    """Return whether another process is behind the same address, as far as discovery says."""
    return bool(before.uid) and after.uid not in {"", before.uid}


def _with_uid(endpoint: Endpoint, before: Endpoint) -> Endpoint:
    """Keep the uid: discovery that omitted it once must not hide a later restart."""
    return replace(endpoint, uid=before.uid) if before.uid and not endpoint.uid else endpoint


def _is_degraded(member: _Member) -> bool:
    return member.health is not HEALTHY or member.probation is not None


def _is_new(entry: Entry, member: _Member) -> bool:
    """Return whether a request was sent since the last scrape, so that no page has counted it yet."""
    return member.observed_at is None or entry.sent_at >= member.observed_at
