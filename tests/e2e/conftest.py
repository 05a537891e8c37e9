"""Fixtures of the end-to-end tests: stacks that a module shares, because starting one takes seconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

_numbers = itertools.count(1)


@pytest.fixture
def prompt() -> Callable[..., str]:
    """Make prompts that no other test has sent: `prompt(words)`; calls within one test differ from the first word on."""

    def make(words: int = 400) -> str:
        number = next(_numbers)
        return " ".join(f"{number}-{word}" for word in range(words))

    return make
