"""Where the pages of one endpoint come from: addresses, TLS and headers of the configuration, and what a failed fetch is called.

When a page is asked for is `scrape`'s concern, how it is fetched `http_client`'s.
"""

from __future__ import annotations

import enum
import ssl
from typing import Final

from extproc import __version__
from extproc.config.schema import ScrapeConfig
from extproc.edge.http_client import CpuMeter, FetchError, FetchFault, KeptConnection, Origin, get_request
from extproc.errors import ConfigError, ConfigProblem
from extproc.pool.page import PageMemory
from extproc.vocabulary import Endpoint

__all__ = ["MAX_PAGE_BYTES", "EndpointPages", "Page", "ScrapeFailedError", "ScrapeFailure", "tls_context"]

MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
"""A hundred times a vLLM page with all its histograms."""
_KEEPALIVE_S: Final = 4.0
"""Shorter than uvicorn's 5 s (vLLM, SGLang): we let go first, instead of writing into a connection that is closing."""
_HEADERS: Final = {"accept": "text/plain;version=0.0.4, */*;q=0.1", "user-agent": f"extproc/{__version__}"}


class ScrapeFailure(enum.Enum):
    """Why a scrape failed; the value is a metric label."""

    TIMEOUT = "timeout"
    CONNECT = "connect"
    """No connection, or it broke before the page was complete."""
    STATUS = "status"
    """Another status than 200; a redirect too."""
    TLS = "tls"
    PARSE = "parse"
    """A page without any signal of the configured engine."""
    TOO_LARGE = "too_large"


_REASONS: Final = {
    FetchFault.TIMEOUT: ScrapeFailure.TIMEOUT,
    FetchFault.CONNECT: ScrapeFailure.CONNECT,
    FetchFault.STATUS: ScrapeFailure.STATUS,
    FetchFault.TLS: ScrapeFailure.TLS,
    FetchFault.ENCODING: ScrapeFailure.PARSE,
    FetchFault.TOO_LARGE: ScrapeFailure.TOO_LARGE,
}


class ScrapeFailedError(Exception):
    """One scrape that told us nothing."""

    def __init__(self, reason: ScrapeFailure, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Page:
    """One page of one endpoint: where it is, and the connection it comes by, which nothing else uses."""

    def __init__(self, origin: Origin, path: str, config: ScrapeConfig, buffer: memoryview, meter: CpuMeter) -> None:
        self._origin = origin
        self._path = path
        self._config = config
        self._connection = KeptConnection(origin, buffer, meter, idle_s=_KEEPALIVE_S)
        self._request = b""

    async def fetch(self) -> bytes:
        """Get the page, over a new connection where none is kept; ScrapeFailedError says why not."""
        config = self._config
        try:
            if not self._request:
                self._request = get_request(self._origin, self._path, {**_HEADERS, **config.headers})
            return await self._connection.get(self._request, timeout_s=float(config.timeout), most_bytes=MAX_PAGE_BYTES)
        except FetchError as error:
            raise ScrapeFailedError(_REASONS[error.fault], str(error)) from error
        except ValueError as error:
            # A header that can not be written down.
            raise ScrapeFailedError(ScrapeFailure.CONNECT, str(error)) from error

    async def close(self) -> None:
        """Let go of the connection, and wait until it is closed; the next `fetch` makes another."""
        await self._connection.close()


class EndpointPages:
    """The pages of one endpoint as one configuration finds them.

    They may be fetched at the same time, each over its own connection. `meter` adds up what both cost.
    """

    def __init__(
        self, config: ScrapeConfig, tls: ssl.SSLContext | None, endpoint: Endpoint, buffer: memoryview
    ) -> None:
        self.meter = CpuMeter()
        self.memory = PageMemory()
        """How its metrics pages are laid out."""

        def page(port: int, path: str) -> Page:
            origin = Origin(endpoint.address, port, tls, config.tls.server_name)
            return Page(origin, path, config, buffer, self.meter)

        self.metrics = page(config.port or endpoint.port, config.path)
        # The port of the configuration is that of the metrics page; models are listed where requests are served.
        self.models = page(endpoint.port, config.models_path)

    async def close(self) -> None:
        """Let go of the connections."""
        await self.metrics.close()
        await self.models.close()


def tls_context(config: ScrapeConfig) -> ssl.SSLContext | None:
    """Build what verifies the endpoints' certificates; None for plain HTTP."""
    if config.scheme != "https":
        return None
    try:
        context = ssl.create_default_context(cafile=config.tls.ca or None)
    except (OSError, ssl.SSLError) as error:
        problem = ConfigProblem(
            "pool.scrape.tls.ca", f"can not be used: {error}", "name a readable PEM file with a CA certificate"
        )
        raise ConfigError((problem,)) from error
    if config.tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
