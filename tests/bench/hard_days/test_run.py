import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from bench.hard_days import engines, hostile
from bench.hard_days.__main__ import main
from bench.hard_days.acts import BAD_CONFIGS, BAD_ENDPOINTS, GOOD_CONFIGS, NONSENSE, engine_order
from bench.hard_days.journal import DISCARD, NAME, Lag, Tail
from bench.hard_days.judge import Invariant
from bench.hard_days.run import grown
from bench.hard_days.schedule import KINDS, Fault, Group
from bench.hard_days.stage import Stage, Usage
from extproc.config.endpoints import load_endpoints
from extproc.config.load import load
from extproc.demo.processes import ChildError, envoy_binary
from extproc.errors import ConfigError
from extproc.sim.faults import FaultKind, parse_fault
from extproc.sim.model_server_options import ModelServerOptions
from extproc.sim.presets import PRESETS

ROOT = Path(__file__).parents[3]


# What is acted out


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS.values() if kind.group in {Group.ENGINE, Group.METRICS}], ids=lambda kind: kind.name
)
def test_every_fault_of_an_engine_is_one_it_understands(kind: object) -> None:
    assert kind in KINDS.values()
    for variant in range(kind.variants):  # type: ignore[attr-defined]
        for strength in (0.0, 0.5, 1.0):
            fault = Fault(1.0, 1.0, kind, (0,), variant, strength)  # type: ignore[arg-type]
            if fault.kind.name in {"restart", "away"}:
                with pytest.raises(ValueError, match="is no fault"):
                    engine_order(fault)
            else:
                order = parse_fault(json.dumps(engine_order(fault)).encode())
                assert order.kind not in {FaultKind.NONE, FaultKind.RESTART}


def test_good_configurations_are_good_and_bad_ones_bad(tmp_path: Path) -> None:
    assert len(GOOD_CONFIGS) == KINDS["config-good"].variants
    assert len(BAD_CONFIGS) == KINDS["config-bad"].variants
    assert len(BAD_ENDPOINTS) == KINDS["endpoints-garbage"].variants
    assert len(NONSENSE) == KINDS["metrics-nonsense"].variants
    stage = Stage(tmp_path, pickers=2, transport="native")
    plain = load(json.dumps(stage.picker_config(stage.pickers[0], {})))
    for changes in GOOD_CONFIGS:
        assert load(json.dumps(stage.picker_config(stage.pickers[1], changes))) != plain
    for text in BAD_CONFIGS:
        if text:  # the empty one is refused by whoever watches the file
            with pytest.raises(ConfigError):
                load(text)
    for text in BAD_ENDPOINTS:
        with pytest.raises(ConfigError):
            load_endpoints(text)


def test_heavy_bodies_are_json_of_four_mebibytes() -> None:
    for make in hostile.heavy():
        body = make()
        assert 0.99 * (4 << 20) < len(body) <= 4 << 20
        json.loads(body)
    for make in hostile.huge():
        body = make()
        assert len(body) > 4 << 20
        json.loads(body)


def test_two_pickers_are_behind_one_envoy(tmp_path: Path) -> None:
    stage = Stage(tmp_path, pickers=2, transport="")
    document = stage._envoy_config(1234)
    clusters = {one["name"]: one for one in document["static_resources"]["clusters"]}
    found = [
        one["endpoint"]["address"]["socket_address"]["port_value"]
        for one in clusters["picker-picker"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    ]
    assert sorted(found) == sorted(picker.ports.grpc for picker in stage.pickers)
    routes = {
        listener["name"]: [
            "retry_policy" in route["route"]
            for route in listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"][0][
                "routes"
            ]
        ]
        for listener in document["static_resources"]["listeners"]
    }
    assert routes["plain"] == [False]
    assert routes["retrying"] == [True]


# Memory


def test_growth() -> None:
    base = Usage(0.0, 100 << 20, 40)
    used = [Usage(float(at), (300 if at < 10 else 120) << 20, 60 if at < 10 else 41) for at in range(16)]
    assert grown("picker-1", used, base, descriptors=True) == ""
    assert "300 MiB" in grown("picker-1", used[:10], base, descriptors=True)
    few = [Usage(float(at), 100 << 20, 90) for at in range(10)]
    assert "90 descriptors" in grown("picker-1", few, base, descriptors=True)
    assert grown("picker-1", few, base, descriptors=False) == ""


# Engines


