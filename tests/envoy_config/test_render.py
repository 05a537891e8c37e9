"""The committed files are what `render` gives, and Envoy accepts every profile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.envoy_config import PROFILES, EnvoyConfigError, EnvoyOptions, render, render_round_robin
from tests.envoy_config.harness import envoy_binary

COMMITTED = Path(__file__).parents[2] / "envoy"
VARIANTS = {
    "committed": EnvoyOptions(),
    "ipv6": EnvoyOptions(endpoints=("[2600::1]:8000", "10.0.0.1:80"), pickers=("[::1]:9002",), listen_host="::1"),
    "names": EnvoyOptions(endpoints=("vllm.default.svc:8000", "10.0.0.1:80"), pickers=("picker.default.svc:9002",)),
    "pickers": EnvoyOptions(pickers=("10.0.0.1:9002", "picker.default.svc:9002", "[::1]:9002")),
    "many": EnvoyOptions(endpoints=tuple(f"10.0.{i // 250}.{i % 250 + 1}:8000" for i in range(1000))),
    "stdout": EnvoyOptions(stdout_access_log=True),
}


@pytest.mark.parametrize("profile", PROFILES)
def test_committed_file_is_what_render_gives(profile: str) -> None:
    text = (COMMITTED / f"{profile}.yaml").read_text(encoding="utf-8")
    hint = f"extproc envoy-config --profile {profile} --output envoy/{profile}.yaml"
    assert text == render(profile, EnvoyOptions()), f"render it again: {hint}"


def test_every_committed_file_has_a_profile() -> None:
    assert {path.stem for path in COMMITTED.glob("*.yaml")} == set(PROFILES)


@pytest.mark.e2e
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("profile", PROFILES)
def test_envoy_accepts(profile: str, variant: str, tmp_path: Path) -> None:
    _validate(render(profile, VARIANTS[variant]), tmp_path)


@pytest.mark.e2e
def test_envoy_accepts_verified_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    chain, key = (str(path) for path in certificate)
    options = EnvoyOptions(
        picker_ca=chain, picker_certificate=chain, picker_key=key, picker_server_name="picker.example.com"
    )
    text = render("tls", options)
    _validate(text, tmp_path)
    context = _cluster(text, "picker")["transport_socket"]["typed_config"]
    assert context["sni"] == "picker.example.com"
    validation = context["common_tls_context"]["validation_context"]
    assert validation["trusted_ca"] == {"filename": chain}
    assert validation["match_typed_subject_alt_names"][0]["matcher"] == {"exact": "picker.example.com"}
    assert "NOT verified" not in text
    assert "NOT verified" in render("tls", EnvoyOptions())


def test_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(EnvoyConfigError, match=r"'direkt' is not one of direct, full-duplex, .*tls"):
        render("direkt", EnvoyOptions())


def test_missing_envoy_data_plane_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envoy_data_plane.envoy.config.bootstrap", None)
    with pytest.raises(EnvoyConfigError, match=r"extproc-picker\[demo\]"):
        render("direct", EnvoyOptions())


def _validate(text: str, folder: Path) -> None:
    path = folder / "envoy.yaml"
    path.write_text(text, encoding="utf-8")
    command = [
        str(envoy_binary()),
        "--mode",
        "validate",
        "-c",
        str(path),
        "--use-dynamic-base-id",
        "--concurrency",
        "1",
    ]
    result = subprocess.run([*command, "-l", "warning"], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def _cluster(text: str, name: str) -> Any:
    return next(c for c in yaml.safe_load(text)["static_resources"]["clusters"] if c["name"] == name)


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
