"""What is an address, and which options are impossible."""

from typing import Any

import pytest

from extproc.envoy_config.options import PROFILES, EnvoyConfigError, EnvoyOptions, HostPort, profile_named


@pytest.mark.parametrize(
    ("text", "host", "port", "is_ip"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 8000, True),
        ("[2600::1]:80", "2600::1", 80, True),
        ("[::1]:65535", "::1", 65535, True),
        ("vllm.default.svc.cluster.local:8000", "vllm.default.svc.cluster.local", 8000, False),
        (" localhost:1 ", "localhost", 1, False),
    ],
)
def test_addresses(text: str, host: str, port: int, is_ip: bool) -> None:
    parsed = HostPort.parse(text, what="endpoint")
    assert (parsed.host, parsed.port, parsed.is_ip) == (host, port, is_ip)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("127.0.0.1", "not HOST:PORT"),
        ("127.0.0.1:", "not HOST:PORT"),
        ("127.0.0.1:0", "port from 1 to 65535"),
        ("127.0.0.1:65536", "port from 1 to 65535"),
        ("127.0.0.1:-1", "not HOST:PORT"),
        ("127.0.0.1:٣", "not HOST:PORT"),
        ("2600::1:80", r"in brackets, as in \[2600::1\]:8000"),
        ("[vllm]:80", "in brackets"),
        (":80", "neither an IP address nor a host name"),
        ("http://vllm:80", "in brackets|neither"),
        ("a,b:80", "neither"),
        ("a b:80", "neither"),
    ],
)
def test_what_is_no_address(text: str, why: str) -> None:
    with pytest.raises(EnvoyConfigError, match=why) as error:
        HostPort.parse(text, what="endpoint")
    assert str(error.value).startswith("endpoint: ")
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"endpoints": ("nowhere",)}, "endpoint: 'nowhere'"),
        ({"pickers": ("nowhere",)}, "picker: 'nowhere'"),
        ({"pickers": ()}, "picker: none: name at least one"),
        ({"pickers": ("10.0.0.1:1", "10.0.0.1:1")}, "name at least one, each once"),
        ({"listen_host": "localhost"}, "listen host: 'localhost' is not an IP address"),
        ({"admin_host": ""}, "admin host: '' is not an IP address"),
        ({"listen_port": 70000}, "listen port: 70000"),
        ({"admin_port": -1}, "admin port: -1"),
        ({"picker_key": "key.pem"}, "give both or neither"),
    ],
)
def test_impossible_options(options: dict[str, Any], why: str) -> None:
    with pytest.raises(EnvoyConfigError, match=why):
        EnvoyOptions(**options)


def test_names() -> None:
    expected = "direct full-duplex buffered streamed headers-only original-dst fail-open tls"
    assert list(PROFILES) == expected.split()
    assert all(profile_named(name).name == name for name in PROFILES)


def test_unknown() -> None:
    with pytest.raises(EnvoyConfigError, match="profile: '' is not one of direct, full-duplex"):
        profile_named("")
