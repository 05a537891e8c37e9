"""Load from child processes, every latency recorded: h2load for one body again and again, `bench.generator` for the rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from extproc.demo.processes import ChildError

__all__ = ["LoadResult", "generate", "h2load", "require_h2load"]

_ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one run saw; times in seconds."""

    requests: int
    failed: int
    """Not answered, or not with a 2xx."""
    duration_s: float
    latencies_s: tuple[float, ...]
    """Sorted."""

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.requests / self.duration_s if self.duration_s else 0.0

    def quantile_s(self, share: float) -> float:
        """Return the nearest-rank quantile of the latencies."""
        if not self.latencies_s:
            return 0.0
        return self.latencies_s[min(len(self.latencies_s) - 1, int(share * len(self.latencies_s)))]


def require_h2load() -> str:
    """Return the path of h2load. Raises ChildError, naming the remedy, where there is none."""
    binary = shutil.which("h2load")
    if binary is None:
        raise ChildError(
            "h2load is missing; on Debian or Ubuntu: apt-get install -y nghttp2-client; on Fedora: dnf install nghttp2; "
            "with Homebrew: brew install nghttp2. The parts core, closed, scrape and memory do without it"
        )
    return binary


async def h2load(
    url: str, body: Path, *, requests: int, clients: int = 4, streams: int = 8, rate: float | None = None
) -> LoadResult:
    """Send `requests` POSTs of `body`; `rate` in requests per second over all clients makes it an open loop."""
    binary = require_h2load()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests.tsv"
        argv = [binary, "-n", str(requests), "-c", str(clients), "-m", str(streams), "-d", str(body)]
        argv += ["-H", "content-type: application/json", f"--log-file={log}"]
        if rate is not None:
            argv += [f"--rps={rate / clients:.3f}"]
        process = await asyncio.create_subprocess_exec(*argv, url, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
        try:
            output, _ = await process.communicate()
        finally:
            await _end(process)
        if process.returncode:
            raise ChildError(
                f"h2load ended with status {process.returncode}:\n{output.decode(errors='replace')[-2000:]}"
            )
        lines = [line.split("\t") for line in log.read_text().splitlines()]
    latencies = sorted(int(line[2]) / 1e6 for line in lines)
    failed = sum(1 for line in lines if not line[1].startswith("2")) + requests - len(lines)
    starts = [int(line[0]) for line in lines]
    ends = [int(line[0]) + int(line[2]) for line in lines]
    duration_s = (max(ends) - min(starts)) / 1e6 if lines else 0.0
    return LoadResult(len(lines), failed, duration_s, tuple(latencies))


async def generate(
    arguments: Sequence[str], *, begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None
) -> LoadResult:
    """Run `bench.generator` with `arguments`; `begin` is called after its run-up, `end` when it has its figures.

    Raises ChildError where it fails.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.generator",
        *arguments,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        cwd=_ROOT,
        limit=1 << 27,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if await process.stdout.readline() == b"ready\n":
            begin()
            process.stdin.write(b"go\n")
            line = await process.stdout.readline()
            end()
            if line:
                found = json.loads(line)
                return LoadResult(
                    found["requests"], found["failed"], found["duration_s"], tuple(sorted(found["latencies_s"]))
                )
        said = await process.stderr.read()
        raise ChildError(f"the load generator failed: {said.decode(errors='replace')[-2000:].strip()}")
    finally:
        process.stdin.close()
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            await asyncio.wait_for(process.wait(), 0.5)
        except (TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(ProcessLookupError):  # it may have ended in this moment
                process.kill()
            await process.wait()
