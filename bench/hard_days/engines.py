"""Eight simulated engines in one process, which write down every request that names itself.

    python -m bench.hard_days.engines JOURNAL MODEL PORT ...

One process, because eight would cost a small machine more than all they are asked for. Faults come by POST /fault, as for
`extproc model-server`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from bench.hard_days.journal import DISCARD, NAME, Lag, Visit
from extproc.loop import run
from extproc.sim.faults import Fault
from extproc.sim.model_server import ModelServer
from extproc.sim.model_server_options import ModelServerOptions
from extproc.sim.presets import PRESETS

__all__ = ["JournaledServer", "main"]

_LAG_EVERY_S: Final = 0.05
_LAG_NOTICED_S: Final = 0.1


class _Open:
    """A visit that has not ended."""

    __slots__ = ("fault", "sha256")

    def __init__(self) -> None:
        self.fault = ""
        self.sha256 = ""


_VISIT: Final = web.RequestKey("visit", _Open)


class JournaledServer(ModelServer):
    """A model server that writes a `Visit` for each request that names itself."""

    def __init__(self, options: ModelServerOptions, number: int, journal: io.FileIO) -> None:
        super().__init__(options)
        self._number = number
        self._journal = journal
        self._open: set[_Open] = set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, and write down how it went."""
        name = request.headers.get(NAME)
        if name is None:
            return await super().handle(request)
        visit, begin_s, status = _Open(), time.monotonic(), 0
        request[_VISIT] = visit
        self._open.add(visit)
        try:
            response = await self._answer(request)
            transport = request.transport
            if transport is not None and not transport.is_closing():
                status = response.status
            return response
        finally:
            self._open.discard(visit)
            written = Visit(name, self._number, begin_s, time.monotonic(), status, visit.fault, visit.sha256)
            self._journal.write(msgspec.json.encode(written) + b"\n")

    async def read_body(self, request: web.BaseRequest) -> bytes:
        """Read a body, and keep its digest."""
        body = await super().read_body(request)
        self._read(request, hashlib.sha256(body).hexdigest())
        return body

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.headers.get(DISCARD):
            return await super().handle(request)
        digest = hashlib.sha256()
        async for chunk in request.content.iter_any():
            digest.update(chunk)
        self._read(request, digest.hexdigest())
        return self._json(request, b'{"error":{"message":"discarded","type":"discarded"}}', 400)

    def _read(self, request: web.BaseRequest, sha256: str) -> None:
        visit = request.get(_VISIT)
        if visit is not None:
            visit.sha256 = sha256

    async def _act(self, fault: Fault, request: web.BaseRequest) -> web.StreamResponse | None:
        visit = request.get(_VISIT)
        if visit is not None:
            visit.fault = fault.kind.value
        return await super()._act(fault, request)

    async def _restart(self, request: web.BaseRequest, seconds: float) -> None:
        for visit in self._open:
            visit.fault = visit.fault or "restart"
        await super()._restart(request, seconds)


async def _watch_lag(journal: io.FileIO) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LAG_EVERY_S)
        now = time.monotonic()
        if now - before - _LAG_EVERY_S > _LAG_NOTICED_S:
            journal.write(msgspec.json.encode(Lag(now, now - before - _LAG_EVERY_S)) + b"\n")


async def _serve(journal: io.FileIO, model: str, ports: list[int]) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)
    servers: list[Any] = []
    for number, port in enumerate(ports):
        options = ModelServerOptions(
            # Slow enough for an answer to last about a second: an engine that answers errors at once looks idle beside it.
            port=port,
            name=f"engine-{number + 1}",
            model=model,
            constants=PRESETS["l4-llama-3.1-8b-fp8"],
            speed=2.0,
        )
        servers.append(JournaledServer(options, number, journal))
        await servers[-1].listen()
    lag = loop.create_task(_watch_lag(journal))
    await stopped.wait()
    lag.cancel()
    await asyncio.gather(*(server.stop() for server in servers))
    return 0


def main(argv: list[str]) -> int:
    """Serve until SIGTERM."""
    path, model, *ports = argv
    with Path(path).open("ab", buffering=0) as journal:
        return run(_serve(journal, model, [int(port) for port in ports]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
