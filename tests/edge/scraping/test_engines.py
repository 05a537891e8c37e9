from __future__ import annotations

from typing import get_args

from extproc.config.schema import EngineName
from extproc.edge.scraping.engines import ENGINES, Signal


def test_every_engine_of_the_configuration_has_a_table() -> None:
    assert set(ENGINES) == set(get_args(EngineName))


def test_every_engine_tells_of_its_queue() -> None:
    for table in ENGINES.values():
        assert Signal.WAITING in {source.signal for source in table.sources}


def test_cache_labels_go_with_an_info_family() -> None:
    for table in ENGINES.values():
        assert bool(table.cache_info) == any(table.cache_labels)


def test_every_family_that_is_read_is_named_once() -> None:
    for table in ENGINES.values():
        assert len(set(table.families)) == len(table.families)
        assert set(table.families) == {source.family for source in table.sources} | set(table.infos)
    assert {"vllm:lora_requests_info", "vllm:cache_config_info", "process_start_time_seconds"} <= set(
        ENGINES["vllm"].families
    )
    assert ENGINES["sglang"].infos == ("sglang:cache_config_info",)
    assert ENGINES["trtllm"].infos == ()
