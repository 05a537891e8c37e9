"""One Envoy for all that are compared: a listener, and clusters of its own, for each server and profile.

The listeners are those of `extproc envoy-config`, unchanged but for names and ports, so that a server is measured in the
very profile that its users run. One more listener has no picker at all: what Envoy itself takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from extproc.envoy_config import EnvoyOptions, render, render_round_robin

__all__ = ["PLAIN", "Listen", "envoy_config"]

PLAIN: Final = "no-filter"
"""Name of the listener without a picker."""


@dataclass(frozen=True, slots=True)
class Listen:
    """One listener."""

    name: str
    """Of its statistics and clusters, too: `http.NAME.ext_proc.stream_msgs_sent`."""
    port: int
    profile: str | None = None
    """Of `extproc envoy-config`; None: without a picker."""
    picker_port: int = 0
    more_picker_ports: tuple[int, ...] = ()
    health_checked: bool = True
    """Whether Envoy asks the server for gRPC health; a stranger may not serve it on this port."""


def envoy_config(listens: Sequence[Listen], endpoints: Sequence[str], admin_port: int) -> dict[str, Any]:
    """Put the listeners together. Raises EnvoyConfigError where a profile does not exist."""
    merged: dict[str, Any] = {}
    for one in listens:
        options = EnvoyOptions(
            tuple(endpoints),
            tuple(f"127.0.0.1:{port}" for port in (one.picker_port or 1, *one.more_picker_ports)),
            listen_port=one.port,
            admin_port=admin_port,
        )
        text = render_round_robin(options) if one.profile is None else render(one.profile, options)
        document = _renamed(yaml.safe_load(text), one)
        if not merged:
            merged = document
        else:
            for kind in ("listeners", "clusters"):
                merged["static_resources"][kind] += document["static_resources"][kind]
    return merged


def _renamed(document: dict[str, Any], listen: Listen) -> dict[str, Any]:
    resources = document["static_resources"]
    names = {cluster["name"]: f"{cluster['name']}-{listen.name}" for cluster in resources["clusters"]}
    for cluster in resources["clusters"]:
        if not listen.health_checked:
            cluster.pop("health_checks", None)
        cluster["name"] = names[cluster["name"]]
        if "load_assignment" in cluster:  # ORIGINAL_DST has none
            cluster["load_assignment"]["cluster_name"] = cluster["name"]
    for one in resources["listeners"]:
        one["name"] = listen.name
        for chain in one["filter_chains"]:
            chain["filters"][0]["typed_config"]["stat_prefix"] = listen.name
        _point(one, names)
    return document


def _point(value: Any, names: dict[str, str]) -> None:
    """Let everything below that names a cluster name the renamed one."""
    if isinstance(value, list):
        for part in value:
            _point(part, names)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key in {"cluster", "cluster_name"} and isinstance(part, str):
                value[key] = names[part]
            else:
                _point(part, names)
