from __future__ import annotations

import errno
import gc

import pytest

from extproc.demo.processes import free_ports
from extproc.edge.process.port_claim import PortClaim


def test_a_port_is_one_process_s_until_it_is_released() -> None:
    (port,) = free_ports(1)
    claim = PortClaim("127.0.0.1", port)
    with pytest.raises(OSError, match="in use") as refused:
        PortClaim("127.0.0.1", port)
    assert refused.value.errno == errno.EADDRINUSE
    other = PortClaim("127.0.0.2", port)
    claim.release()
    claim.release()
    PortClaim("127.0.0.1", port).release()
    other.release()


def test_any_free_port_is_claimed_by_nobody() -> None:
    claims = [PortClaim("127.0.0.1", 0) for _ in range(2)]
    for claim in claims:
        claim.release()
    gc.collect()
