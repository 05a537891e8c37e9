"""The wiring of `serve`: what starts and stops in which order, what a reload changes, and what readiness says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc import app
from extproc.app import Picker, read_config, serve
from extproc.config.load import load
from extproc.config.schema import Config, PoolConfig
from extproc.edge.process.tls import self_signed
from extproc.edge.scraping.failures import ScrapeFailure
from extproc.errors import ConfigError
from extproc.protocol.outcome import LogEntry
from extproc.types import Endpoint, EndpointMetrics, InferenceRequest, Usage

LIMIT_S = 60.0
BASE = """
server: {host: 127.0.0.1, grpc_port: 0, health_port: 0, metrics_port: 0, drain_delay: 0, grace_period: 0}
admin: {port: 0}
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Undo what a picker does to the process it normally has to itself: the root logger, signals, frozen garbage."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    handled = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for number, handler in handled.items():
        signal.signal(number, handler)
    gc.unfreeze()


class Source:
    """Endpoints that the test finds."""

    def __init__(self, found: Callable[[Sequence[Endpoint]], None]) -> None:
        self.tell = found
        self.first_done = asyncio.Event()
        self.trouble = ""
        self.why_empty = ""
        self.closed = False

    async def start(self) -> None:
        """Find nothing yet."""

    async def close(self) -> None:
        self.closed = True

    def find(self, *endpoints: Endpoint) -> None:
        self.tell(endpoints)
        self.first_done.set()


class Running:
    """A picker that runs on the test's loop."""

    def __init__(self, text: str, overrides: dict[str, object] | None = None, path: Path | None = None) -> None:
        content = (BASE + text).encode()
        config = app.parse_config(content, "test", overrides or {})
        self.picker = Picker(config, path=path, content=content, overrides=overrides or {})
        self.task: asyncio.Task[int] | None = None

    async def __aenter__(self) -> Self:
        self.task = asyncio.get_running_loop().create_task(self.picker.run())
        await self.until(lambda: self.picker.server.grpc_port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.task is not None
        if not self.task.done():
            self.picker._stop.set()
        with contextlib.suppress(ConfigError):
            await self.task

    def change(self, text: str) -> None:
        """Let the watched file have this text."""
        self.picker._on_change(self.picker._parse(text.encode()))

    async def until(self, condition: Callable[[], object]) -> None:
        assert self.task is not None
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                if self.task.done():
                    self.task.result()
                    raise AssertionError("the picker has ended")
                await asyncio.sleep(0.001)

    async def get(self, path: str, *, admin: bool = False) -> tuple[int, str]:
        server = self.picker.admin_server if admin else self.picker.metrics_server
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{server.port}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def health(self) -> int:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.picker.server.health_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="readiness"))
        return int(answer.status)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """Replace discovery; each source made is in the list."""
    made: list[Source] = []

    def discovery_for(_: PoolConfig, found: Any, **__: Any) -> Source:
        made.append(Source(found))
        return made[-1]

    monkeypatch.setattr(app, "discovery_for", discovery_for)
    monkeypatch.setattr(app, "_FIRST_LOOK_S", 0.0)
    return made


