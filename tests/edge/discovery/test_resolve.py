"""Answers, empty answers and no answers, from a real DNS server on loopback and from the system."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import dns.rcode
import pytest

from extproc.edge.discovery import resolve
from extproc.edge.discovery.resolve import (
    DnsResolver,
    Family,
    NoAddressesError,
    ResolveError,
    SystemResolver,
    sort_addresses,
)
from tests.edge.discovery.dns_server import dns_server


async def test_addresses_in_numeric_order() -> None:
    async with dns_server() as server:
        server.records["vllm.test", "A"] = ["10.0.0.10", "10.0.0.9", "9.0.0.1"]
        server.records["vllm.test", "AAAA"] = ["2001:db8::2", "2001:db8::1"]
        resolver = DnsResolver("127.0.0.1", server.port)
        assert await resolver.addresses("vllm.test", "A") == ["9.0.0.1", "10.0.0.9", "10.0.0.10"]
        assert await resolver.addresses("vllm.test", "AAAA") == ["2001:db8::1", "2001:db8::2"]
        assert await resolver.addresses("vllm.test", "address") == ["9.0.0.1", "10.0.0.9", "10.0.0.10"]


async def test_ipv6_counts_where_there_is_no_ipv4() -> None:
    async with dns_server() as server:
        server.records["six.test", "AAAA"] = ["2001:db8::1"]
        resolver = DnsResolver("127.0.0.1", server.port)
        assert await resolver.addresses("six.test", "address") == ["2001:db8::1"]
        with pytest.raises(NoAddressesError):
            await resolver.addresses("six.test", "A")


async def test_services_of_the_lowest_priority_number() -> None:
    async with dns_server() as server:
        server.records["_http._tcp.test", "SRV"] = [
            "0 5 8001 b.test.",
            "0 1 8000 a.test.",
            "0 1 8000 a.test.",
            "1 0 9 c.test.",
        ]
        resolver = DnsResolver("127.0.0.1", server.port)
        assert await resolver.services("_http._tcp.test") == [("a.test", 8000), ("b.test", 8001)]
        server.records["_http._tcp.test", "SRV"] = ["0 0 0 ."]
        with pytest.raises(NoAddressesError):
            await resolver.services("_http._tcp.test")


async def test_nothing_there_is_not_no_answer() -> None:
    async with dns_server() as server:
        resolver = DnsResolver("127.0.0.1", server.port, timeout_s=0.2)
        with pytest.raises(NoAddressesError):
            await resolver.addresses("nobody.test", "address")
        with pytest.raises(NoAddressesError):
            await resolver.services("nobody.test")
        for rcode in (dns.rcode.SERVFAIL, dns.rcode.REFUSED):
            server.rcode = rcode
            with pytest.raises(ResolveError) as caught:
                await resolver.addresses("vllm.test", "A")
            assert not isinstance(caught.value, NoAddressesError)
        server.rcode, server.silent = None, True
        with pytest.raises(ResolveError, match="LifetimeTimeout"):
            await resolver.services("_http._tcp.test")


async def test_names_that_are_no_names() -> None:
    with pytest.raises(ResolveError):
        await DnsResolver("127.0.0.1", 1).addresses("a" * 70 + ".test", "A")
    with pytest.raises(ResolveError):
        await SystemResolver().addresses("\ud800", "address")


async def test_the_system_knows_localhost() -> None:
    assert await SystemResolver().addresses("localhost", "address") == ["127.0.0.1"]
    assert await SystemResolver().addresses("::1", "AAAA") == ["::1"]


class FakeLoop:
    """Stands in for the loop's `getaddrinfo`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.result: Any = None
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", self._answer)

    async def _answer(self, *_: Any, **__: Any) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        if self.result is None:
            await asyncio.Event().wait()
        return self.result


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), NoAddressesError),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), ResolveError),
        (socket.gaierror(socket.EAI_FAIL, ""), ResolveError),
        (OSError("broken"), ResolveError),
        ([], NoAddressesError),
        ([(10, 1, 6, "", ("fe80::1%eth0", 0, 0, 2))], NoAddressesError),
        (None, ResolveError),
    ],
)
async def test_what_the_system_may_say(monkeypatch: pytest.MonkeyPatch, result: Any, expected: type) -> None:
    FakeLoop(monkeypatch).result = result
    with pytest.raises(ResolveError) as caught:
        await SystemResolver(timeout_s=0.01).addresses("a.test", "address")
    assert type(caught.value) is expected


async def test_the_system_resolver_asks_dns_for_services(monkeypatch: pytest.MonkeyPatch) -> None:
    async with dns_server() as server:
        server.records["_http._tcp.test", "SRV"] = ["0 1 8000 a.test."]
        monkeypatch.setattr(resolve, "DnsResolver", lambda timeout_s: DnsResolver("127.0.0.1", server.port, timeout_s))
        resolver = SystemResolver()
        assert await resolver.services("_http._tcp.test") == [("a.test", 8000)]
        assert await resolver.services("_http._tcp.test") == [("a.test", 8000)]


def test_without_a_server_the_system_s_configuration_counts() -> None:
    from dns.resolver import NoResolverConfiguration

    try:
        assert DnsResolver()._resolver().nameservers
    except NoResolverConfiguration:
        pytest.skip("this machine has no /etc/resolv.conf")


@pytest.mark.parametrize(("family", "kept"), [("address", ["1.2.3.4"]), ("A", ["1.2.3.4"]), ("AAAA", ["::1"])])
def test_families(family: Family, kept: list[str]) -> None:
    assert sort_addresses({"::1", "1.2.3.4"}, family) == kept
    with pytest.raises(NoAddressesError):
        sort_addresses(set(), family)
