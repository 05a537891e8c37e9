from __future__ import annotations

import socket

import pytest

from extproc.edge.listen import listening_socket
from extproc.edge.port_claim import SHARES_PORTS
from extproc.sim.processes import free_ports


# Tests listen on loopback only, so what any address means is looked up in what the system would be asked.
class Asked:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ipv6: bool) -> None:
        self.calls: list[tuple[tuple[str, int], dict[str, object]]] = []
        self.ipv6 = ipv6
        self._made = socket.create_server
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
        monkeypatch.setattr(socket, "create_server", self)

    def __call__(self, address: tuple[str, int], **options: object) -> socket.socket:
        self.calls.append((address, options))
        if options["family"] is socket.AF_INET6 and not self.ipv6:
            raise OSError(97, "Address family not supported by protocol")
        return self._made(("127.0.0.1", 0))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_any_address_is_both_families(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, ipv6=True)
    listening_socket(host, 9002).close()
    assert asked.calls == [
        (("::", 9002), {"family": socket.AF_INET6, "reuse_port": SHARES_PORTS, "dualstack_ipv6": True})
    ]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_ipv6_it_is_ipv4(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, ipv6=False)
    listening_socket(host, 9002).close()
    assert asked.calls[-1] == (("0.0.0.0", 9002), {"family": socket.AF_INET, "reuse_port": SHARES_PORTS})


def test_one_address_is_that_one() -> None:
    with listening_socket("127.0.0.1", 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listening_socket("127.0.0.1", listening.getsockname()[1])


@pytest.mark.skipif(not SHARES_PORTS, reason="ports are shared on Linux alone")
def test_a_port_is_shared_from_the_moment_its_owner_says_so() -> None:
    (port,) = free_ports(1)
    with listening_socket("127.0.0.1", port) as old:
        with pytest.raises(OSError, match="in use"):
            listening_socket("127.0.0.1", port)
        old.share()
        with listening_socket("127.0.0.1", port) as new:
            with pytest.raises(OSError, match="in use"):
                listening_socket("127.0.0.1", port)
            old.close()
            with socket.create_connection(("127.0.0.1", port)):
                new.accept()[0].close()
    with listening_socket("127.0.0.1", port):
        pass  # closing gives the port up


def test_a_port_of_another_program_is_in_use_and_not_claimed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        for _ in range(2):
            with pytest.raises(OSError, match="in use"):
                listening_socket("127.0.0.1", port)
    with listening_socket("127.0.0.1", port):
        pass
