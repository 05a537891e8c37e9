"""Rules between several keys, and what the type of one key cannot express.

Each rule adds its problems to the diagnostics, and adds none where one of its keys has a problem already. A new section
adds a function here and a line in `RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from extproc.config.document import Diagnostics, Path, path_text
from extproc.config.schema import ENDPOINT_SOURCES, Config

__all__ = ["RULES", "apply"]

Rule = Callable[[Config, Diagnostics], None]

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_WILDCARDS: Final = frozenset({"0.0.0.0", "::", "*", ""})


def apply(config: Config, diagnostics: Diagnostics) -> None:
    """Check all rules, in document order."""
    for rule in RULES:
        rule(config, diagnostics)


def _tls(config: Config, diagnostics: Diagnostics) -> None:
    tls = config.server.tls
    at = ("server", "tls")
    if diagnostics.touches((*at, "mode")):
        return
    for key, value in (("certificate", tls.certificate), ("private_key", tls.private_key)):
        if diagnostics.touches((*at, key)):
            continue
        if tls.mode == "files" and not value:
            diagnostics.add((*at, key), "missing, but required by `mode: files`", "set the path of a PEM file")
        elif tls.mode != "files" and value:
            diagnostics.add((*at, key), f"not used with `mode: {tls.mode}`", "set `server.tls.mode: files`")
    if tls.mode == "plaintext" and tls.client_ca:
        # To ignore it would accept any client where client certificates are wanted.
        diagnostics.add(
            (*at, "client_ca"), "not used with `mode: plaintext`", "set `server.tls.mode` to files or self-signed"
        )


def _ports(config: Config, diagnostics: Diagnostics) -> None:
    listeners: list[tuple[Path, str, int]] = [
        (("server", "grpc_port"), config.server.host, config.server.grpc_port),
        (("server", "health_port"), config.server.host, config.server.health_port),
        (("server", "metrics_port"), config.server.host, config.server.metrics_port),
        (("admin", "port"), config.admin.host, config.admin.port),
    ]
    if diagnostics.touches(("server", "host"), ("admin", "host"), *(path for path, _, _ in listeners)):
        return
    for index, (path, host, port) in enumerate(listeners):
        for other, other_host, other_port in listeners[:index]:
            overlap = host == other_host or bool({host, other_host} & _WILDCARDS)
            if port and port == other_port and overlap:
                diagnostics.add(
                    path, f"port {port} is already used by `{path_text(other)}`", "give each listener its own port"
                )
                break


def _buffers(config: Config, diagnostics: Diagnostics) -> None:
    one, all_ = ("server", "max_inspect_bytes"), ("server", "max_buffered_bytes")
    if diagnostics.touches(one, all_) or config.server.max_inspect_bytes <= config.server.max_buffered_bytes:
        return
    diagnostics.add(
        one,
        f"{config.server.max_inspect_bytes} bytes for one body is more than `{path_text(all_)}`, "
        f"the limit for all bodies ({config.server.max_buffered_bytes})",
        f"set it to at most `{path_text(all_)}`",
    )


def _response_phase(config: Config, diagnostics: Diagnostics) -> None:
    phase, transport = ("server", "response_phase"), ("server", "transport")
    if config.server.response_phase != "close" or config.server.transport == "native":
        return
    if not diagnostics.touches(phase, transport):
        diagnostics.add(
            phase,
            "`close` is not available with `server.transport: grpcio`, which sends the end of a stream after its last message",
            "set `server.transport: native`, or `response_phase: auto`, which keeps the response phase on grpcio",
        )


def _sources(config: Config, diagnostics: Diagnostics) -> None:
    pool = config.pool
    for key in ENDPOINT_SOURCES:
        if key != pool.source and getattr(pool, key):
            diagnostics.add(
                ("pool", key),
                f"only one source of endpoints can be used, and `pool.{pool.source}` is set too",
                "remove one of them",
            )


def _dns(config: Config, diagnostics: Diagnostics) -> None:
    dns = config.pool.dns
    at = ("pool", "dns")
    if dns is None or diagnostics.touches((*at, "port"), (*at, "type")):
        return
    if dns.type != "SRV" and dns.port == 0:
        diagnostics.add(
            (*at, "port"), f"missing, but required by `type: {dns.type}`", "set the port on which the engines listen"
        )


def _scrape(config: Config, diagnostics: Diagnostics) -> None:
    scrape = config.pool.scrape
    at = ("pool", "scrape")
    for name in scrape.headers:
        if _HEADER_NAME.fullmatch(name) is None and not diagnostics.touches((*at, "headers", name)):
            diagnostics.add((*at, "headers"), "not a valid HTTP header name", "use letters, digits and -")
    if scrape.models_path and not scrape.models_path.startswith("/") and not diagnostics.touches((*at, "models_path")):
        diagnostics.add(
            (*at, "models_path"), f'found the text "{scrape.models_path[:60]}"', "start it with /, or leave it empty"
        )
    busy, idle = (*at, "busy_interval"), (*at, "idle_interval")
    if scrape.busy_interval > scrape.idle_interval and not diagnostics.touches(busy, idle):
        diagnostics.add(
            busy,
            f"{scrape.busy_interval:g} s is longer than `idle_interval` ({scrape.idle_interval:g} s)",
            "set it to at most `pool.scrape.idle_interval`",
        )


def _routing(config: Config, diagnostics: Diagnostics) -> None:
    routing = config.routing
    weights = ("routing", "weights")
    values = [getattr(routing.weights, name) for name in routing.weights.__struct_fields__]
    if routing.strategy == "weighted" and not any(values) and not diagnostics.touches(weights, ("routing", "strategy")):
        diagnostics.add(
            weights, "all weights are 0, so all endpoints would have the same score", "set at least one weight above 0"
        )
    header = ("routing", "session_header")
    if (
        routing.session_header
        and _HEADER_NAME.fullmatch(routing.session_header) is None
        and not diagnostics.touches(header)
    ):
        diagnostics.add(header, "not a valid HTTP header name", "use letters, digits and -")


RULES: Final[tuple[Rule, ...]] = (_tls, _response_phase, _ports, _buffers, _sources, _dns, _scrape, _routing)
