from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import itertools
import logging
import random
import ssl
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
from extproc.edge.scraping import scrape_interval as cadence
from extproc.edge.scraping import scraper as scrape
from extproc.edge.scraping import source as scrape_source
from extproc.edge.scraping.core_share import Wakefulness
from extproc.edge.scraping.engines import ENGINES
from extproc.edge.scraping.failures import ScrapeFailure
from extproc.edge.scraping.scraper import Scraper, ScrapeSink
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


@asynccontextmanager
async def scraping(sink: Sink, config: ScrapeConfig, *endpoints: Endpoint) -> AsyncIterator[Scraper]:
    tasks = Tasks(sleep=lambda _: asyncio.sleep(0))
    scraper = Scraper(config, "vllm", sink, rng=random.Random(1), tasks=tasks)
    scraper.set_endpoints(endpoints)
    try:
        yield scraper
    finally:
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


async def test_a_request_wakes_an_idle_endpoint_and_only_that() -> None:
    sink = Sink()
    async with serving(page(IDLE)) as one, serving(page(IDLE)) as other, scraping(sink, RARE, one, other) as scraper:
        await sink.until(lambda: len(sink.observed) == 2)
        # The callback runs before the next interval is planned: wait until both tasks rest.
        while any(target.due_at < scraper._clock() + 60 for target in scraper._targets.values()):
            await asyncio.sleep(0)
        scraper.mark_busy(one.id)
        scraper.mark_busy("10.0.0.1:1")
        await sink.until(lambda: len(sink.observed) >= 5)
    names = [name for name, _ in sink.observed]
    assert names.count(other.id) == 1


async def observed(sink: Sink, count: int) -> None:
    """Wait until the sink was told of so many pages."""
    await sink.until(lambda: len(sink.observed) == count)


async def at_rest(scraper: Scraper, count: int) -> None:
    """Wait until so many endpoints rest: what is due is planned after the sink was told."""
    while sum(target.joins_at < scrape._NEVER for target in scraper._targets.values()) < count:
        await asyncio.sleep(0)


