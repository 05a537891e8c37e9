"""A whole installation for one test: model servers, the picker and a real Envoy, all on free loopback ports.

Everything is a real process started as a user would (`python -m extproc ...`); only an upstream whose exact bytes a test
wants to see runs within the test (`Recorder`). Leaving the context stops all of it, also after a failure; what each
process printed stays in `folder/logs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import pytest
import yaml
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from extproc.demo.processes import Child, ChildError, Children, envoy_binary, free_ports
from extproc.envoy_config import EnvoyOptions, render

MODEL: Final = "llama-3.1-8b"
"""What every model server serves."""
DESTINATION: Final = "x-gateway-destination-endpoint"
TRANSPORTS: Final = ("grpcio", "native")
"""The picker's two gRPC implementations: both must show the same to everybody."""
DEADLINE_S: Final = 60.0
"""Longest wait for anything that has to happen; far above what it takes, for machines that are busy otherwise."""


async def until(predicate: Callable[[], object], what: str = "", *, timeout: float = DEADLINE_S) -> Any:
    """Poll `predicate` (sync or async) until it gives something true, and return that; fail after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    while True:
        found = predicate()
        value: Any = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if loop.time() > end:
            named = what or getattr(predicate, "__name__", "the condition")
            raise AssertionError(f"not within {timeout:g} s: {named}; last: {value!r}")
        await asyncio.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Response:
    """One complete answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Decode the body."""
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """Decode the body as server-sent events, without the final `[DONE]`."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        assert lines, f"no event but {self.body[:200]!r}"
        assert lines[-1] == b"[DONE]", f"the stream is not complete: it ends in {lines[-1]!r}"
        return [json.loads(line) for line in lines[:-1]]


