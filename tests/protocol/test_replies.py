from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from extproc.protocol.events import Event
from extproc.protocol.replies import Finish, Reply


@pytest.mark.parametrize("kind", [*get_args(Event), *get_args(Reply)])
def test_events_and_replies_are_small_values_that_cannot_change(kind: type[Finish]) -> None:
    assert issubclass(kind, msgspec.Struct)
    assert kind.__struct_config__.frozen
    assert "__dict__" not in dir(kind)