async def test_others_go_along_with_one_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that stands still but for what the test says; real timers are an hour away."""
    monkeypatch.setattr(scrape, "_COMPANY", 3)
    monkeypatch.setattr(cadence, "first_delay_s", lambda *_: 0.0)
    sink, now = Sink(), 1000.0
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(serving(page(IDLE))) for _ in range(6)]
        early, late = endpoints[:5], endpoints[5]
        config = structs.replace(RARE, busy_interval=Seconds(60))
        scraper = Scraper(config, "vllm", sink, lambda: now, rng=random.Random(1))
        stack.push_async_callback(scraper.close)
        scraper.set_endpoints(early)
        await observed(sink, 5)
        now += 2600
        scraper.set_endpoints(endpoints)
        await observed(sink, 6)
        await at_rest(scraper, 6)
        now += 100  # four fifths of the first five's hour, less the fifteenth that is left of each, have gone by
        scraper.mark_busy(early[1].id)  # has a time of its own now, and is not due twice
        await observed(sink, 7)
        await at_rest(scraper, 6)
        for went in (3, 1):
            sink.observed.clear()
            first = next(target for target in scraper._targets.values() if target.joins_at <= now)
            first.due_at = now
            scraper._set_off(first)
            await observed(sink, went)
            await at_rest(scraper, 6)
            assert {name for name, _ in sink.observed}.isdisjoint({early[1].id, late.id})
        assert all(target.joins_at > now for target in scraper._targets.values())


async def test_a_thread_that_is_awake_scrapes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "first_delay_s", lambda *_: 0.0)
    sink, now = Sink(), 1000.0
    async with serving(page(IDLE)) as one, serving(page(IDLE)) as other:
        scraper = Scraper(RARE, "vllm", sink, lambda: now, rng=random.Random(1))
        scraper.set_endpoints([one, other])
        await observed(sink, 2)
        await at_rest(scraper, 2)
        now += 3000
        monkeypatch.setattr(Wakefulness, "share", lambda _self: 0.5)
        for number, endpoint in enumerate((one, other), 3):
            target = scraper._targets[endpoint.id]
            target.due_at = now
            scraper._set_off(target)
            await observed(sink, number)
            await at_rest(scraper, 2)
        assert [name for name, _ in sink.observed[2:]] == [one.id, other.id]
        now += 3000
        scraper._set_off(scraper._targets[one.id])
        assert len(scraper._resting) <= 2, "what has gone is forgotten all the same"
        await scraper.close()
        assert scraper._resting == []


def test_whoever_does_not_rest_is_not_woken() -> None:
    loop = asyncio.new_event_loop()
    alarm = loop.create_future()
    for _ in range(2):
        scrape._ring(alarm)
    scrape._ring(None)
    assert alarm.done()
    loop.close()


async def test_a_failing_endpoint_keeps_its_backoff() -> None:
    sink = Sink()
    dead = Endpoint("127.0.0.1", 1)
    async with scraping(sink, RARE, dead) as scraper:
        await sink.until(lambda: len(sink.failures) == 1)
        target = scraper._targets[dead.id]
        while target.due_at < scraper._clock() + 60:
            await asyncio.sleep(0)
        scraper.mark_busy(dead.id)
        assert target.due_at > scraper._clock() + 60
        assert target.joins_at == scrape._NEVER, "nor does it go along with others"


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


async def test_models_without_metrics_and_metrics_without_models(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=scrape.__name__)
    sink = Sink()

    async def only_models(request: web.Request) -> web.StreamResponse:
        return web.Response(text=MODELS, status=200 if request.path == "/v1/models" else 404)

    async with serving(only_models) as one, serving(page(IDLE)) as other, scraping(sink, ScrapeConfig(), one, other):
        await sink.until(lambda: bool(sink.models and sink.observed))
        while not any(record.message == "models unknown" for record in caplog.records):
            await asyncio.sleep(0)
    assert sink.models == [(one.id, {"tiny": None, "alpha": "tiny"})]
    assert sink.failures == [(one.id, ScrapeFailure.STATUS)]


async def test_failure_and_recovery_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=scrape.__name__)
    sink = Sink()

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=IDLE, status=503 if len(sink.failures) < 3 else 200)

    async with serving(answer) as endpoint, scraping(sink, FAST, endpoint):
        await sink.until(lambda: len(sink.observed) >= 3)
    told = [(record.levelname, record.message, vars(record)["endpoint"]) for record in caplog.records]
    assert told[:2] == [("WARNING", "scrape fails", endpoint.id), ("INFO", "scrape recovered", endpoint.id)]
    assert {message for _, message, _ in told[2:]} <= {WHOLE}
    assert vars(caplog.records[0])["reason"] == "status"
    assert vars(caplog.records[1])["failures"] == 3


async def test_a_sink_that_breaks_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.break_at = 2
    async with serving(page(BUSY)) as endpoint, scraping(sink, FAST, endpoint) as scraper:
        await sink.until(lambda: len(sink.observed) >= 4)
        assert scraper._tasks.failures["scrape"] == 2
    failed = [vars(record)["of"] for record in caplog.records if record.levelname == "ERROR"]
    assert failed == [endpoint.id] * 2


async def test_endpoints_come_and_go() -> None:
    sink = Sink()
    async with serving(page(BUSY)) as one, serving(page(BUSY)) as other, scraping(sink, FAST, one) as scraper:
        await sink.until(lambda: len(sink.observed) >= 2)
        first = scraper._targets[one.id]
        scraper.set_endpoints([one, other])
        assert scraper._targets[one.id] is first
        await sink.until(lambda: other.id in {name for name, _ in sink.observed})
        scraper.set_endpoints([Endpoint(one.address, one.port, uid="new")])
        assert scraper._targets[one.id] is not first
        sink.observed.clear()
        await sink.until(lambda: len(sink.observed) >= 4)
        assert {name for name, _ in sink.observed} == {one.id}
        scraper.set_endpoints([])
        assert scraper._demanded_cores == pytest.approx(0.0)
        await scraper.close()
        await scraper.close()


async def test_many_that_come_or_go_take_several_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_AT_ONCE", 3)
    first, second = ([Endpoint("127.0.0.1", 1, name=str(n), uid=f"{turn}{n}") for n in range(8)] for turn in "ab")
    first, second = (
        [replace(one, address=f"127.0.0.{n + 1}") for n, one in enumerate(them)] for them in (first, second)
    )
    scraper = Scraper(structs.replace(RARE, budget=1e-9), "vllm", Sink(), rng=random.Random(1))

    def running() -> int:
        return sum(target.task is not None for target in scraper._targets.values())

    scraper.set_endpoints(first)
    for count in (3, 6, 8, 8):
        assert running() == count
        await asyncio.sleep(0)
    old = list(scraper._targets.values())
    scraper.set_endpoints(second)
    turns = 0
    while any(target.task is not None for target in old) or running() < 8:
        turns += 1
        before = running(), sum(target.task is not None for target in old)
        await asyncio.sleep(0)
        after = running(), sum(target.task is not None for target in old)
        assert 0 < after[0] - before[0] + before[1] - after[1] <= 3
    assert turns == 5, "8 and 8, 3 at once"
    scraper.set_endpoints(first)
    await scraper.close()
    assert not scraper._departing
    await asyncio.sleep(0)
    assert running() == 0


async def test_what_is_found_of_an_endpoint_that_has_left_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its task has ended, which may take some turns of the loop."""
    monkeypatch.setattr(scrape, "_AT_ONCE", 0)
    sink, asked = Sink(), 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        sink.wake()
        if asked % 3 == 0:
            return web.Response(status=500)
        return web.Response(text=MODELS if request.path == "/v1/models" else BUSY)

    config = structs.replace(FAST, models_path="/v1/models", models_interval=Seconds(0.001))
    async with serving(answer) as endpoint, scraping(sink, config) as scraper:
        monkeypatch.setattr(scrape, "_AT_ONCE", 1)
        scraper.set_endpoints([endpoint])
        await sink.until(lambda: bool(sink.observed and sink.models and sink.failures))
        monkeypatch.setattr(scrape, "_AT_ONCE", 0)
        scraper.set_endpoints([])
        for told in (sink.observed, sink.models, sink.failures):
            told.clear()
        seen = asked
        await sink.until(lambda: asked >= seen + 10)
        assert (sink.observed, sink.models, sink.failures) == ([], [], [])


