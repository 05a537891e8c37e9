"""Every configuration key, with its type, unit, default, allowed range and reason.

The single source: loading (`load.py`), the published JSON Schema (`extproc/config/schema.json`) and the reference
(`docs/configuration.md`) are derived from it, and tests keep them equal. All structs are frozen and refuse unknown keys;
the range of one key is in its annotation, rules between keys are in `rules.py`. Durations are seconds (a number, or text
such as `250ms`, `5s`, `2m`, `1h`); sizes are bytes (a number, or text such as `64KiB`, `4MiB`).
"""
# ruff: noqa: RUF012 - msgspec copies an empty list or dictionary for each instance

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from extproc.config.values import Bytes, EndpointText, PositiveSeconds, Seconds, Section

__all__ = [
    "API_VERSION",
    "ENDPOINT_SOURCES",
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

EngineName = Literal["vllm", "sglang", "trtllm", "triton-trtllm", "triton"]
Weight = Annotated[float, Meta(ge=0, le=1000)]
StrategyName = Literal["random", "round-robin", "least-load", "session", "prefix-hash", "prefix-cache", "weighted"]


class TlsConfig(Section, frozen=True):
    """How the gRPC port (9002) is secured. A client can write false entries into the index: use mTLS across hosts."""

    mode: Annotated[
        Literal["plaintext", "files", "self-signed"],
        Meta(
            description="`plaintext`, certificate `files` (re-read when they change), or a `self-signed` certificate made at start (for gateways that do not verify it)."
        ),
    ] = "plaintext"
    certificate: Annotated[str, Meta(description="PEM file with the certificate chain; with `mode: files`.")] = ""
    private_key: Annotated[str, Meta(description="PEM file with the private key; with `mode: files`.")] = ""
    client_ca: Annotated[
        str,
        Meta(
            description="PEM file with the CA that must have signed client certificates (mTLS); empty: clients are not asked for one."
        ),
    ] = ""


class ServerConfig(Section, frozen=True):
    """The gRPC service for Envoy, and the health and metrics ports."""

    transport: Annotated[
        Literal["grpcio", "native"],
        Meta(
            description="gRPC implementation. `native` is extproc's own HTTP/2 layer and uses a fraction of the CPU per request; "
            "`grpcio` is grpc.aio, the reference. Needs a restart."
        ),
    ] = "native"
    host: Annotated[str, Meta(min_length=1, description="Address the gRPC, health and metrics ports listen on.")] = (
        "0.0.0.0"
    )
    grpc_port: Annotated[
        int,
        Meta(
            ge=0, le=65535, description="ext_proc and access log service; also answers gRPC health. 0: any free port."
        ),
    ] = 9002
    health_port: Annotated[
        int, Meta(ge=0, le=65535, description="gRPC health in plaintext, for probes and gateways. 0: any free port.")
    ] = 9003
    metrics_port: Annotated[
        int, Meta(ge=0, le=65535, description="HTTP: `/metrics`, `/healthz`, `/readyz`. 0: any free port.")
    ] = 9090
    tls: TlsConfig = TlsConfig()
    response_phase: Annotated[
        Literal["keep", "close", "auto"],
        Meta(
            description="What to do with a response phase that the gateway configures (the `direct` profile has none): `keep` takes part in it; `close` ends the stream with the request body where both directions are full duplex, so that there is no message per token and no running response depends on the picker; `auto` does so only towards an Envoy, and only over TLS, where the two ends cannot be read apart (agentgateway would break; docs/develop/adr/0006). `close` needs `transport: native`; on grpcio `auto` keeps."
        ),
    ] = "keep"
    response_sample: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the streams that keep their response phase under `close` and `auto`, to learn what the engines report (usage, cached tokens).",
        ),
    ] = 0.02
    default_body_mode: Annotated[
        Literal["full-duplex", "buffered", "streamed", "none"],
        Meta(description="Body mode assumed for peers that send no `protocol_config`."),
    ] = "full-duplex"
    decision_deadline: Annotated[
        PositiveSeconds,
        Meta(
            description="Longest time between the end of the request body and a delayed decision; then 503. No other deadline applies: Envoy has none in full duplex. No strategy delays decisions at present."
        ),
    ] = Seconds(2)
    max_inspect_bytes: Annotated[
        Bytes,
        Meta(
            extra_json_schema={"minimum": 1},
            description="Bytes of one body buffered for the decision; for a longer body the endpoint is chosen by what has been read, and the body is streamed through.",
        ),
    ] = Bytes(4 * 1024 * 1024)
    max_buffered_bytes: Annotated[
        Bytes,
        Meta(
            extra_json_schema={"minimum": 1},
            description="Bytes of all bodies buffered at a time; above that, endpoints are chosen by what has been read.",
        ),
    ] = Bytes(512 * 1024 * 1024)
    max_message_bytes: Annotated[
        Bytes,
        Meta(
            extra_json_schema={"minimum": 64 * 1024, "maximum": 2**31 - 1},
            description="Largest gRPC message accepted. Envoy sends chunks of up to its buffer limit, and whole bodies in buffered mode. Needs a restart.",
        ),
    ] = Bytes(64 * 1024 * 1024)
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="gRPC connections at a time, including handshakes, as far as there are file descriptors. Above that, idle ones are closed for new ones, the oldest first; if none is idle, the newest is refused (with transport `grpcio` always the newest). Envoy opens one per worker and cluster. Needs a restart.",
        ),
    ] = 1000
    max_connection_age: Annotated[
        Seconds,
        Meta(
            description="Age at which the peer is asked to reconnect (GOAWAY; open streams finish): a connection kept for ever binds an Envoy to one picker. 0: never. Needs a restart."
        ),
    ] = Seconds(0)
    max_connection_age_jitter: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Share by which that age varies, up and down, so that connections made together do not reconnect together. grpcio always uses 0.1. Needs a restart.",
        ),
    ] = 0.1
    drain_delay: Annotated[
        Seconds,
        Meta(
            description="Time between becoming unready and closing the port on SIGTERM, so that an Envoy that checks readiness stops using this picker before the port closes."
        ),
    ] = Seconds(5)
    grace_period: Annotated[
        Seconds,
        Meta(
            description="Time open streams have to finish after that; with a response phase, at least as long as the longest response."
        ),
    ] = Seconds(120)


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


