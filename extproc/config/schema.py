"""Every configuration key, with its type, unit, default, allowed range and reason.

This module (with `schema_pool` and `schema_server` for the sections `pool` and `server`) is the single source: loading
(`load.py`), the published JSON Schema (`extproc/config/schema.json`) and the reference (`docs/configuration.md`) are
derived from it, and tests hold them equal. All structs are frozen and refuse unknown keys; what one key alone may hold
stands in its annotation, what several must agree on in `rules.py`. Durations are seconds (a number, or text such as
`250ms`, `5s`, `2m`, `1h`); sizes are bytes (a number, or text such as `64KiB`, `4MiB`).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from extproc.config.schema_pool import (
    DnsConfig,
    EngineName,
    FileConfig,
    HealthConfig,
    PoolConfig,
    ScrapeConfig,
    ScrapeTlsConfig,
)
from extproc.config.schema_server import ServerConfig, TlsConfig
from extproc.config.values import Bytes, PositiveSeconds, Seconds, Section

__all__ = [
    "API_VERSION",
    "KIND",
    "RESTART_KEYS",
    "AdminConfig",
    "Bytes",
    "Config",
    "DecisionLogConfig",
    "DnsConfig",
    "EngineName",
    "ExplainConfig",
    "FileConfig",
    "HealthConfig",
    "InFlightConfig",
    "LimitsConfig",
    "LogConfig",
    "PoolConfig",
    "PrefixCacheConfig",
    "PrefixConfig",
    "PrefixHashConfig",
    "RoutingConfig",
    "ScrapeConfig",
    "ScrapeTlsConfig",
    "Seconds",
    "ServerConfig",
    "StrategyName",
    "TlsConfig",
    "WeightsConfig",
]

API_VERSION: Final = "extproc/v1alpha1"
KIND: Final = "ExtprocConfig"


Weight = Annotated[float, Meta(ge=0, le=1000)]
StrategyName = Literal["random", "round-robin", "least-load", "session", "prefix-hash", "prefix-cache", "weighted"]


class AdminConfig(Section, frozen=True):
    """The pages `/debug/endpoints` and `/debug/decisions`. They show addresses and model names: loopback by default."""

    host: Annotated[str, Meta(min_length=1, description="Address the admin pages listen on. Needs a restart.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the admin pages; 0: any free port. Needs a restart.")
    ] = 9091
    decisions: Annotated[
        int, Meta(ge=0, le=100_000, description="How many of the last decisions `/debug/decisions` remembers.")
    ] = 256


class WeightsConfig(Section, frozen=True, rename="kebab"):
    """Weights of `strategy: weighted`; 0 switches a scorer off. Only their ratios count."""

    prefix: Annotated[Weight, Meta(description="Share of the prompt the endpoint already holds.")] = 4.0
    kv_cache: Annotated[Weight, Meta(description="Free share of the engine's KV cache.")] = 1.0
    queue: Annotated[Weight, Meta(description="Few requests waiting in the engine.")] = 2.0
    running: Annotated[Weight, Meta(description="Few requests running in the engine.")] = 0.0
    in_flight: Annotated[Weight, Meta(description="Few requests and uncached tokens of our own under way.")] = 5.0
    lora: Annotated[
        Weight, Meta(description="The adapter is loaded, or a slot for it is free; counts only for adapters.")
    ] = 1.0
    session: Annotated[
        Weight,
        Meta(
            description="The endpoint a consistent hash of the session key names; counts only for requests with a key."
        ),
    ] = 0.0


class PrefixHashConfig(Section, frozen=True):
    """`strategy: prefix-hash`: consistent hashing with bounded loads, as in KubeAI."""

    prefix_bytes: Annotated[int, Meta(ge=1, le=1_000_000, description="Leading prompt bytes that are hashed.")] = 512
    load_factor: Annotated[
        float,
        Meta(ge=1, le=100, description="An endpoint takes at most this many times the mean of requests in flight."),
    ] = 1.25
    replicas: Annotated[int, Meta(ge=1, le=4096, description="Virtual nodes per endpoint on the ring.")] = 128


class PrefixCacheConfig(Section, frozen=True):
    """`strategy: prefix-cache`: longest match with a balance threshold, as in SGLang's router."""

    min_match: Annotated[
        float, Meta(ge=0, le=1, description="Share of the prompt that must match, else least load.")
    ] = 0.3
    balance_abs: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Least load when the largest and smallest number in flight differ by more than this ...",
        ),
    ] = 16
    balance_rel: Annotated[
        float, Meta(ge=1, le=1000, description="... and the largest exceeds the smallest this many times.")
    ] = 1.5


class LimitsConfig(Section, frozen=True):
    """Beyond which load an endpoint takes no more requests; when all are beyond, 429. 0 means no limit."""

    in_flight: Annotated[int, Meta(ge=0, description="Requests of ours under way at one endpoint.")] = 0
    queue: Annotated[int, Meta(ge=0, description="Requests waiting in one engine.")] = 0
    kv_cache: Annotated[float, Meta(ge=0, le=1, description="Share of one engine's KV cache in use.")] = 0.0


