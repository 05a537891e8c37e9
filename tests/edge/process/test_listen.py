from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from extproc.demo.processes import free_ports
from extproc.edge.process import listen
from extproc.edge.process.descriptors import Reserve
from extproc.edge.process.listen import ConnectionBounds, Listener, PortObserver, ProtocolListener, listening_socket
from extproc.edge.process.port_claim import SHARES_PORTS


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
    (port,) = free_ports(1)
    listening_socket(host, port).close()
    assert asked.calls == [
        (("::", port), {"family": socket.AF_INET6, "reuse_port": SHARES_PORTS, "dualstack_ipv6": True})
    ]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_ipv6_it_is_ipv4(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, ipv6=False)
    (port,) = free_ports(1)
    listening_socket(host, port).close()
    assert asked.calls[-1] == (("0.0.0.0", port), {"family": socket.AF_INET, "reuse_port": SHARES_PORTS})


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


# Taking connections


class Counted(PortObserver):
    """Counts what is reported."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.drops: list[tuple[str, str]] = []

    def accept_failed(self, listener: str) -> None:
        self.failures.append(listener)

    def connection_dropped(self, listener: str, reason: str) -> None:
        self.drops.append((listener, reason))


class Exhausted(socket.socket):
    """A listening socket that cannot accept at first."""

    refusals = 0
    error = errno.EMFILE

    def accept(self) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise OSError(self.error, "not now")
        return super().accept()


def exhausted(refusals: int, error: int = errno.EMFILE) -> Exhausted:
    bound = Exhausted()
    bound.refusals, bound.error = refusals, error
    bound.bind(("127.0.0.1", 0))
    return bound


class Greeter(asyncio.Protocol):
    """Says hello, and whether its socket delays."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        delays = not transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.write(b"late" if delays else b"soon")  # type: ignore[attr-defined]


async def greeted(port: int) -> bytes:
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = await reader.read(4)
        writer.transport.abort()
    return said


def on_every_loop(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    makers: list[Any] = [asyncio.new_event_loop]
    with contextlib.suppress(ImportError):
        import uvloop

        makers.append(uvloop.new_event_loop)
    for make in makers:
        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(run())


def test_connections_are_taken_without_delay() -> None:
    async def run() -> None:
        listener = ProtocolListener(listening_socket("127.0.0.1", 0), ConnectionBounds("metrics"), Greeter)
        assert [await greeted(listener.port) for _ in range(40)] == [b"soon"] * 40
        listener.close()
        listener.close()
        assert listener.sockets[0].fileno() < 0

    on_every_loop(run)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_what_cannot_be_accepted_is_counted_and_waits(
    error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listen, "_RETRY_S", 0.01)
    counted = Counted()

    async def run() -> None:
        listener = ProtocolListener(exhausted(5, error), ConnectionBounds("metrics", 9, counted), Greeter)
        assert await greeted(listener.port) == b"soon"
        listener.close()

    on_every_loop(run)
    assert set(counted.failures) == {"metrics"}
    assert len(counted.failures) % 5 == 0
    assert len(caplog.records) == len(counted.failures) // 5, "logged once in a while"
    assert ("ulimit -n" in caplog.text) == (error in {errno.EMFILE, errno.ENFILE})


def test_without_descriptors_the_reserve_is_used_at_once_and_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_RETRY_S", 0.01)

    async def run() -> None:
        reserve, counted = Reserve(2), Counted()
        listener = ProtocolListener(exhausted(2), ConnectionBounds("grpc", 9, counted, reserve=reserve), Greeter)
        gave: list[bool] = []
        give = reserve.release

        def giving() -> bool:
            gave.append(give())
            return gave[-1]

        monkeypatch.setattr(reserve, "release", giving)
        assert await greeted(listener.port) == b"soon"
        assert gave == [True, True]
        async with asyncio.timeout(30):
            while not reserve.full:
                await asyncio.sleep(0.001)
        assert counted.failures == ["grpc"] * 2
        listener.close()
        reserve.close()

    on_every_loop(run)


def test_a_defect_costs_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    defects = 0

    def sometimes() -> asyncio.Protocol:
        nonlocal defects
        defects += 1
        if defects % 2:
            raise ZeroDivisionError
        return Greeter()

    async def run() -> None:
        listener = ProtocolListener(listening_socket("127.0.0.1", 0), ConnectionBounds("admin"), sometimes)
        assert [await greeted(listener.port) for _ in range(4)] == [b"", b"soon"] * 2
        listener.close()

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        other = Listener(listening_socket("127.0.0.1", 0), ConnectionBounds("admin"), broken)
        assert await greeted(other.port) == b""
        other.close()

    on_every_loop(run)
    # On each loop: two by `sometimes`, one by `broken`.
    said = caplog.text.count("a connection could not be set up")
    assert said > 0
    assert said % 3 == 0


def test_drops_are_counted_and_seldom_logged(caplog: pytest.LogCaptureFixture) -> None:
    now, counted = [0.0], Counted()
    bounds = ConnectionBounds("health", 2, counted, clock=lambda: now[0])
    for now[0] in (0.0, 5.0, 9.0, 10.0, 15.0):
        bounds.dropped("full", "b")
        bounds.dropped("silent", "b")
    assert counted.drops == [("health", "full"), ("health", "silent")] * 5
    assert len(caplog.records) == 2
    with pytest.raises(AssertionError):
        ConnectionBounds("model")


class Waiter(asyncio.Protocol):
    """Says a word to whoever comes."""

    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


@pytest.mark.parametrize("waiting", [1, 100])
def test_who_waits_in_the_queue_is_taken_before_the_port_closes(waiting: int) -> None:
    async def run() -> None:
        listener = ProtocolListener(listening_socket("127.0.0.1", 0), ConnectionBounds("grpc"), Waiter)
        # The loop does not run meanwhile: the system completes these connections, and nobody has accepted them.
        clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(waiting)]
        port = listener.port
        listener.finish()
        await asyncio.wait(listener.opening)
        for client in clients:
            with client:
                client.setblocking(False)
                assert await asyncio.get_running_loop().sock_recv(client, 9) == b"hello"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        listener.finish()
        listener.close()

    on_every_loop(run)
