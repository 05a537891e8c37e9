"""Fixtures of the end-to-end tests: stacks that a module shares, because starting one takes seconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.e2e.stack import TRANSPORTS

_numbers = itertools.count(1)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport in turn, for tests that start a stack of their own."""
    name: str = request.param
    return name


@pytest.fixture
def prompt() -> Callable[..., str]:
    """Make prompts that no other test has sent: `prompt(words)`; calls within one test differ from the first word on."""

    def make(words: int = 400) -> str:
        number = next(_numbers)
        return " ".join(f"{number}-{word}" for word in range(words))

    return make
