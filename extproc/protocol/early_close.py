"""Whether a stream may end with its request: towards whom, how often, and until when.

Under a gateway that sends the response through the picker in full duplex, a clean end of the stream right behind the
request body lets the gateway go on alone: no message per token, and no running response that our death could cut. It
is safe only where the gateway reads the body's end and the stream's end together, because what it sends us of a
response on a stream that we have ended is lost to the client. docs/develop/adr/0006-early-close.md has the experiment.
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
"""The header fields of a call that `gateway_of` looks at."""
_MOST_PEERS: Final = 10_000
"""Addresses remembered; with more of them in trouble nobody's stream is ended early."""


class Gateway(enum.Enum):
    """Who is at the other end of a stream, as far as it matters for its end."""

    UNKNOWN = "unknown"
    """The transport cannot end a stream together with its last message (grpc.aio): never early."""
    OTHER = "other"
    ENVOY_IN_CLEAR = "envoy_in_clear"
    """An Envoy on a plaintext connection: what is written together may be read apart, when a segment is late."""
    ENVOY = "envoy"
    """An Envoy on TLS that ends here: a record is read whole, or not yet."""


def gateway_of(call: Mapping[str, str], *, tls: bool) -> Gateway:
    """Recognise Envoy's own gRPC client by the header fields of its call (names in lower case; `GATEWAY_FIELDS` are enough).

    Envoy 1.40 sends `x-envoy-internal: true` and `x-forwarded-for` (`envoy_grpc`, unless `skip_envoy_headers`; recorded,
    and source/common/grpc/async_client_impl.cc), and no `user-agent`, where gRPC libraries name themselves. Others send
    no `x-envoy` header by themselves; where an Envoy between has added it, its `x-request-id` is there too, and such a
    proxy would read and write the two ends apart. When in doubt it is no Envoy.
    """
    foreign = "user-agent" in call or "x-request-id" in call
    if foreign or call.get("x-envoy-internal") != "true":
        return Gateway.OTHER
    return Gateway.ENVOY if tls else Gateway.ENVOY_IN_CLEAR


class EarlyClose:
    """One object per process: what the settings want, what was seen of each peer, and who is in the sample."""

    __slots__ = ("_logged_plaintext", "_observer", "_rng", "_stopped")

    def __init__(self, observer: Observer, rng: random.Random | None = None) -> None:
        self._observer = observer
        self._rng = rng or random.Random(0)
        self._stopped: set[str] = set()
        self._logged_plaintext = False

    def wanted(self, settings: SessionSettings, config: ProtocolConfig | None, gateway: Gateway, peer: str) -> bool:
        """Tell whether a stream should end with its request body; draws the sample, so ask once for each stream.

        `config` is what the gateway said; only full duplex in both directions can be left (with no response body in
        it there is nothing to leave, and in the other modes Envoy waits for our answers).
        """
        phase = settings.response_phase
        if phase is ResponsePhase.KEEP or gateway is Gateway.UNKNOWN or config != _BOTH_WAYS:
            return False
        if phase is ResponsePhase.AUTO and gateway is not Gateway.ENVOY:
            if gateway is Gateway.ENVOY_IN_CLEAR and not self._logged_plaintext:
                self._logged_plaintext = True
                _log.info("an Envoy speaks plaintext: `server.response_phase: auto` keeps its response phase")
            return False
        if self._stopped and (peer_host(peer) in self._stopped or len(self._stopped) >= _MOST_PEERS):
            return False
        return self._rng.random() >= settings.response_sample

    def late(self, peer: str, decision_id: str, kind: str) -> None:
        """Take note of a response message on a stream that was ended: no stream of this peer is ended early any more.

        A peer is an address without its port, so that all connections of one gateway count as one. It stays so until
        the picker restarts: what arrived in two halves once may do so again.
        """
        self._observer.late_response(kind)
        node = peer_host(peer)
        if len(self._stopped) < _MOST_PEERS:
            self._stopped.add(node)
        _log.warning(
            "a response message came on a stream that had been ended with its request: that response may be damaged; "
            "streams of this peer keep their response phase from now on",
            extra={"decision": decision_id, "peer": peer, "kind": kind},
        )


def peer_host(peer: str) -> str:
    """Return the host of a peer's address as gRPC spells it (`ipv4:10.0.0.1:1234`): everything before the port."""
    return peer.rpartition(":")[0]
