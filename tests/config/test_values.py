"""Text forms of durations, sizes and endpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.values import parse_bytes, parse_endpoint, parse_seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0),
        (1.5, 1.5),
        ("250ms", 0.25),
        ("5s", 5),
        ("2m", 120),
        ("1h", 3600),
        ("0.5s", 0.5),
        (315_360_000, 315_360_000),
    ],
)
def test_durations(value: object, seconds: float) -> None:
    assert parse_seconds(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        "5",
        "5 s",
        "-5s",
        "5S",
        "s",
        "1d",
        "٥s",
        "1e3s",
        True,
        None,
        [],
        -1,
        float("nan"),
        float("inf"),
        10**400,
        -(10**400),
        "99999999999h",
    ],
)
def test_bad_durations(value: object) -> None:
    with pytest.raises(ValueError, match=r"duration|number of seconds"):
        parse_seconds(value)


@pytest.mark.parametrize(
    ("value", "size"), [(0, 0), (7, 7), ("64KiB", 65536), ("4MiB", 4 * 2**20), ("1GiB", 2**30), ("12B", 12)]
)
def test_sizes(value: object, size: int) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize("value", ["", "5", "4MB", "4mib", "1.5KiB", 1.0, True, None, -1, 2**63, "9999999999TiB"])
def test_bad_sizes(value: object) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:8001", ("127.0.0.1", 8001)),
        ("[::1]:1", ("::1", 1)),
        ("[2001:DB8:0::7]:65535", ("2001:db8::7", 65535)),
        ("localhost:80", ("localhost", 80)),
        ("vllm-0.vllm.models.svc:8000", ("vllm-0.vllm.models.svc", 8000)),
        ("a.example.:8000", ("a.example.", 8000)),
        ("under_score:8000", ("under_score", 8000)),
    ],
)
def test_endpoints(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("localhost", "port is missing"),
        ("::1:80", "colons"),
        ("[::1]", "address"),
        ("[::1]80", "address"),
        ("[::1:80", "address"),
        ("[1.2.3.4]:80", "not a valid IPv6 address"),
        ("1.2.3:80", "not a valid IPv4 address"),
        ("10:30", "not a valid IPv4 address"),
        ("a b:80", "not a valid host name"),
        ("-a:80", "not a valid host name"),
        (":80", "not a valid host name"),
        ("a" * 254 + ":80", "not a valid host name"),
        ("http://a:80", "colons"),
        ("a:0", "not a valid port"),
        ("a:65536", "not a valid port"),
        ("a:٨", "not a valid port"),
        ("a:", "not a valid port"),
        ("a:-1", "not a valid port"),
    ],
)
def test_bad_endpoints(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_endpoint(text)


@given(st.text())
def test_any_text_is_an_endpoint_or_a_value_error(text: str) -> None:
    try:
        host, port = parse_endpoint(text)
    except ValueError:
        return
    bracketed = f"[{host}]" if ":" in host else host
    assert parse_endpoint(f"{bracketed}:{port}") == (host, port)