async def test_engines_write_down_what_they_were_asked(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.touch()
    tail = Tail(path)
    options = ModelServerOptions(port=0, name="e", model="m", constants=PRESETS["h100-llama-3.1-8b"], speed=50.0)
    with path.open("ab", buffering=0) as journal:
        server = engines.JournaledServer(options, 4, journal)
        await server.listen()
        url = f"http://127.0.0.1:{server.port}"
        async with aiohttp.ClientSession(url) as http:

            async def ask(name: str, body: bytes, **headers: str) -> int:
                given = {"content-type": "application/json", NAME: name, **headers}
                async with http.post("/v1/completions", data=body, headers=given) as answer:
                    await answer.read()
                    return answer.status

            body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
            assert await ask("whole", body) == 200
            assert await ask("discarded", b"{" * 100, **{DISCARD: "1"}) == 400
            await http.post("/fault", json={"kind": "error", "status": 503, "count": 1})
            assert await ask("error", body) == 503
            await http.post("/fault", json={"kind": "close", "after_tokens": 1, "count": 1})
            with pytest.raises(aiohttp.ClientError):
                await ask("closed", body)
            await http.post("/fault", json={"kind": "hang"})
            hanging = asyncio.ensure_future(ask("hung", body))
            while not server._open:
                await asyncio.sleep(0)
            await http.post("/fault", json={"kind": "restart"})
            with pytest.raises(aiohttp.ClientError):
                await hanging
            async with http.get("/v1/models") as answer:
                assert answer.status == 200
        await server.stop()
    visits = {one.name: one for one in tail.read() if not isinstance(one, Lag)}
    assert {name: (one.status, one.fault) for name, one in visits.items()} == {
        "whole": (200, ""),
        "discarded": (400, ""),
        "error": (503, "error"),
        "closed": (0, "close"),
        "hung": (0, "hang"),
    }
    assert visits["whole"].sha256 == hashlib.sha256(body).hexdigest()
    assert visits["discarded"].sha256 == hashlib.sha256(b"{" * 100).hexdigest()
    assert all(one.engine == 4 and one.end_s >= one.begin_s for one in visits.values())


# The command


def test_a_dry_run_prints_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert main(["--dry-run", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first
    assert len(first.splitlines()) > 40
    assert main(["--dry-run", "--seed", "3", "--without", "picker-kill"]) == 0
    without = capsys.readouterr().out
    assert len(without.splitlines()) > 40
    assert "picker-kill" not in without


@pytest.mark.parametrize(
    "argv",
    [
        ["--minutes", "0"],
        ["--rate", "0"],
        ["--without", "nothing-of-the-kind"],
        ["--only", "heavy", "--without", "heavy"],
        ["--pickers", "3"],
    ],
)
def test_arguments(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


@pytest.fixture
def _envoy() -> None:
    try:
        envoy_binary()
    except ChildError as error:
        pytest.skip(str(error))


def command(folder: Path, *argv: str) -> list[str]:
    return [sys.executable, "-m", "bench.hard_days", "--out", str(folder), *argv]


@pytest.mark.e2e
@pytest.mark.usefixtures("_envoy")
def test_a_short_run(tmp_path: Path) -> None:
    """Some of each: what is broken shows in the figures, and nothing is left behind."""
    argv = command(tmp_path, "--minutes", "0.4", "--seed", "5", "--pickers", "1", "--rate", "6")
    argv += [
        "--only",
        "error-500",
        "break-off-close",
        "picker-kill",
        "endpoints-leave",
        "cut-upload",
        "heavy",
        "trailers",
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    assert not done.stderr
    found = json.loads((tmp_path / "hard-days.json").read_text())
    figures, aims = found["figures"], {aim["name"]: aim for aim in found["aims"]}
    assert figures["seed"] == 5
    assert figures["command"] in done.stdout
    assert figures["ways"]["picker"]["requests"] > 100
    assert figures["ways"]["round robin"]["failed"] > 0
    assert {invariant.value for invariant in Invariant} <= set(aims)
    assert (done.returncode == 0) == all(aim["met"] for aim in aims.values())
    for invariant in (Invariant.ANSWERS, Invariant.LEDGER, Invariant.GAPS, Invariant.LOGS, Invariant.ALIVE):
        assert aims[invariant.value]["met"], done.stdout
    assert (tmp_path / "hard-days" / "logs").exists() == (done.returncode == 1)


@pytest.mark.e2e
@pytest.mark.usefixtures("_envoy")
def test_interrupted_it_ends_its_processes(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "--minutes", "3", "--seed", "1"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if " s  " in line:  # the first fault: everything runs
            break
    children = [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == process.pid
    ]
    assert len(children) >= 3
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--seed 1" in said
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0
