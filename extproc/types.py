"""The nouns that the rooms of the core exchange; plain data, no behaviour beyond derived values.

It exists so that `protocol`, `request`, `prefix`, `pool` and `routing` need not import each other: each produces or
consumes these values. What only one room needs stays in that room.

What is made on every request is a frozen msgspec struct, not a frozen dataclass: a `Decision` takes 0.3 us to make
instead of 4.2, an `EndpointSnapshot` 0.2 instead of 2.8 (`dataclasses.replace` becomes `msgspec.structs.replace`). None of
them can be part of a cycle, so the garbage collector is spared looking at them (`gc=False`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self, TypeVar

import msgspec

__all__ = [
    "Candidate",
    "Decision",
    "Endpoint",
    "EndpointMetrics",
    "EndpointSnapshot",
    "Finished",
    "InferenceRequest",
    "Outcome",
    "PrefixMatch",
    "RequestKind",
    "RouteEffect",
    "Snapshots",
    "Usage",
    "column",
    "column_at",
    "endpoint_id",
    "endpoint_ids",
    "part",
    "places",
    "settled",
    "somebody",
    "two_columns",
]

T = TypeVar("T")

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class RequestKind(enum.Enum):
    """Which API a request speaks; the value is a metric label."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    OTHER = "other"
    """Not inference, or an API we do not know: routed by load, passed through untouched."""


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """What the router needs to know of one request."""

    kind: RequestKind = RequestKind.OTHER
    model: str = ""
    """Model or LoRA adapter name as the client wrote it; empty when absent."""
    prompts: tuple[bytes, ...] = ()
    """Canonical prompt bytes, one entry per prompt of the request (usually one), in the engine's order of tokens.
    Equal prompts in any JSON spelling give equal bytes. Empty: no prompt recognised, route by load."""
    cache_salt: str = ""
    stream: bool = False
    max_tokens: int | None = None
    """Upper bound of tokens to generate, in tokens; None when the client set none."""
    user: str = ""
    session_key: str = ""
    """Value that the `session` scorer and strategy hash: the configured header, else `user`; empty for none."""
    subset: frozenset[str] | None = None
    """Addresses (`ip:port` or bare `ip`) the gateway allows; None: no hint; empty: nobody (503)."""
    request_id: str = ""
    body_bytes: int = 0
    complete: bool = True
    """False where the decision is made on the first part of a body that exceeds the inspection limit."""
    explain: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address that serves a model: a (pod, port) pair in Kubernetes."""

    address: str
    """IPv4 or IPv6 address, without brackets."""
    port: int
    name: str = ""
    """What a person calls it: pod name or the host name of the configuration; may be empty."""
    uid: str = ""
    """Identity of the process behind the address, if known; another uid at the same address is a restart."""
    labels: Mapping[str, str] = field(default_factory=lambda: _NO_LABELS, hash=False)
    models: frozenset[str] | None = None
    """Model and adapter names from the configuration or discovery; None: unknown, hence eligible for all."""
    id: str = field(init=False)
    """`ip:port`, IPv6 in brackets: the value of the destination header."""

    def __post_init__(self) -> None:
        """Derive `id` once; it is read several times per request."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        object.__setattr__(self, "id", f"{host}:{self.port}")


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """What one scrape of one endpoint said, summed over its data-parallel ranks. None: the page does not have it."""

    waiting: float | None = None
    """Requests queued in the engine."""
    running: float | None = None
    """Requests in the engine's batch."""
    kv_cache_usage: float | None = None
    """Share of KV blocks held by running requests, 0 to 1, mean over ranks (0 when idle, even with a full prefix cache)."""
    cache_tokens: int | None = None
    """Capacity of the KV cache in tokens, summed over ranks."""
    block_tokens: int | None = None
    """Tokens per KV block."""
    lora_running: frozenset[str] | None = None
    lora_waiting: frozenset[str] | None = None
    lora_max: int | None = None
    """Adapter slots; None: the engine runs without LoRA."""
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    prefix_queries_total: float | None = None
    """Prompt tokens looked up in the prefix cache since the engine started."""
    prefix_hits_total: float | None = None
    requests_total: float | None = None
    """Finished requests since the engine started, all reasons."""
    process_start_time_s: float | None = None
    """Unix time at which the engine's process started."""
    models: frozenset[str] = frozenset()
    """Values of the `model_name` label seen on the page."""
    scrape_s: float = 0.0
    """How long the scrape took, in seconds."""