class Metrics:
    """One page of Prometheus metrics."""

    def __init__(self, text: str) -> None:
        self.samples: list[tuple[str, Mapping[str, str], float]] = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """Add up the samples of this name that carry these labels; 0 when there is none."""
        return sum(
            value
            for found, has, value in self.samples
            if found == name and all(has.get(key) == wanted for key, wanted in labels.items())
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Add up the samples of this name per value of one label, without those that have counted nothing yet."""
        found: dict[str, float] = {}
        for sample, has, value in self.samples:
            if sample == name and value:
                found[has[label]] = found.get(has[label], 0) + value
        return found


@dataclass
class Received:
    """What a recorder was sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    complete: bool = False
    """Whether the end of the body came."""


class Recorder:
    """A small upstream in the test's own process that keeps every request; `answer` may be replaced.

    It is no engine: scrapes of it fail with 404, and `/v1/models` lists nothing.
    """

    def __init__(self) -> None:
        self.port = 0
        self.received: list[Received] = []
        self.read_bodies = True
        """False: `answer` is called as soon as the headers are there."""
        self.answer: Callable[[web.Request, Received], Awaitable[web.StreamResponse]] = self._ok
        self._runner: web.AppRunner | None = None

    @property
    def id(self) -> str:
        """`ip:port`, as decisions name it."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if (
            request.path in {"/metrics", "/v1/models"}
            and request.method == "GET"
            and "x-request-id" not in request.headers
        ):
            return web.Response(status=404)  # the picker's scrape; Envoy gives its requests an id
        headers = {name.lower(): value for name, value in request.headers.items()}
        received = Received(request.method, request.path_qs, headers)
        self.received.append(received)
        if self.read_bodies and "upgrade" not in headers:
            async for chunk in request.content.iter_any():
                received.body += chunk
            received.complete = True
        return await self.answer(request, received)

    async def _ok(self, _: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response({"body_bytes": len(received.body)})


@dataclass
class Ports:
    envoy: int
    envoy_admin: int
    grpc: int
    health: int
    metrics: int
    admin: int

    @classmethod
    def free(cls) -> Ports:
        return cls(*free_ports(6))


@dataclass
class Stack:
    """Model servers `gpu-1` .. `gpu-N`, recorders, a picker and an Envoy of one profile.

    `config` is merged into the picker's configuration (`picker_config`), `envoy` into the `EnvoyOptions`;
    `edit(yaml) -> yaml` changes the rendered Envoy configuration. `server_args[i]` are further arguments of model
    server i. `transport` is the picker's gRPC implementation (empty: what is shipped). `dead` further endpoints are configured at which nobody listens. `ready=False` does not wait for signals.
    """

    profile: str
    folder: Path
    transport: str = ""
    servers: int = 2
    recorders: int = 0
    dead: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    envoy: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[str], str] | None = None
    server_args: Sequence[Sequence[str]] = ()
    speed: float = 20.0
    ready: bool = True
    concurrency: int = 1

    def __post_init__(self) -> None:
        self.ports = Ports.free()
        self.server_ports = free_ports(self.servers) if self.servers else []
        self.dead_ids = [f"127.0.0.1:{port}" for port in free_ports(self.dead)] if self.dead else []
        self.upstreams = [Recorder() for _ in range(self.recorders)]
        self.children = Children(self.folder / "logs")
        self.engines: list[Child] = []
        self.config_file = self.folder / "extproc.yaml"
        self.envoy_file = self.folder / "envoy.yaml"
        self.picker: Child
        self.proxy: Child
        self.http: aiohttp.ClientSession
        self._exit = contextlib.AsyncExitStack()
        self._starts: dict[str, int] = {}

    # Life

    async def __aenter__(self) -> Self:
        try:
            binary = envoy_binary()
        except ChildError as error:
            pytest.skip(str(error))
        self._binary = str(binary)
        async with contextlib.AsyncExitStack() as exit_stack:
            await exit_stack.enter_async_context(self.children)
            for upstream in self.upstreams:
                exit_stack.push_async_callback(upstream.close)
                await upstream.start()
            self.http = await exit_stack.enter_async_context(
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=60),
                    connector=aiohttp.TCPConnector(limit=0),
                    auto_decompress=False,
                )
            )
            self.write_config()
            await asyncio.gather(*(self.start_engine(index) for index in range(self.servers)), self.start_picker())
            await self.start_envoy()
            if self.ready:
                await until(self.heard, "every model server has been scraped")
            self._exit = exit_stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    async def _start(self, name: str, argv: Sequence[str]) -> Child:
        """Start a child; a second one of the same name gets a log of its own."""
        count = self._starts[name] = self._starts.get(name, 0) + 1
        return await self.children.start(name if count == 1 else f"{name}-{count}", argv)

    async def start_engine(self, index: int) -> Child:
        """Start model server `index` (from 0), or start it again."""
        name = f"gpu-{index + 1}"
        port = str(self.server_ports[index])
        argv = [*EXTPROC, "model-server", "--name", name, "--port", port, "--model", MODEL, "--speed", str(self.speed)]
        if index < len(self.server_args):
            argv += self.server_args[index]
        child = await self._start(name, argv)
        self.engines[index : index + 1] = [child]
        await child.wait_http(f"http://127.0.0.1:{port}/health", timeout_s=DEADLINE_S)
        return child

    async def start_picker(self, *, by_log: bool = False) -> Child:
        """Start the picker, or start it again, with the configuration that is in the file; ready as its log or `/readyz` says."""
        self.picker = await self._start("picker", [*EXTPROC, "serve", "--config", str(self.config_file)])
        if by_log:
            await until(lambda: '"event":"ready"' in self.picker.log.read_text(), "it logs that it is ready")
            return self.picker
        await self.picker.wait_http(f"http://127.0.0.1:{self.ports.metrics}/readyz", timeout_s=DEADLINE_S)
        return self.picker

    async def start_envoy(self) -> Child:
        """Start Envoy, or start it again, and wait until it knows that the picker is healthy."""
        text = render(self.profile, self.envoy_options())
        self.envoy_file.write_text(self.edit(text) if self.edit else text)
        argv = [self._binary, "-c", str(self.envoy_file), "--concurrency", str(self.concurrency)]
        self.proxy = await self._start("envoy", [*argv, "--use-dynamic-base-id", "--log-level", "warning"])
        await self.proxy.wait_http(f"http://127.0.0.1:{self.ports.envoy_admin}/ready", timeout_s=DEADLINE_S)
        await self.picker_healthy()
        return self.proxy

    async def picker_healthy(self, *, healthy: bool = True) -> None:
        """Wait until Envoy's health checks say so of the picker, or of all if there are several."""
        count = len(self.envoy_options().pickers)

        async def seen() -> bool:
            return (await self.envoy_stat("cluster.picker.membership_healthy") == count) is healthy

        await until(seen, f"Envoy holds the picker for {'healthy' if healthy else 'unhealthy'}")

    async def heard(self) -> bool:
        """Tell whether the picker has signals and models of every model server."""
        known = {found["endpoint"]: found for found in await self.endpoints()}
        return all(
            (found := known.get(name)) and found["signal_age_s"] is not None and found["models"] is not None
            for name in self.server_ids
        )

    async def scraped(self, *indices: int) -> None:
        """Wait until the picker has seen what these model servers' pages (of all, if none is named) hold now.

        Two pages that ended after this call: the first may have been written before it.
        """
        wanted = {self.server_ids[index] for index in indices} or set(self.server_ids)
        loop = asyncio.get_running_loop()
        for _ in range(2):
            since = loop.time()

            async def anew(since: float = since) -> bool:
                waited_s = loop.time() - since  # before the ages are told: younger than that is after the beginning
                found = await self.endpoints()
                ages = {one["endpoint"]: one["signal_age_s"] for one in found if one["endpoint"] in wanted}
                return ages.keys() == wanted and all(age is not None and age < waited_s for age in ages.values())

            await until(anew, "every model server has been scraped anew")

    # Configuration

    @property
    def server_ids(self) -> list[str]:
        """`ip:port` of every model server."""
        return [f"127.0.0.1:{port}" for port in self.server_ports]

    @property
    def endpoint_ids(self) -> list[str]:
        """`ip:port` of every endpoint: model servers, recorders, dead ones."""
        return [*self.server_ids, *(upstream.id for upstream in self.upstreams), *self.dead_ids]

    def envoy_options(self) -> EnvoyOptions:
        """What Envoy's configuration is rendered with."""
        given: dict[str, Any] = {
            "endpoints": tuple(self.endpoint_ids),
            "pickers": (f"127.0.0.1:{self.ports.grpc}",),
            "listen_port": self.ports.envoy,
            "admin_port": self.ports.envoy_admin,
            **self.envoy,
        }
        return EnvoyOptions(**given)

    def picker_config(self) -> dict[str, Any]:
        """The picker's configuration as a document."""
        base: dict[str, Any] = {
            "apiVersion": "extproc/v1alpha1",
            "kind": "ExtprocConfig",
            "server": {
                **({"transport": self.transport} if self.transport else {}),
                "host": "127.0.0.1",
                "grpc_port": self.ports.grpc,
                "health_port": self.ports.health,
                "metrics_port": self.ports.metrics,
                "drain_delay": 0,
                "grace_period": 1,
                "tls": {"mode": "self-signed" if self.profile == "tls" else "plaintext"},
            },
            "admin": {"port": self.ports.admin, "decisions": 1000},
            "pool": {"endpoints": self.endpoint_ids},
            "routing": {"fallbacks": 0 if self.profile == "original-dst" else 1},
            "explain": {"header": True},
        }
        return merged(base, self.config)

    def write_config(self, changes: Mapping[str, Any] | None = None) -> None:
        """Write the picker's configuration, with `changes` merged in; a running picker reloads it."""
        document = merged(self.picker_config(), changes or {})
        fresh = self.config_file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(document, sort_keys=False))
        fresh.replace(self.config_file)

    # Traffic

    @property
    def url(self) -> str:
        """Where clients speak to Envoy."""
        return f"http://127.0.0.1:{self.ports.envoy}"

    async def post(
        self, path: str, body: bytes | Mapping[str, Any], headers: Mapping[str, str] | None = None, **options: Any
    ) -> Response:
        """POST through Envoy: bytes as they are, or a JSON object."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data, headers, **options)

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Response:
        """GET through Envoy."""
        return await self.request("GET", path, None, headers)

    async def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Response:
        """Send any request through Envoy; an async iterator as body is sent chunked, piece by piece."""
        given = dict(headers or {})
        if body is not None and not any(name.lower() == "content-type" for name in given):
            given["content-type"] = "application/json"
        data = io.BytesIO(body) if isinstance(body, bytes) else body  # aiohttp warns of large bytes
        async with self.http.request(method, self.url + path, data=data, headers=given, **options) as answer:
            names = {name.lower(): value for name, value in answer.headers.items()}
            return Response(answer.status, names, await answer.read())

    async def chat(self, content: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Response:
        """Send one short chat request."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
        return await self.post("/v1/chat/completions", body, headers)

    async def fault(self, index: int, **order: Any) -> None:
        """Order a fault of model server `index`, not through Envoy (see extproc/sim/faults.py)."""
        url = f"http://{self.server_ids[index]}/fault"
        async with self.http.post(url, json=order) as answer:
            assert answer.status == 200, await answer.text()

    # What the picker says

    async def metrics(self, port: int = 0) -> Metrics:
        """Read the picker's metrics, or those at another port."""
        async with self.http.get(f"http://127.0.0.1:{port or self.ports.metrics}/metrics") as answer:
            return Metrics(await answer.text())

    async def decided(self) -> int:
        """Count the decisions so far."""
        return int((await self.metrics()).total("extproc_decisions_total"))

    async def decisions(self, limit: int = 40) -> list[dict[str, Any]]:
        """Read the last decisions, newest first; a page of very many costs more than most tests."""
        found: list[dict[str, Any]] = (await self._page(f"decisions?limit={limit}"))["decisions"]
        return found

    async def endpoints(self) -> list[dict[str, Any]]:
        """Read what the picker believes of each endpoint."""
        found: list[dict[str, Any]] = (await self._page("endpoints"))["endpoints"]
        return found

    async def in_flight(self) -> int:
        """Count the requests the picker holds for open."""
        return sum(found["in_flight"] for found in await self.endpoints())

    async def settled(self) -> list[dict[str, Any]]:
        """Wait until no request is open and no body held; return the decisions, newest first."""

        async def nothing_held() -> bool:
            if await self.in_flight():
                return False
            page = await self.metrics()
            return page.total("extproc_buffered_bytes") == 0

        await until(nothing_held, "every request is released")
        return await self.decisions()

    async def _page(self, name: str) -> dict[str, Any]:
        async with self.http.get(f"http://127.0.0.1:{self.ports.admin}/debug/{name}") as answer:
            assert answer.status == 200, await answer.text()
            page: dict[str, Any] = await answer.json()
            return page

    # What Envoy says

    async def envoy_stat(self, name: str) -> int:
        """Read one number of Envoy's statistics; 0 where there is none of that name."""
        url = f"http://127.0.0.1:{self.ports.envoy_admin}/stats?format=json&filter=^{name}$"
        async with self.http.get(url) as answer:
            stats = (await answer.json(content_type=None))["stats"]
        return int(stats[0]["value"]) if stats else 0


EXTPROC: Final = (sys.executable, "-m", "extproc")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` laid over it, section by section."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def on_both(*profiles: str) -> list[Any]:
    """Return the parameters of a fixture that runs one stack for each profile on each transport: `running(param, folder)`."""
    return [
        pytest.param((profile, transport), id=f"{profile}-{transport}")
        for profile in profiles
        for transport in TRANSPORTS
    ]


@contextlib.asynccontextmanager
async def running(where: tuple[str, str], folder: Path, **options: Any) -> AsyncIterator[Stack]:
    """Run a stack for the length of a block; `where`: profile and transport."""
    profile, transport = where
    async with Stack(profile, folder, transport, **options) as stack:
        yield stack
