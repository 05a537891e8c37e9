"""The demo's parts that start nothing; its real run is `tests/e2e/test_demo.py`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.load import load
from extproc.demo import command as demo
from extproc.demo.command import Ports, add_arguments, main
from extproc.demo.processes import ChildError, Children
from extproc.demo.report import RunFigures


def arguments(tmp_path: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--out", str(tmp_path / "out"), *words])


def row(name: str, **fields: Any) -> RunFigures:
    known: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(RunFigures)}
    return RunFigures(**{**known, "name": name, "errors": 0, "per_endpoint": {"gpu-1": 1}, **fields})


GOOD = (row("round robin", cached_share=0.3, ttft_mean_s=0.4), row("picker", cached_share=0.75, ttft_mean_s=0.1))
DECISION = {"matched_bytes": 0, "decided_at": 1.0, "candidates": [], "reason": "because"}


def make(tmp_path: Path, *words: str) -> Any:
    return demo._Demo(arguments(tmp_path, *words))


def test_ports_are_the_conventional_ones_or_free_ones() -> None:
    assert Ports().all() == (10000, 9901, 9002, 9003, 9090, 9091, 8001, 8002, 8003, 8004)
    assert len(set(Ports.free().all())) == 10


def test_the_number_of_rows(tmp_path: Path) -> None:
    assert arguments(tmp_path).rows == len(demo.ROWS)
    assert [name for name, _ in make(tmp_path, "--rows", "2").rows] == ["round robin", "picker"]
    with pytest.raises(SystemExit):
        arguments(tmp_path, "--rows", "1")


def test_the_workload_follows_the_options(tmp_path: Path) -> None:
    spec = make(tmp_path, "--sessions", "3", "--seed", "9").workload.spec
    assert (spec.sessions, spec.seed, spec.tenants) == (3, 9, demo.SPEC.tenants)


@pytest.mark.parametrize("strategy", [strategy for _, strategy in demo.ROWS if strategy])
def test_the_pickers_configuration_is_a_valid_one(tmp_path: Path, strategy: str) -> None:
    found = make(tmp_path, "--free-ports")
    text = found._picker_config(strategy)
    config = load(text)
    assert config.routing.strategy == strategy
    assert len(config.pool.endpoints) == demo.SERVERS
    assert yaml.safe_load(text)["server"]["grpc_port"] == found.ports.grpc


def test_a_port_in_use_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "port_is_free", lambda port: port not in {9002, 8003})
    assert main(arguments(tmp_path)) == 2
    said = capsys.readouterr()
    assert said.err == (
        "extproc demo: port 9002, 8003 on 127.0.0.1 is in use; stop what listens there, or run `extproc demo --free-ports`\n"
    )
    assert "Traceback" not in said.out


def test_a_missing_envoy_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXTPROC_ENVOY", str(tmp_path / "none"))
    assert main(arguments(tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"extproc demo: EXTPROC_ENVOY={tmp_path / 'none'} is not an executable file")
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_interrupted_is_130(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(_: object) -> int:
        raise error

    monkeypatch.setattr(demo, "_with_signals", interrupted)
    assert main(arguments(tmp_path, "--free-ports")) == 130
    assert "everything it started has been stopped" in capsys.readouterr().err


def report(tmp_path: Path, *rows: RunFigures, decisions: list[dict[str, Any]]) -> tuple[bool, Any]:
    found = make(tmp_path)
    found.out.mkdir()
    failed: bool = found._report(rows, decisions, found.out / "demo.png", 61.0)
    return failed, json.loads((found.out / "demo.json").read_text())


def test_a_good_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed, document = report(tmp_path, *GOOD, decisions=[DECISION])
    assert not failed
    assert document["figures"].keys() == {"round robin", "picker"}
    assert all(aim["met"] for aim in document["aims"])
    said = capsys.readouterr()
    assert "because" in said.out
    assert said.err == ""


@pytest.mark.parametrize(
    ("rows", "missed"),
    [
        ((dataclasses.replace(GOOD[0], errors=1), GOOD[1]), "errors"),
        ((GOOD[0], dataclasses.replace(GOOD[1], cached_share=0.5)), "cached share, picker against round robin"),
        ((dataclasses.replace(GOOD[0], cached_share=0.0), GOOD[1]), "cached share, picker against round robin"),
        ((dataclasses.replace(GOOD[0], cached_share=0.1), GOOD[1]), "round robin's own cached share"),
        ((GOOD[0], dataclasses.replace(GOOD[1], ttft_mean_s=0.5)), "TTFT mean"),
        ((dataclasses.replace(GOOD[0], ttft_mean_s=0.0), GOOD[1]), "TTFT mean"),
    ],
)
def test_a_missed_aim_is_said_and_fails(
    rows: tuple[RunFigures, RunFigures], missed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed, document = report(tmp_path, *rows, decisions=[DECISION])
    assert failed
    assert missed in next(aim["name"] for aim in document["aims"] if not aim["met"])
    assert f"extproc demo: missed: {missed}" in capsys.readouterr().err


def test_a_picker_without_decisions_fails(tmp_path: Path) -> None:
    assert report(tmp_path, *GOOD, decisions=[])[0]


def test_three_decisions_are_chosen_to_tell_something() -> None:
    def decision(matched: int, at: float, best: int = 0) -> dict[str, Any]:
        return {"matched_bytes": matched, "decided_at": at, "candidates": [{"matched_bytes": best}]}

    cold, warm, yields = decision(0, 1.0), decision(900, 2.0, 900), decision(100, 3.0, 800)
    others = [decision(0, 4.0), decision(500, 5.0, 500)]
    chosen = demo._three([others[0], warm, yields, cold, others[1]])
    assert [found for _, found in chosen] == [cold, warm, yields]
    assert demo._three([]) == []
    assert len(demo._three([cold, warm])) == 2


def test_paths_are_shown_as_short_as_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo._short(tmp_path / "out" / "demo.json") == "out/demo.json"
    assert demo._short(Path("/elsewhere/demo.json")) == "/elsewhere/demo.json"


async def test_keeping_up_ends_when_one_process_has_ended_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def start(children: Children, _strategy: str) -> None:
        await children.start("gpu-1", [sys.executable, "-c", "import time; time.sleep(600)"])
        await children.start("picker", [sys.executable, "-c", "print('no more'); raise SystemExit(3)"])

    found = make(tmp_path, "--free-ports")
    monkeypatch.setattr(found, "_start", start)
    with pytest.raises(ChildError, match=r"picker ended with status 3:\n.*no more"):
        await found._stay()
    assert f"curl -si http://127.0.0.1:{found.ports.envoy}/v1/chat/completions" in capsys.readouterr().out
