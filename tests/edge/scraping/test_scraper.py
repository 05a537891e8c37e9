from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import logging
import random
import ssl
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from msgspec import structs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_asgi_app
from prometheus_client.registry import Collector

from extproc.config.schema import ScrapeConfig, ScrapeTlsConfig, Seconds
from extproc.edge.process.tasks import Tasks
from extproc.edge.scraping import planner
from extproc.edge.scraping import source as scrape_source
from extproc.edge.scraping.engines import ENGINES
from extproc.edge.scraping.failures import ScrapeFailure
from extproc.edge.scraping.scraper import Scraper
from extproc.errors import ConfigError
from extproc.sim.model_server import ModelServerOptions, serve
from extproc.types import Endpoint, EndpointMetrics

IDLE = "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n"
BUSY = "vllm:num_requests_waiting 2\nvllm:num_requests_running 3\n"
WHOLE = "no selected metrics page from this engine: whole pages for now"
MODELS = '{"data": [{"id": "tiny", "parent": null}, {"id": "alpha", "parent": "tiny"}]}'
FAST = ScrapeConfig(
    busy_interval=Seconds(0.005),
    idle_interval=Seconds(0.01),
    cost_factor=0,
    timeout=Seconds(5),
    models_path="",
)
RARE = ScrapeConfig(
    busy_interval=Seconds(0.005), idle_interval=Seconds(3600), cost_factor=0, timeout=Seconds(5), models_path=""
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Sink:
    """Records what it is told and lets a test wait for it."""

    def __init__(self) -> None:
        self.observed: list[tuple[str, EndpointMetrics]] = []
        self.failures: list[tuple[str, ScrapeFailure]] = []
        self.models: list[tuple[str, Mapping[str, str | None]]] = []
        self.restart_at: int | None = None
        self.break_at: int | None = None
        self.break_at_models = False
        self._changed = asyncio.Event()

    def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> bool:
        self.observed.append((endpoint_id, metrics))
        self._changed.set()
        if self.break_at is not None and self.break_at >= len(self.observed):
            raise RuntimeError("sink")
        return self.restart_at == len(self.observed)

    def observe_failure(self, endpoint_id: str, reason: ScrapeFailure, now: float) -> None:
        self.failures.append((endpoint_id, reason))
        self._changed.set()

    def observe_models(self, endpoint_id: str, models: Mapping[str, str | None], now: float) -> None:
        self.models.append((endpoint_id, models))
        self._changed.set()
        if self.break_at_models:
            raise RuntimeError("sink")

    def wake(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def serving(handler: Handler, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Endpoint]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield Endpoint("127.0.0.1", port)
    finally:
        await runner.cleanup()


async def at_once(_delay_s: float) -> None:
    """Stand in for the wait before a failed task runs again."""


@asynccontextmanager
async def scraping(
    sink: Sink, config: ScrapeConfig, *endpoints: Endpoint, tasks: Tasks | None = None
) -> AsyncIterator[Scraper]:
    scraper = Scraper(config, "vllm", sink, rng=random.Random(1), tasks=tasks or Tasks(sleep=at_once))
    scraper.set_endpoints(endpoints)
    try:
        yield scraper
    finally:
        await scraper.close()
        await scraper.close()


def page(text: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    return answer


@asynccontextmanager
async def raw(answer: bytes) -> AsyncIterator[Endpoint]:
    """Answer each request with these bytes and then close; without any, say nothing until the client has gone."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer:
            writer.write(answer)
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])


def self_signed(folder: Path) -> tuple[ssl.SSLContext, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
    begin = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    names = [x509.DNSName("engine.test"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(begin + dt.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path = folder / "key.pem"
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path, key_path)
    return context, path


async def test_scrapes_again_and_again_on_one_connection() -> None:
    sink = Sink()
    ports = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        assert request.headers["accept-encoding"] == "identity"
        return web.Response(text=BUSY)

    async with serving(answer) as endpoint, scraping(sink, FAST, endpoint):
        await sink.until(lambda: len(sink.observed) >= 5)
    name, metrics = sink.observed[0]
    assert name == endpoint.id
    assert (metrics.waiting, metrics.running) == (2, 3)
    assert metrics.scrape_s > 0
    assert len(ports) == 1
    assert sink.failures == []
    assert sink.models == []


async def test_a_hanging_endpoint_delays_nobody() -> None:
    sink = Sink()
    config = ScrapeConfig(
        busy_interval=Seconds(0.005), idle_interval=Seconds(0.005), cost_factor=0, timeout=Seconds(3600), models_path=""
    )
    async with raw(b"") as slow, serving(page(BUSY)) as good, scraping(sink, config, slow, good):
        await sink.until(lambda: len(sink.observed) >= 10)
    assert {name for name, _ in sink.observed} == {good.id}


async def test_reasons_of_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_source, "MAX_PAGE_BYTES", 100_000)

    async def redirect(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/other" if request.path != "/other" else "/")

    async def status(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text=IDLE)

    sink, patient = Sink(), structs.replace(FAST, timeout=Seconds(3600))
    refused = Endpoint("127.0.0.1", 1)
    async with (
        raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nvllm") as cut_off,
        raw(b"") as hanging,
        serving(redirect) as redirecting,
        serving(status) as failing,
        serving(page("x" * 200_000)) as large,
        serving(page("<html>")) as foreign,
    ):
        wanted = {
            hanging.id: ScrapeFailure.TIMEOUT,
            refused.id: ScrapeFailure.CONNECT,
            cut_off.id: ScrapeFailure.CONNECT,
            redirecting.id: ScrapeFailure.STATUS,
            failing.id: ScrapeFailure.STATUS,
            large.id: ScrapeFailure.TOO_LARGE,
            foreign.id: ScrapeFailure.PARSE,
        }
        others = (refused, cut_off, redirecting, failing, large, foreign)
        hasty = structs.replace(FAST, timeout=Seconds(0.05))
        async with scraping(sink, patient, *others), scraping(sink, hasty, hanging):
            await sink.until(lambda: {name for name, _ in sink.failures} >= set(wanted))
    assert dict(sink.failures) == wanted
    assert sink.observed == []


async def test_tls(tmp_path: Path) -> None:
    context, ca = self_signed(tmp_path)

    def config(tls: ScrapeTlsConfig) -> ScrapeConfig:
        return ScrapeConfig(
            scheme="https",
            tls=tls,
            busy_interval=Seconds(0.005),
            idle_interval=Seconds(0.01),
            cost_factor=0,
            models_path="",
        )

    async with serving(page(IDLE), tls=context) as endpoint, serving(page(IDLE)) as plain:
        for tls in (
            ScrapeTlsConfig(insecure_skip_verify=True),
            ScrapeTlsConfig(ca=str(ca)),
            ScrapeTlsConfig(ca=str(ca), server_name="engine.test"),
        ):
            sink = Sink()
            async with scraping(sink, config(tls), endpoint):
                await sink.until(lambda: len(sink.observed) >= 2)  # noqa: B023 - awaited within the loop
            assert sink.failures == []
        for tls, target in (
            (ScrapeTlsConfig(), endpoint),
            (ScrapeTlsConfig(ca=str(ca), server_name="other.test"), endpoint),
            (ScrapeTlsConfig(ca=str(ca)), plain),
        ):
            sink = Sink()
            async with scraping(sink, config(tls), target):
                await sink.until(lambda: len(sink.failures) >= 1)  # noqa: B023 - awaited within the loop
            assert sink.failures[0] == (target.id, ScrapeFailure.TLS)


async def test_a_ca_that_can_not_be_used_is_a_configuration_error(tmp_path: Path) -> None:
    config = ScrapeConfig(scheme="https", tls=ScrapeTlsConfig(ca=str(tmp_path / "none.pem")))
    with pytest.raises(ConfigError, match=r"pool\.scrape\.tls\.ca"):
        Scraper(config, "vllm", Sink())


async def test_path_port_and_headers() -> None:
    sink = Sink()
    seen: list[tuple[str, str | None]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((request.path_qs, request.headers.get("authorization")))
        return web.Response(text=IDLE)

    async with serving(answer) as served:
        config = ScrapeConfig(
            path="/prometheus/metrics?x=1",
            port=served.port,
            headers={"Authorization": "Bearer x"},
            models_path="",
        )
        async with scraping(sink, config, Endpoint("127.0.0.1", 1)):
            await sink.until(lambda: len(sink.observed) >= 1)
    assert seen == [("/prometheus/metrics?x=1", "Bearer x")]


async def test_a_header_that_can_not_be_sent_is_a_failure() -> None:
    sink = Sink()
    config = ScrapeConfig(headers={"x": "a\r\nb"}, models_path="")
    async with serving(page(IDLE)) as endpoint, scraping(sink, config, endpoint):
        await sink.until(lambda: len(sink.failures) >= 1)
    assert sink.failures[0] == (endpoint.id, ScrapeFailure.CONNECT)


async def test_models_are_asked_for_rarely_and_anew_after_a_restart() -> None:
    sink = Sink()
    sink.restart_at = 4
    pages_before: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            pages_before.append(len(sink.observed))
            return web.Response(text=MODELS)
        return web.Response(text=BUSY)

    config = ScrapeConfig(busy_interval=Seconds(0.005), cost_factor=0)
    async with serving(answer) as endpoint, scraping(sink, config, endpoint):
        await sink.until(lambda: len(sink.observed) >= 8 and len(sink.models) >= 2)
    assert sink.models == [(endpoint.id, {"tiny": None, "alpha": "tiny"})] * 2
    first, second = pages_before
    assert first >= 1
    assert second >= 4


async def test_a_request_wakes_an_idle_endpoint_and_only_that() -> None:
    sink = Sink()
    async with serving(page(IDLE)) as one, serving(page(IDLE)) as other, scraping(sink, RARE, one, other) as scraper:
        await sink.until(lambda: len(sink.observed) == 2)
        scraper.mark_busy(one.id)
        scraper.mark_busy("10.0.0.1:1")
        await sink.until(lambda: len(sink.observed) >= 5)
    names = [name for name, _ in sink.observed]
    assert names.count(other.id) == 1


async def test_models_without_metrics_and_metrics_without_models() -> None:
    sink = Sink()

    async def only_models(request: web.Request) -> web.StreamResponse:
        return web.Response(text=MODELS, status=200 if request.path == "/v1/models" else 404)

    async with serving(only_models) as one, serving(page(IDLE)) as other, scraping(sink, ScrapeConfig(), one, other):
        await sink.until(lambda: bool(sink.models and sink.observed))
    assert sink.models == [(one.id, {"tiny": None, "alpha": "tiny"})]
    assert sink.failures == [(one.id, ScrapeFailure.STATUS)]


async def test_a_sink_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sink, tasks = Sink(), Tasks(sleep=at_once)
    sink.break_at = 2
    async with serving(page(BUSY)) as endpoint, scraping(sink, FAST, endpoint, tasks=tasks):
        await sink.until(lambda: len(sink.observed) >= 4)
        assert tasks.failures["scrape"] == 2
    failed = [vars(record)["of"] for record in caplog.records if record.levelname == "ERROR"]
    assert failed == [endpoint.id] * 2


async def test_endpoints_come_and_go() -> None:
    sink = Sink()
    async with serving(page(BUSY)) as one, serving(page(BUSY)) as other, scraping(sink, FAST, one) as scraper:
        await sink.until(lambda: len(sink.observed) >= 2)
        scraper.set_endpoints([one, other])
        await sink.until(lambda: other.id in {name for name, _ in sink.observed})
        scraper.set_endpoints([Endpoint(one.address, one.port, uid="new")])
        sink.observed.clear()
        await sink.until(lambda: len(sink.observed) >= 4)
        assert {name for name, _ in sink.observed} == {one.id}


class Sleepers(Tasks):
    """Starts tasks that do nothing, and keeps them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.started: list[asyncio.Task[None]] = []
        self.all_started = asyncio.Event()
        self._count = count

    def start(
        self, kind: str, work: Callable[[], Coroutine[Any, Any, None]], *, detail: str = ""
    ) -> asyncio.Task[None]:
        task = super().start(kind, self._sleep_forever, detail=detail)
        self.started.append(task)
        if len(self.started) == self._count:
            self.all_started.set()
        return task

    async def _sleep_forever(self) -> None:
        await asyncio.Event().wait()


async def over_turns(turns: int, look: Callable[[], int]) -> list[int]:
    """Look once in each of so many turns of the event loop."""
    loop = asyncio.get_running_loop()
    seen, done = [], loop.create_future()

    def turn() -> None:
        seen.append(look())
        if len(seen) == turns:
            done.set_result(None)
        else:
            loop.call_soon(turn)

    turn()
    await done
    return seen


async def test_the_tasks_of_a_large_pool_end_in_several_turns_of_the_loop() -> None:
    pool = [Endpoint(f"10.0.{number // 100}.{number % 100 + 1}", 8000) for number in range(250)]
    tasks = Sleepers(len(pool))
    async with scraping(Sink(), structs.replace(RARE, budget=1e6), *pool, tasks=tasks) as scraper:
        await tasks.all_started.wait()
        scraper.set_endpoints([])
        ending = await over_turns(4, lambda: sum(task.cancelling() > 0 for task in tasks.started))
        assert ending == [100, 200, 250, 250]


async def test_close_ends_what_set_endpoints_has_not() -> None:
    pool = [Endpoint(f"10.0.{number // 100}.{number % 100 + 1}", 8000) for number in range(250)]
    tasks = Sleepers(len(pool))
    async with scraping(Sink(), structs.replace(RARE, budget=1e6), *pool, tasks=tasks) as scraper:
        await tasks.all_started.wait()
        scraper.set_endpoints(pool[:1])
        await scraper.close()
        assert all(task.cancelled() for task in tasks.started)


async def test_reconfigure_switches_engine_and_scraping() -> None:
    sink, asked = Sink(), 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.Response(text=BUSY + "trtllm_num_requests_waiting 9\n")

    async with serving(answer) as endpoint, serving(page(BUSY)) as other:
        off = ScrapeConfig(enabled=False)
        async with scraping(sink, off, endpoint) as scraper:
            scraper.reconfigure(FAST, "vllm")
            await sink.until(lambda: len(sink.observed) >= 1)
            scraper.reconfigure(FAST, "vllm")
            scraper.reconfigure(FAST, "trtllm")
            await sink.until(lambda: sink.observed[-1][1].waiting == 9)
            scraper.reconfigure(off, "trtllm")
            seen = asked
            async with scraping(sink, FAST, other):
                await sink.until(lambda: sum(name == other.id for name, _ in sink.observed) >= 10)
            assert asked <= seen + 1, "one may have been under way"
        assert sink.failures == []


async def test_connections_are_made_anew_where_that_is_asked_for() -> None:
    sink, ports = Sink(), set()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        return web.Response(text=BUSY)

    async with serving(answer) as endpoint, scraping(sink, FAST, endpoint) as scraper:
        await sink.until(lambda: len(sink.observed) >= 2)
        scraper.reconfigure(FAST, "vllm", even_if_same=True)
        await sink.until(lambda: len(ports) == 2)


async def test_the_budget_counts_the_cpu_time_of_scrapes() -> None:
    sink = Sink()
    async with serving(page(BUSY)) as endpoint, scraping(sink, structs.replace(FAST, budget=1e-6), endpoint) as scraper:
        assert scraper.stretch == 1.0
        await sink.until(lambda: len(sink.observed) >= 1)
        # Between 0.1 ms and a second of CPU every 5 ms.
        assert 0.02e6 < scraper.stretch < 200e6
        scraper.reconfigure(FAST, "vllm")
        await sink.until(lambda: len(sink.observed) >= 4)
        scraper.set_endpoints([])
        assert scraper.stretch == 1.0


class HangingModels:
    """Takes every question and answers none; tells which connections are open."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.asked = 0
        self.open = 0
        self.most_open = 0
        self._talks: list[asyncio.StreamWriter] = []

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._talks.append(writer)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        self._sink.wake()
        await reader.read()
        self.open -= 1
        self._sink.wake()
        writer.close()

    def answer(self) -> None:
        """Answer the last question after all."""
        self._talks[-1].write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(MODELS), MODELS.encode()))


@asynccontextmanager
async def hanging_models(
    sink: Sink, metrics: Handler | None = None
) -> AsyncIterator[tuple[HangingModels, Endpoint, int]]:
    """Serve metrics at one port, the last of the three, and at the endpoint's own nothing but silence."""
    models = HangingModels(sink)
    async with (
        serving(metrics or page(BUSY)) as other,
        await asyncio.start_server(models.talk, "127.0.0.1", 0) as server,
    ):
        yield models, Endpoint("127.0.0.1", server.sockets[0].getsockname()[1]), other.port
        # Whoever asked has been closed: nothing may be left open.
        await sink.until(lambda: models.open == 0)


async def test_models_that_hang_delay_no_metrics() -> None:
    sink = Sink()
    async with hanging_models(sink) as (models, endpoint, port):
        # The fetch that hangs outlives `models_interval`: another may not begin at the same time.
        config = structs.replace(
            FAST, port=port, timeout=Seconds(3600), models_path="/v1/models", models_interval=Seconds(0.001)
        )
        async with scraping(sink, config, endpoint):
            await sink.until(lambda: models.asked == 1)
            begin = len(sink.observed)
            await sink.until(lambda: len(sink.observed) >= begin + 20)
            assert (models.asked, models.open, models.most_open) == (1, 1, 1)
            assert sink.failures == []
            models.answer()
            await sink.until(lambda: models.asked == 2)
            assert sink.models == [(endpoint.id, {"tiny": None, "alpha": "tiny"})]
            assert models.most_open == 1


async def test_models_that_time_out_are_asked_again_on_another_connection(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=planner.__name__)
    sink = Sink()
    async with hanging_models(sink) as (models, endpoint, port):
        config = structs.replace(
            FAST, port=port, timeout=Seconds(0.3), models_path="/v1/models", models_interval=Seconds(0.001)
        )
        async with scraping(sink, config, endpoint):
            await sink.until(lambda: models.asked >= 2)
    assert {vars(record)["reason"] for record in caplog.records if record.message == "models unknown"} == {"timeout"}
    assert models.most_open == 1


async def test_a_restart_during_a_look_at_the_models_has_them_asked_for_anew() -> None:
    sink = Sink()
    sink.restart_at = 4
    async with hanging_models(sink) as (models, endpoint, port):
        config = structs.replace(FAST, port=port, timeout=Seconds(3600), models_path="/v1/models")
        async with scraping(sink, config, endpoint):
            await sink.until(lambda: len(sink.observed) >= 6 and models.asked == 1)
            models.answer()
            await sink.until(lambda: models.asked == 2)
            assert len(sink.models) == 1
            assert models.most_open == 1


async def leave(scraper: Scraper) -> None:
    scraper.set_endpoints([])


async def switch_off(scraper: Scraper) -> None:
    scraper.reconfigure(ScrapeConfig(enabled=False), "vllm")


@pytest.mark.parametrize("end", [leave, switch_off, Scraper.close])
async def test_a_fetch_of_the_models_ends_with_its_endpoint(end: Callable[[Scraper], Awaitable[None]]) -> None:
    sink = Sink()
    async with hanging_models(sink) as (models, endpoint, port):
        config = structs.replace(FAST, port=port, timeout=Seconds(3600), models_path="/v1/models")
        async with scraping(sink, config, endpoint) as scraper:
            await sink.until(lambda: models.asked == 1)
            await end(scraper)
            await sink.until(lambda: models.open == 0)
    assert (models.asked, sink.models) == (1, [])


async def test_a_reconfigured_scraper_looks_at_the_models_anew() -> None:
    sink = Sink()
    async with hanging_models(sink) as (models, endpoint, port):
        config = structs.replace(FAST, port=port, timeout=Seconds(3600), models_path="/v1/models")
        async with scraping(sink, config, endpoint) as scraper:
            await sink.until(lambda: models.asked == 1)
            scraper.reconfigure(structs.replace(config, timeout=Seconds(1800)), "vllm")
            await sink.until(lambda: models.asked == 2)
            assert (models.open, models.most_open) == (1, 1)


async def test_models_that_break_the_sink_harm_no_scrape() -> None:
    sink, tasks = Sink(), Tasks(sleep=at_once)
    sink.break_at_models = True

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=MODELS if request.path == "/v1/models" else BUSY)

    config = structs.replace(FAST, models_path="/v1/models")
    async with serving(answer) as endpoint, scraping(sink, config, endpoint, tasks=tasks):
        await sink.until(lambda: len(sink.models) == 2)
        sink.break_at_models = False
        seen = len(sink.observed)
        await sink.until(lambda: len(sink.observed) >= seen + 3)
        assert tasks.failures["models"] == 2
        assert tasks.failures["scrape"] == 0
    assert sink.failures == []


async def test_close_before_anything_was_fetched() -> None:
    scraper = Scraper(FAST, "vllm", Sink(), clock=time.monotonic)
    scraper.reconfigure(RARE, "vllm")
    await scraper.close()


# Only the families in use


class Vllm:
    """vLLM's metrics: its whole page at the exact path, below it the one that Python's Prometheus client writes.

    The client is the real one, in its own process' mode or, with `multiprocess`, as SGLang and TensorRT-LLM use it: with
    one collector that names nothing.
    """

    def __init__(self, *, multiprocess: bool = False, without_names: bool = False) -> None:
        self.inner = CollectorRegistry()
        self.registry = (
            CollectorRegistry(support_collectors_without_names=without_names) if multiprocess else self.inner
        )
        if multiprocess:
            self.registry.register(Everything(self.inner))
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            Gauge(name, "A gauge.", ["model_name"], registry=self.inner).labels("tiny").set(0.5)
        self.tokens = Counter("vllm:prompt_tokens", "A counter.", ["model_name"], registry=self.inner).labels("tiny")
        for number in range(20):
            Histogram(f"vllm:histogram_{number}", "Of no use here.", registry=self.inner).observe(number)
        self.whole = make_asgi_app(self.registry)
        self.asked: Tally[bool] = Tally()
        """How often for the whole page (False) and for a selected one (True)."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked["name[]" in request.query] += 1
        below = request.path != "/metrics"
        query = request.url.raw_query_string.encode() if below else b""
        headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.whole({"type": "http", "query_string": query, "headers": headers}, receive, send)
        return web.Response(status=sent[0]["status"], body=sent[1]["body"])


class Everything(Collector):
    """As `MultiProcessCollector`: gives all families, and says the name of none beforehand."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Any:
        yield from self._registry.collect()


def same(metrics: EndpointMetrics, other: EndpointMetrics) -> bool:
    return replace(metrics, scrape_s=0.0) == replace(other, scrape_s=0.0)


@pytest.mark.parametrize("engine", [Vllm(), Vllm(multiprocess=True, without_names=True)], ids=["own", "multiprocess"])
async def test_an_engine_that_selects_is_asked_for_its_whole_page_once(engine: Vllm) -> None:
    sink = Sink()
    async with serving(engine.answer) as endpoint, scraping(sink, FAST, endpoint) as scraper:
        assert not scraper.selects(endpoint.id)
        assert not scraper.selects("10.0.0.1:1")
        await sink.until(lambda: len(sink.observed) >= 5)
        assert scraper.selects(endpoint.id)
        engine.tokens.inc(7)
        seen = len(sink.observed)
        await sink.until(lambda: len(sink.observed) >= seen + 2)
    first, last = sink.observed[0][1], sink.observed[-1][1]
    assert first.prompt_tokens_total == 0
    assert same(last, replace(first, prompt_tokens_total=7))
    assert first.running == 0.5
    assert first.models == {"tiny"}
    assert engine.asked[False] == 1
    assert sink.failures == []


async def test_what_begins_later_is_asked_for_all_the_same() -> None:
    sink = Sink()
    engine = Vllm()
    async with serving(engine.answer) as endpoint, scraping(sink, FAST, endpoint) as scraper:
        await sink.until(lambda: scraper.selects(endpoint.id))
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        lora = Gauge("vllm:lora_requests_info", "Adapters.", labels, registry=engine.inner)
        lora.labels("4", "alpha", "").set(1.8e9)
        await sink.until(lambda: sink.observed[-1][1].lora_running == frozenset({"alpha"}))
        assert scraper.selects(endpoint.id)
    assert engine.asked[False] == 1


async def test_the_model_server_selects_as_vllm_does() -> None:
    sink = Sink()
    server = await serve(ModelServerOptions(port=0, loras=("alpha",), pad_metrics=True))
    endpoint = Endpoint("127.0.0.1", server.port)
    async with scraping(sink, FAST, endpoint) as scraper:
        await sink.until(lambda: len(sink.observed) >= 3)
        assert scraper.selects(endpoint.id)
    await server.stop()
    assert all(same(metrics, sink.observed[0][1]) for _, metrics in sink.observed)
    assert sink.failures == []


BIG = BUSY + "# what nobody reads\n" * 100


def answers(selected: web.Response | None) -> Callable[[], web.Response]:
    def make() -> web.Response:
        if selected is None:
            return web.Response(text=BIG)
        return web.Response(status=selected.status, text=selected.text, headers=selected.headers)

    return make


@pytest.mark.parametrize(
    ("selected", "why"),
    [
        (answers(None), f"{len(BIG)} bytes, the whole page {len(BIG)}"),
        (answers(web.Response(status=404, text="{}")), "status 404"),
        (answers(web.Response(status=307, headers={"location": "/metrics"})), "status 307"),
        (answers(web.Response(text="<html>what?</html>")), "no signal of engine vllm in 18 bytes"),
        (answers(web.Response(text="")), "no signal of engine vllm in 0 bytes"),
        (answers(web.Response(text="vllm:num_requests_waiting 2\n")), "lacks running"),
        (answers(web.Response(text=BUSY, headers={"content-encoding": "br"})), "content-encoding br"),
    ],
    ids=["ignores", "404", "307", "garbage", "empty", "less", "encoded"],
)
async def test_an_engine_that_does_not_select_is_asked_once_and_scraped_all_the_same(
    selected: Callable[[], web.Response], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=planner.__name__)
    sink = Sink()
    asked: list[bool] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append("name[]" in request.query)
        return selected() if asked[-1] else web.Response(text=BIG)

    async with serving(answer) as endpoint, scraping(sink, FAST, endpoint) as scraper:
        await sink.until(lambda: len(sink.observed) >= 6)
        assert not scraper.selects(endpoint.id)
    assert asked[:4] == [False, True, False, False]
    assert asked.count(True) == 1
    assert {(metrics.waiting, metrics.running) for _, metrics in sink.observed} == {(2, 3)}
    assert sink.failures == []
    (record,) = caplog.records
    assert record.message == WHOLE
    assert vars(record)["detail"].startswith(why)


async def test_the_multiprocess_mode_that_selects_nothing_is_scraped_whole() -> None:
    """SGLang and TensorRT-LLM: `CollectorRegistry()` with a `MultiProcessCollector` gives an empty page."""
    sink = Sink()
    engine = Vllm(multiprocess=True)
    async with serving(engine.answer) as endpoint, scraping(sink, FAST, endpoint):
        await sink.until(lambda: len(sink.observed) >= 6)
    assert engine.asked[True] == 1
    assert sink.failures == []


async def test_whole_pages_where_selecting_is_switched_off_and_on_again() -> None:
    sink = Sink()
    engine = Vllm()
    async with (
        serving(engine.answer) as endpoint,
        scraping(sink, structs.replace(FAST, select=False), endpoint) as scraper,
    ):
        await sink.until(lambda: len(sink.observed) >= 4)
        assert engine.asked[True] == 0
        scraper.reconfigure(FAST, "vllm")
        await sink.until(lambda: scraper.selects(endpoint.id))
        scraper.reconfigure(structs.replace(FAST, select=False), "vllm")
        await sink.until(lambda: not scraper.selects(endpoint.id))


async def test_selecting_is_tried_anew_after_the_engine_was_down() -> None:
    sink = Sink()
    engine = Vllm()
    up, knows = True, False

    async def answer(request: web.Request) -> web.StreamResponse:
        if not up or (request.path != "/metrics" and not knows):
            return web.Response(status=503)
        return await engine.answer(request)

    async with serving(answer) as endpoint, scraping(sink, FAST, endpoint) as scraper:
        await sink.until(lambda: len(sink.observed) >= 4)
        assert not scraper.selects(endpoint.id)
        knows = True
        seen = len(sink.observed)
        await sink.until(lambda: len(sink.observed) >= seen + 4)
        assert not scraper.selects(endpoint.id)
        up = False
        await sink.until(lambda: bool(sink.failures))
        up = True
        await sink.until(lambda: scraper.selects(endpoint.id))
        # Down again: failures are those of the whole page, one for each turn.
        up = False
        failed = len(sink.failures)
        await sink.until(lambda: len(sink.failures) > failed)
        assert not scraper.selects(endpoint.id)


async def test_a_selected_page_that_hangs_is_replaced_in_the_same_turn() -> None:
    sink = Sink()
    engine = Vllm()
    hang, go_on = False, asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal hang
        if hang and request.path != "/metrics":
            hang = False
            await go_on.wait()
        return await engine.answer(request)

    config = structs.replace(FAST, timeout=Seconds(1.5))
    async with serving(answer) as endpoint, scraping(sink, config, endpoint) as scraper:
        await sink.until(lambda: scraper.selects(endpoint.id))
        hang = True
        await sink.until(lambda: engine.asked[False] == 2)
        await sink.until(lambda: scraper.selects(endpoint.id))
        go_on.set()
    assert engine.asked[False] == 2
    assert sink.failures == []


async def test_every_family_of_the_engine_is_asked_for() -> None:
    sink = Sink()
    names: list[list[str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        names.append(request.query.getall("name[]", []))
        return web.Response(text=BIG)

    config = structs.replace(FAST, path="/metrics?view=all")
    async with serving(answer) as endpoint, scraping(sink, config, endpoint):
        await sink.until(lambda: len(names) >= 2)
    assert names[:2] == [[], list(ENGINES["vllm"].families)]
