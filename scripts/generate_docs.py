"""Write what is generated of docs/ and the JSON Schema again: `make docs`. Tests hold the committed files equal."""

from __future__ import annotations

import re
from pathlib import Path

from extproc.edge.observability.instruments import markdown_table
from extproc.edge.observability.telemetry import Telemetry
from scripts.config_reference import json_schema_text, markdown

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Write docs/configuration.md, extproc/config/schema.json and the table of docs/metrics.md."""
    (ROOT / "docs/configuration.md").write_text(markdown(), encoding="utf-8")
    (ROOT / "extproc/config/schema.json").write_text(json_schema_text(), encoding="utf-8")
    metrics = ROOT / "docs/metrics.md"
    table = markdown_table(Telemetry().instruments.definitions)
    text, found = re.subn(
        r"^\| metric \|.*\n(?:\|.*\n)*", lambda _: table, metrics.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert found == 1, f"{metrics}: {found} tables of metrics"
    metrics.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
