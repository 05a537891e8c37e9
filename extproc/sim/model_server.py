"""`extproc model-server`: starts, announces and stops a simulated vLLM replica.

What it answers is in `endpoints`, its options in `model_server_options`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from extproc.loop import run
from extproc.sim.endpoints import ModelServer
from extproc.sim.model_server_options import ModelServerOptions, add_arguments, options_from

if TYPE_CHECKING:
    import argparse

__all__ = ["ModelServerOptions", "RunningServer", "add_arguments", "main", "serve"]


class RunningServer:
    """A model server that listens, in the current event loop."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    @property
    def url(self) -> str:
        """`http://host:port`."""
        host = self._server.options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def stop(self) -> None:
        """Stop at once, as vLLM on SIGTERM: running streams end with an error event. A second call does nothing."""
        if not self._server.stopping.is_set():
            await self._server.stop()


async def serve(options: ModelServerOptions) -> RunningServer:
    """Start a model server in the current event loop. Raises OSError when the port cannot be had."""
    server = ModelServer(options)
    await server.listen()
    return RunningServer(server)


def main(args: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT, with the arguments of `add_arguments`. Returns the exit status: 0, or 2 for a bad start."""
    try:
        options = options_from(args)
    except ValueError as error:
        sys.stderr.write(f"extproc model-server: {error}\n")
        return 2
    return run(_run(options))


async def _run(options: ModelServerOptions) -> int:
    try:
        server = await serve(options)
    except OSError as error:
        reason = error.strerror or str(error)
        sys.stderr.write(f"extproc model-server: cannot listen on {options.host}:{options.port}: {reason}\n")
        return 2
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    sys.stdout.write(f"model server {options.name}: {options.model} on {server.url}\n")
    sys.stdout.flush()
    await stopped.wait()
    await server.stop()
    return 0
