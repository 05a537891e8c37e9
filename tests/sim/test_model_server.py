import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from extproc.sim.model_server import ModelServerOptions, add_arguments, main, serve

ROOT = Path(__file__).parents[2]
PROGRAM = """
import argparse, sys
from extproc.sim.model_server import add_arguments, main
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(main(parser.parse_args()))
"""


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


async def test_serve_and_stop() -> None:
    server = await serve(ModelServerOptions(port=0, name="a"))
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/health") as answer:
            assert (answer.status, answer.headers["x-model-server"]) == (200, "a")
        await server.stop()
        await server.stop()
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"http://127.0.0.1:{server.port}/health")


async def test_url_of_an_ipv6_address() -> None:
    with contextlib.suppress(OSError):  # not every machine has IPv6
        server = await serve(ModelServerOptions(port=0, host="::1"))
        assert server.url == f"http://[::1]:{server.port}"
        await server.stop()


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(arguments("--port", str(port))) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"extproc model-server: cannot listen on 127.0.0.1:{port}: ")
    assert text.count("\n") == 1


def test_bad_values_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--speed", "0")) == 2
    assert capsys.readouterr().err == "extproc model-server: speed must be positive\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_cleanly(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, "--port", "0", "--name", "b"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process,
        contextlib.ExitStack() as on_failure,
    ):
        on_failure.callback(process.kill)  # else leaving would wait for ever
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("model server b: meta-llama/Llama-3.1-8B-Instruct on http://127.0.0.1:")
        with urllib.request.urlopen(f"{line.split()[-1]}/health") as answer:
            assert answer.status == 200
        # With uvloop where it is there: its transports are not asyncio's.
        for order in (b'{"kind":"reset","count":1}', b'{"kind":"reset","count":1,"after_tokens":1}'):
            with urllib.request.urlopen(f"{line.split()[-1]}/fault", order):
                pass
            body = urllib.request.Request(
                f"{line.split()[-1]}/v1/completions",
                b'{"prompt":"x","stream":true,"max_tokens":5}',
                {"content-type": "application/json"},
            )
            # While the request is still being sent, urllib wraps it.
            with pytest.raises(OSError, match="reset by peer"), urllib.request.urlopen(body) as answer:
                answer.read()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
