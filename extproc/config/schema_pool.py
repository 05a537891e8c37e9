"""The section `pool` of the configuration: where endpoints come from, how they are scraped, how health is judged.

Part of the schema (see `schema.py`, which exports all of it); it stands apart only because of its length.
"""
# ruff: noqa: RUF012 - msgspec copies an empty list or dictionary for each instance

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from extproc.config.values import EndpointText, PositiveSeconds, Seconds, Section

EngineName = Literal["vllm", "sglang", "trtllm", "triton-trtllm", "triton"]


class ScrapeTlsConfig(Section, frozen=True):
    """TLS of the scrape, where `scheme` is `https`."""

    insecure_skip_verify: Annotated[bool, Meta(description="Accept any certificate.")] = False
    ca: Annotated[str, Meta(description="PEM file with the CA to trust; empty: the system's.")] = ""
    server_name: Annotated[str, Meta(description="Name to verify and send as SNI; empty: the endpoint's address.")] = ""


class ScrapeConfig(Section, frozen=True):
    """How the engines' signals are read. One page costs a real vLLM 6 to 37 ms of the process that streams its tokens."""

    enabled: Annotated[bool, Meta(description="False: decide on our own bookkeeping alone.")] = True
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
            description="Oldest that signals of an endpoint with requests under way may get, where `cost_factor` and `budget` allow it."
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
            description="After a first whole page ask only for the metric families that are used: at `path` with a slash behind it and `name[]=...` in the query, as Python's Prometheus client understands it. Whoever does not is asked for whole pages again."
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
    """Passive health: how failures lower an endpoint's standing, and how it heals."""

    half_life: Annotated[PositiveSeconds, Meta(description="Time in which a bad standing heals by half.")] = Seconds(10)
    demote_below: Annotated[
        float,
        Meta(ge=0, le=1, description="An endpoint whose standing is lower is chosen only when nothing better is left."),
    ] = 0.5
    max_demoted_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="At most this share of the endpoints is demoted at any time, so that health can not become a weapon.",
        ),
    ] = 0.5


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
