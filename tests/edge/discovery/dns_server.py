"""A tiny real DNS server on loopback UDP, for the tests of resolving and discovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer(asyncio.DatagramProtocol):
    """Answers from `records`, which a test may change at any time.

    `records[(name, type)]` lists record texts; a name without any entry does not exist (NXDOMAIN), one without an entry of
    this type has none (NODATA). `rcode` set: every query fails with it. `silent`: no answer at all.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode: dns.rcode.Rcode | None = None
        self.silent = False
        self.queries: list[tuple[str, str]] = []
        self.port = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = str(question.name).rstrip("."), dns.rdatatype.to_text(question.rdtype)
        self.queries.append((name, kind))
        if self.silent:
            return
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        texts = self.records.get((name, kind))
        if self.rcode is not None:
            response.set_rcode(self.rcode)
        elif texts:
            response.answer.append(dns.rrset.from_text_list(question.name, 0, "IN", kind, texts))
        elif not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(response.to_wire(), addr)


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    """Run a server on a free port of 127.0.0.1."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(DnsServer, local_addr=("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()