class ScrapeTlsConfig(Section, frozen=True):
    """TLS of the scrape, where `scheme` is `https`."""

    insecure_skip_verify: Annotated[bool, Meta(description="Accept any certificate.")] = False
    ca: Annotated[str, Meta(description="PEM file with the CA to trust; empty: the system's.")] = ""
    server_name: Annotated[str, Meta(description="Name to verify and send as SNI; empty: the endpoint's address.")] = ""


class ScrapeConfig(Section, frozen=True):
    """How the engines' metrics are read. A page takes CPU time from the process that streams tokens."""

    enabled: Annotated[bool, Meta(description="False: decide on the picker's own counts alone.")] = True
    scheme: Annotated[Literal["http", "https"], Meta(description="Scheme of the metrics page.")] = "http"
    path: Annotated[str, Meta(pattern="^/", description="Path of the metrics page.")] = "/metrics"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the metrics page; 0: the endpoint's own port.")] = 0
    headers: Annotated[
        dict[str, str], Meta(description="Headers sent with each scrape, for example `authorization`.")
    ] = {}
    tls: ScrapeTlsConfig = ScrapeTlsConfig()
    busy_interval: Annotated[
        PositiveSeconds,
        Meta(
            description="Longest age of the metrics of an endpoint with requests in flight, where `cost_factor` and `budget` allow it."
        ),
    ] = Seconds(0.25)
    idle_interval: Annotated[
        PositiveSeconds,
        Meta(
            description="Longest time between two scrapes of an endpoint that has none; it may go along with others after four fifths of it."
        ),
    ] = Seconds(5)
    cost_factor: Annotated[
        float,
        Meta(
            ge=0,
            le=10_000,
            description="From the start of one scrape to the next at least this many times the measured scrape time: 30 keeps the engine's cost under about 3 %.",
        ),
    ] = 30.0
    budget: Annotated[
        float,
        Meta(
            gt=0,
            le=64,
            description="Cores of its own CPU the picker spends on scraping at most. Beyond it all intervals are stretched alike, and signals get older than `busy_interval` and `cost_factor` ask for: the budget wins.",
        ),
    ] = 0.3
    timeout: Annotated[
        PositiveSeconds,
        Meta(description="Longest time one page may take; a selected page half of that, before the whole one."),
    ] = Seconds(2)
    select: Annotated[
        bool,
        Meta(
            description="After a first whole page ask only for the metric families that are used: at `path` with a slash behind it and `name[]=...` in the query, as Python's Prometheus client understands it. An engine that does not support it is asked for whole pages again."
        ),
    ] = True
    models_path: Annotated[
        str, Meta(description="Path that lists models and adapters; empty: not asked, every endpoint is eligible.")
    ] = "/v1/models"
    models_interval: Annotated[PositiveSeconds, Meta(description="Time between two looks at `models_path`.")] = Seconds(
        30
    )


class FileConfig(Section, frozen=True):
    """Endpoints from a watched file: YAML or JSON, a list of `host:port`, or `{endpoints: [...]}`."""

    path: Annotated[str, Meta(min_length=1, description="The file; changes are picked up, also by symbolic-link swap.")]


