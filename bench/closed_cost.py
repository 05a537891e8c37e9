"""What a request costs without Envoy: a gRPC load generator against each server itself, 32 streams always under way.

The generator (`bench.generator grpc`) speaks ext_proc as an Envoy with the profile `direct` does, on one connection.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.bodies import write_one
from bench.compare import Sample, aim, order_of, summary, table
from bench.load import generate
from bench.stage import Contender, Stage
from extproc.demo.processes import ChildError

__all__ = ["lines", "measure"]

STREAMS: Final = 32
_TRIAL: Final = 300


async def measure(stage: Stage, folder: Path, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Run all rounds; return `{"figures": ..., "aims": [...]}`. Raises ChildError.

    Other people's servers take part where they were asked to serve the profile `direct`.
    """
    body = write_one(folder / "bench-body-1000.json", 1000, random.Random(5))
    servers = [one for one in stage.contenders.values() if one.name != "native-close" and one.profile == "direct"]
    requests = {one.name: int((await _sample(one, body, _TRIAL)).rate * seconds) for one in servers}
    samples: dict[str, list[Sample]] = {one.name: [] for one in servers}
    for number in range(rounds):
        for one in order_of(servers, number):
            samples[one.name].append(await _sample(one, body, requests[one.name]))
    found = summary(samples)
    aims = []
    if "native" in found:
        name = "CPU, 1 kB chats in a closed loop without Envoy, native, x bare"
        aims.append(aim(name, 0.4, found["native"]["cpu_us"]["ratio"]))
    return {"figures": {"rounds": rounds, "streams": STREAMS, "servers": found}, "aims": aims}


async def _sample(server: Contender, body: Path, requests: int) -> Sample:
    times: list[float] = []
    arguments = ["grpc", "--port", str(server.port), "--bodies", str(body), "--streams", str(STREAMS)]
    arguments += ["--requests", str(requests), "--run-up", str(max(64, requests // 8))]
    result = await generate(
        arguments, begin=lambda: times.append(server.cpu_s()), end=lambda: times.append(server.cpu_s())
    )
    if result.failed:
        raise ChildError(f"{result.failed} of {requests} calls failed at {server.name}\n{server.child.tail()}")
    return Sample.of(result, times[1] - times[0])


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Lay out the table."""
    title = f"1 kB chats, closed loop of {figures['streams']} streams, gRPC straight to the server ({figures['rounds']} rounds)"
    return [title, *table(figures["servers"])]
