"""The section `server` of the configuration: the gRPC port, how it is secured, and what a stream may cost.

What holds for all keys (types, units, where they are published) stands in `schema`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from extproc.config.values import Bytes, PositiveSeconds, Seconds, Section

__all__ = ["ServerConfig", "TlsConfig"]


class TlsConfig(Section, frozen=True):
    """How the gRPC port (9002) is secured. Whoever may speak to it may poison the index: prefer mTLS across hosts."""

    mode: Annotated[
        Literal["plaintext", "files", "self-signed"],
        Meta(
            description="`plaintext`, certificate `files` (re-read when they change), or a `self-signed` certificate made at start (what gateways that do not verify expect)."
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
    """The gRPC service for Envoy and the ports beside it."""

    transport: Annotated[
        Literal["grpcio", "native"],
        Meta(
            description="gRPC implementation. `native` is our own HTTP/2 layer, a fraction of the CPU per request; "
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
            description="Longest time a decision may be held after the end of the request body; then 503. The only deadline there is: Envoy has none in full duplex. No strategy of today holds one."
        ),
    ] = Seconds(2)
    max_inspect_bytes: Annotated[
        Bytes,
        Meta(
            extra_json_schema={"minimum": 1},
            description="Bytes of one body held for the decision; a longer body is decided on what has been read and streamed through.",
        ),
    ] = Bytes(4 * 1024 * 1024)
    max_buffered_bytes: Annotated[
        Bytes,
        Meta(
            extra_json_schema={"minimum": 1},
            description="Bytes of all bodies held at once; beyond, requests are decided on what has been read.",
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
            description="gRPC connections at a time, handshakes among them, as far as there are file descriptors. Beyond, those that have said nothing make place, the oldest first; where there is none the newest is refused (with transport `grpcio` always the newest). Envoy opens one per worker and cluster. Needs a restart.",
        ),
    ] = 1000
    max_connection_age: Annotated[
        Seconds,
        Meta(
            description="Age at which a connection is asked to come back (GOAWAY; open streams finish): one that is kept for ever pins an Envoy to one picker. 0: never. Needs a restart."
        ),
    ] = Seconds(0)
    max_connection_age_jitter: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Share by which that age differs from connection to connection, up and down, so that those made together do not come back together. grpcio has a tenth of its own, whatever stands here. Needs a restart.",
        ),
    ] = 0.1
    drain_delay: Annotated[
        Seconds,
        Meta(
            description="Time between turning unready and closing the port on SIGTERM, so that an Envoy that watches readiness passes by before it meets a closed port."
        ),
    ] = Seconds(5)
    grace_period: Annotated[
        Seconds,
        Meta(
            description="Time that open streams have to finish after that; with a response phase, as long as the longest response."
        ),
    ] = Seconds(120)
