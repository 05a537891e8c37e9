"""Host names and SRV records to addresses: the system's resolver, or one given DNS server.

Distinguishes an answer, the answer that there is nothing (`NoAddressesError`), and no answer (`ResolveError`). How often a
name is resolved, and what follows, is decided in `sources`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING, Final, Literal, Protocol

from extproc.errors import ExtprocError

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver as AsyncResolver

__all__ = ["DnsResolver", "Family", "NoAddressesError", "ResolveError", "Resolver", "SystemResolver", "sort_addresses"]

Family = Literal["address", "A", "AAAA"]
"""`address`: IPv4 where there is any, else IPv6: the two addresses of a dual-stack server are one server."""

_TIMEOUT_S: Final = 5.0
"""For one look-up with all its retries; as long as the shortest interval between two."""
_FAMILIES: Final = {"address": socket.AF_UNSPEC, "A": socket.AF_INET, "AAAA": socket.AF_INET6}
_NOTHING: Final = frozenset(
    code
    for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY")  # not every platform has all three
    if (code := getattr(socket, name, None)) is not None
)


class ResolveError(ExtprocError):
    """No answer: the server failed, refused, or was not reached."""


class NoAddressesError(ResolveError):
    """The answer is that the name does not exist, or has no address of the family asked for."""


class Resolver(Protocol):
    """What discovery looks up; raises only ResolveError and NoAddressesError."""

    async def addresses(self, host: str, family: Family) -> list[str]:
        """Return the addresses of a name, sorted, without repeats; never empty."""
        ...

    async def services(self, name: str) -> list[tuple[str, int]]:
        """Return (target, port) of a name's SRV records of the lowest priority number, sorted; never empty."""
        ...


def sort_addresses(found: set[str], family: Family) -> list[str]:
    """Order addresses by number and keep those of the family; raises NoAddressesError where none is left."""
    parsed = sorted((ipaddress.ip_address(text) for text in found), key=lambda ip: (ip.version, int(ip)))
    versions = {"A": {4}, "AAAA": {6}}.get(family, {parsed[0].version} if parsed else set())
    kept = [str(ip) for ip in parsed if ip.version in versions]
    if not kept:
        raise NoAddressesError("no address")
    return kept


class SystemResolver:
    """The system's resolver: `/etc/hosts`, `/etc/resolv.conf` and search domains."""

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._dns: DnsResolver | None = None

    async def addresses(self, host: str, family: Family) -> list[str]:
        """Call `getaddrinfo` in a thread of the loop's executor."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await loop.getaddrinfo(host, None, family=_FAMILIES[family], type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            kind = NoAddressesError if error.errno in _NOTHING else ResolveError
            raise kind(error.strerror or str(error)) from error
        except TimeoutError as error:
            raise ResolveError(f"no answer within {self._timeout_s:g} s") from error
        except (OSError, UnicodeError) as error:  # a name that cannot be encoded
            raise ResolveError(str(error)) from error
        # A link-local address carries its interface (`%eth0`); it cannot be reached from other hosts.
        return sort_addresses({str(entry[4][0]) for entry in found if "%" not in str(entry[4][0])}, family)

    async def services(self, name: str) -> list[tuple[str, int]]:
        """Query the servers of `/etc/resolv.conf`: `getaddrinfo` has no SRV records."""
        if self._dns is None:
            self._dns = DnsResolver(timeout_s=self._timeout_s)
        return await self._dns.services(name)


class DnsResolver:
    """Direct DNS queries, to the servers of `/etc/resolv.conf` or to one given server."""

    def __init__(self, server: str = "", port: int = 53, timeout_s: float = _TIMEOUT_S) -> None:
        self._server = server
        self._port = port
        self._timeout_s = timeout_s

    async def addresses(self, host: str, family: Family) -> list[str]:
        """Query A and, if no A record exists and the family allows it, AAAA records."""
        found: set[str] = set()
        wanted = ("A", "AAAA") if family == "address" else (family,)
        for kind in wanted:
            try:
                found.update(await self._ask(host, kind))
            except NoAddressesError:
                continue
            break
        return sort_addresses(found, family)

    async def services(self, name: str) -> list[tuple[str, int]]:
        """Query SRV records (RFC 2782); their weight is ignored, because the strategy decides."""
        records = [text.split() for text in await self._ask(name, "SRV")]
        found = [(int(priority), target.rstrip("."), int(port)) for priority, _, port, target in records]
        lowest = min(priority for priority, _, _ in found)
        kept = {(target, port) for priority, target, port in found if priority == lowest and target and port}
        if not kept:  # the target "." means that the service is not available
            raise NoAddressesError("the service is not available")
        return sorted(kept)

    async def _ask(self, name: str, kind: str) -> list[str]:
        from dns import exception, resolver

        try:
            answer = await self._resolver().resolve(name, kind, search=not self._server, lifetime=self._timeout_s)
        except (resolver.NXDOMAIN, resolver.NoAnswer) as error:
            raise NoAddressesError("no such name, or no record of this type") from error
        except (exception.DNSException, OSError, UnicodeError, ValueError) as error:
            raise ResolveError(f"{type(error).__name__}: {error}") from error
        return [record.to_text() for record in answer]

    def _resolver(self) -> AsyncResolver:
        """Make a resolver for one look-up, so that a changed `/etc/resolv.conf` counts."""
        from dns.asyncresolver import Resolver as AsyncResolver

        if not self._server:
            return AsyncResolver()
        made = AsyncResolver(configure=False)
        made.nameservers = [self._server]
        made.port = self._port
        return made