@pytest.fixture
async def closed_port() -> AsyncIterator[int]:
    """A port nobody listens on, kept from others."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def lines(text: str) -> dict[str, dict[str, Any]]:
    """The log by event; of equal events the last."""
    return {found["event"]: found for found in map(json.loads, text.splitlines())}


# Reading the configuration


def test_flags_beat_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("server: {grpc_port: 1}\npool: {dns: {host: x, port: 1}}\n")
    config = read_config(path, {"server.grpc_port": 2, "pool.endpoints": ["127.0.0.1:8001"]})
    assert config.server.grpc_port == 2
    assert (config.pool.endpoints, config.pool.dns) == (["127.0.0.1:8001"], None)
    assert read_config(None, {}) == Config()


@pytest.mark.parametrize("make", [lambda path: path, lambda path: path.mkdir() or path])
def test_a_file_that_cannot_be_read(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the file: .*check the path"):
        serve(make(tmp_path / "none"), {})


# From start to end


async def test_a_life(sources: list[Source], capfd: pytest.CaptureFixture[str]) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        assert await running.get("/readyz") == (503, "waiting for the first look-up of endpoints\n")
        assert await running.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await running.get("/healthz"))[0] == 200
        sources[0].find(Endpoint("127.0.0.1", 1))
        await running.until(lambda: running.picker._ready()[0])
        await running.until(lambda: running.picker.server.health.ready)
        assert await running.get("/readyz") == (200, "ready\n")
        assert await running.health() == health_pb2.HealthCheckResponse.SERVING
        status, page = await running.get("/debug/config", admin=True)
        assert (status, json.loads(page)["generation"]) == (200, 1)
        (shown,) = json.loads((await running.get("/debug/endpoints", admin=True))[1])["endpoints"]
        assert shown["endpoint"] == "127.0.0.1:1"
        _, metrics = await running.get("/metrics")
        for wanted in ("extproc_config_generation 1.0", "extproc_endpoints 1.0", "extproc_log_lines_dropped_total 0.0"):
            assert wanted in metrics
        running.picker._on_stop_signal(signal.SIGTERM)
        assert running.picker._ready() == (False, "draining")
        assert running.task is not None
        assert await running.task == 0
    assert sources[0].closed
    events = lines(capfd.readouterr().out)
    assert list(events)[:4] == ["serving ext_proc", "started", "endpoints changed", "ready"]
    assert list(events)[-3:] == ["draining", "closing the gRPC port", "stopped"]
    assert events["stopped"]["in_flight"] == 0


async def test_the_grpc_port_opens_when_the_endpoints_are_known(
    sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Envoy uses its only picker from the moment it listens: before the first look-up that would be 503 for everybody."""
    monkeypatch.setattr(app, "_FIRST_LOOK_S", LIMIT_S)
    running = Running("")
    running.task = asyncio.get_running_loop().create_task(running.picker.run())
    await running.until(lambda: sources)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.picker.server.grpc_port
    assert await running.get("/readyz") == (503, "waiting for the first look-up of endpoints\n")
    sources[0].find(Endpoint("127.0.0.1", 1))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(running.__aexit__)
        await running.until(lambda: running.picker.server.grpc_port)
        await running.until(lambda: running.picker.server.health.ready)
        assert await running.health() == health_pb2.HealthCheckResponse.SERVING


