import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.__main__ import PARTS, aim_lines, main
from bench.load import LoadResult
from extproc.demo.processes import ChildError, envoy_binary

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> object:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_aims_say_what_was_measured_and_whether_it_was_met() -> None:
    lines = aim_lines(
        [
            {"name": "CPU", "aim": 1.5, "measured": 1.4, "met": True},
            {"name": "p99", "aim": 1.5, "measured": 1.61, "met": False},
        ]
    )
    assert lines[0].split() == ["met", "CPU", "aim", "1.5", "measured", "1.4"]
    assert lines[1].startswith("MISSED p99")


def test_without_h2load_it_fails_and_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "apt-get install -y nghttp2-client" in said
    assert "core, closed, scrape and memory do without it" in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["fast"], f"fast: not one of {', '.join(PARTS)}"),
        (["--rounds", "0"], "--rounds: at least 1"),
        (["--transport", "udp"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_wrong_peer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "--peer", "mine=run {prot}", "--out", str(tmp_path)]) == 1
    assert "{prot} is not a placeholder" in capsys.readouterr().err


def test_quantiles_are_of_the_nearest_rank() -> None:
    result = LoadResult(100, 0, 2.0, tuple(float(place) for place in range(100)))
    assert (result.rate, result.quantile_s(0.5), result.quantile_s(0.99)) == (50.0, 50.0, 99.0)


def _children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def _bench(folder: Path, *argv: str) -> asyncio.subprocess.Process:
    try:
        envoy_binary()
    except ChildError as error:
        pytest.skip(str(error))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench",
        *argv,
        "--out",
        str(folder),
        cwd=_ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_it_ends_all_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    process = await _bench(tmp_path, "closed", "--quick")
    while not (tmp_path / "bench-logs" / "envoy.log").exists():
        assert process.returncode is None
        await asyncio.sleep(0.01)
    pids = _children_of(process.pid)
    assert len(pids) >= 4  # engines, bare, two pickers
    process.send_signal(number)
    _, said = await process.communicate()
    assert process.returncode == 130
    assert b"interrupted" in said
    assert b"Traceback" not in said
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.e2e
async def test_figures_go_to_a_file(tmp_path: Path) -> None:
    process = await _bench(tmp_path, "closed", "--quick", "--transport", "native", "--rounds", "1")
    output, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["figures"]["machine"]["cores"] >= 1
    assert set(written["figures"]["closed"]["servers"]) == {"bare", "native"}
    assert [one["name"] for one in written["aims"]] == [
        "CPU, 1 kB chats in a closed loop without Envoy, native, x bare"
    ]
    assert b"== closed ==" in output
    assert not (tmp_path / "bench-logs").exists()