async def test_reconfigure_switches_engine_and_scraping() -> None:
    sink = Sink()
    async with serving(page(BUSY + "trtllm_num_requests_waiting 9\n")) as endpoint:
        off = ScrapeConfig(enabled=False)
        async with scraping(sink, off, endpoint) as scraper:
            assert scraper._targets[endpoint.id].task is None
            scraper.reconfigure(FAST, "vllm")
            await sink.until(lambda: len(sink.observed) >= 1)
            task = scraper._targets[endpoint.id].task
            scraper.reconfigure(FAST, "vllm")
            assert scraper._targets[endpoint.id].task is task
            scraper.reconfigure(FAST, "trtllm")
            await sink.until(lambda: sink.observed[-1][1].waiting == 9)
            scraper.reconfigure(off, "trtllm")
            assert scraper._targets[endpoint.id].task is None
        assert sink.failures == []


async def test_the_budget_stretches_the_intervals() -> None:
    sink = Sink()
    async with serving(page(BUSY)) as endpoint, scraping(sink, FAST, endpoint) as scraper:
        assert scraper.stretch == 1.0
        await sink.until(lambda: len(sink.observed) >= 5)
        target = scraper._targets[endpoint.id]
        # Our own CPU, as it was measured; 5 ms between two scrapes would take a good part of a core.
        assert target.cpu_s is not None
        assert 0.0001 < target.cpu_s < 1.0
        assert scraper._demanded_cores > 0.01
        tight = structs.replace(FAST, budget=1e-6)
        scraper.reconfigure(tight, "vllm")
        seen = len(sink.observed)
        await sink.until(lambda: len(sink.observed) > seen)
        target = scraper._targets[endpoint.id]
        while target.due_at < scraper._clock() + 10:
            await asyncio.sleep(0)
        assert scraper.stretch > 1000
        scraper.reconfigure(FAST, "vllm")
        seen = len(sink.observed)
        await sink.until(lambda: len(sink.observed) >= seen + 3)
        scraper.set_endpoints([])
        assert scraper.stretch == 1.0


class Leaping(Scraper):
    """Does not wait while it rests: its clock leaps to the time that is due."""

    def __init__(self, config: ScrapeConfig, sink: ScrapeSink) -> None:
        self.now_s = 0.0
        super().__init__(config, "vllm", sink, lambda: self.now_s, rng=random.Random(1))

    async def _rest(self, target: scrape._Target) -> None:
        self.now_s = max(self.now_s, target.due_at)
        await asyncio.sleep(0)


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


async def test_models_that_hang_leave_the_metrics_their_rhythm() -> None:
    """The issue's promise, counted in pages on the scraper's clock: no two are further apart than the wished 250 ms."""
    sink = Sink()
    ended_at_s: list[float] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        # A page takes 5 ms.
        scraper.now_s += 0.005
        ended_at_s.append(scraper.now_s)
        return web.Response(text=BUSY)

    async with hanging_models(sink, answer) as (models, endpoint, port):
        # The look that hangs outlives `models_interval`: another may not begin beside it.
        config = ScrapeConfig(port=port, cost_factor=0, timeout=Seconds(3600), models_interval=Seconds(5))
        scraper = Leaping(config, sink)
        scraper.set_endpoints([endpoint])
        await sink.until(lambda: models.asked == 1)
        begin = len(ended_at_s)
        await sink.until(lambda: len(ended_at_s) >= begin + 60)
        assert scraper.now_s > 10
        assert max(later - earlier for earlier, later in itertools.pairwise(ended_at_s)) <= 0.25
        assert (models.asked, models.open, models.most_open) == (1, 1, 1)
        assert sink.failures == []
        # When it has ended, it is long time for the next.
        models.answer()
        await sink.until(lambda: models.asked == 2)
        assert sink.models == [(endpoint.id, {"tiny": None, "alpha": "tiny"})]
        assert models.most_open == 1
        await scraper.close()


