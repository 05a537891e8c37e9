"""The command line: what each subcommand hands on, its exit status, and what it says when it cannot."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from extproc import __version__, cli
from extproc.config.load import load
from extproc.errors import ConfigError, ConfigProblem, ExtprocError

PYTHON = [sys.executable, "-m", "extproc"]


def run(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program as users do."""
    return subprocess.run([*PYTHON, *words], capture_output=True, text=True, input=stdin, timeout=300, check=False)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text("pool: {endpoints: ['10.0.0.7:8000', '[2001:db8::7]:8000']}\n")
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text("server:\n  grpcPort: 1\nrouting: {near_tie: 7}\n")
    return path


# The program


def test_version_comes_without_heavy_imports() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"extproc {__version__}\n", "")
    code = (
        "import sys; from extproc import cli; cli._parser('check-config'); "
        "print(sorted({'aiohttp', 'grpc', 'asyncio', 'prometheus_client', 'envoy_data_plane'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert loaded.stdout == "[]\n"


def test_a_reader_that_has_enough_is_no_error() -> None:
    with subprocess.Popen([*PYTHON, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        said = child.stderr.read()
    assert b"Traceback" not in said


def test_output_to_a_closed_pipe_is_no_error(good: Path) -> None:
    argv = [*PYTHON, "check-config", "--show", str(good)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        said = child.stderr.read()
    assert (child.returncode, said) == (1, b"")


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    said = capsys.readouterr().out
    for command in ("serve", "check-config", "explain", "envoy-config", "model-server", "demo"):
        assert command in said


def test_the_programs_own_arguments_are_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["extproc", "check-config", str(good)])
    assert cli.main() == 0
    assert capsys.readouterr().out == f"{good}: ok\n"


@pytest.mark.parametrize("words", [["fly"], ["serve", "--no-such"], ["serve", "--grpc-port", "x"], ["check-config"]])
def test_wrong_arguments_are_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


# check-config


def test_check_config_shows_the_defaults(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", "--show", str(good)]) == 0
    assert load(capsys.readouterr().out) == load(good.read_text())


def test_check_config_names_every_problem(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", str(bad)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "extproc check-config: the configuration cannot be used:"
    assert [line.split(": ")[1:3] for line in said[1:]] == [
        ["line 2", "server.grpcPort"],
        ["line 3", "routing.near_tie"],
    ]


def test_check_config_of_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


# serve and explain: what is handed on


class Called:
    """Stands for the function behind a subcommand."""

    def __init__(self, status: int = 0, error: BaseException | None = None) -> None:
        self.status = status
        self.error = error
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> int:
        self.args, self.options = args, options
        if self.error is not None:
            raise self.error
        return self.status


def test_flags_become_keys_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Called()
    monkeypatch.setattr("extproc.app.serve", called)
    words = [
        "serve",
        "--config",
        "c.yaml",
        "--grpc-port",
        "1",
        "--strategy",
        "random",
        "--fallbacks",
        "2",
        "--endpoint",
        "a:1",
    ]
    assert cli.main([*words, "--endpoint", "b:2"]) == 0
    keys = {
        "server.grpc_port": 1,
        "routing.strategy": "random",
        "routing.fallbacks": 2,
        "pool.endpoints": ["a:1", "b:2"],
    }
    assert called.args == (Path("c.yaml"), keys)


def test_every_flag_is_a_key() -> None:
    document: Any = load("")
    for _, key, kind, _ in cli._FLAGS:
        value = document
        for step in key.split("."):
            value = getattr(value, step)
        assert isinstance(value, kind)


def test_without_flags_nothing_is_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Called()
    monkeypatch.setattr("extproc.app.serve", called)
    assert cli.main(["serve"]) == 0
    assert called.args == (None, {})


def test_explain_hands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Called(status=1)
    monkeypatch.setattr("extproc.explain.explain", called)
    words = ["explain", "body.json", "--after", "x.json", "--path", "/v1/completions", "--json", "--endpoint", "a:1"]
    assert cli.main(words) == 1
    assert called.args == (None, {"pool.endpoints": ["a:1"]})
    assert called.options == {
        "body": Path("body.json"),
        "after": [Path("x.json")],
        "request_path": "/v1/completions",
        "as_json": True,
    }


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError((ConfigProblem("a.b", "is wrong", "do right", line=3),), source="f"), 2, "  f: line 3: a.b: is wrong; do right\n"),
        (ExtprocError("no way"), 2, "extproc serve: no way\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)  # fmt: skip
def test_errors_become_lines(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("extproc.app.serve", Called(error=error))
    assert cli.main(["serve"]) == status
    assert capsys.readouterr().err.endswith(said)


# The subcommands that need the extra `demo`


def test_envoy_config_takes_the_endpoints_of_the_configuration(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["envoy-config", "--profile", "direct", "--config", str(good)]) == 0
    said = capsys.readouterr().out
    assert "10.0.0.7" in said
    assert "2001:db8::7" in said


def test_envoy_config_of_a_configuration_without_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dns.yaml"
    path.write_text("pool: {dns: {host: vllm.example.com, port: 8000}}\n")
    assert cli.main(["envoy-config", "--config", str(path)]) == 2
    assert "name them by --endpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "module"), [("envoy-config", "envoy_data_plane"), ("demo", "envoy_data_plane"), ("demo", "matplotlib")]
)
def test_a_lean_installation_says_what_is_missing(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == module else find_spec(name, *args)
    )
    assert cli.main([command]) == 2
    said = capsys.readouterr().err
    assert module in said
    assert "pip install 'extproc-picker[demo]'" in said


@pytest.mark.parametrize(("command", "target"), [("model-server", "extproc.sim.model_server.main"), ("demo", "extproc.demo.command.main")])  # fmt: skip
def test_the_simulation_commands_hand_on(command: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    def main(args: argparse.Namespace) -> int:
        seen.append(args)
        return 7

    monkeypatch.setattr(target, main)
    assert cli.main([command]) == 7
    assert seen[0].command == command


@pytest.mark.parametrize("command", ["serve", "check-config", "explain", "envoy-config", "model-server", "demo"])
def test_every_subcommand_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: extproc {command} ")
    assert f"example:\n  extproc {command} " in said
    options = re.split(r"^  (?=--)", said[said.index("options:") : said.index("example:")], flags=re.MULTILINE)[1:]
    assert [option for option in options if "default: " not in " ".join(option.split())] == []


def test_the_help_fits_one_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out.splitlines()
    assert len(said) <= 24
    assert max(map(len, said)) <= 80
    assert "example:" in said


def test_the_module_is_the_program() -> None:
    words: Sequence[str] = ("check-config", "-")
    done = run(*words)
    assert done.returncode == 2
    assert "cannot read the file" in done.stderr
