"""The README's code runs, its configurations are valid, and its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from extproc import cli
from extproc.config.load import load

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert found
    return found


def commands() -> list[list[str]]:
    """Every `extproc ...` of the shell blocks, without redirections and the ampersand."""
    text = "".join(blocks("sh")).replace("\\\n", " ")
    return [shlex.split(re.split(r"[>&|]", line)[0])[1:] for line in text.splitlines() if line.startswith("extproc ")]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    assert "prompt bytes" in capsys.readouterr().out


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configurations_are_valid(text: str) -> None:
    load(text)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_parse(words: list[str]) -> None:
    assert cli._parser(words[0]).parse_args(words).command == words[0]


def test_named_keys_exist() -> None:
    config = load("")
    for key in re.findall(r"`((?:routing|pool|server|prefix|log)\.[\w.-]+)[:`]", README):
        value: object = config
        for step in key.split("."):
            value = getattr(value, step.replace("-", "_"))
