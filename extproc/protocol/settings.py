"""What a session may buffer, how long it may wait, and which names it uses on the wire."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from extproc.config.schema import Config
from extproc.protocol.events import BodyMode

__all__ = [
    "CONTROL_HEADERS",
    "DECISION_KEY",
    "DESTINATION",
    "DESTINATION_NAMESPACE",
    "EXPLAIN_HEADER",
    "OWN_NAMESPACE",
    "PICKER_HEADERS",
    "PIECE_BYTES",
    "SERVED_KEY",
    "SUBSET_KEY",
    "ResponsePhase",
    "SessionSettings",
]

EXPLAIN_HEADER: Final = "x-extproc-explain"
"""Asks for an explanation in a request, carries it in a response."""

PIECE_BYTES: Final = 62_000
"""Largest body piece of a reply in full duplex: GKE refuses messages over 64 kB (gateway-api-inference-extension #854)."""

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Request header, and metadata key in `DESTINATION_NAMESPACE`, that carry the destination (Endpoint Picker Protocol)."""

SERVED_KEY: Final = f"{DESTINATION}-served"
"""Metadata key, in `DESTINATION_NAMESPACE`, by which a gateway names the endpoint that answered."""

SUBSET_KEY: Final = f"{DESTINATION}-subset"
"""Metadata key, in `SessionSettings.subset_namespace`, of the addresses that a gateway allows."""

DECISION_KEY: Final = "x-extproc-decision"
"""Metadata key, in `DESTINATION_NAMESPACE`, of the decision id; comes back in the access log."""

DESTINATION_NAMESPACE: Final = "envoy.lb"
"""The only metadata namespace that every gateway receives (Istio drops all others)."""

OWN_NAMESPACE: Final = "extproc"
"""Metadata namespace of our own: decision id and explanation, for gateways that receive it."""

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
"""Headers by which clients address a picker: ours, the conformance tests' and llm-d's. No engine reads any of them."""

CONTROL_HEADERS: Final = frozenset((SUBSET_KEY, *PICKER_HEADERS))
"""Request headers meant for a picker: removed before the request goes on."""

_BODY_MODES: Final = {
    "full-duplex": BodyMode.FULL_DUPLEX,
    "buffered": BodyMode.BUFFERED,
    "streamed": BodyMode.STREAMED,
    "none": BodyMode.NONE,
}


class ResponsePhase(enum.Enum):
    """What to do with a response phase that the gateway configures."""

    KEEP = "keep"
    """Process it to its end."""
    CLOSE = "close"
    """End the stream with the request, wherever the gateway's modes allow that."""
    AUTO = "auto"
    """CLOSE where the gateway is known to be an Envoy and the connection is TLS, KEEP everywhere else."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Limits and names for sessions that begin from now on; a running session keeps those it began with."""

    max_inspect_bytes: int = 4 * 1024 * 1024
    """Longest body prefix buffered for a decision; a longer body is decided on that prefix and streamed through."""
    default_body_mode: BodyMode = BodyMode.FULL_DUPLEX
    """For gateways that send no `protocol_config`, in both directions."""
    deadline_s: float = 2.0
    """Longest wait for a pending decision, in seconds, from the end of the body."""
    response_phase: ResponsePhase = ResponsePhase.KEEP
    response_sample: float = 0.02
    """Share of the streams (0 to 1) that keep their response phase all the same, to learn what engines report."""
    allow_explain: bool = False
    subset_namespace: str = "envoy.lb.subset_hint"
    piece_bytes: int = PIECE_BYTES
    """Largest body piece of a reply in full duplex."""

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
