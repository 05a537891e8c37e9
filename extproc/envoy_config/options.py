"""What a user may choose about a rendered Envoy configuration, and how `host:port` texts are read.

Decides which texts are addresses and which options are possible at all; what is done with them is left to the modules
that build the messages.
"""

import ipaddress
from dataclasses import dataclass
from typing import Self


class EnvoyConfigError(ValueError):
    """An option that cannot be rendered; the message names the option, what was found and what is allowed."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """One address as Envoy wants it: the host without brackets, and the port.

    `host` is an IPv4 or IPv6 address or a DNS name; `port` is 1 to 65535 (`SocketAddress.address`, `.port_value`).
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, what: str) -> Self:
        """Read `host:port`; an IPv6 host stands in brackets, as in `override_host` (`[2600::1]:80`).

        `what` names the option for the error. Raises EnvoyConfigError.
        """
        host, colon, port = text.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if bracketed:
            host = host[1:-1]
        if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise EnvoyConfigError(f"{what}: {text!r} is not HOST:PORT with a port from 1 to 65535")
        if bracketed != (":" in host) or (bracketed and not _is_ip(host)):
            raise EnvoyConfigError(f"{what}: {text!r}: write an IPv6 address in brackets, as in [2600::1]:8000")
        if not host or any(c.isspace() or c in "/,@" for c in host):
            raise EnvoyConfigError(f"{what}: {text!r}: {host!r} is neither an IP address nor a host name")
        return cls(host, int(port))

    @property
    def is_ip(self) -> bool:
        """Whether Envoy can use the host as it stands, without DNS."""
        return _is_ip(self.host)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


DEFAULT_ENDPOINTS = ("127.0.0.1:8001", "127.0.0.1:8002")
"""The endpoints in the committed files: two model servers on this machine."""


@dataclass(frozen=True, slots=True)
class EnvoyOptions:
    """The user's part of a configuration. The defaults are what the committed `envoy/*.yaml` were rendered with.

    Raises EnvoyConfigError when constructed with something impossible.
    """

    endpoints: tuple[str, ...] = DEFAULT_ENDPOINTS
    """The model servers, `host:port` each. A host name is resolved by Envoy (STRICT_DNS); `override_host` compares the
    resolved `ip:port`, so a picker has to name addresses, never names."""
    pickers: tuple[str, ...] = ("127.0.0.1:9002",)
    """Where pickers serve ext_proc, access logs and gRPC health, `host:port` each. 9002 is the field's convention."""
    listen_host: str = "127.0.0.1"
    """IP address to listen on. Loopback, so that a first try is not open to the network; 0.0.0.0 or :: to serve others."""
    listen_port: int = 10000
    admin_host: str = "127.0.0.1"
    """IP address of Envoy's admin interface. It can stop Envoy and shows everything: never a public address."""
    admin_port: int = 9901
    stdout_access_log: bool = False
    """Whether Envoy also writes one line per request to its standard output: useful to look at, a cost under load."""
    picker_ca: str | None = None
    """Profile `tls`: file with the CA that signed the picker's certificate. None: the certificate is not verified, which is
    what the gateways do (facts: Envoy AI Gateway, kgateway), and protects against listeners, not against impostors."""
    picker_certificate: str | None = None
    """Profile `tls`: file with a client certificate to present to the picker; with `picker_key`."""
    picker_key: str | None = None
    """Profile `tls`: the key of `picker_certificate`."""
    picker_server_name: str | None = None
    """Profile `tls`: the name to ask for (SNI) and, with `picker_ca`, to find in the certificate. None: the picker's host name,
    or, of several pickers, any of theirs."""

    def __post_init__(self) -> None:
        for text in self.endpoints:
            HostPort.parse(text, what="endpoint")
        for text in self.pickers:
            HostPort.parse(text, what="picker")
        if not self.pickers or len(set(self.pickers)) < len(self.pickers):
            raise EnvoyConfigError(f"picker: {', '.join(self.pickers) or 'none'}: name at least one, each once")
        for what, host in (("listen host", self.listen_host), ("admin host", self.admin_host)):
            if not _is_ip(host):
                raise EnvoyConfigError(
                    f"{what}: {host!r} is not an IP address (Envoy binds to addresses, not to names)"
                )
        for what, port in (("listen port", self.listen_port), ("admin port", self.admin_port)):
            if not 0 <= port <= 65535:
                raise EnvoyConfigError(f"{what}: {port} is not from 0 to 65535")
        if (self.picker_certificate is None) != (self.picker_key is None):
            raise EnvoyConfigError("picker certificate and picker key: give both or neither")
