"""The code of the documents runs, their configurations are valid, and their commands and keys exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from extproc import cli
from extproc.config.load import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "SECURITY.md")
}


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Every `extproc ...` of the shell blocks, without redirections and the ampersand."""
    text = "".join(block for document in DOCUMENTS.values() for block in blocks("sh", document)).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(re.split(r"[>&|]", line)[0])[1:] for line in lines if line.startswith("extproc ")]


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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_keys_exist(document: str) -> None:
    config = load("")
    for key in re.findall(r"`((?:routing|pool|server|prefix|log|in_flight|admin)\.[\w.-]+)[:`]", DOCUMENTS[document]):
        value: object = config
        for step in key.split("."):
            # Parts that the default does not have (`pool.dns`) are known by their type.
            value = getattr(value, step.replace("-", "_"), None)
            if value is None:
                assert f"`{key}`" in DOCUMENTS["docs/configuration.md"], key
                break
