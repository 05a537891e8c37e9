"""Which pages an endpoint has: addresses, queries, TLS and headers.

When a page is fetched is decided by `planner`, how it is fetched is the concern of `http_client`.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from extproc import __version__
from extproc.config.schema import ScrapeConfig
from extproc.edge.scraping.failures import ScrapeFailedError, ScrapeFailure
from extproc.edge.scraping.http_client import CpuMeter, KeptConnection, Origin, get_request
from extproc.errors import ConfigError, ConfigProblem
from extproc.types import Endpoint

__all__ = ["MAX_PAGE_BYTES", "EndpointPages", "Page", "selected_path", "tls_context"]

MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Some hundred times a vLLM page with all its histograms."""
_KEEPALIVE_S: Final = 4.0
"""Shorter than uvicorn's 5 s (vLLM, SGLang): the picker closes first, instead of writing into a connection that is closing."""
_HEADERS: Final = {"accept": "text/plain;version=0.0.4, */*;q=0.1", "user-agent": f"extproc/{__version__}"}


class Page:
    """One page of one endpoint: its request and its connection. Of the pages on one connection, one `fetch` at a time."""

    def __init__(
        self, connection: KeptConnection, origin: Origin, path: str, config: ScrapeConfig, *, timeout_s: float
    ) -> None:
        self._connection = connection
        self._origin = origin
        self._path = path
        self._headers = {**_HEADERS, **config.headers}
        self._timeout_s = timeout_s
        self._request = b""

    async def fetch(self) -> bytes:
        """Return the page, over a new connection where none is kept; ScrapeFailedError says why there is none."""
        try:
            if not self._request:
                self._request = get_request(self._origin, self._path, self._headers)
            return await self._connection.get(self._request, timeout_s=self._timeout_s, max_bytes=MAX_PAGE_BYTES)
        except ValueError as error:
            # A header of the configuration that can not be sent.
            raise ScrapeFailedError(ScrapeFailure.CONNECT, str(error)) from error

    async def close(self) -> None:
        """Close the connection, and wait until it is closed; the next `fetch` makes another."""
        await self._connection.close()


class EndpointPages:
    """The pages of one endpoint under one configuration.

    `metrics` is the whole metrics page, `selected` only the `families` of it; both use one connection. `models`, the list
    of models, has its own, so that it may be fetched at the same time. `meter` adds up the CPU time of all of them.
    """

    def __init__(
        self,
        config: ScrapeConfig,
        tls: ssl.SSLContext | None,
        endpoint: Endpoint,
        buffer: memoryview,
        families: Sequence[str] = (),
    ) -> None:
        self.meter = CpuMeter()

        def at(port: int) -> tuple[KeptConnection, Origin]:
            origin = Origin(endpoint.address, port, tls, config.tls.server_name)
            return KeptConnection(origin, buffer, self.meter, idle_s=_KEEPALIVE_S), origin

        timeout_s = float(config.timeout)
        metrics = at(config.port or endpoint.port)
        self.metrics = Page(*metrics, config.path, config, timeout_s=timeout_s)
        # Where it hangs the whole page is still to be fetched in the same scrape.
        self.selected = Page(*metrics, selected_path(config.path, families), config, timeout_s=timeout_s / 2)
        # The port of the configuration is that of the metrics page; models are listed where requests are served.
        self.models = Page(*at(endpoint.port), config.models_path, config, timeout_s=timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self.metrics.close()
        await self.models.close()


def selected_path(path: str, families: Sequence[str]) -> str:
    """Write the path of some families of the page at `path` (which may have a query): a slash behind it, and a name for each.

    The slash because vLLM and TensorRT-LLM have two pages: the one at the exact path knows no query (a route of
    prometheus-fastapi-instrumentator), everything below it is Python's Prometheus client, which does
    (vllm/entrypoints/serve/instrumentator/metrics.py; prometheus_client/exposition.py, `_bake_output`). Names are those of
    samples: of a counter `x` the client writes `x_total` only where that is named.
    """
    place, _, query = path.partition("#")[0].partition("?")
    names = [f"name%5B%5D={quote(family, safe=':')}" for family in families]
    return f"{place.removesuffix('/')}/?{'&'.join([query, *names] if query else names)}"


def tls_context(config: ScrapeConfig) -> ssl.SSLContext | None:
    """Make the TLS context of scrapes; None for plain HTTP. ConfigError: the CA file can not be used. Reads a file."""
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
