"""The profiles by name: which parts of a request the picker sees, how it names the endpoint, what happens without it.

Only data. How each choice becomes a message stands in `listener` and `clusters`; what it costs, in `comments`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from extproc.envoy_config.options import EnvoyConfigError


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
    """The destination is dialled as it stands in the header, instead of being looked up among the configured endpoints."""
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
