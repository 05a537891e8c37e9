"""The types that the packages of the core exchange: plain data, no behaviour beyond derived values.

They let `protocol`, `request`, `prefix`, `pool` and `routing` do without importing each other. Types that only one package
needs are defined there.

What is made on every request is a frozen msgspec struct, because frozen dataclasses are slow to make (so it is
`msgspec.structs.replace`, not `dataclasses.replace`). None of them can be part of a reference cycle, so that the garbage
collector need not track them (`gc=False`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

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
    "Usage",
]

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
    """Addresses (`ip:port` or bare `ip`) the gateway allows; None: no hint; empty: no endpoint (503)."""
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
    """The values of one metrics page, summed over its data-parallel ranks. None: the page does not have it."""

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
    """The state of one endpoint at one moment; immutable, shared by all decisions until it changes.

    What a decision or the end of a request changes comes last, so that `pool` can bind the rest.
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


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """Which share of a request's prompts each endpoint holds."""

    prompt_bytes: int = 0
    """Bytes of all prompts together."""
    matched_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Leading bytes held, by endpoint id; endpoints that hold nothing are absent."""


class Candidate(NamedTuple):
    """One endpoint that passed the filters, with its scores.

    A tuple, because these are made per endpoint and tuples are made fastest.
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
    """All endpoints that passed the filters, in pool order; immutable, built when they are first read."""
    filtered: tuple[tuple[str, str], ...]
    """(endpoint id, filter name) of each endpoint removed."""
    note: str
    """The strategy's own reason: a short phrase such as `longest prefix` or `near tie, less loaded`."""
    kind: RequestKind
    model: str
    prompt_bytes: int
    matched_bytes: int
    """Leading prompt bytes that the chosen endpoint holds, by the index."""
    prompt_tokens: int
    """Estimate from the text, by what engines have reported; the template's tokens are in it."""
    predicted_cached_tokens: int
    decided_at: float
    request_id: str = ""
    config_generation: int = 0
    explain: bool = False
    chosen: EndpointSnapshot | None = None
    """The chosen endpoint's snapshot, also where `candidates` are not kept."""
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
    """What one decision, or its end, changes in a picker's state: all that another picker needs to know of it."""

    id: str
    """The decision's."""
    endpoint_id: str
    block_bytes: int
    """Size of the first prefix blocks; a receiver with another size ignores the hashes."""
    chains: tuple[Sequence[int], ...]
    """Prefix block hashes, a chain per prompt, 64 bits each; may be left out of the message about an end."""
    uncached_tokens: int
    outcome: Outcome | None = None
    """None: the request has just been sent."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What the engine reported of one finished request, in tokens; None: not reported."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Outcome(enum.Enum):
    """How a request ended; the value is a metric label."""

    OK = "ok"
    """Response status below 400, complete."""
    CLIENT_ERROR = "client_error"
    """4xx but 429: a single one does not lower the endpoint's health score."""
    BUSY = "busy"
    """429 or an engine's own 503: it works, but is full."""
    SERVER_ERROR = "server_error"
    CONNECT_FAILURE = "connect_failure"
    RESET = "reset"
    """The endpoint closed the stream before or during its response."""
    TIMEOUT = "timeout"
    CLIENT_GONE = "client_gone"
    ABORTED = "aborted"
    """The ext_proc stream ended before the end of the request was seen, for an unknown reason."""
    LEASE_EXPIRED = "lease_expired"
    """Its end was not reported: the lease ended, or an estimate or the engine's page said that it must be over."""
    ENDPOINT_GONE = "endpoint_gone"
    """The endpoint left the pool, or restarted, while the request was in flight."""


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
    """How earlier attempts at other endpoints ended, by endpoint, as far as the proxy reported."""