class EndpointSnapshot(msgspec.Struct, frozen=True, gc=False):
    """What the picker believes of one endpoint at one moment; immutable, shared by all decisions until it changes.

    What a decision or an end changes comes last, so that the rest is worked out once per scrape (`pool`).
    """

    endpoint: Endpoint
    observed_at: float | None = None
    """When the last successful scrape ended, on the router's clock, in seconds; None: never: unknown, not idle."""
    kv_cache_usage: float | None = None
    lora_running: frozenset[str] = frozenset()
    lora_waiting: frozenset[str] = frozenset()
    lora_max: int | None = None
    models: frozenset[str] | None = None
    """Model and adapter names it is known to serve; None: unknown, hence eligible."""
    demoted: bool = False
    """Passive health: chosen only when nothing better is left."""
    health_score: float = 1.0
    """Passive health, 0 (every recent request failed) to 1 (none did)."""
    scrape_failures: int = 0
    """Scrapes that failed in a row."""
    probation: float | None = None
    """Its requests fail: the share of its fair share of requests it is given; at 1 only where it is chosen for its load.
    None: not on probation."""
    waiting: float | None = None
    """Requests queued, scraped and corrected by what we have sent and seen end since; None: unknown."""
    running: float | None = None
    in_flight: int = 0
    """Requests of ours that have not ended."""
    in_flight_tokens: int = 0
    """Their prompt tokens that had to be computed (not predicted as cached)."""
    guessed: int = 0
    """Of those in flight, the ones of which neither the end nor the time they take is known: limits do not count them."""


class _WorkedOut:
    """What readers have worked out row by row from snapshots that follow one another, and where these differ."""

    __slots__ = ("columns", "dropped", "moves", "parts", "places", "timed")

    def __init__(self) -> None:
        self.columns: dict[Callable[[EndpointSnapshot], Any], tuple[int, Any]] = {}
        """With how many of the moves are in it."""
        self.timed: dict[Callable[[EndpointSnapshot, float], Any], tuple[float, int, Any]] = {}
        """As `columns`, and for which time."""
        self.moves: list[int] = []
        """Places that changed, in order; without the first `dropped` ones."""
        self.dropped = 0
        self.parts: dict[Callable[[EndpointSnapshot], bool], _Part] = {}
        self.places: dict[str, int] | None = None
        """By endpoint id; what follows one another has the same endpoints."""


class _Part(NamedTuple):
    """Some of the snapshots, as they were after so many moves."""

    moved: int
    settled: object
    """Of the whole."""
    mask: Sequence[bool]
    place_of: Sequence[int]
    """Where each of them stands in the part, counted from 1."""
    snapshots: Snapshots


_MOST_MOVES: Final = 10_000
"""Then the older half is dropped, and with it columns that nobody has asked for since."""


