"""What a rendered Envoy configuration can be: the profiles by name, and the options a user may choose.

Decides which texts are addresses and which options are possible at all. How each choice becomes a message is decided in
`listener` and `clusters`; what it costs is in `comments`.
"""

import enum
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
        """Read `host:port`; an IPv6 host is in brackets, as in `override_host` (`[2600::1]:80`).

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
        """Whether the host is an IP address, which Envoy uses without DNS."""
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
    """Where pickers serve ext_proc, access logs and gRPC health, `host:port` each. 9002 is the port that endpoint pickers use by convention."""
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


class BodyMode(enum.Enum):
    """`ProcessingMode.BodySendMode`, the ones we offer, spelled as Envoy does."""

    NONE = "NONE"
    STREAMED = "STREAMED"
    BUFFERED = "BUFFERED"
    FULL_DUPLEX_STREAMED = "FULL_DUPLEX_STREAMED"


class Retries(enum.Enum):
    """On which requests Envoy may try another endpoint when the first could not be reached."""

    ALWAYS = "always"
    WHEN_PICKER_ALLOWS = "when the picker allows"
    NEVER = "never"


MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Profile:
    """One ready configuration."""

    name: str
    summary: str
    """For the head of the file and for `--help`."""
    request_body: BodyMode
    full_response: bool = False
    """Whether the response goes through the picker too (all three parts, full duplex). Otherwise it sees none of it, and
    learns of the end by Envoy's gRPC access log."""
    original_dst: bool = False
    """Envoy connects to the destination in the header, instead of looking it up among the configured endpoints."""
    fail_open: bool = False
    """`failure_mode_allow`: without a picker, go on by round robin."""
    picker_tls: bool = False
    retries: Retries = Retries.ALWAYS
    buffer_limit_bytes: int = MEBIBYTE
    """`per_connection_buffer_limit_bytes` of the listener: with BUFFERED the largest body there can be (else 413)."""


_ALL = (
    Profile(
        name="direct",
        summary="Our default. The picker sees the whole request as it streams in, and nothing of the response: no message per "
        "token, and no picker that dies can cut a running answer. How a request ended, and what the engine says it used, "
        "reaches the picker in Envoy's gRPC access log.",
        request_body=BodyMode.FULL_DUPLEX_STREAMED,
        retries=Retries.WHEN_PICKER_ALLOWS,
    ),
    Profile(
        name="full-duplex",
        summary="What the gateways configure (Istio, kgateway, Envoy AI Gateway): all six parts of request and response go "
        "through the picker. For trying a picker as a gateway will drive it. It costs a message per token, and a picker that "
        "dies cuts running answers, unless it closes its stream at the end of the request.",
        request_body=BodyMode.FULL_DUPLEX_STREAMED,
        full_response=True,
        retries=Retries.WHEN_PICKER_ALLOWS,
    ),
    Profile(
        name="buffered",
        summary="Envoy collects the whole request body and sends it in one message. Simple for the picker; the request waits in "
        "Envoy's memory, and a body above the buffer limit is refused with 413.",
        request_body=BodyMode.BUFFERED,
        buffer_limit_bytes=64 * MEBIBYTE,
    ),
    Profile(
        name="streamed",
        summary="The body is shown to the picker chunk by chunk, but the headers have to be answered before the first chunk "
        "comes: the picker decides without the prompt. For pickers that only count or log bodies.",
        request_body=BodyMode.STREAMED,
        retries=Retries.WHEN_PICKER_ALLOWS,
    ),
    Profile(
        name="headers-only",
        summary="The picker sees the request headers alone. The cheapest, and enough for session affinity or least load; "
        "decisions by prefix need a body.",
        request_body=BodyMode.NONE,
    ),
    Profile(
        name="original-dst",
        summary="Like Envoy AI Gateway and llm-d's standalone chart: Envoy dials whatever address the picker's header names. "
        "No endpoints to configure; no fallback list, no retry on another endpoint, and no word on which endpoint served.",
        request_body=BodyMode.FULL_DUPLEX_STREAMED,
        full_response=True,
        original_dst=True,
        retries=Retries.NEVER,
    ),
    Profile(
        name="fail-open",
        summary="Like `buffered`, and when the picker is away requests go on, by round robin.",
        request_body=BodyMode.BUFFERED,
        fail_open=True,
        buffer_limit_bytes=64 * MEBIBYTE,
    ),
    Profile(
        name="tls",
        summary="`direct`, with TLS between Envoy and the picker.",
        request_body=BodyMode.FULL_DUPLEX_STREAMED,
        picker_tls=True,
        retries=Retries.WHEN_PICKER_ALLOWS,
    ),
)

PROFILES: Mapping[str, Profile] = MappingProxyType({profile.name: profile for profile in _ALL})
"""Every profile by its name, in the order of the documentation."""


def profile_named(name: str) -> Profile:
    """Look a profile up; raises EnvoyConfigError that names all of them."""
    try:
        return PROFILES[name]
    except KeyError:
        raise EnvoyConfigError(f"profile: {name!r} is not one of {', '.join(PROFILES)}") from None
