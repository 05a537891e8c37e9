"""Which pages an endpoint has, and what a failed fetch is called."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from aiohttp import web

from extproc.config.schema import ScrapeConfig, ScrapeTlsConfig
from extproc.edge.scraping.failures import ScrapeFailedError, ScrapeFailure
from extproc.edge.scraping.http_client import read_buffer
from extproc.edge.scraping.source import EndpointPages, selected_path, tls_context
from extproc.errors import ConfigError
from extproc.types import Endpoint
from tests.edge.scraping.test_scraper import page, raw, self_signed, serving


def pages(endpoint: Endpoint, config: ScrapeConfig, tls: ssl.SSLContext | None = None) -> EndpointPages:
    made = EndpointPages(config, tls, endpoint, read_buffer())
    made.meter.start()
    return made


async def test_each_page_has_its_own_connection() -> None:
    ports = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        assert request.headers["user-agent"].startswith("extproc/")
        assert request.headers["accept"].startswith("text/plain;version=0.0.4")
        assert request.headers["x"] == "y"
        return web.Response(text=request.path_qs)

    async with serving(answer) as endpoint:
        made = pages(endpoint, ScrapeConfig(path="/m?a=b", headers={"X": "y"}))
        assert await made.metrics.fetch() == b"/m?a=b"
        assert await made.models.fetch() == b"/v1/models"
        assert await made.metrics.fetch() == b"/m?a=b"
        await made.models.close()
        assert await made.models.fetch() == b"/v1/models"
        assert await made.metrics.fetch() == b"/m?a=b"
        await made.close()
    metrics, models, *rest = ports
    assert metrics != models
    assert rest == [metrics, rest[1], metrics]
    assert rest[1] not in {metrics, models}


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/metrics", "/metrics/?name%5B%5D=vllm:a&name%5B%5D=b_total"),
        ("/metrics/", "/metrics/?name%5B%5D=vllm:a&name%5B%5D=b_total"),
        ("/p/metrics?x=1&y", "/p/metrics/?x=1&y&name%5B%5D=vllm:a&name%5B%5D=b_total"),
        ("/?#top", "/?name%5B%5D=vllm:a&name%5B%5D=b_total"),
    ],
)
def test_families_are_named_behind_a_slash(path: str, wanted: str) -> None:
    assert selected_path(path, ("vllm:a", "b_total")) == wanted


async def test_the_selected_page_comes_by_the_connection_of_the_whole_one() -> None:
    ports = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.Response(text=request.path + "".join(request.query.getall("name[]", [])))

    async with serving(answer) as endpoint:
        made = EndpointPages(ScrapeConfig(), None, endpoint, read_buffer(), ("a", "b:c"))
        made.meter.start()
        assert await made.metrics.fetch() == b"/metrics"
        assert await made.selected.fetch() == b"/metrics/ab:c"
        assert await made.metrics.fetch() == b"/metrics"
        await made.close()
    assert len(set(ports)) == 1


async def test_models_are_listed_where_requests_are_served() -> None:
    async with serving(page("metrics")) as metrics, serving(page("models")) as endpoint:
        made = pages(endpoint, ScrapeConfig(port=metrics.port))
        assert await made.metrics.fetch() == b"metrics"
        assert await made.models.fetch() == b"models"
        await made.close()


async def test_faults_and_headers_that_can_not_be_written() -> None:
    async with raw(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n") as endpoint:
        for config, reason in (
            (ScrapeConfig(), ScrapeFailure.PARSE),
            (ScrapeConfig(headers={"x": "a\r\nb"}), ScrapeFailure.CONNECT),
        ):
            made = pages(endpoint, config)
            with pytest.raises(ScrapeFailedError) as caught:
                await made.metrics.fetch()
            assert caught.value.reason is reason
            await made.close()


async def test_tls_by_configuration(tmp_path: Path) -> None:
    context, ca = self_signed(tmp_path)
    assert tls_context(ScrapeConfig()) is None
    async with serving(page("metrics"), tls=context) as endpoint:
        for tls in (
            ScrapeTlsConfig(insecure_skip_verify=True),
            ScrapeTlsConfig(ca=str(ca)),
            ScrapeTlsConfig(ca=str(ca), server_name="engine.test"),
        ):
            config = ScrapeConfig(scheme="https", tls=tls)
            made = pages(endpoint, config, tls_context(config))
            assert await made.metrics.fetch() == b"metrics"
            await made.close()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_that_can_not_be_used(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    config = ScrapeConfig(scheme="https", tls=ScrapeTlsConfig(ca=str(path)))
    with pytest.raises(ConfigError, match=r"pool\.scrape\.tls\.ca"):
        tls_context(config)
