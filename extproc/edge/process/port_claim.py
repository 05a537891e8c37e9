"""Who may listen on a port beside whom: a picker that drains shares its ports with its successor, and nobody else does.

All pickers set SO_REUSEPORT, or a new process could not bind while the old one still serves. By that option alone two
pickers started by mistake with the same ports would each get some connections, silently. So each port is claimed as well,
by a name that one process of the machine can have at a time, and given up when draining begins.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Final

__all__ = ["SHARES_PORTS", "PortClaim"]

SHARES_PORTS: Final = sys.platform == "linux"
"""Whether a port can be shared: where there are no names to claim it with, nobody shares."""


class PortClaim:
    """One port of this machine (or network namespace), claimed until released; the system releases it with the process."""

    def __init__(self, host: str, port: int) -> None:
        """Claim it; port 0 (any free one) is nobody else's anyway. Raises OSError (EADDRINUSE) where another process has it."""
        self._held: socket.socket | None = None
        if not SHARES_PORTS or not port:
            return
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # In Linux's abstract namespace: no file, and gone with the process however that ends.
            held.bind(f"\0extproc/port/{host}/{port}")
        except OSError as error:
            held.close()
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from error
        self._held = held

    def release(self) -> None:
        """Let another process have it; harmless when repeated."""
        held, self._held = self._held, None
        if held is not None:
            held.close()