async def test_models_that_time_out_are_asked_again_on_another_connection(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=scrape.__name__)
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
async def test_a_look_at_the_models_ends_with_its_endpoint(end: Callable[[Scraper], Awaitable[None]]) -> None:
    sink = Sink()
    async with hanging_models(sink) as (models, endpoint, port):
        config = structs.replace(FAST, port=port, timeout=Seconds(3600), models_path="/v1/models")
        async with scraping(sink, config, endpoint) as scraper:
            await sink.until(lambda: models.asked == 1)
            look = scraper._targets[endpoint.id].models_task
            assert look is not None
            await end(scraper)
            await sink.until(lambda: models.open == 0)
            await scraper.close()
            assert look.cancelled()
            assert scraper._leaving == set()
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
    sink = Sink()
    sink.break_at_models = True

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=MODELS if request.path == "/v1/models" else BUSY)

    config = structs.replace(FAST, models_path="/v1/models")
    async with serving(answer) as endpoint, scraping(sink, config, endpoint) as scraper:
        await sink.until(lambda: len(sink.models) == 2)
        sink.break_at_models = False
        seen = len(sink.observed)
        await sink.until(lambda: len(sink.observed) >= seen + 3)
        assert scraper._targets[endpoint.id].failures == 0
        assert scraper._tasks.failures["models"] == 2
        assert scraper._tasks.failures["scrape"] == 0


async def test_a_slow_page_is_asked_for_more_rarely() -> None:
    sink = Sink()
    now = 0.0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal now
        now += 0.02
        return web.Response(text=BUSY)

    async with serving(answer) as endpoint:
        scraper = Scraper(ScrapeConfig(models_path=""), "vllm", sink, lambda: now, rng=random.Random(1))
        scraper.set_endpoints([endpoint])
        await sink.until(lambda: len(sink.observed) == 1)
        target = scraper._targets[endpoint.id]
        while target.due_at <= now:
            await asyncio.sleep(0)
        # From start to start 30 times what a scrape takes: taken to be 10 ms, now found to be 20.
        assert target.scrape_s == pytest.approx(0.013)
        assert target.due_at - now == pytest.approx(29 * 0.013)
        await scraper.close()


async def test_a_stopped_scraper_asks_for_nothing() -> None:
    sink = Sink()
    async with serving(page(BUSY)) as endpoint, scraping(sink, FAST, endpoint) as scraper:
        await sink.until(lambda: len(sink.observed) >= 2)
        assert scraper._demanded_cores > 0
        scraper.reconfigure(ScrapeConfig(enabled=False), "vllm")
        assert scraper._demanded_cores == pytest.approx(0.0)


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
    caplog.set_level(logging.INFO, logger=scrape.__name__)
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


async def test_after_a_restart_the_whole_page_comes_first() -> None:
    sink = Sink()
    sink.restart_at = 4
    order: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        order.append(request.path)
        return web.Response(text=BIG if request.path == "/metrics" else BUSY)

    async with serving(answer) as endpoint, scraping(sink, FAST, endpoint):
        await sink.until(lambda: len(sink.observed) >= 7)
    whole, part = "/metrics", "/metrics/"
    assert order[:7] == [whole, part, part, part, whole, part, part]


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


@pytest.mark.parametrize("knows", [True, False])
async def test_no_signal_gets_too_old_over_selecting(knows: bool) -> None:
    """The promise of the cadence, on the scraper's clock, with pages of 5 ms: also in the turn that tries in vain."""
    sink = Sink()
    ended_at_s: list[float] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        scraper.now_s += 0.005
        if "name[]" in request.query and not knows:
            return web.Response(status=404)
        return web.Response(text=BUSY if "name[]" in request.query else BIG)

    class Noting(Sink):
        def observe(self, endpoint_id: str, metrics: EndpointMetrics, now: float) -> bool:
            ended_at_s.append(now)
            return super().observe(endpoint_id, metrics, now)

    sink = Noting()
    async with serving(answer) as endpoint:
        scraper = Leaping(ScrapeConfig(models_path="", cost_factor=0), sink)
        scraper.set_endpoints([endpoint])
        await sink.until(lambda: len(ended_at_s) >= 40)
        assert scraper.selects(endpoint.id) is knows
        await scraper.close()
    assert max(later - earlier for earlier, later in itertools.pairwise(ended_at_s)) <= 0.25


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
