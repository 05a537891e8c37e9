"""Notices that a file's content has changed, in every way files change, by looking once a second.

In place, by atomic rename, by the symbolic-link swap of a mounted ConfigMap (`..data`), by deletion and return. Polling
instead of inotify: it works on every file system (NFS, FUSE, overlay), needs no dependency, and costs one `stat` a second.
What the content means is the listener's concern.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

from extproc.edge.process.tasks import Tasks

__all__ = ["MAX_FILE_BYTES", "FileWatcher"]

MAX_FILE_BYTES: Final = 16 * 2**20
"""Larger files are not read: somebody named the wrong one."""

_log = logging.getLogger(__name__)


class _Look(NamedTuple):
    """What tells one state of a file from another without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int


class FileWatcher:
    """Calls `on_change(content)` once for each new content of a file.

    What is there at the first `check` counts as a change, so that one way leads through everything; a caller that has
    read the file already passes its content as `known`. A file that vanishes or cannot be read keeps its last content:
    nothing is called. A file that is written in place is reported once it has looked the same twice, so that nobody reads
    half of it; a new file in its place (rename, link swap) is reported at once.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        on_change: Callable[[bytes], None],
        interval_s: float = 1.0,
        *,
        known: bytes | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        tasks: Tasks | None = None,
    ) -> None:
        self.path: Final = Path(path)
        self.unreadable = ""
        """Why the file cannot be read at the moment; empty: it can."""
        self._on_change = on_change
        self._interval_s = interval_s
        self._sleep = sleep
        self._tasks = tasks or Tasks()
        self._digest = None if known is None else _digest(known)
        self._seen: _Look | None = None
        """The look whose content was read last."""
        self._sure = False
        """It looked the same a second time: no write slipped in within the clock tick of the first read."""
        self._resting: _Look | None = None
        """A look of a file that is being written in place."""
        self._task: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()

    def check(self) -> bool:
        """Look once; True: the content has changed and `on_change` was called. Raises only what `on_change` raises."""
        content = self._probe()
        if content is None:
            return False
        self._on_change(content)
        return True

    def start(self) -> None:
        """Look again and again, on a task of the running loop. The file is read in a thread: a hung mount must not stop us.

        A content whose `on_change` raises is not told of again: the supervisor logs the defect, and the watch goes on.
        """
        assert self._task is None, "started twice"
        self._task = self._tasks.start("config", self._run, detail=str(self.path))

    async def read_again(self, *, even_if_same: bool = False) -> bool:
        """Read the file now, in whatever state it is; True: `on_change` was called, as the content is new or `even_if_same`."""
        async with self._looking:
            known = self._digest
            self._seen, self._resting, self._digest = None, None, None
            content = await asyncio.to_thread(self._probe)
            if content is None:
                self._digest = known
                return False
            if self._digest == known and not even_if_same:
                return False
        self._on_change(content)
        return True

    async def close(self) -> None:
        """Stop looking; a second call does nothing."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._sleep(self._interval_s)
            async with self._looking:
                content = await asyncio.to_thread(self._probe)
            if content is not None:
                self._on_change(content)

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
        self._seen, self._resting = look, None
        digest = _digest(content)
        if digest == self._digest:
            return None
        self._digest = digest
        return content

    def _settled(self, look: _Look) -> bool:
        """Tell whether a changed file may be read: a new one at once, one written in place when it rests."""
        if self._seen is None or look[:2] != self._seen[:2] or look == self._resting:
            return True
        self._resting = look
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
