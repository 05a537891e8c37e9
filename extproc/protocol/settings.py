"""What a session may hold, how long it may wait and which names it uses on the wire."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from extproc.config.schema import Config
from extproc.protocol.events import BodyMode

__all__ = ["EXPLAIN_HEADER", "PICKER_HEADERS", "PIECE_BYTES", "ResponsePhase", "SessionSettings"]

EXPLAIN_HEADER: Final = "x-extproc-explain"
"""Asks for an explanation in a request, carries it in a response."""

PIECE_BYTES: Final = 62_000
"""Largest body piece of a reply in full duplex: GKE refuses messages over 64 kB (gateway-api-inference-extension #854)."""

_DESTINATION: Final = "x-gateway-destination-endpoint"
"""Endpoint Picker Protocol (gateway-api-inference-extension docs/proposals/004)."""

PICKER_HEADERS: Final = (
    EXPLAIN_HEADER,
    "test-epp-endpoint-selection",
    "x-gateway-inference-objective",
    "x-gateway-inference-fairness-id",
    "x-gateway-model-name-rewrite",
    "x-llm-d-inference-objective",
    "x-llm-d-inference-fairness-id",
    "x-llm-d-model-name-rewrite",
    "x-slo-ttft-ms",
    "x-slo-tpot-ms",
    "x-llm-d-slo-ttft-ms",
    "x-llm-d-slo-tpot-ms",
)
"""What clients say to a picker: ours, the conformance tests' and those of llm-d's router. No engine reads any of them."""

_CONTROL_HEADERS: Final = (f"{_DESTINATION}-subset", *PICKER_HEADERS)

_BODY_MODES: Final = {
    "full-duplex": BodyMode.FULL_DUPLEX,
    "buffered": BodyMode.BUFFERED,
    "streamed": BodyMode.STREAMED,
    "none": BodyMode.NONE,
}


class ResponsePhase(enum.Enum):
    """What to do with a response phase that the gateway configures."""

    KEEP = "keep"
    """Take part in it to its end."""
    CLOSE = "close"
    """End the stream with the request, wherever the gateway's modes allow that."""
    AUTO = "auto"
    """CLOSE where the gateway is known to be an Envoy and the connection is TLS, KEEP everywhere else."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Limits and names for sessions that begin from now on; a running session keeps those it began with."""

    max_inspect_bytes: int = 4 * 1024 * 1024
    """Longest body prefix held for a decision; a longer body is decided on that prefix and streamed through."""
    default_body_mode: BodyMode = BodyMode.FULL_DUPLEX
    """For peers that send no `protocol_config`, in both directions."""
    deadline_s: float = 2.0
    """Longest wait for a held decision, from the end of the body."""
    response_phase: ResponsePhase = ResponsePhase.KEEP
    response_sample: float = 0.02
    """Share of the streams that keep their response phase all the same, to learn what engines report."""
    allow_explain: bool = False
    subset_namespace: str = "envoy.lb.subset_hint"
    subset_key: str = f"{_DESTINATION}-subset"
    destination_header: str = _DESTINATION
    """Request header and metadata key that carry the destination."""
    destination_namespace: str = "envoy.lb"
    """The only namespace every gateway receives (Istio drops all others)."""
    served_key: str = f"{_DESTINATION}-served"
    """Metadata key, in `destination_namespace`, by which a gateway names the endpoint that answered."""
    decision_key: str = "x-extproc-decision"
    """Metadata key, in `destination_namespace`, of the decision id; comes back in the access log."""
    own_namespace: str = "extproc"
    """Metadata namespace of our own: decision id and explanation, for gateways that receive it."""
    control_headers: frozenset[str] = frozenset(_CONTROL_HEADERS)
    """Request headers meant for a picker: removed before the request goes on."""
    piece_bytes: int = PIECE_BYTES
    clear_route_cache: bool = False
    """Ask the gateway to match its routes again after the edit; nothing we set by default changes a route."""

    @classmethod
    def from_config(cls, config: Config) -> SessionSettings:
        """Take what concerns the wire from a configuration."""
        server = config.server
        return cls(
            max_inspect_bytes=server.max_inspect_bytes,
            default_body_mode=_BODY_MODES[server.default_body_mode],
            deadline_s=server.decision_deadline,
            response_phase=ResponsePhase(server.response_phase),
            response_sample=server.response_sample,
            allow_explain=config.explain.header is not False,
            subset_namespace=config.routing.subset_namespace,
        )
