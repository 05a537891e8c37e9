"""The processes of the benchmark: engines that cost next to nothing, the two servers, and an Envoy before each.

The engines are one more Envoy with a listener each that answers everything itself: no Python that would take its share of
the machine and of the latencies. Their metrics page is as long as a real vLLM's.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bench.core_cost import MODEL, metrics_page
from extproc.edge.envoy_config import EnvoyOptions, render
from extproc.sim.processes import Child, ChildError, Children, envoy_binary, free_ports

__all__ = ["Server", "cpu_s", "engines_config", "raise_stage"]

ENGINES: Final = 10
_ROOT: Final = Path(__file__).resolve().parent.parent
_MAX_BODY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Server:
    """One of the two that are compared, behind an Envoy of its own."""

    name: str
    child: Child
    envoy: Child
    url: str
    """Of its Envoy's listener."""


def cpu_s(child: Child) -> float:
    """Return the CPU time a child has used, all threads, in seconds: to the nanosecond, where `/proc` has hundredths.

    Linux's `clock_getcpuclockid(3)` makes the clock's number of the process id like this; Python does not offer the call.
    """
    return time.clock_gettime((~child.process.pid << 3) | 2)


def engines_config(ports: list[int], page: Path) -> dict[str, Any]:
    """Return the configuration of an Envoy that plays one model server on each port."""
    usage = {"prompt_tokens": 250, "completion_tokens": 1, "total_tokens": 251}
    answer = {"id": "cmpl-1", "object": "chat.completion", "model": MODEL, "choices": [], "usage": usage}
    models = {"object": "list", "data": [{"id": MODEL, "object": "model", "parent": None}]}
    routes = [
        _route({"path": "/metrics"}, {"filename": str(page)}, "text/plain"),
        _route({"path": "/v1/models"}, {"inline_string": json.dumps(models)}, "application/json"),
        _route({"prefix": "/"}, {"inline_string": json.dumps(answer)}, "application/json"),
    ]
    return {"static_resources": {"listeners": [_listener(port, routes) for port in ports]}}


def _route(match: dict[str, str], body: dict[str, str], content_type: str) -> dict[str, Any]:
    header = {"header": {"key": "content-type", "value": content_type}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    return {"match": match, "direct_response": {"status": 200, "body": body}, "response_headers_to_add": [header]}


def _listener(port: int, routes: list[dict[str, Any]]) -> dict[str, Any]:
    extension = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{extension}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "engine",
        "route_config": {
            "max_direct_response_body_size_bytes": _MAX_BODY_BYTES,
            "virtual_hosts": [{"name": "engine", "domains": ["*"], "routes": routes}],
        },
        "http_filters": [
            # Without it the answer would come before the request has ended, and end the connection.
            {
                "name": "buffer",
                "typed_config": {"@type": f"{extension}.http.buffer.v3.Buffer", "max_request_bytes": _MAX_BODY_BYTES},
            },
            {"name": "router", "typed_config": {"@type": f"{extension}.http.router.v3.Router"}},
        ],
    }
    return {
        "name": f"engine-{port}",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


async def raise_stage(children: Children, folder: Path, transport: str = "grpcio") -> tuple[Server, Server]:
    """Start everything, the picker on `transport`, and wait until each is ready; return the bare server and the picker. Raises ChildError."""
    binary = str(envoy_binary())
    ports = free_ports(ENGINES + 8)
    engine_ports, rest = ports[:ENGINES], ports[ENGINES:]
    addresses = [f"127.0.0.1:{port}" for port in engine_ports]
    page = folder / "bench-metrics.txt"
    page.write_bytes(metrics_page())
    path = folder / "bench-engines.json"
    path.write_text(json.dumps(engines_config(engine_ports, page), indent=1))
    engines = await children.start("engines", [binary, "-c", str(path), *_ENVOY])
    await engines.wait_http(f"http://{addresses[-1]}/metrics")

    bare_port, picker_port, health_port, metrics_port, *envoys = rest
    argv = [sys.executable, "-m", "bench.bare_server", "--port", str(bare_port)]
    argv += [text for address in addresses for text in ("--endpoint", address)]
    bare = await children.start("bare", argv, env={"PYTHONPATH": str(_ROOT)})
    config = folder / "bench-picker.yaml"
    config.write_text(_picker_config(addresses, picker_port, health_port, metrics_port))
    argv = [sys.executable, "-m", "extproc", "serve", "--config", str(config), "--transport", transport]
    picker = await children.start("picker", argv)
    await picker.wait_http(f"http://127.0.0.1:{metrics_port}/readyz")
    servers = []
    for name, child, port in (("bare", bare, bare_port), ("picker", picker, picker_port)):
        listen, admin, *envoys = envoys
        options = EnvoyOptions(tuple(addresses), f"127.0.0.1:{port}", listen_port=listen, admin_port=admin)
        path = folder / f"bench-envoy-{name}.yaml"
        path.write_text(render("direct", options))
        envoy = await children.start(f"envoy-{name}", [binary, "-c", str(path), *_ENVOY])
        await envoy.wait_http(f"http://127.0.0.1:{admin}/ready")
        if not child.running:
            raise ChildError(f"{name} has ended:\n{child.tail()}")
        servers.append(Server(name, child, envoy, f"http://127.0.0.1:{listen}/v1/chat/completions"))
    return servers[0], servers[1]


_ENVOY: Final = ("--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning")


def _picker_config(addresses: list[str], grpc: int, health: int, metrics: int) -> str:
    """Return the default configuration but for ports and endpoints: default strategy, scraping, metrics and log."""
    ports = {"grpc_port": grpc, "health_port": health, "metrics_port": metrics}
    return yaml.safe_dump(
        {
            "apiVersion": "extproc/v1alpha1",
            "kind": "ExtprocConfig",
            "server": {"host": "127.0.0.1", **ports, "drain_delay": 0, "grace_period": 2},
            "admin": {"port": 0},
            "pool": {"endpoints": addresses},
        },
        sort_keys=False,
    )
