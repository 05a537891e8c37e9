"""What holds for all tests: hypothesis profiles, and how two runs of the same suite (pytest-xdist) keep out of each other's way.

Hypothesis: `fast` by default, the same examples in every run; `deep` with HYPOTHESIS_PROFILE=deep (nightly, or before a
release), many more and other ones each time. What `deep` finds becomes an `@example`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No deadlines anywhere: the machine is shared, and how long an example takes says nothing about the code.
settings.register_profile(
    "fast", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER:
    each = 20_000 // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    low = 12_000 + each * int(_WORKER.removeprefix("gw"))
    os.environ.setdefault("EXTPROC_PORTS", f"{low}-{low + each}")
# Child processes are forked with a function that runs before exec, in which gRPC's handlers would wake its threads.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# A shell's background job ignores Ctrl-C and hands that on; what is started here has to feel it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _locked(file: Path, how: int) -> Iterator[None]:
    with file.open("w") as held:
        fcntl.flock(held, how)
        yield


@pytest.fixture(autouse=True)
def _turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a test marked `alone` run while no other worker runs one: it measures, or compares what timing decides."""
    if not _WORKER:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent
    door, room = folder / "door", folder / "room"
    if request.node.get_closest_marker("alone") is not None:
        # Whoever wants to be alone holds the door, so that it is not overtaken for ever.
        with _locked(door, fcntl.LOCK_EX), _locked(room, fcntl.LOCK_EX):
            yield
        return
    with contextlib.ExitStack() as held:
        with _locked(door, fcntl.LOCK_SH):
            held.enter_context(_locked(room, fcntl.LOCK_SH))
        yield
