"""The endpoints file."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.endpoints import EndpointEntry, load_endpoints
from extproc.errors import ConfigError


@pytest.mark.parametrize("text", ["[a:1, '[::1]:2']", "endpoints: [a:1, '[::1]:2']", '["a:1", "[::1]:2"]'])
def test_short_forms(text: str) -> None:
    assert load_endpoints(text) == (EndpointEntry(address="a", port=1), EndpointEntry(address="::1", port=2))


def test_long_form() -> None:
    text = "- {address: '2001:DB8::1', port: 1, name: n, models: [m], labels: {zone: a}}\n- {address: h, port: 2}"
    assert load_endpoints(text) == (
        EndpointEntry(address="2001:db8::1", port=1, name="n", models=["m"], labels={"zone": "a"}),
        EndpointEntry(address="h", port=2),
    )


def test_empty_lists_are_valid() -> None:
    assert load_endpoints("[]") == load_endpoints("endpoints: []") == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "found nothing (null); allowed: a list"),
        ("5", "line 1: found the number 5; allowed: a list"),
        ("{}", "line 1: endpoints: missing; allowed: a list; write [] for an empty list"),
        ("endpoints: a:1", 'endpoints: found the text "a:1"; allowed: a list'),
        ("endpoints: []\nx: 1", "line 2: x: unknown key; allowed here: `endpoints`"),
        ("[a]", '[0]: found the text "a"; the port is missing'),
        ("[5]", "[0]: found the number 5; allowed: `host:port`, or a mapping"),
        ("[{port: 1}]", "[0].address: missing"),
        ("[{address: h}]", "[0].port: missing"),
        ("[{address: h, port: 0}]", "[0].port: found the number 0"),
        ("[{address: 'a b', port: 1}]", "[0].address: found the text \"a b\"; 'a b' is not a valid host name"),
        ("[{address: '', port: 1}]", "[0].address: found"),
        ("[{address: h, port: 1, nmae: x}]", "[0].nmae: unknown key; did you mean `name`?"),
        ("endpoints:\n- a:1\n- {address: h, port: x}", "line 3: endpoints[1].port: found"),
    ],
)
def test_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_endpoints(text, source="f")
    assert len(caught.value.problems) == 1
    assert problem in str(caught.value)


@given(st.text() | st.binary())
def test_any_text_raises_only_config_error(text: str | bytes) -> None:
    with contextlib.suppress(ConfigError):
        load_endpoints(text)