class RoutingConfig(Section, frozen=True):
    """How an endpoint is chosen."""

    strategy: Annotated[StrategyName, Meta(description="Which strategy decides; see docs/strategies.md.")] = "weighted"
    weights: WeightsConfig = WeightsConfig()
    prefix_hash: PrefixHashConfig = PrefixHashConfig()
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()
    limits: LimitsConfig = LimitsConfig()
    near_tie: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Candidates whose total is within this share of the best count as tied; the less loaded of two at random wins.",
        ),
    ] = 0.02
    fallbacks: Annotated[
        int,
        Meta(
            ge=0,
            le=8,
            description="Further endpoints named after the destination. Only for Envoy's override_host (our profiles); other gateways break on a list. "
            "0: where the destination cannot be reached, our profiles take turns over the others.",
        ),
    ] = 0
    session_header: Annotated[str, Meta(description="Request header whose value is the session key.")] = "x-session-id"
    subset_namespace: Annotated[str, Meta(description="Metadata namespace of the gateway's subset hint.")] = (
        "envoy.lb.subset_hint"
    )
    unknown_model: Annotated[
        Literal["route", "reject"],
        Meta(
            description="When every endpoint's models are known and none has the requested one: `route` lets the engine answer, `reject` answers 404."
        ),
    ] = "route"


class PrefixConfig(Section, frozen=True):
    """The prefix index: our model of what each engine's KV cache holds."""

    block_bytes: Annotated[
        int,
        Meta(
            ge=16,
            le=65536,
            description="Size of the first prefix blocks in bytes; later ones are coarser. A change empties the index.",
        ),
    ] = 256
    max_blocks: Annotated[
        int,
        Meta(
            ge=1000,
            le=1_000_000_000,
            description="Blocks remembered over all endpoints; about 24 bytes of memory each. A change empties the index.",
        ),
    ] = 4_000_000
    capacity_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="KV cache of one endpoint in tokens, where the engine does not say; 0: assume 1,000,000 (too much costs little, too little a lot).",
        ),
    ] = 0
    bytes_per_token: Annotated[
        float,
        Meta(
            gt=0,
            le=64,
            description="Bytes of plain text per token until it has been learned from the engines' usage; denser texts (digits, base64, other scripts) and the template are estimated beside it.",
        ),
    ] = 4.0


class InFlightConfig(Section, frozen=True):
    """The ledger of our own decisions."""

    lease: Annotated[
        PositiveSeconds,
        Meta(
            description="A request whose end nobody tells us of is released after this time; entries of Envoy's access log renew it."
        ),
    ] = Seconds(600)


class ExplainConfig(Section, frozen=True):
    """Explanations for clients."""

    header: Annotated[
        bool | Literal["brief", "full"],
        Meta(
            description="Honour the request header `x-extproc-explain: 1` by a response header of the same name. `full` (or `true`) tells whoever "
            "may ask the addresses of the endpoints and how much of a prompt each of them holds, and with that what others have asked: "
            "for trying out, and where all clients are trusted. `brief` names the strategy, counts of endpoints and the decision's id, by which "
            "`/debug/decisions` has the rest."
        ),
    ] = False


class DecisionLogConfig(Section, frozen=True):
    """One structured line per decision, without prompt text."""

    enabled: Annotated[bool, Meta(description="Write decision lines.")] = True
    sample: Annotated[float, Meta(ge=0, le=1, description="Share of the decisions that are logged.")] = 1.0


class LogConfig(Section, frozen=True):
    """The structured log on standard output."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severity that is written.")
    ] = "info"
    format: Annotated[Literal["json", "text"], Meta(description="One JSON object per line, or text for people.")] = (
        "json"
    )
    queue: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Lines that may wait for a blocked output; further ones are dropped and counted. Needs a restart.",
        ),
    ] = 10_000
    decisions: DecisionLogConfig = DecisionLogConfig()


class Config(Section, frozen=True):
    """The whole document."""

    apiVersion: Annotated[Literal["extproc/v1alpha1"], Meta(description="Version of this schema.")] = API_VERSION  # noqa: N815 - Kubernetes spells it so
    kind: Annotated[Literal["ExtprocConfig"], Meta(description="Kind of the document.")] = KIND
    server: ServerConfig = ServerConfig()
    admin: AdminConfig = AdminConfig()
    pool: PoolConfig = PoolConfig()
    routing: RoutingConfig = RoutingConfig()
    prefix: PrefixConfig = PrefixConfig()
    in_flight: InFlightConfig = InFlightConfig()
    explain: ExplainConfig = ExplainConfig()
    log: LogConfig = LogConfig()


RESTART_KEYS = frozenset(
    {
        "server.transport",
        "server.host",
        "server.grpc_port",
        "server.health_port",
        "server.metrics_port",
        "server.tls.mode",
        "server.tls.certificate",
        "server.tls.private_key",
        "server.tls.client_ca",
        "server.max_message_bytes",
        "server.max_connections",
        "server.max_connection_age",
        "server.max_connection_age_jitter",
        "admin.host",
        "admin.port",
        "log.queue",
    }
)
"""Keys that need a restart; a reload that changes one of them applies the rest and says so."""
