"""The shipped image, built and run: lean, not root, read-only, ready, and gone with status 0 when told to stop."""

from __future__ import annotations

import asyncio
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    docker = pytest.importorskip("docker")
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.image import DockerImage

from tests.e2e.stack import until

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim"
pytestmark = pytest.mark.e2e


def knock(where: str) -> None:
    """See whether anybody listens at a DOCKER_HOST, before docker's client tries: it leaks a socket where nobody does."""
    url = urlsplit(where)
    if url.scheme == "unix":
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(url.path)
    else:
        socket.create_connection((url.hostname, url.port or 2375), timeout=5).close()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    try:
        knock(where)
    except OSError as error:
        pytest.skip(f"no Docker engine answers at {where} ({error}); start one, or set DOCKER_HOST")
    client = docker.from_env()
    try:
        client.images.get(BASE)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(BASE)
        except docker.errors.APIError as error:
            pytest.skip(f"the base image {BASE} is not there and cannot be fetched ({str(error)[:200]})")
    # The host's network, because some engines give builds none of their own.
    with DockerImage(path=ROOT, tag="extproc:e2e", network_mode="host", rm=True) as built:
        yield str(built)
    client.close()


def container(image: str, *command: str) -> Any:
    return (
        DockerContainer(image)
        .with_command(list(command))
        .with_exposed_ports(9090)
        .with_kwargs(read_only=True, cap_drop=["ALL"], security_opt=["no-new-privileges"], mem_limit="512m")
    )


async def ready(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def test_it_serves_and_stops(image: str) -> None:
    with container(image, "serve", "--endpoint", "10.0.0.7:8000") as running:
        url = f"http://{running.get_container_host_ip()}:{running.get_exposed_port(9090)}"
        await until(lambda: ready(f"{url}/readyz"), "the picker in the container is ready")
        wrapped = running.get_wrapped_container()
        assert wrapped.attrs["Config"]["User"] == "65532:65532"
        for port in ("9002/tcp", "9003/tcp", "9090/tcp"):
            assert port in wrapped.attrs["Config"]["ExposedPorts"]
        await asyncio.to_thread(wrapped.stop, timeout=30)
        assert wrapped.wait()["StatusCode"] == 0
        assert b'"event":"stopped"' in wrapped.logs()


async def test_it_is_lean(image: str) -> None:
    code = (
        "import importlib.util as u, os, shutil; "
        "names = ['pytest', 'hypothesis', 'matplotlib', 'numpy', 'envoy_data_plane', 'testcontainers', 'pip', 'setuptools']; "
        "print([n for n in names if u.find_spec(n)], os.getuid(), bool(u.find_spec('uvloop')))"
    )
    with container(image, "serve") as running:
        status, said = running.exec(["python", "-c", code])
    assert (status, said.decode().strip()) == (0, "[] 65532 True")


async def test_a_bad_configuration_is_status_2(image: str) -> None:
    with container(image, "serve", "--strategy", "best") as running:
        wrapped = running.get_wrapped_container()
        assert (await asyncio.to_thread(wrapped.wait, timeout=60))["StatusCode"] == 2
        assert b"routing.strategy" in wrapped.logs()
