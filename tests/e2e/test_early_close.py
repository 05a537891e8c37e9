"""Streams that end with their request, over a network that holds segments back: the experiment of ADR 6, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.late_close import Plan, measure
from extproc.demo.processes import ChildError, envoy_binary

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _envoy() -> None:
    try:
        envoy_binary()
    except ChildError as error:
        pytest.skip(str(error))


async def test_over_tls_no_byte_is_lost_wherever_the_stream_is_cut(tmp_path: Path) -> None:
    found = await measure(Plan(400, "close", tls=True, late=0.1, connections=32), tmp_path)
    assert (found["good"], found["damaged"], found["failed"]) == (400, 0, 0), found["examples"]
    assert (found["ended_early"], found["late_closes"]) == (400, 0)
    assert found["segments_late"] > 50


async def test_every_damage_is_noticed_in_clear(tmp_path: Path) -> None:
    # So few are damaged (docs/develop/adr/0006) that here there may be one, and then it is counted.
    found = await measure(Plan(400, "close", late=0.1, connections=32), tmp_path)
    assert found["failed"] == 0, found["examples"]
    assert found["damaged"] <= found["late_closes"] <= 4
    assert found["ended_early"] > 0


@pytest.mark.parametrize("tls", [True, False])
async def test_auto_ends_streams_towards_an_envoy_on_tls_alone(tmp_path: Path, tls: bool) -> None:
    found = await measure(Plan(100, "auto", tls=tls, connections=16), tmp_path)
    assert (found["good"], found["late_closes"]) == (100, 0), found["examples"]
    assert (found["ended_early"], found["kept"]) == ((100, 0) if tls else (0, 100))


async def test_keep_keeps(tmp_path: Path) -> None:
    found = await measure(Plan(200, "keep", late=0.1, connections=32), tmp_path)
    assert (found["good"], found["ended_early"], found["kept"]) == (200, 0, 200), found["examples"]
