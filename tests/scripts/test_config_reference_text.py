"""Every example in the documentation loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from extproc.config.endpoints import load_endpoints
from extproc.config.load import load
from scripts.config_reference_text import AFTER, BEFORE

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> list[str]:
    """All blocks of the configuration's own pages, and elsewhere those that say they are configurations."""
    found = [block for text in (BEFORE, AFTER) for block in BLOCK.findall(text)]
    for path in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]:
        if path.is_file():
            blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
            found += [block for block in blocks if re.search(r"^apiVersion: extproc/", block, re.MULTILINE)]
    return found


@pytest.mark.parametrize("text", examples())
def test_examples_load(text: str) -> None:
    if text.startswith("# endpoints file"):
        assert load_endpoints(text)
    else:
        load(text)