class DnsConfig(Section, frozen=True):
    """Endpoints from DNS, re-resolved."""

    host: Annotated[str, Meta(min_length=1, description="Name to resolve.")]
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of every address found; not used for SRV, which names ports.")
    ] = 0
    type: Annotated[
        Literal["address", "A", "AAAA", "SRV"],
        Meta(
            description="`address`: A, and AAAA only where there is no A, so that a dual-stack server is not counted twice. `SRV`: the targets of the lowest priority number."
        ),
    ] = "address"
    interval: Annotated[PositiveSeconds, Meta(description="Time between two look-ups.")] = Seconds(5)


class HealthConfig(Section, frozen=True):
    """Passive health: how failures lower an endpoint's health score, and how it heals."""

    half_life: Annotated[PositiveSeconds, Meta(description="Time in which a bad health score heals by half.")] = (
        Seconds(10)
    )
    demote_below: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="An endpoint whose health score is lower is chosen only when nothing better is left.",
        ),
    ] = 0.5
    max_demoted_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="At most this share of the endpoints is demoted at any time, so that failures cannot take most of the pool out of use.",
        ),
    ] = 0.5


ENDPOINT_SOURCES: Final = ("endpoints", "file", "dns")
"""Keys of `pool` that name a source of endpoints; at most one is set. A new source is an optional section of `PoolConfig`,
its key here, and a class in `edge.discovery.sources.KINDS`."""


class PoolConfig(Section, frozen=True):
    """Where the endpoints come from and how they are watched. At most one of `endpoints`, `file`, `dns` is used."""

    endpoints: Annotated[
        list[EndpointText],
        Meta(description="Static list of `host:port`; host names, IPv4, `[IPv6]`. Names are re-resolved."),
    ] = []
    file: FileConfig | None = None
    dns: DnsConfig | None = None
    engine: Annotated[EngineName, Meta(description="Which engine's metric names to read.")] = "vllm"
    models: Annotated[
        list[str],
        Meta(description="Models and adapters every endpoint serves; empty: learned from `scrape.models_path`."),
    ] = []
    scrape: ScrapeConfig = ScrapeConfig()
    health: HealthConfig = HealthConfig()

    @property
    def source(self) -> str:
        """The one of `ENDPOINT_SOURCES` that is set; `endpoints` (an empty list) where none is."""
        return next((key for key in ENDPOINT_SOURCES if getattr(self, key)), ENDPOINT_SOURCES[0])


class WeightsConfig(Section, frozen=True, rename="kebab"):
    """Weights of `strategy: weighted`; 0 switches a scorer off. Only their ratios count."""

    prefix: Annotated[Weight, Meta(description="Share of the prompt the endpoint already holds.")] = 4.0
    kv_cache: Annotated[Weight, Meta(description="Free share of the engine's KV cache.")] = 1.0
    queue: Annotated[Weight, Meta(description="Few requests waiting in the engine.")] = 2.0
    running: Annotated[Weight, Meta(description="Few requests running in the engine.")] = 0.0
    in_flight: Annotated[Weight, Meta(description="Few requests and uncached tokens of this picker in flight.")] = 5.0
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
        float, Meta(ge=0, le=1, description="Share of the prompt that must match; below it, choose by least load.")
    ] = 0.3
    balance_abs: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Choose by least load when the largest and smallest number in flight differ by more than this ...",
        ),
    ] = 16
    balance_rel: Annotated[
        float, Meta(ge=1, le=1000, description="... and the largest exceeds the smallest this many times.")
    ] = 1.5


class LimitsConfig(Section, frozen=True):
    """Load above which an endpoint gets no more requests; when all endpoints are above it, 429. 0 means no limit."""

    in_flight: Annotated[int, Meta(ge=0, description="Requests of this picker in flight at one endpoint.")] = 0
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
    """The prefix index: a model of what each engine's KV cache holds."""

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
    """The requests in flight, counted by the picker itself."""

    lease: Annotated[
        PositiveSeconds,
        Meta(
            description="A request whose end is not reported is released after this time; entries of Envoy's access log renew it."
        ),
    ] = Seconds(600)


class ExplainConfig(Section, frozen=True):
    """Explanations for clients."""

    header: Annotated[
        bool | Literal["brief", "full"],
        Meta(
            description="Honour the request header `x-extproc-explain: 1` by a response header of the same name. `full` (or `true`) shows every "
            "client the addresses of the endpoints and how much of a prompt each of them holds, and so what other clients have asked: "
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
            description="Lines queued while the output is blocked; further ones are dropped and counted. Needs a restart.",
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
