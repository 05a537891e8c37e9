"""Listening sockets: which addresses one configured host stands for, and when another process may listen beside us."""

from __future__ import annotations

import logging
import socket

from extproc.edge.port_claim import SHARES_PORTS, PortClaim

__all__ = ["ListeningSocket", "listening_socket"]

_log = logging.getLogger(__name__)


class ListeningSocket(socket.socket):
    """A listening socket whose port nobody else has until it is shared or closed."""

    claim: PortClaim | None = None

    def share(self) -> None:
        """Let a successor listen on the same port from now on; harmless when repeated."""
        if self.claim is not None:
            self.claim.release()

    def close(self) -> None:
        """Listen no more."""
        self.share()
        super().close()


def listening_socket(host: str, port: int) -> ListeningSocket:
    """Return a socket that listens on `host`; `0.0.0.0` and `::` are all addresses of both families, as with gRPC.

    Another picker can have the port beside it from `share` on. Raises OSError where the address cannot be had.
    """
    claim = PortClaim(host, port)
    try:
        made = ListeningSocket(fileno=_listening(host, port).detach())
    except BaseException:
        claim.release()
        raise
    made.claim = claim
    return made


def _listening(host: str, port: int) -> socket.socket:
    shared = SHARES_PORTS and bool(port)  # nobody comes to a port that the system has chosen
    if host in {"0.0.0.0", "::"} and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, reuse_port=shared, dualstack_ipv6=True)
        except OSError:
            _log.debug("no IPv6 here; listening on IPv4 alone")
            host = "0.0.0.0"
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, reuse_port=shared)