class Snapshots(tuple[EndpointSnapshot, ...]):  # noqa: SLOT001 - a tuple has no room for slots
    """One snapshot per endpoint, in pool order, with what readers have worked out from them (`settled`, `column`).

    A decision changes the load of one endpoint (in flight, waiting, running), a scrape all of one. So what the last
    decision has worked out serves the next one, but for those endpoints.
    """

    worked: _WorkedOut
    moved: int
    """How many moves led here."""
    settled: dict[Callable[[Sequence[EndpointSnapshot]], Any], Any]
    """What has been worked out of all at once, for these and others that differ in their load only."""

    def __new__(cls, rows: Iterable[EndpointSnapshot] = ()) -> Self:
        """Start with nothing worked out."""
        made = super().__new__(cls, rows)
        made.worked = _WorkedOut()
        made.moved = 0
        made.settled = {}
        return made

    def changed(self, changes: Mapping[int, EndpointSnapshot]) -> Snapshots:
        """Return these with others of the same endpoints at some places. 1 us for one of 100; what is `settled` is settled anew."""
        after = self.with_load(changes)
        after.settled = {}
        return after

    def with_load(self, changes: Mapping[int, EndpointSnapshot]) -> Snapshots:
        """Return these with others at some places, which must differ in their load only. Cost: as `changed`."""
        rows = list(self)
        for place, snapshot in changes.items():
            rows[place] = snapshot
        worked = self.worked
        moves = worked.moves
        if self.moved != worked.dropped + len(moves):
            return Snapshots(rows)  # others came after these already
        if len(moves) > _MOST_MOVES:
            half = len(moves) // 2
            del moves[:half]
            worked.dropped += half
        moves += changes
        after: Snapshots = _new_tuple(Snapshots, rows)
        after.worked = worked
        after.moved = worked.dropped + len(moves)
        after.settled = self.settled
        return after


_new_tuple: Final = tuple.__new__


def settled(snapshots: Sequence[EndpointSnapshot], work: Callable[[Sequence[EndpointSnapshot]], T]) -> T:
    """Return `work` of the snapshots, from memory where it is known.

    `work` is a function of a module that looks at nothing a decision changes (`in_flight`, `in_flight_tokens`,
    `waiting`, `running`; whether they are known it may look at). Nobody may change the result.
    """
    if not isinstance(snapshots, Snapshots):
        return work(snapshots)
    memory = snapshots.settled
    found: T | None = memory.get(work)
    if found is None:
        found = memory[work] = work(snapshots)
    return found


def column(
    snapshots: Sequence[EndpointSnapshot], of: Callable[[EndpointSnapshot], T], kind: Callable[..., Any] = list
) -> Sequence[T]:
    """Return `of` each snapshot, in order, from memory where it is known; `of` is always the same function.

    Asked of the newest snapshots, as every decision does, it costs one call of `of` per change since it was last asked.
    """
    values: Any
    if not isinstance(snapshots, Snapshots):
        values = kind([of(snapshot) for snapshot in snapshots])
        return values  # type: ignore[no-any-return]
    worked, moved = snapshots.worked, snapshots.moved
    found = worked.columns.get(of)
    if found is None or found[0] < worked.dropped or not 0 <= moved - found[0] <= len(snapshots):
        values = kind([of(snapshot) for snapshot in snapshots])
    elif found[0] == moved:
        return found[1]  # type: ignore[no-any-return]
    else:
        # A copy: what was returned before belongs to the decisions made on it.
        values = found[1].copy()
        for place in worked.moves[found[0] - worked.dropped : moved - worked.dropped]:
            values[place] = of(snapshots[place])
    worked.columns[of] = moved, values
    return values  # type: ignore[no-any-return]


def column_at(snapshots: Snapshots, of: Callable[[EndpointSnapshot, float], T], at: float) -> Sequence[T]:
    """Return `of` each snapshot at a time, in order: as `column`, as long as the time is the same."""
    worked, moved = snapshots.worked, snapshots.moved
    found = worked.timed.get(of)
    values: list[T]
    if found is None or found[0] != at or found[1] < worked.dropped or not 0 <= moved - found[1] <= len(snapshots):
        values = [of(snapshot, at) for snapshot in snapshots]
    elif found[1] == moved:
        return found[2]  # type: ignore[no-any-return]
    else:
        values = found[2].copy()
        for place in worked.moves[found[1] - worked.dropped : moved - worked.dropped]:
            values[place] = of(snapshots[place], at)
    worked.timed[of] = at, moved, values
    return values


