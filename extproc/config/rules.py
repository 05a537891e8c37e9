"""What several keys must agree on, and what one key's type cannot express.

Each rule adds its problems to the findings; a rule keeps silent where one of its keys has a problem already. A new
section adds a function here and a line in `RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from extproc.config.document import Diagnostics, Path, path_text
from extproc.config.schema import Config

__all__ = ["RULES", "apply"]

Rule = Callable[[Config, Diagnostics], None]

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_WILDCARDS: Final = frozenset({"0.0.0.0", "::", "*", ""})


def apply(config: Config, findings: Diagnostics) -> None:
    """Check all rules, in document order."""
    for rule in RULES:
        rule(config, findings)


def _tls(config: Config, findings: Diagnostics) -> None:
    tls = config.server.tls
    at = ("server", "tls")
    if findings.touches((*at, "mode")):
        return
    for key, value in (("certificate", tls.certificate), ("private_key", tls.private_key)):
        if findings.touches((*at, key)):
            continue
        if tls.mode == "files" and not value:
            findings.add((*at, key), "missing; `mode: files` needs it", "name a PEM file")
        elif tls.mode != "files" and value:
            findings.add((*at, key), f"not used with `mode: {tls.mode}`", "set `server.tls.mode: files`")
    if tls.mode == "plaintext" and tls.client_ca:
        # Silently accepting anybody where client certificates were asked for would be the worst reading.
        findings.add(
            (*at, "client_ca"), "not used with `mode: plaintext`", "set `server.tls.mode` to files or self-signed"
        )


def _ports(config: Config, findings: Diagnostics) -> None:
    listeners: list[tuple[Path, str, int]] = [
        (("server", "grpc_port"), config.server.host, config.server.grpc_port),
        (("server", "health_port"), config.server.host, config.server.health_port),
        (("server", "metrics_port"), config.server.host, config.server.metrics_port),
        (("admin", "port"), config.admin.host, config.admin.port),
    ]
    if findings.touches(("server", "host"), ("admin", "host"), *(path for path, _, _ in listeners)):
        return
    for index, (path, host, port) in enumerate(listeners):
        for other, other_host, other_port in listeners[:index]:
            overlap = host == other_host or bool({host, other_host} & _WILDCARDS)
            if port and port == other_port and overlap:
                findings.add(path, f"port {port} is also `{path_text(other)}`", "give each listener a port of its own")
                break


def _buffers(config: Config, findings: Diagnostics) -> None:
    one, all_ = ("server", "max_inspect_bytes"), ("server", "max_buffered_bytes")
    if findings.touches(one, all_) or config.server.max_inspect_bytes <= config.server.max_buffered_bytes:
        return
    findings.add(
        one,
        f"{config.server.max_inspect_bytes} bytes for one body, but only {config.server.max_buffered_bytes} for all",
        f"keep it at or below `{path_text(all_)}`",
    )


def _response_phase(config: Config, findings: Diagnostics) -> None:
    phase, transport = ("server", "response_phase"), ("server", "transport")
    if config.server.response_phase != "close" or config.server.transport == "native":
        return
    if not findings.touches(phase, transport):
        findings.add(
            phase,
            "`close` cannot be done on `server.transport: grpcio`, which writes a stream's end apart from its last message",
            "set `server.transport: native`, or `auto`, which keeps the response phase on grpcio",
        )


def _sources(config: Config, findings: Diagnostics) -> None:
    pool = config.pool
    used = [key for key, value in (("endpoints", pool.endpoints), ("file", pool.file), ("dns", pool.dns)) if value]
    if len(used) > 1:
        for key in used[1:]:
            findings.add(("pool", key), f"a second source of endpoints beside `pool.{used[0]}`", "keep one of them")


def _dns(config: Config, findings: Diagnostics) -> None:
    dns = config.pool.dns
    at = ("pool", "dns")
    if dns is None or findings.touches((*at, "port"), (*at, "type")):
        return
    if dns.type != "SRV" and dns.port == 0:
        findings.add((*at, "port"), f"missing; `type: {dns.type}` names no port", "set the port the engines listen on")


def _scrape(config: Config, findings: Diagnostics) -> None:
    scrape = config.pool.scrape
    at = ("pool", "scrape")
    for name in scrape.headers:
        if _HEADER_NAME.fullmatch(name) is None and not findings.touches((*at, "headers", name)):
            findings.add(
                (*at, "headers"), "a header name with characters that HTTP forbids", "use letters, digits and -"
            )
    if scrape.models_path and not scrape.models_path.startswith("/") and not findings.touches((*at, "models_path")):
        findings.add(
            (*at, "models_path"), f'found the text "{scrape.models_path[:60]}"', "begin it with /, or leave it empty"
        )
    busy, idle = (*at, "busy_interval"), (*at, "idle_interval")
    if scrape.busy_interval > scrape.idle_interval and not findings.touches(busy, idle):
        findings.add(
            busy,
            f"{scrape.busy_interval:g} s is longer than `idle_interval` ({scrape.idle_interval:g} s)",
            "a busy endpoint is scraped at least as often as an idle one",
        )


def _routing(config: Config, findings: Diagnostics) -> None:
    routing = config.routing
    weights = ("routing", "weights")
    values = [getattr(routing.weights, name) for name in routing.weights.__struct_fields__]
    if routing.strategy == "weighted" and not any(values) and not findings.touches(weights, ("routing", "strategy")):
        findings.add(
            weights, "all weights are 0, so nothing would tell endpoints apart", "give one scorer a weight above 0"
        )
    header = ("routing", "session_header")
    if (
        routing.session_header
        and _HEADER_NAME.fullmatch(routing.session_header) is None
        and not findings.touches(header)
    ):
        findings.add(header, "a header name with characters that HTTP forbids", "use letters, digits and -")


RULES: Final[tuple[Rule, ...]] = (_tls, _response_phase, _ports, _buffers, _sources, _dns, _scrape, _routing)