async def test_ready_that_comes_too_late_opens_no_door(sources: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    async with Running("") as running:
        await running.until(lambda: sources)
        monkeypatch.setattr(running.picker.server.health, "set_ready", opened.append)
        running.picker._stop.set()
        sources[0].find(Endpoint("127.0.0.1", 1))
        await running.until(lambda: running.picker._discovered)
    assert opened == []


NO_ENDPOINTS = "no endpoints: not ready, and every request gets 503"
EMPTY = {
    "no source at all": ("", "pool.endpoints is empty; set it (or --endpoint), pool.file or pool.dns"),
    "a name that does not resolve": ("pool: {endpoints: ['nowhere.invalid:1']}", "pool.endpoints nowhere.invalid: "),
    "a DNS name that does not resolve": ("pool: {dns: {host: nowhere.invalid, port: 1}}", "pool.dns nowhere.invalid: "),
    "a file that is not there": ("pool: {file: {path: FOLDER/none.yaml}}", "none.yaml: No such file or directory; "),
    "a file that lists none": ("pool: {file: {path: FOLDER/empty.yaml}}", "empty.yaml: lists none; "),
    "a file that is no list": ("pool: {file: {path: FOLDER/bad.yaml}}", "bad.yaml: "),
}


@pytest.mark.parametrize("case", EMPTY)
async def test_without_endpoints_it_is_not_ready_and_says_why(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, why = EMPTY[case]
    (tmp_path / "empty.yaml").write_text("endpoints: []")
    (tmp_path / "bad.yaml").write_text("endpoints: [")
    async with Running(text.replace("FOLDER", str(tmp_path))) as running:
        await running.until(lambda: running.picker._discovered)
        status, said = await running.get("/readyz")
        assert status == 503
        assert said.startswith("no endpoints: ")
        assert why in said
        assert await running.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert "extproc_endpoints 0.0" in (await running.get("/metrics"))[1]
        running.change(BASE + "pool: {endpoints: ['127.0.0.1:1']}\n")
        await running.until(lambda: running.picker.server.health.ready)
        assert await running.get("/readyz") == (200, "ready\n")
    told = lines(capfd.readouterr().out)
    assert told[NO_ENDPOINTS]["level"] == "warning"
    assert why in told[NO_ENDPOINTS]["why"]
    assert told["ready"]["endpoints"] == 1


async def test_a_pool_that_becomes_empty_is_not_ready_until_it_has_endpoints_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with_one = BASE + "pool: {endpoints: ['127.0.0.1:1']}\n"
    async with Running("pool: {endpoints: ['127.0.0.1:1']}\n") as running:
        health = running.picker.server.health
        await running.until(lambda: health.ready)
        running.change(BASE + "pool: {endpoints: []}\n")
        await running.until(lambda: not health.ready)
        assert await running.get("/readyz") == (
            503,
            "no endpoints: pool.endpoints is empty; set it (or --endpoint), pool.file or pool.dns\n",
        )
        running.change(BASE + "pool: {endpoint: ['127.0.0.1:1']}\n")
        assert (
            "dns, and the newest configuration was refused: line 4: pool.endpoint: unknown key"
            in (await running.get("/readyz"))[1]
        )
        running.change(with_one)
        await running.until(lambda: health.ready)
        assert await running.get("/readyz") == (200, "ready\n")
    assert NO_ENDPOINTS in lines(capfd.readouterr().out)


async def test_a_look_up_that_fails_keeps_the_endpoints_and_is_named(sources: list[Source]) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        sources[0].find(Endpoint("127.0.0.1", 1))
        await running.until(lambda: running.picker.server.health.ready)
        sources[0].trouble = "models.example: no answer within 5 s"
        assert await running.get("/readyz") == (
            200,
            "ready, with the endpoints found last; a look-up fails: models.example: no answer within 5 s\n",
        )


async def test_told_to_stop_twice_ends_at_once(sources: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    async with Running("") as running:
        await running.until(lambda: sources)
        with monkeypatch.context() as patch:
            patch.setattr(signal, "raise_signal", raised.append)
            running.picker._on_stop_signal(signal.SIGINT)
            assert raised == []
            running.picker._on_stop_signal(signal.SIGINT)
        assert raised == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


@pytest.mark.parametrize("key", ["server.grpc_port", "server.health_port", "server.metrics_port", "admin.port"])
async def test_a_port_in_use_names_the_key_and_leaves_nothing_open(key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = Running("", {key: port})
        with pytest.raises(ConfigError) as refused:
            await running.picker.run()
    (problem,) = refused.value.problems
    assert problem.path == key
    assert str(port) in problem.message
    assert "in use" in problem.message


@pytest.mark.parametrize("with_uvloop", [True, False])
def test_uvloop_is_used_where_it_is(with_uvloop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[str] = []

    class Short:
        def __init__(self, *_: object, **__: object) -> None:
            """Take what a picker takes."""

        def run(self) -> Coroutine[Any, Any, int]:
            async def main() -> int:
                loops.append(type(asyncio.get_running_loop()).__module__)
                return 5

            return main()

    if with_uvloop:
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.setattr(app, "Picker", Short)
    assert serve(None, {}) == 5
    assert loops[0].startswith("uvloop") is with_uvloop


# Endpoints and signals


async def test_endpoints_and_signals_reach_the_router(sources: list[Source], capfd: pytest.CaptureFixture[str]) -> None:
    one, two = Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2)
    async with Running("pool: {scrape: {enabled: false}}") as running:
        picker = running.picker
        await running.until(lambda: sources)
        sources[0].find(one, two)
        sources[0].find(one, two)
        assert [found.endpoint for found in picker.router.snapshots(0.0)] == [one, two]
        picker.observe(one.id, EndpointMetrics(waiting=3, process_start_time_s=10.0, scrape_s=0.01), 1.0)
        picker.observe_failure(two.id, ScrapeFailure.TIMEOUT, 1.0)
        picker.observe_models(one.id, {"m": None}, 1.0)
        assert picker.observe(one.id, EndpointMetrics(process_start_time_s=20.0), 2.0)
        decision = picker.router.route(InferenceRequest(model="m"), now=3.0)
        picker.observer.decided(decision, 0.001, {})
        picker.scraper.mark_busy(decision.endpoint.id)
        picker.service.on_log_entry(LogEntry(decision.id, status=200, usage=Usage(5, 1, 0)))
        _, page = await running.get("/metrics")
        assert f'extproc_scrape_errors_total{{endpoint="{two.id}",reason="timeout"}} 1.0' in page
        assert 'extproc_model_decisions_total{kind="other",model="m"} 1.0' in page
        assert (
            f'extproc_requests_total{{endpoint="{decision.endpoint.id}",outcome="ok",strategy="weighted"}} 1.0' in page
        )
        sources[0].find()
    found = lines(capfd.readouterr().out)
    assert found["an engine has restarted; its prefixes are forgotten"]["endpoint"] == one.id
    assert found["endpoints changed"]["total"] == 0
    assert found["endpoints changed"]["removed"] == [one.id, two.id]


async def test_scraping_is_switched_on_and_off(sources: list[Source], closed_port: int) -> None:
    async with Running("pool: {scrape: {enabled: false}}") as running:
        picker = running.picker
        await running.until(lambda: sources)
        sources[0].find(Endpoint("127.0.0.1", closed_port))
        running.change(BASE + "pool: {scrape: {busy_interval: 10ms, idle_interval: 10ms}}")
        await running.until(lambda: picker.router.snapshots(0.0)[0].scrape_failures)
        running.change(BASE + "pool: {scrape: {enabled: false}}")
        assert len(sources) == 1, "where endpoints come from has not changed"


async def test_leases_are_looked_at(sources: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_UPKEEP_S", 0.001)
    async with Running("in_flight: {lease: 1ms}\npool: {scrape: {enabled: false}}") as running:
        await running.until(lambda: sources)
        sources[0].find(Endpoint("127.0.0.1", 1))
        running.picker.router.route(InferenceRequest(), now=running.picker._clock())
        await running.until(lambda: running.picker.router.in_flight == 0)


async def test_upkeep_that_fails_goes_on_and_is_told_of(
    sources: list[Source], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A defect in what releases requests must not hold all later ones for ever."""
    monkeypatch.setattr(app, "_UPKEEP_S", 0.001)
    defects = 3
    async with Running("in_flight: {lease: 1ms}\npool: {scrape: {enabled: false}}") as running:
        picker = running.picker
        await running.until(lambda: sources)
        monkeypatch.setattr(picker.tasks, "_sleep", lambda _: asyncio.sleep(0))
        expire = picker.router.expire

        def broken(**given: Any) -> None:
            nonlocal defects
            defects -= 1
            if defects >= 0:
                raise ZeroDivisionError
            expire(**given)

        monkeypatch.setattr(picker.router, "expire", broken)
        sources[0].find(Endpoint("127.0.0.1", 1))
        picker.router.route(InferenceRequest(), now=picker._clock())
        await running.until(lambda: picker.router.in_flight == 0)
        _, page = await running.get("/metrics")
        assert 'extproc_background_task_failures_total{task="upkeep"} 3.0' in page
        assert 'extproc_background_task_failures_total{task="scrape"} 0.0' in page, "known label values from the start"
        status, text = await running.get("/readyz")
        assert (status, text) == (200, "ready, with background tasks that keep failing, see the log: upkeep\n")
    told = lines(capfd.readouterr().out)["a background task has failed and is started again: report the traceback"]
    assert "ZeroDivisionError" in told["traceback"]
    assert told["task"] == "upkeep"


async def test_a_defect_in_a_callback_of_the_loop_is_counted(
    sources: list[Source], capfd: pytest.CaptureFixture[str]
) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        _, page = await running.get("/metrics")
    assert 'extproc_internal_errors_total{where="event loop"} 1.0' in page
    assert "ZeroDivisionError" in capfd.readouterr().out


async def test_a_source_that_cannot_be_changed_at_first_is_changed_later(
    sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Running("") as running:
        picker = running.picker
        await running.until(lambda: sources)
        monkeypatch.setattr(picker.tasks, "_sleep", lambda _: asyncio.sleep(0))
        make, defects = vars(app)["discovery_for"], [ZeroDivisionError(), ZeroDivisionError()]

        def sometimes(*given: Any, **named: Any) -> Any:
            if defects:
                raise defects.pop()
            return make(*given, **named)

        monkeypatch.setattr(app, "discovery_for", sometimes)
        running.change(BASE + "pool: {endpoints: ['127.0.0.1:1']}")
        await running.until(lambda: len(sources) == 2)
        assert sources[0].closed
        assert picker.tasks.failures["discovery"] == 2


async def test_a_configuration_that_a_defect_stops_is_not_said_to_be_in_force(
    sources: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Running("") as running:
        picker = running.picker
        await running.until(lambda: sources)
        sources[0].find(Endpoint("127.0.0.1", 1))
        await running.until(lambda: picker.server.health.ready)
        with monkeypatch.context() as patch:
            patch.setattr(picker.router, "reconfigure", lambda *_, **__: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                running.change(BASE)
        status, text = await running.get("/readyz")
        assert status == 200
        assert "the newest was refused: an internal error" in text
        running.change(BASE)
        assert await running.get("/readyz") == (200, "ready\n")


# Reload


async def test_told_to_read_again_it_does_so_once_more_after_the_last_time(
    sources: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "extproc.yaml"
    path.write_text(BASE)
    async with Running("", path=path) as running:
        picker = running.picker
        picker._on_sighup()  # before it has started
        await running.until(lambda: len(sources) == 2)
        reads = 0
        read = picker._read_files

        async def counted() -> None:
            nonlocal reads
            reads += 1
            if reads == 1:
                for _ in range(5):
                    picker._on_sighup()
            await read()

        monkeypatch.setattr(picker, "_read_files", counted)
        await running.until(lambda: picker._reading is not None and picker._reading.done())
        picker._on_sighup()
        await running.until(lambda: picker._reading is not None and picker._reading.done())
        assert reads == 2


async def test_a_refused_configuration_is_tried_again_when_told_to(
    sources: list[Source], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it names may be there now."""
    authority = tmp_path / "ca.pem"
    path = tmp_path / "extproc.yaml"
    path.write_text(BASE)
    async with Running("", path=path) as running:
        picker = running.picker
        await running.until(lambda: picker._started)
        path.write_text(BASE + f"pool: {{scrape: {{scheme: https, tls: {{ca: '{authority}'}}}}}}")
        picker._on_sighup()
        await running.until(lambda: picker._refused)
        await running.until(lambda: picker._reading is not None and picker._reading.done())
        authority.write_bytes(self_signed(("localhost",), datetime.now(UTC)).certificate)
        picker._on_sighup()
        await running.until(lambda: not picker._refused)
        await running.until(lambda: picker._reading is not None and picker._reading.done())
        authority.unlink()
        picker._on_sighup()
        await running.until(lambda: picker._reading is not None and picker._reading.done())
    told = lines(capfd.readouterr().out)["SIGHUP: files were read again; endpoints are looked up anew"]
    assert told["configuration"] == "unchanged"
    assert told["scrape_ca"].startswith("refused, the last good one stays: ")


async def test_a_changed_file_is_applied_while_running(
    sources: list[Source], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE)
    async with Running("", path=path) as running:
        picker = running.picker
        await running.until(lambda: sources)
        sources[0].find(Endpoint("127.0.0.1", 1))
        await running.until(lambda: picker._ready()[0])
        fresh = tmp_path / "new"
        fresh.write_text(BASE + "routing: {strategy: random}\n")
        fresh.replace(path)
        await running.until(lambda: picker.router.generation == 2)
        assert picker.router.config.routing.strategy == "random"
    assert lines(capfd.readouterr().out)["the configuration was reloaded"]["generation"] == 2


async def test_a_bad_change_keeps_the_last_good_one(sources: list[Source], capfd: pytest.CaptureFixture[str]) -> None:
    async with Running("") as running:
        picker = running.picker
        await running.until(lambda: sources)
        sources[0].find(Endpoint("127.0.0.1", 1))
        await running.until(lambda: picker._ready()[0])
        running.change("routing: {strategy: best}\n")
        assert (picker.router.generation, picker.router.config.routing.strategy) == (1, "weighted")
        ready, reason = picker._ready()
        assert ready
        assert "the newest was refused: " in reason
        assert "routing.strategy" in reason
        assert "extproc_config_last_reload_successful 0.0" in (await running.get("/metrics"))[1]
        running.change(BASE)
        assert picker._ready() == (True, "ready")
        assert "extproc_config_last_reload_successful 1.0" in (await running.get("/metrics"))[1]
    refused = lines(capfd.readouterr().out)["the changed configuration was refused; the last good one stays"]
    assert "best" in refused["problems"][0]


async def test_an_emptied_file_is_no_wish_for_an_empty_pool(sources: list[Source]) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        running.change(" \n")
        assert running.picker.router.generation == 1
        assert "the file is empty" in running.picker._refused


async def test_a_ca_that_cannot_be_read_is_a_bad_change(sources: list[Source]) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        running.change(BASE + "pool: {scrape: {scheme: https, tls: {ca: /no/such.pem}}}")
        assert running.picker.router.generation == 1


async def test_a_ca_that_is_away_for_a_moment_is_no_reason_to_refuse_another_change(
    sources: list[Source], tmp_path: Path
) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_bytes(self_signed(("localhost",), datetime.now(UTC)).certificate)
    scraped = f"pool: {{scrape: {{scheme: https, tls: {{ca: '{authority}'}}}}}}\n"
    async with Running(scraped) as running:
        await running.until(lambda: sources)
        authority.unlink()
        running.change(BASE + scraped + "routing: {strategy: random}\n")
        assert running.picker.router.config.routing.strategy == "random"


@pytest.mark.parametrize(
    ("host", "header", "warned"),
    [
        ("0.0.0.0", "true", True),
        ("::", "full", True),
        ("10.0.0.1", "full", True),
        ("picker.example.com", "full", True),
        ("0.0.0.0", "brief", False),
        ("0.0.0.0", "false", False),
        ("127.0.0.1", "true", False),
        ("::1", "full", False),
        ("localhost", "full", False),
    ],
)
def test_who_tells_everybody_everything_is_warned(
    host: str, header: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    new = load(f"{{server: {{host: '{host}'}}, explain: {{header: {header}}}}}")
    app.warn_of_explanations(None, new)
    app.warn_of_explanations(load("explain: {header: brief}"), new)
    assert len([record for record in caplog.records if "set it to brief" in record.message]) == 2 * warned
    app.warn_of_explanations(load("explain: {header: true}"), new)
    assert len(caplog.records) == 2 * warned, "once, not with every reload"


async def test_what_a_reload_reaches(sources: list[Source], capfd: pytest.CaptureFixture[str]) -> None:
    text = BASE.replace("grace_period: 0", "grace_period: 0, max_buffered_bytes: 9, max_inspect_bytes: 7")
    text = text.replace("admin: {port: 0}", "admin: {port: 0, decisions: 3}").replace(
        "metrics_port: 0", "metrics_port: 1"
    )
    text += "pool: {endpoints: ['127.0.0.1:1']}\nlog: {level: warning}\nrouting: {session_header: x-me}\n"
    async with Running("") as running:
        picker = running.picker
        await running.until(lambda: sources)
        running.change(text)
        assert picker.budget.limit_bytes == 9
        assert picker.shared.settings.max_inspect_bytes == 7
        assert picker.recent._capacity == 3
        assert picker.service._session_header == "x-me"
        await running.until(lambda: len(sources) == 2)
        await running.until(lambda: sources[0].closed)
        sources[1].find()
        assert picker._discovery is sources[1]
    found = lines(capfd.readouterr().out)
    assert found["some changed keys take effect only after a restart"]["keys"] == ["server.metrics_port"]
    assert "the configuration was reloaded" not in found, "the level is raised by then"


async def test_flags_beat_a_changed_file_too(sources: list[Source]) -> None:
    async with Running("", {"routing.strategy": "random"}) as running:
        await running.until(lambda: sources)
        running.change(BASE + "routing: {strategy: session, near_tie: 0.5}")
        routing = running.picker.router.config.routing
        assert (routing.strategy, routing.near_tie) == ("random", 0.5)


def test_the_collector_is_calmed() -> None:
    """No full collection by itself, and no generation that can grow to a pause that shows."""
    thresholds = gc.get_threshold()
    try:
        app.tune_gc()
        youngest, survivors, full = gc.get_threshold()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    assert youngest * survivors <= 20_000
    assert youngest * survivors * full >= 100_000_000