def two_columns(
    snapshots: Snapshots, of: Callable[[EndpointSnapshot], tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Return both values of `of` each snapshot, each in a list of its own: as `column`, which twice would cost twice."""
    worked, moved = snapshots.worked, snapshots.moved
    found = worked.columns.get(of)
    if found is None or found[0] < worked.dropped or not 0 <= moved - found[0] <= len(snapshots):
        rows = [of(snapshot) for snapshot in snapshots]
        first, second = [one for one, _ in rows], [other for _, other in rows]
    elif found[0] == moved:
        return found[1]  # type: ignore[no-any-return]
    else:
        first, second = found[1][0].copy(), found[1][1].copy()
        for place in worked.moves[found[0] - worked.dropped : moved - worked.dropped]:
            first[place], second[place] = of(snapshots[place])
    worked.columns[of] = moved, (first, second)
    return first, second


def somebody(snapshots: Sequence[EndpointSnapshot], is_so: Callable[[EndpointSnapshot], bool]) -> bool:
    """Tell whether `is_so` of any of the snapshots: a `column` that takes next to no time to search."""
    return True in column(snapshots, is_so, bytearray)


def part(snapshots: Snapshots, keep: Callable[[EndpointSnapshot], bool]) -> Snapshots:
    """Return those that are kept, as snapshots that follow one another as the whole ones do.

    So what is worked out of them stays, too, as long as the same ones are kept. Cost: 6 us of 1,000.
    """
    worked, moved, mask = snapshots.worked, snapshots.moved, column(snapshots, keep, bytearray)
    last = worked.parts.get(keep)
    if last is not None and last.moved == moved:
        return last.snapshots
    if (
        last is not None
        and last.mask == mask
        and last.moved >= worked.dropped
        and 0 < moved - last.moved <= len(snapshots)
    ):
        place_of = last.place_of
        changes = {
            place_of[place] - 1: snapshots[place]
            for place in worked.moves[last.moved - worked.dropped : moved - worked.dropped]
            if mask[place]
        }
        before = last.snapshots
        kept = before.with_load(changes) if last.settled is snapshots.settled else before.changed(changes)
    else:
        place_of, kept = list(accumulate(mask)), Snapshots(compress(snapshots, mask))
    worked.parts[keep] = _Part(moved, snapshots.settled, mask, place_of, kept)
    return kept


def places(snapshots: Sequence[EndpointSnapshot]) -> Mapping[str, int]:
    """Return where each endpoint stands, by its id; the same object for snapshots that follow one another."""
    if not isinstance(snapshots, Snapshots):
        return {snapshot.endpoint.id: place for place, snapshot in enumerate(snapshots)}
    found = snapshots.worked.places
    if found is None:
        found = snapshots.worked.places = {snapshot.endpoint.id: place for place, snapshot in enumerate(snapshots)}
    return found


def endpoint_id(snapshot: EndpointSnapshot) -> str:
    """Return the endpoint's id."""
    return snapshot.endpoint.id


def endpoint_ids(snapshots: Sequence[EndpointSnapshot]) -> Sequence[str]:
    """Return the endpoints' ids, in order."""
    return column(snapshots, endpoint_id)


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """Which share of a request's prompts each endpoint holds."""

    prompt_bytes: int = 0
    """Bytes of all prompts together."""
    matched_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Leading bytes held, by endpoint id; endpoints that hold nothing are absent."""


class Candidate(NamedTuple):
    """One endpoint that passed the filters, with what every scorer thought of it.

    A tuple, not a dataclass: a decision makes one per endpoint, and tuples are made four times as fast.
    """

    endpoint_id: str
    total: float
    """Weighted sum; only comparable within one decision."""
    scores: tuple[float, ...]
    """One value in [0, 1] per entry of `Decision.scorers`, in the same order."""
    matched_bytes: int
    in_flight: int
    waiting: float | None
    kv_cache_usage: float | None
    signal_age_s: float | None
    """Age of the scraped signals used; None: never scraped."""


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where one request goes, and everything needed to say why."""

    id: str
    """16 hex digits, unguessable enough not to collide; correlates the access log."""
    endpoint: Endpoint
    fallbacks: tuple[Endpoint, ...]
    """Further endpoints in order of preference, sent only when configured."""
    strategy: str
    scorers: tuple[tuple[str, float], ...]
    """(name, weight) of each scorer that took part."""
    candidates: Sequence[Candidate]
    """All endpoints that passed the filters, in pool order; immutable, and made only when somebody looks."""
    filtered: tuple[tuple[str, str], ...]
    """(endpoint id, filter name) of each endpoint removed."""
    note: str
    """The strategy's own reason: a short phrase such as `longest prefix` or `near tie, less loaded`."""
    kind: RequestKind
    model: str
    prompt_bytes: int
    matched_bytes: int
    """Leading prompt bytes the chosen endpoint was believed to hold."""
    prompt_tokens: int
    """Estimate from the text, by what engines have reported; the template's tokens are in it."""
    predicted_cached_tokens: int
    decided_at: float
    request_id: str = ""
    config_generation: int = 0
    explain: bool = False
    chosen: EndpointSnapshot | None = None
    """What was believed of the chosen endpoint: at hand also where `candidates` are not kept."""
    set_headers: tuple[tuple[str, str], ...] = ()
    """Further request headers to set, beside the destination."""
    remove_headers: tuple[str, ...] = ()
    body_splice: tuple[int, int, bytes] | None = None
    """(start, end, replacement) in the request body, in bytes; None: pass on byte for byte."""

    @property
    def destination(self) -> str:
        """`ip:port` of the endpoint and, separated by commas, of the fallbacks: the value of the destination header."""
        if not self.fallbacks:
            return self.endpoint.id
        return ",".join((self.endpoint.id, *(endpoint.id for endpoint in self.fallbacks)))


class RouteEffect(NamedTuple):
    """What one decision, or its end, changes in a picker's state: all that another picker needs to be told of it."""

    id: str
    """The decision's."""
    endpoint_id: str
    block_bytes: int
    """Size of the first prefix blocks: hashes of another size mean nothing to the receiver, who then leaves them out."""
    chains: tuple[Sequence[int], ...]
    """Prefix block hashes, a chain per prompt, 64 bits each; may be left out of the news of an end."""
    uncached_tokens: int
    outcome: Outcome | None = None
    """None: the request has just been sent."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The engine's own word on one finished request, in tokens; None where it said nothing."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Outcome(enum.Enum):
    """How a request ended; the value is a metric label."""

    OK = "ok"
    """Response status below 400, complete."""
    CLIENT_ERROR = "client_error"
    """4xx but 429: one alone says nothing of the endpoint."""
    BUSY = "busy"
    """429 or an engine's own 503: it works, but has no room."""
    SERVER_ERROR = "server_error"
    CONNECT_FAILURE = "connect_failure"
    RESET = "reset"
    """The endpoint broke off, before or in the middle of its answer."""
    TIMEOUT = "timeout"
    CLIENT_GONE = "client_gone"
    ABORTED = "aborted"
    """The ext_proc stream ended before the end of the request was seen; nobody says why."""
    LEASE_EXPIRED = "lease_expired"
    """No word came within the lease."""
    ENDPOINT_GONE = "endpoint_gone"
    """The endpoint left the pool, or restarted, while the request was under way."""


class Finished(msgspec.Struct, frozen=True, gc=False):
    """One request that has ended."""

    decision: Decision
    """As it was made; without its candidates where the pool is large."""
    outcome: Outcome
    usage: Usage | None
    duration_s: float
    """From the decision to the end, as far as we know of it."""
    evicted_blocks: int = 0
    """Blocks the index gave up because it had promised more than the engine held."""
    served_by: str = ""
    """The endpoint (`ip:port`) that answered, where it is not the chosen one; `outcome` and `usage` are its."""
    tried: Mapping[str, Outcome] = MappingProxyType({})
    """How earlier attempts at other endpoints ended, by endpoint, as far as the proxy told."""
