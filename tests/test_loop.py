import asyncio
import sys

import pytest

from extproc.loop import run


async def name_of_loop() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_uvloop_is_taken_where_it_is_installed() -> None:
    pytest.importorskip("uvloop", reason="uvloop is not installed")
    assert run(name_of_loop()).startswith("uvloop")


def test_asyncio_does_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run(name_of_loop()).startswith("asyncio")
