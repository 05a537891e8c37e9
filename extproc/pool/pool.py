"""All endpoints: what was scraped, our own requests in flight and passive health, joined into immutable snapshots.

Decides what the picker believes of each endpoint at `now`. It fetches nothing (`edge.scraping.scraper`), holds no prefixes
(`prefix`) and chooses nobody (`routing`). Calls that name an endpoint or decision that is gone change nothing: scrapes
and log entries arrive late by nature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

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
from extproc.pool.load import GAUGE_LAG_S, Load
from extproc.pool.probation import LEFT_OVER, REFUSING, RefusalHistory
from extproc.pool.restarts import Lifetime
from extproc.snapshots import Snapshots
from extproc.types import Endpoint, EndpointMetrics, EndpointSnapshot, Outcome

__all__ = ["Pool", "PoolChange"]

_NOT_TRIED: Mapping[str, Outcome] = MappingProxyType({})
_UNREACHED = Outcome.CONNECT_FAILURE
_REFRESHES_PER_HALF_LIFE = 20
"""How finely healing is followed: a standing in a snapshot is at most 3.5 % (of the badness) behind."""
_MANY_AILING = 50
_JUDGED_APART_S = 0.05
"""Where more endpoints ail than that, all of them are judged anew at most so often: judging costs something for each."""


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What a new list of endpoints changed."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    restarted: tuple[str, ...] = ()
    """Still there, but another process: another uid at the same address."""
    returned: tuple[str, ...] = ()
    """Of those added, the ones that had left not long ago and are taken to be the same process: what was known of them holds."""
    forgotten: tuple[str, ...] = ()
    """Left some time ago, or came back as another process: nothing of what was known of them holds."""
    orphaned: tuple[Entry, ...] = ()
    """Our requests at forgotten and restarted endpoints; they are released."""


@dataclass(slots=True)
class _Member:
    """What we keep of one endpoint."""

    endpoint: Endpoint
    load: Load = field(default_factory=Load)
    metrics: EndpointMetrics | None = None
    observed_at: float | None = None
    scrape_failures: int = 0
    models: Mapping[str, str | None] | None = None
    """From `/v1/models`: name -> parent; None: not known."""
    names: frozenset[str] | None = None
    """What it serves, by all we know; None: unknown."""
    lifetime: Lifetime = field(default_factory=Lifetime)
    health: Health = HEALTHY
    refusals: RefusalHistory = field(default_factory=RefusalHistory)
    probation: float | None = None
    seen: Callable[[float | None, float | None, int, int, int], EndpointSnapshot] | None = None
    """Makes the snapshot out of waiting, running, in flight and tokens in flight; all else of it is bound. None: stale."""


class Pool:
    """State of all endpoints. Not thread-safe; every call is synchronous and short."""

    def __init__(self, config: PoolConfig, in_flight: InFlightConfig) -> None:
        self._config = config
        self._lease_s = float(in_flight.lease)
        self._members: dict[str, _Member] = {}
        self._departed: dict[str, tuple[float, _Member]] = {}
        """Endpoints that have left the list, by when they are forgotten, in order: a look-up may miss one whose requests run on."""
        self._order: dict[str, int] = {}
        self._ledger = Ledger()
        self._seen_failures = SeenFailures()
        self._seen_refusals = SeenFailures()
        self._orphans: list[Entry] = []
        self._over: list[Entry] = []
        self._ailing: set[str] = set()
        """Not well by passive health, or on probation: they are judged anew as time goes by."""
        self._demoted: frozenset[str] = frozenset()
        self._refresh_at = 0.0
        self._stale: set[str] = set()
        self._moved: set[str] = set()
        """Endpoints of which only the load changed: what `routing` has worked out from the rest stays."""
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
        self._ailing = {name for name in (*self._ailing, *returned) if name in members and _ails(members[name])}
        self._known_models = None
        for member in changed:
            self._learn_names(member)
        self._stale = {name for name in self._stale if name in members}
        self._stale.update([member.endpoint.id for member in changed])
        self._moved = {name for name in self._moved if name in members}
        self._snapshots = Snapshots(rows)
        self._judge(now)
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
        self._judge(now)
        self._rebuild_all()

    # Signals

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> bool:
        """Take in one scrape that ended at `now`; True: the engine has restarted since the last one.

        Requests sent before the last scrape of the process that is gone are released then; fetch them with
        `take_orphans`. (Those sent since may be the new process's; their end comes by the access log or the lease.)
        """
        member = self._members.get(endpoint_id)
        if member is None:
            return False
        last_seen_at = member.lifetime.observe(metrics, now)
        restarted = last_seen_at is not None
        if restarted:
            self._orphans += self._ledger.orphan(endpoint_id, sent_before=last_seen_at)
            member.models = None
            self._known_models = None
        member.metrics = metrics
        member.observed_at = now
        member.scrape_failures = 0
        shown_since = now - metrics.scrape_s - GAUGE_LAG_S
        if metrics.waiting is not None and metrics.running is not None:
            self._over += self._ledger.excess(
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
        return restarted

    def observe_failure(self, endpoint_id: str, now: float) -> None:  # noqa: ARG002 - all of `observe*` take the time
        """Note a scrape that failed: what was scraped before stays, and ages."""
        member = self._members.get(endpoint_id)
        if member is not None:
            member.scrape_failures += 1
            self._stale.add(endpoint_id)

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:  # noqa: ARG002 - as above
        """Take in what an endpoint says it serves, name -> parent (None: base model); an empty list means unknown."""
        member = self._members.get(endpoint_id)
        if member is not None and models != (member.models or {}):
            member.models = MappingProxyType(dict(models)) if models else None
            self._learn_names(member)
            self._known_models = None
            self._stale.add(endpoint_id)

    def take_orphans(self) -> tuple[Entry, ...]:
        """Hand over, once, the requests released because `observe` saw their engine restart."""
        orphans, self._orphans = tuple(self._orphans), []
        return orphans

    def take_over(self) -> tuple[Entry, ...]:
        """Hand over, once, the requests released because `observe` saw that their engine has them no more."""
        over, self._over = tuple(self._over), []
        return over

    def metrics(self, endpoint_id: str) -> EndpointMetrics | None:
        """Give the last page read from an endpoint; None: none yet, or no such endpoint."""
        member = self._members.get(endpoint_id)
        return member.metrics if member else None

    def known_models(self) -> Mapping[str, str | None]:
        """Give all models and adapters known anywhere in the pool: name -> parent (None: base model, or not told)."""
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
        """Enter a decision, ours or a peer's, as under way; False where its endpoint is gone or its id is known already. O(1)."""
        member = self._members.get(endpoint_id)
        if member is None or not self._ledger.add(
            decision_id, endpoint_id, uncached_tokens, now, self._lease_s, request_id
        ):
            return False
        member.load.sent()
        self._moved.add(endpoint_id)
        return True

    def prefilled(self, decision_id: str) -> None:
        """Note the first byte of an answer: its tokens wait no longer. Idempotent."""
        entry = self._ledger.prefilled(decision_id)
        if entry is not None:
            member = self._members.get(entry.endpoint_id)
            if member is None:
                member = self._departed[entry.endpoint_id][1]
            else:
                self._moved.add(entry.endpoint_id)
            if _is_new(entry, member):
                member.load.started()

    def unseen(self, decision_id: str, now: float, *, guessed: bool) -> None:
        """Note that nobody will report a request's end; `guessed`: nor is anything known of how long such requests take."""
        entry = self._ledger.unseen(decision_id, now, guessed=guessed)
        if entry is not None and guessed and entry.endpoint_id in self._members:
            self._moved.add(entry.endpoint_id)

    def ended(
        self,
        decision_id: str,
        outcome: Outcome,
        now: float,
        *,
        served_by: str = "",
        tried: Mapping[str, Outcome] = _NOT_TRIED,
    ) -> Entry | None:
        """Release a request, exactly once; None where it is not open (`id_state` tells why).

        `served_by` is the endpoint that answered in the end, where the proxy tells: if it is another one than we chose,
        the outcome speaks of the other. `tried` says how the attempts before it ended; where it does not name the one we
        chose, that one could not be reached.
        """
        entry = self._ledger.release(decision_id)
        if entry is None:
            return None
        member = self._left(entry, was_waiting=not entry.prefilled)
        if tried or (served_by and served_by != entry.endpoint_id):
            ends = {entry.endpoint_id: _UNREACHED, **tried}
            if served_by:
                ends[served_by] = outcome
            for name, how in ends.items():
                self._assess(name, entry.request_id, how, now)
        elif member is None:
            # The endpoint is not in the list now: its requests may end because of that.
            return entry
        elif outcome is not _OK:
            self._assess(entry.endpoint_id, entry.request_id, outcome, now)
        elif member.refusals.succeeded(now) or member.health is not HEALTHY:
            self._heal(member, now)
        return entry

    def renew(self, decision_id: str, now: float) -> bool:
        """Let a request's lease begin anew (a periodic log entry came); False where it is not open."""
        return self._ledger.renew(decision_id, now)

    def expire(self, now: float) -> list[Entry]:
        """Release requests whose lease has run out (`Outcome.LEASE_EXPIRED`); says nothing of their endpoints' health."""
        expired = self._ledger.expire(now)
        for entry in expired:
            # Ten minutes of silence: long past its prefill, or lost before it came anywhere.
            self._left(entry, was_waiting=False)
        return expired

    def id_state(self, decision_id: str) -> IdState:
        """Tell an open decision from one that ended not long ago and from one that is not ours."""
        return self._ledger.state(decision_id)

    # What is believed

    def snapshots(self, now: float) -> Snapshots:
        """Give one snapshot per endpoint, in the order of discovery; the same objects until something changes.

        Cost: 3 us for each endpoint that was scraped since the last call, 1.5 where only its load changed, and 1 us in all
        for 100 that did not change. What readers have worked out of the others stays.
        """
        if self._ailing and now >= self._refresh_at:
            self._judge(now)
        if self._stale or self._moved:
            for name in self._stale:
                self._members[name].seen = None
            changes: dict[int, EndpointSnapshot] = {}
            for name in self._moved | self._stale if self._stale else self._moved:
                changes[self._order[name]] = self._build(name, now)
            before = self._snapshots
            self._snapshots = before.changed(changes) if self._stale else before.with_load(changes)
            self._stale.clear()
            self._moved.clear()
        return self._snapshots

    def _build(self, name: str, now: float) -> EndpointSnapshot:
        member = self._members[name]
        return (member.seen or self._see(member, now))(*member.load.believed(), *self._ledger.load(name))

    def _see(
        self, member: _Member, now: float
    ) -> Callable[[float | None, float | None, int, int, int], EndpointSnapshot]:
        """Bind all of an endpoint's snapshot that no decision changes: every request makes two of them."""
        name = member.endpoint.id
        metrics = member.metrics or _NO_METRICS
        member.seen = partial(
            EndpointSnapshot,  # in the order of its fields, which a test pins
            member.endpoint,
            member.observed_at,
            metrics.kv_cache_usage,
            metrics.lora_running or _NO_NAMES,
            metrics.lora_waiting or _NO_NAMES,
            metrics.lora_max,
            member.names,
            name in self._demoted,
            member.health.score(now, self._config.health.half_life) if name in self._ailing else 1.0,
            member.scrape_failures,
            member.probation,
        )
        return member.seen

    def _learn_names(self, member: _Member) -> None:
        """Work out what an endpoint serves: discovery knows best, then the configuration, then the endpoint itself."""
        if member.endpoint.models is not None:
            member.names = member.endpoint.models
        elif self._config.models:
            member.names = frozenset(self._config.models)
        elif member.models is not None:
            # An adapter loaded since the last look at the list shows in the metrics first.
            metrics = member.metrics or _NO_METRICS
            in_use = (metrics.lora_running or _NO_NAMES) | (metrics.lora_waiting or _NO_NAMES)
            member.names = in_use.union(member.models)
        else:
            member.names = None
        # The same set where it is equal, as it mostly is: comparing 1,000 of them takes no time then.
        first = next(iter(self._members.values())).names
        if member.names == first:
            member.names = first

    def _left(self, entry: Entry, *, was_waiting: bool) -> _Member | None:
        """Take a request out of its endpoint's load; return the endpoint, None where it is not in the list any more."""
        member = self._members.get(entry.endpoint_id)
        if member is None:
            departed = self._departed[entry.endpoint_id][1]
            departed.load.ended(was_waiting=was_waiting and _is_new(entry, departed))
            return None
        member.load.ended(was_waiting=was_waiting and _is_new(entry, member))
        self._moved.add(entry.endpoint_id)
        return member

    def _assess(self, endpoint_id: str, request_id: str, outcome: Outcome, now: float) -> None:
        """Let one outcome count for an endpoint's health."""
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
            # "Used to work": an endpoint that was never scraped may simply have no metrics page.
            failing = member.scrape_failures > 0 and member.metrics is not None
            step = FAILURE_STEP_UNSCRAPABLE if failing else FAILURE_STEP
            member.health = member.health.failed(now, float(self._config.health.half_life), step=step)
            member.refusals.failed(now)
            self._ailing.add(endpoint_id)
            self._judge_after(member, now)

    def _heal(self, member: _Member, now: float) -> None:
        """Take account of a success where there was something to heal; its record has it already."""
        if member.health is not HEALTHY:
            member.health = member.health.succeeded(now, float(self._config.health.half_life))
            self._judge_after(member, now)
        else:
            self._review(member, now)

    def _judge_after(self, member: _Member, now: float) -> None:
        """Judge after one endpoint's health has changed: all that ail, or where they are many this one now and the others soon."""
        if len(self._ailing) <= _MANY_AILING:
            self._judge(now)
        else:
            self._stale.add(member.endpoint.id)
            self._review(member, now)
            self._refresh_at = min(self._refresh_at, now + _JUDGED_APART_S)

    def _judge(self, now: float) -> None:
        """Work out scores, demotions and probations at `now`; only endpoints that ail cost anything."""
        half_life_s = float(self._config.health.half_life)
        scores: dict[str, float] = {}
        for name in self._ailing:
            member = self._members[name]
            if member.health.badness_at(now, half_life_s) == 0.0:
                member.health = HEALTHY
            else:
                scores[name] = member.health.score(now, half_life_s)
                self._stale.add(name)
        before = self._demoted
        self._demoted = demoted(scores, len(self._members), self._config.health)
        self._stale |= (before ^ self._demoted) & self._members.keys()
        for name in tuple(self._ailing):
            self._review(self._members[name], now)
        self._refresh_at = now + half_life_s / _REFRESHES_PER_HALF_LIFE

    def _review(self, member: _Member, now: float) -> None:
        """Work out whether an endpoint is on probation, and whether it ails at all. O(1)."""
        name, record = member.endpoint.id, member.refusals
        share = record.share(now)
        if member.health is not HEALTHY:
            standing = member.health.score(now, float(self._config.health.half_life))
            if standing < self._config.health.demote_below and name not in self._demoted:
                share = LEFT_OVER
            elif standing < _PROVEN and record.failures > 1:
                share = REFUSING
        if share != member.probation:
            member.probation = share
            self._stale.add(name)
        if _ails(member):
            if not self._ailing:
                self._refresh_at = now
            self._ailing.add(name)
        elif name in self._ailing:
            self._ailing.discard(name)
            self._stale.add(name)

    def _rebuild_all(self) -> None:
        """Have the next `snapshots` build every one anew."""
        for member in self._members.values():
            self._learn_names(member)
        self._snapshots = Snapshots([EndpointSnapshot(member.endpoint) for member in self._members.values()])
        self._stale = set(self._members)
        self._moved.clear()


_OK = Outcome.OK
"""By a name of the module: before Python 3.12 looking up a member takes five times as long as any other attribute."""
_PROVEN = 0.8
"""Standing that time alone gives back to an endpoint that has failed twice in a row, with no success since."""
_KEPT_S = 120.0
"""How long an endpoint that left may come back as the same one: a failed look-up, or readiness that flaps under overload."""
_MOST_DEPARTED = 1000
_LOG_CONNECTS_S = 3.0
"""How long a request has to be without a reporter before a page releases it. Envoy opens its access log stream with its
first flush, 1 s after it started: until then its requests seem to have no reporter, but their entries will come."""
_NO_METRICS = EndpointMetrics()
_NO_NAMES: frozenset[str] = frozenset()


def _is_another(before: Endpoint, after: Endpoint) -> bool:
    """Tell whether another process is behind the same address, as far as discovery says."""
    return bool(before.uid) and after.uid not in {"", before.uid}


def _with_uid(endpoint: Endpoint, before: Endpoint) -> Endpoint:
    """Keep the uid: discovery that forgot it for once must not hide a later restart."""
    return replace(endpoint, uid=before.uid) if before.uid and not endpoint.uid else endpoint


def _ails(member: _Member) -> bool:
    return member.health is not HEALTHY or member.probation is not None


def _is_new(entry: Entry, member: _Member) -> bool:
    """Tell whether a request was sent since the last scrape, so that no page has counted it yet."""
    return member.observed_at is None or entry.sent_at >= member.observed_at
