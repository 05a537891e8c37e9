"""Every way in which files change."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from extproc.edge.process import file_watch as watch
from extproc.edge.process.file_watch import FileWatcher
from extproc.edge.process.tasks import Tasks


class Watched:
    def __init__(self, path: Path, known: bytes | None = None) -> None:
        self.seen: list[bytes] = []
        self.watcher = FileWatcher(path, bytes, self.seen.append, known=known)

    async def looks(self, times: int = 1) -> list[bytes]:
        """Look so many times; return what was reported meanwhile."""
        before = len(self.seen)
        for _ in range(times):
            await self.watcher.check()
        return self.seen[before:]


def replace(path: Path, content: bytes) -> None:
    """Put new content in place as editors and `kubectl` do: another file, renamed."""
    other = path.with_name("other")
    other.write_bytes(content)
    other.rename(path)


def touch(path: Path, ns: int) -> None:
    os.utime(path, ns=(ns, ns))


async def test_the_first_content_counts_as_a_change(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a")
    watched = Watched(path)
    assert await watched.looks() == [b"a"]
    assert await watched.looks(3) == []


async def test_known_content_does_not(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a")
    watched = Watched(path, known=b"a")
    assert await watched.looks(3) == []
    replace(path, b"b")
    assert await watched.looks() == [b"b"]


async def test_an_atomic_rename_is_seen_at_once(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a")
    watched = Watched(path)
    await watched.looks(2)
    replace(path, b"b")
    assert await watched.looks() == [b"b"]


async def test_a_file_written_in_place_is_read_when_it_rests(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a")
    watched = Watched(path)
    await watched.looks(2)
    path.write_bytes(b"half")
    touch(path, 10**9)
    assert await watched.looks() == []
    path.write_bytes(b"half and half")
    touch(path, 2 * 10**9)
    assert await watched.looks() == []
    assert await watched.looks() == [b"half and half"]


async def test_a_write_within_the_same_clock_tick_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a")
    touch(path, 10**9)
    watched = Watched(path)
    assert await watched.looks() == [b"a"]
    path.write_bytes(b"b")  # the same size, and, as far as the clock can tell, the same time
    touch(path, 10**9)
    assert await watched.looks() == [b"b"]


async def test_the_same_content_again_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a")
    watched = Watched(path)
    await watched.looks(2)
    replace(path, b"a")
    touch(path, 10**9)
    assert await watched.looks(3) == []


async def test_the_link_swap_of_a_config_map(tmp_path: Path) -> None:
    for name, content in (("..2026_1", b"a"), ("..2026_2", b"b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_bytes(content)
    data, path = tmp_path / "..data", tmp_path / "config.yaml"
    data.symlink_to("..2026_1")
    path.symlink_to("..data/config.yaml")
    watched = Watched(path)
    assert await watched.looks(2) == [b"a"]
    (tmp_path / "..data_tmp").symlink_to("..2026_2")
    (tmp_path / "..data_tmp").rename(data)
    assert await watched.looks() == [b"b"]


async def test_deletion_keeps_the_last_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "f"
    path.write_bytes(b"a")
    watched = Watched(path)
    await watched.looks()
    path.unlink()
    assert await watched.looks(3) == []
    assert watched.watcher.unreadable == "No such file or directory"
    path.write_bytes(b"b")
    assert await watched.looks(2) == [b"b"]
    assert watched.watcher.unreadable == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_file_that_comes_later(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "f")
    assert await watched.looks() == []
    (tmp_path / "f").write_bytes(b"a")
    assert await watched.looks() == [b"a"]


async def test_a_directory_and_a_huge_file_are_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Watched(tmp_path)
    assert await directory.looks() == []
    assert directory.watcher.unreadable == "Is a directory"
    monkeypatch.setattr(watch, "MAX_FILE_BYTES", 3)
    (tmp_path / "f").write_bytes(b"abcd")
    huge = Watched(tmp_path / "f")
    assert await huge.looks() == []
    assert huge.watcher.unreadable == "larger than 3 bytes"
    bad_name = Watched(Path("a\0b"))
    assert await bad_name.looks() == []
    assert "null byte" in bad_name.watcher.unreadable


async def test_recovery_without_a_change_is_noticed(tmp_path: Path) -> None:
    path, away = tmp_path / "f", tmp_path / "away"
    path.write_bytes(b"a")
    watched = Watched(path)
    await watched.looks(2)
    path.rename(away)
    await watched.looks()
    away.rename(path)
    assert await watched.looks() == []
    assert watched.watcher.unreadable == ""


async def test_watching_on_a_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a")
    ticks: asyncio.Queue[None] = asyncio.Queue()
    asleep: asyncio.Queue[None] = asyncio.Queue()
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    def listen(content: bytes) -> None:
        seen.put_nowait(content)
        if content == b"a":
            raise RuntimeError("the listener's defect")

    async def sleep(_: float) -> None:
        asleep.put_nowait(None)
        await ticks.get()

    watcher = FileWatcher(path, bytes, listen, sleep=sleep, tasks=Tasks(sleep=lambda _: asyncio.sleep(0)))
    watcher.start()
    ticks.put_nowait(None)
    assert await seen.get() == b"a"
    await asleep.get()
    await asleep.get()
    ticks.put_nowait(None)  # nothing new
    await asleep.get()
    replace(path, b"b")
    ticks.put_nowait(None)
    assert await seen.get() == b"b"
    await watcher.close()
    await watcher.close()
    assert "a background task has failed" in caplog.text


async def test_reading_again_asks_no_look(tmp_path: Path) -> None:
    """A file whose size, time and inode are as before, and one that is still being written."""
    path = tmp_path / "f"
    path.write_bytes(b"one")
    seen: list[bytes] = []
    watcher = FileWatcher(path, bytes, seen.append)
    assert await watcher.read_again()
    assert not await watcher.read_again()
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await watcher.read_again()
    assert await watcher.read_again(even_if_same=True)
    assert seen == [b"one", b"two", b"two"]
    path.unlink()
    assert not await watcher.read_again(even_if_same=True)
    assert watcher.unreadable
    path.write_bytes(b"two")
    assert not await watcher.check(), "it is known already"
    assert len(seen) == 3


async def test_reading_and_parsing_happen_off_the_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a")
    parsed_in: list[int] = []
    told_in: list[int] = []

    def parse(content: bytes) -> str:
        parsed_in.append(threading.get_ident())
        return content.decode()

    watcher = FileWatcher(path, parse, lambda _: told_in.append(threading.get_ident()))
    assert await watcher.check()
    assert await watcher.read_again(even_if_same=True)
    assert threading.get_ident() not in parsed_in
    assert len(parsed_in) == 2
    assert told_in == [threading.get_ident()] * 2
