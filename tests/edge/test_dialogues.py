"""Every dialogue of the session's tests once more, over a real connection of each transport.

What a test expects of the session must come over the wire, byte for byte the same. The few dialogues that no wire can carry
are named below, each with its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import pytest

from extproc.edge.grpcio.server import GrpcioServer
from extproc.edge.native.server import NativeServer
from tests.edge.wire_dialogue import HurriedLoop, Wires, over
from tests.protocol import test_session
from tests.protocol.test_session import *  # noqa: F403 - collected here as well

TRANSPORTS: Final[dict[str, Any]] = {"grpcio": GrpcioServer, "native": NativeServer}

NOT_ON_A_WIRE: Final = {
    "test_thousands_of_half_bodies_stay_within_the_budget": "makes its sessions itself (real streams: tests/e2e)",
    "test_what_comes_meanwhile_is_kept_in_order": "a paused edge keeps it back itself, uncut (native/test_calls, grpcio/test_stream)",
    "test_a_peer_that_says_everything_at_once_gets_its_answer_and_the_end": "gRPC forbids to write after a half-close",
    "test_an_illegal_message_raises_and_changes_nothing": "over a wire the stream ends with INVALID_ARGUMENT (test_stream)",
}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all: grpc.aio's own thread may still speak to the loop of a test that is over."""
    with asyncio.Runner(loop_factory=HurriedLoop) as runner:
        yield runner


@pytest.fixture(autouse=True, params=list(TRANSPORTS))
def wires(request: pytest.FixtureRequest, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wires]:
    if reason := NOT_ON_A_WIRE.get(request.node.originalname):
        pytest.skip(reason)
    wires = over(TRANSPORTS[request.param], runner, monkeypatch, test_session)
    yield wires
    wires.close()


def test_the_exceptions_exist() -> None:
    known = {name for scope in (test_session, *vars(test_session).values()) for name in dir(scope)}
    assert NOT_ON_A_WIRE.keys() <= known
