from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from extproc.protocol.events import Event
from extproc.protocol.replies import Finish, Reply


@pytest.mark.parametrize("kind", [*get_args(Event), *get_args(Reply)])
def test_events_and_replies_are_small_values_that_cannot_change(kind: type[Finish]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert "__slots__" in vars(kind)
    assert "__dict__" not in dir(kind)
    assert vars(kind)["__dataclass_params__"].frozen
