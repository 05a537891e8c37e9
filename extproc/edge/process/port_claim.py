"""Claims on ports: a picker that drains shares its ports with its successor; two others cannot use the same port.

All pickers set SO_REUSEPORT, because a new process must be able to bind while the old one still serves. With that option
alone two pickers started by mistake with the same ports would each get some connections, without an error. So each port is
also claimed by a socket name that one process of the machine can have at a time, and released when draining begins.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Final

__all__ = ["SHARES_PORTS", "PortClaim"]

SHARES_PORTS: Final = sys.platform == "linux"
"""Whether ports are shared: only where there are abstract socket names to claim them with."""


class PortClaim:
    """One port of this machine (or network namespace), claimed until released; the system releases it with the process."""

    def __init__(self, host: str, port: int) -> None:
        """Claim it; port 0 (any free one) needs no claim. Raises OSError (EADDRINUSE) where another process has it."""
        self._socket: socket.socket | None = None
        if not SHARES_PORTS or not port:
            return
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # In Linux's abstract namespace: no file, and the system removes it however the process ends.
            claim.bind(f"\0extproc/port/{host}/{port}")
        except OSError as error:
            claim.close()
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from error
        self._socket = claim

    def release(self) -> None:
        """Let another process claim it. A second call does nothing."""
        claim, self._socket = self._socket, None
        if claim is not None:
            claim.close()
