import asyncio
import os
import shlex
import sys
from pathlib import Path

import aiohttp
import pytest

from bench import stage as stage_module
from bench.core_cost import chat_body
from bench.peers import Peer, parse_peers
from bench.proxy_cost import Driver, Load
from bench.stage import children_of, cpu_s, picker_config, raise_stage
from bench.stream_cost import targets
from extproc.config.load import load
from extproc.demo.processes import ChildError, Children, envoy_binary

_BARE = Path(stage_module.__file__).with_name("bare_server.py")
_TWIN = f"{shlex.quote(sys.executable)} {_BARE} --port {{port}} --endpoints {{endpoints}}"


@pytest.fixture
def _envoy() -> None:
    try:
        envoy_binary()
    except ChildError as error:
        pytest.skip(str(error))


def _peers(command: str, *profiles: str) -> tuple[Peer, ...]:
    return parse_peers([f"twin={command}"], [f"twin={profile}" for profile in profiles])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_picker_is_configured_as_it_comes() -> None:
    config = load(picker_config(["127.0.0.1:8001"], "native", (1, 2, 3)).encode(), source="test")
    assert (config.server.transport, config.server.response_phase) == ("native", "keep")
    assert config.routing.strategy == "weighted"
    assert config.pool.scrape.enabled


async def test_the_cpu_time_of_another_process_can_be_read(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        # The kernel counts in hundredths of a second: what starts quicker would have used none.
        code = "import time\nwhile time.process_time() < 0.1: pass\ntime.sleep(600)"
        child = await children.start("waits", [sys.executable, "-c", code])
        while (used_s := cpu_s(child)) == 0.0:
            await asyncio.sleep(0.01)
        assert used_s > 0.0
        assert children_of(child.process.pid) == [child.process.pid]


@pytest.mark.e2e
@pytest.mark.usefixtures("_envoy")
async def test_all_are_reached_through_one_envoy_and_end_with_the_stage(tmp_path: Path) -> None:
    peers = _peers(f"sh -c {shlex.quote('sleep 600 & exec ' + _TWIN)}", "full-duplex")
    async with raise_stage(tmp_path, transports=("native",), peers=peers, streams=True) as stage:
        twin = stage.contenders["twin"]
        assert set(stage.contenders) - {"native-close"} == {"bare", "native", "twin"}
        assert [listener for _, listener in targets(stage)["direct"]] == ["bare-direct", "native-direct"]
        assert (twin, "twin-full-duplex") in targets(stage)["full duplex both ways"]
        body = chat_body(["a", "b"], 1000)
        spoken = {}
        async with aiohttp.ClientSession() as http:
            for listener in ("native-direct", "bare-direct", "bare-full-duplex", "twin-full-duplex", "no-filter"):
                before, _ = await stage.messages(listener)
                async with http.post(stage.url(listener), data=body) as response:
                    assert (await response.text()).count("data: ") == 102
                spoken[listener] = (await stage.messages(listener))[0] - before
        assert max(spoken["native-direct"], spoken["bare-direct"]) <= 4  # no message per token
        assert min(spoken["bare-full-duplex"], spoken["twin-full-duplex"]) > 50
        assert spoken["no-filter"] == 0

        sample = await Driver(stage, tmp_path).sample(twin, Load("few", 30, None, 300.0))
        assert sample.cpu_us > 0.0
        assert twin.rss_bytes() > stage.contenders["bare"].rss_bytes() / 2
        group = children_of(twin.child.process.pid)
        assert len(group) == 2
        pids = [*group, stage.envoy.process.pid, *(one.child.process.pid for one in stage.contenders.values())]
    while any(map(_alive, group)):  # those of a stranger are init's to reap
        if all(_zombie(pid) for pid in group if _alive(pid)):
            break
        await asyncio.sleep(0.01)
    assert not [pid for pid in pids if _alive(pid) and not _zombie(pid)]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.e2e
@pytest.mark.usefixtures("_envoy")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/no/such/program {port}", "cannot start twin"),
        ("sh -c 'echo what went wrong; exit 3'", "twin ended with status 3:\nwhat went wrong"),
        ("sleep 600", "twin does not listen on 127.0.0.1:"),
        (f"{shlex.quote(sys.executable)} -m http.server --bind 127.0.0.1 {{port}}", "is not answered: status 5"),
    ],
)
async def test_a_peer_that_does_not_work_is_told_and_nothing_is_left(
    tmp_path: Path, command: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "_PEER_READY_S", 2.0)
    with pytest.raises(ChildError) as caught:
        async with raise_stage(tmp_path, transports=(), peers=_peers(command)):
            raise AssertionError("it was taken for a server")
    assert said in str(caught.value)
    assert not _own_children()


def _own_children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return [pid for pid in found if not _zombie(pid)]
