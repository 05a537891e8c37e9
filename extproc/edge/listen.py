"""Listening sockets: which addresses one configured host stands for."""

from __future__ import annotations

import logging
import socket

__all__ = ["listening_socket"]

_log = logging.getLogger(__name__)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host`; `0.0.0.0` and `::` are all addresses of both families, as with gRPC.

    Raises OSError where the address cannot be had.
    """
    if host in {"0.0.0.0", "::"} and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError:
            _log.debug("no IPv6 here; listening on IPv4 alone")
            host = "0.0.0.0"
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)
