"""`extproc envoy-config`, from its arguments to its output."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from extproc.envoy_config import EnvoyOptions, add_arguments, main, render


def run(*arguments: str, endpoints: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(arguments), lambda _: endpoints)


def test_without_arguments_the_default_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    assert capsys.readouterr().out == render("direct", EnvoyOptions())


def test_endpoints_come_from_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--profile", "buffered", "--config", "picker.yaml", endpoints=["10.0.0.7:8000"]) == 0
    engines = yaml.safe_load(capsys.readouterr().out)["static_resources"]["clusters"][1]
    address = engines["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    assert address == {"address": "10.0.0.7", "port_value": 8000}


def test_every_option_arrives(tmp_path: Path) -> None:
    output = tmp_path / "envoy.yaml"
    arguments = (
        "--profile tls --endpoint 10.0.0.1:1 --endpoint 10.0.0.2:2 --picker 10.0.0.3:3 --picker 10.0.0.4:4 --listen-host 0.0.0.0 "
        "--listen-port 80 --admin-host ::1 --admin-port 90 --stdout-access-log --picker-ca ca.pem "
        "--picker-certificate c.pem --picker-key k.pem --picker-server-name picker.example.com"
    )
    assert run(*arguments.split(), "--output", str(output)) == 0
    assert output.read_text(encoding="utf-8") == render(
        "tls",
        EnvoyOptions(
            endpoints=("10.0.0.1:1", "10.0.0.2:2"),
            pickers=("10.0.0.3:3", "10.0.0.4:4"),
            listen_host="0.0.0.0",
            listen_port=80,
            admin_host="::1",
            admin_port=90,
            stdout_access_log=True,
            picker_ca="ca.pem",
            picker_certificate="c.pem",
            picker_key="k.pem",
            picker_server_name="picker.example.com",
        ),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "none"], "profile: 'none' is not one of direct,"),
        (["--picker", "here"], "picker: 'here' is not HOST:PORT"),
        (["--config", "empty.yaml"], "endpoints: profile direct needs at least one"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"extproc envoy-config: {message}")


def test_help_tells_the_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    assert "fail-open" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--profile", "direct", "--output", str(tmp_path / "missing" / "envoy.yaml")) == 2
    assert "missing/envoy.yaml: No such file or directory" in capsys.readouterr().err
