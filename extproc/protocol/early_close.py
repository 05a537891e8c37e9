"""Whether a stream may end with its request: for which gateways, how often, and until when.

Where a gateway sends the response through the picker in full duplex, a clean end of the stream directly after the
request body makes the gateway continue without us: no message per token, and a failure of the picker cannot cut a
response. It is safe only where the gateway reads the end of the body and the end of the stream together, because what it
sends of a response on a stream that we have ended is lost to the client. docs/develop/adr/0006-early-close.md has the
experiment.
"""

from __future__ import annotations

import enum
import logging
import random
from collections.abc import Mapping
from typing import Final

from extproc.protocol.events import BodyMode, ProtocolConfig
from extproc.protocol.interfaces import Observer
from extproc.protocol.settings import ResponsePhase, SessionSettings

__all__ = ["GATEWAY_FIELDS", "EarlyClose", "Gateway", "gateway_of", "peer_host"]

_log = logging.getLogger(__name__)
_BOTH_WAYS: Final = ProtocolConfig(BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX)
GATEWAY_FIELDS: Final = frozenset({"user-agent", "x-envoy-internal", "x-request-id"})
"""The header fields of a call that `gateway_of` reads."""
_MOST_PEERS: Final = 10_000
"""Addresses remembered; after late responses from so many no stream is ended early."""


class Gateway(enum.Enum):
    """Which kind of gateway is at the other end of a stream, as far as it matters for ending it early."""

    UNKNOWN = "unknown"
    """Not determined, or the transport cannot end a stream together with its last message (grpc.aio): never early."""
    OTHER = "other"
    ENVOY_IN_CLEAR = "envoy_in_clear"
    """An Envoy on a plaintext connection: one write may be read in two parts, when a TCP segment is late."""
    ENVOY = "envoy"
    """An Envoy on TLS that is terminated here: a TLS record is read as a whole."""


def gateway_of(call: Mapping[str, str], *, tls: bool) -> Gateway:
    """Recognise Envoy's own gRPC client by the header fields of its call (names in lower case; `GATEWAY_FIELDS` are enough).

    Envoy 1.40 sends `x-envoy-internal: true` and `x-forwarded-for` (`envoy_grpc`, unless `skip_envoy_headers`; recorded,
    and source/common/grpc/async_client_impl.cc), and no `user-agent`, where gRPC libraries name themselves. Others send
    no `x-envoy` header by themselves; where an Envoy in between has added it, its `x-request-id` is there too, and such a
    proxy would read and write the two ends separately. In case of doubt the answer is OTHER.
    """
    foreign = "user-agent" in call or "x-request-id" in call
    if foreign or call.get("x-envoy-internal") != "true":
        return Gateway.OTHER
    return Gateway.ENVOY if tls else Gateway.ENVOY_IN_CLEAR


class EarlyClose:
    """One object per process: decides per stream by settings, gateway, peers with late responses, and a random sample."""

    __slots__ = ("_logged_plaintext", "_observer", "_rng", "_stopped")

    def __init__(self, observer: Observer, rng: random.Random | None = None) -> None:
        self._observer = observer
        self._rng = rng or random.Random(0)
        self._stopped: set[str] = set()
        self._logged_plaintext = False

    def wanted(self, settings: SessionSettings, config: ProtocolConfig | None, gateway: Gateway, peer: str) -> bool:
        """Return whether a stream should end with its request body; draws from the sample, so call it once per stream.

        `config` is what the gateway sent. Only in full duplex in both directions: without a response body there is
        nothing to save, and in the other modes Envoy waits for our answers.
        """
        phase = settings.response_phase
        if phase is ResponsePhase.KEEP or gateway is Gateway.UNKNOWN or config != _BOTH_WAYS:
            return False
        if phase is ResponsePhase.AUTO and gateway is not Gateway.ENVOY:
            if gateway is Gateway.ENVOY_IN_CLEAR and not self._logged_plaintext:
                self._logged_plaintext = True
                _log.info(
                    "an Envoy is connected in plaintext: `server.response_phase: auto` keeps its response phase; use TLS, or `close`"
                )
            return False
        if self._stopped and (peer_host(peer) in self._stopped or len(self._stopped) >= _MOST_PEERS):
            return False
        return self._rng.random() >= settings.response_sample

    def late(self, peer: str, decision_id: str, kind: str) -> None:
        """Process a response message on a stream that was ended: no further stream of this peer is ended early.

        A peer is an address without its port, so that all connections of one gateway count as one. This holds until
        the picker restarts: what was read in two parts once may be so again.
        """
        self._observer.late_response(kind)
        node = peer_host(peer)
        if len(self._stopped) < _MOST_PEERS:
            self._stopped.add(node)
        _log.warning(
            "a response message arrived on a stream that was ended with its request: that response may be damaged; "
            "streams of this peer keep their response phase from now on",
            extra={"decision": decision_id, "peer": peer, "kind": kind},
        )


def peer_host(peer: str) -> str:
    """Return the host of a peer's address as gRPC spells it (`ipv4:10.0.0.1:1234`): everything before the port."""
    return peer.rpartition(":")[0]
