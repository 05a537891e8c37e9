from __future__ import annotations

from typing import get_args

from extproc.config.schema import EngineName
from extproc.pool.engines import ENGINES, Signal


def test_every_engine_of_the_configuration_has_a_table() -> None:
    assert set(ENGINES) == set(get_args(EngineName))


def test_every_engine_tells_of_its_queue() -> None:
    for table in ENGINES.values():
        assert Signal.WAITING in {source.signal for source in table.sources}


def test_cache_labels_go_with_an_info_family() -> None:
    for table in ENGINES.values():
        assert bool(table.cache_info) == any(table.cache_labels)
