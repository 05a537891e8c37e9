"""How long one body can hold the event loop: the worst of `heavy_bodies`, from its bytes to the Decision and the log.

Times are CPU time of the calling thread for one whole `RequestService.decide`, refusals too. Every kind is tried once, as long as
the inspection limit and as long as what is still read whole; the worst kinds are tried in every variant, and counted is the
least of several tries.

    python -m bench.heavy_cost [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
from collections.abc import Iterator
from time import thread_time
from typing import Any, Final

from bench.heavy_bodies import LIMIT_BYTES, Heavy, heavy_bodies, largest_read_whole
from extproc.app import tune_gc
from extproc.config.schema import Config
from extproc.edge.observability.decisions import RecentDecisions
from extproc.edge.observability.log import Log
from extproc.edge.observability.telemetry import Telemetry
from extproc.edge.services.request_service import RequestService
from extproc.errors import RequestError
from extproc.protocol.interfaces import Observers, RouteRequest
from extproc.router import Router
from extproc.types import Endpoint, Outcome

__all__ = ["lines", "measure", "worst"]

_AIM_MS: Final = 50.0
_SHOWN: Final = 10
_TRIES: Final = 5


class _Core:
    """A core with ten endpoints whose log goes nowhere."""

    def __init__(self, log: Log) -> None:
        config = Config()
        self._router = Router(config, rng=random.Random(1))
        self._router.set_endpoints([Endpoint(f"10.0.0.{place}", 8000) for place in range(1, 11)], now=0.0)
        recent = RecentDecisions(config.admin.decisions)
        self._core = RequestService(self._router, Observers(Telemetry(), recent, log), log_connected=lambda _peer: True)
        self._now = 0.0

    def took_ms(self, heavy: Heavy, body: bytes, tries: int) -> float:
        """Decide on a body, and return the least time it took."""
        headers = {"content-type": "application/json", "content-encoding": heavy.content_encoding}
        ask = RouteRequest("POST", heavy.path, headers, body, heavy.complete, None, False, False)
        least = float("inf")
        for _ in range(tries):
            self._now += 1.0
            begin = thread_time()
            with contextlib.suppress(RequestError):
                decided = self._core.decide(ask, self._now)
                least = min(least, thread_time() - begin)
                self._router.finished(decided.id, Outcome.CLIENT_GONE, now=self._now)
                continue
            least = min(least, thread_time() - begin)
        return least * 1e3


@contextlib.contextmanager
def _core() -> Iterator[_Core]:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    log = Log(Config().log, rng=random.Random(3), fd=nowhere)
    try:
        yield _Core(log)
    finally:
        log.close()
        os.close(nowhere)


def worst(*, every: int = 1, tries: int = _TRIES) -> list[tuple[str, float]]:
    """Return names and milliseconds of the worst, the worst first; of the kinds only each `every`th is tried."""
    tune_gc()
    with _core() as core:
        first = [
            (core.took_ms(heavy, body, 1), heavy.name, how)
            for heavy in list(heavy_bodies(cut=False, twice=False))[::every]
            for how, body in _lengths(heavy)
        ]
        suspects = {name for _, name, _ in sorted(first, reverse=True)[:_SHOWN]}
        found = [
            (f"{heavy.name}, {how}", core.took_ms(heavy, body, tries))
            for heavy in heavy_bodies()
            if any(heavy.name == name or heavy.name.startswith(f"{name}, ") for name in suspects)
            for how, body in _lengths(heavy)
        ]
    return sorted(found, key=lambda one: -one[1])[:_SHOWN]


def _lengths(heavy: Heavy) -> Iterator[tuple[str, bytes]]:
    yield "4 MiB", heavy.make(LIMIT_BYTES)
    whole = largest_read_whole(heavy)
    yield f"{len(whole) // 1000} kB", whole


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Return `{"figures": ..., "aims": [...]}`: the worst bodies in milliseconds, and the very worst against its aim."""
    found = worst(every=12 if quick else 1, tries=2 if quick else _TRIES)
    most = round(found[0][1], 1)
    aim = {"name": "the worst body, bytes to Decision and log, ms", "aim": _AIM_MS, "measured": most, "min": most}
    return {"figures": {name: {"ms": round(ms, 1)} for name, ms in found}, "aims": [aim | {"met": most <= _AIM_MS}]}


def lines(figures: dict[str, Any]) -> list[str]:
    """Say the figures in words, the worst first."""
    return [f"{case['ms']:6.1f} ms  {name}" for name, case in figures.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one kind of body in twelve")
    measured = measure(quick=parser.parse_args().quick)
    print("\n".join(lines(measured["figures"])))
    for aim in measured["aims"]:
        print(f"{'met ' if aim['met'] else 'MISS'} {aim['name']}: {aim['measured']} (aim {aim['aim']})")


if __name__ == "__main__":
    main()
