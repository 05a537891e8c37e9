"""Watches a file for changes of its content, by polling once a second, and parses what is new in a thread.

Finds changes in place, by atomic rename, by the symbolic-link swap of a mounted ConfigMap (`..data`), and by deletion and
return. Polling instead of inotify: it works on every file system (NFS, FUSE, overlay), needs no dependency, and costs one
`stat` a second. What the content means is decided by the caller's `parse` and `on_change`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from extproc.edge.process.tasks import Tasks

__all__ = ["MAX_FILE_BYTES", "FileWatcher"]

MAX_FILE_BYTES: Final = 16 * 2**20
"""Larger files are not read: such a path is a mistake."""

_Parsed = TypeVar("_Parsed")

_log = logging.getLogger(__name__)


class _Look(NamedTuple):
    """Properties of a file that change with its content."""

    device: int
    inode: int
    size: int
    mtime_ns: int


class FileWatcher(Generic[_Parsed]):
    """Calls `on_change(parse(content))` once for each new content of a file.

    Reading and `parse` run in a thread, because a hung mount or a long file must not stop the event loop; `on_change` runs
    on the loop. An error in the content is part of what `parse` returns. The content found by the first `check` counts as
    a change; a caller that has read the file already passes its content as `known`. A file that vanishes or cannot be read
    keeps its last content: nothing is called. A file written in place is read once it was unchanged between two looks, so
    that no half-written content is used; a new file in its place (rename, link swap) is read at once.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        parse: Callable[[bytes], _Parsed],
        on_change: Callable[[_Parsed], None],
        interval_s: float = 1.0,
        *,
        known: bytes | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        tasks: Tasks | None = None,
    ) -> None:
        self.path: Final = Path(path)
        self.unreadable = ""
        """Why the file cannot be read at the moment; empty: it can."""
        self._parse = parse
        self._on_change = on_change
        self._interval_s = interval_s
        self._sleep = sleep
        self._tasks = tasks or Tasks()
        self._digest = None if known is None else _digest(known)
        self._seen: _Look | None = None
        """The look whose content was read last."""
        self._sure = False
        """It looked the same a second time: no write happened within the clock tick of the first read."""
        self._changing: _Look | None = None
        """The last look at a file that is being written in place."""
        self._task: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()

    async def check(self) -> bool:
        """Look once; True: the content has changed and `on_change` was called. Raises what `parse` and `on_change` raise."""
        async with self._looking:
            return self._report(await asyncio.to_thread(self._look))

    def start(self) -> None:
        """Check again and again, on a task of the running loop.

        Content whose `parse` or `on_change` raises is not reported again: the supervisor logs the defect and goes on.
        """
        assert self._task is None, "started twice"
        self._task = self._tasks.start("config", self._run, detail=str(self.path))

    async def read_again(self, *, even_if_same: bool = False) -> bool:
        """Read the file now, in whatever state it is; True: `on_change` was called, as the content is new or `even_if_same`."""
        async with self._looking:
            return self._report(await asyncio.to_thread(self._look_anew, even_if_same))

    async def close(self) -> None:
        """Stop looking; a second call does nothing."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._sleep(self._interval_s)
            await self.check()

    def _report(self, found: tuple[_Parsed] | None) -> bool:
        if found is None:
            return False
        self._on_change(found[0])
        return True

    # In a thread, one call at a time

    def _look(self) -> tuple[_Parsed] | None:
        """Return new content, parsed; None: there is none."""
        content = self._probe()
        return None if content is None else (self._parse(content),)

    def _look_anew(self, even_if_same: bool) -> tuple[_Parsed] | None:
        """Read and parse the file whatever it looks like; None: unreadable, or the known content and not `even_if_same`."""
        known = self._digest
        self._seen, self._changing, self._digest = None, None, None
        content = self._probe()
        if content is None:
            self._digest = known
            return None
        return None if self._digest == known and not even_if_same else (self._parse(content),)

    def _probe(self) -> bytes | None:
        """Return new content, or None: nothing new, still being written, or unreadable."""
        try:
            found = os.stat(self.path)  # noqa: PTH116 - follows links, which is the point
            look = _Look(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if look == self._seen and self._sure:
                self._readable()
                return None
            if look != self._seen and not self._settled(look):
                return None
            content = self._read()
        except OSError as error:
            self._fail(error.strerror or str(error))
            return None
        except ValueError as error:
            self._fail(str(error))
            return None
        self._readable()
        self._sure = look == self._seen
        self._seen, self._changing = look, None
        digest = _digest(content)
        if digest == self._digest:
            return None
        self._digest = digest
        return content

    def _settled(self, look: _Look) -> bool:
        """Tell whether a changed file may be read: a new one at once, one written in place when it no longer changes."""
        if self._seen is None or look[:2] != self._seen[:2] or look == self._changing:
            return True
        self._changing = look
        return False

    def _read(self) -> bytes:
        with self.path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        return content

    def _fail(self, why: str) -> None:
        if not self.unreadable:
            _log.warning(
                "cannot read a watched file; its last content stays", extra={"path": str(self.path), "why": why}
            )
        self.unreadable = why

    def _readable(self) -> None:
        if self.unreadable:
            _log.info("a watched file can be read again", extra={"path": str(self.path)})
        self.unreadable = ""


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
