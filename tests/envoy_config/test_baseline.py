"""The yardstick: Envoy alone, alike in everything but the picker."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from extproc.envoy_config import EnvoyOptions, render, render_round_robin
from tests.envoy_config.harness import envoy_binary

OPTIONS = EnvoyOptions(endpoints=("10.0.0.1:8000", "10.0.0.2:8000"))


def manager(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    typed: dict[str, Any] = found["typed_config"]
    return typed


def test_nothing_of_the_picker_is_left() -> None:
    text = render_round_robin(OPTIONS)
    for word in (
        "envoy.filters.http.ext_proc",
        "9002",
        "override_host",
        "envoy.access_loggers.http_grpc",
        "cluster_name: picker",
    ):
        assert word not in text
    document = yaml.safe_load(text)
    assert [one["name"] for one in manager(document)["http_filters"]] == ["envoy.filters.http.router"]
    assert [one["name"] for one in document["static_resources"]["clusters"]] == ["engines"]


def test_everything_else_is_as_in_direct() -> None:
    ours, theirs = yaml.safe_load(render_round_robin(OPTIONS)), yaml.safe_load(render("direct", OPTIONS))
    assert ours["admin"] == theirs["admin"]
    assert ours["overload_manager"] == theirs["overload_manager"]
    engines = next(one for one in theirs["static_resources"]["clusters"] if one["name"] == "engines")
    found = ours["static_resources"]["clusters"][0]
    [protocol] = engines["typed_extension_protocol_options"].values()
    del protocol["http_filters"]  # of our retries
    assert {key: value for key, value in found.items() if key != "load_balancing_policy"} == {
        key: value for key, value in engines.items() if key != "load_balancing_policy"
    }
    for key in ("stream_idle_timeout", "http2_protocol_options", "codec_type"):
        assert manager(ours).get(key) == manager(theirs).get(key)
    routes = manager(ours)["route_config"]["virtual_hosts"][0]["routes"]
    assert routes == manager(theirs)["route_config"]["virtual_hosts"][0]["routes"][-len(routes) :]


def test_envoy_accepts_it(tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(render_round_robin(OPTIONS))
    argv = [str(envoy_binary()), "--mode", "validate", "-c", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
