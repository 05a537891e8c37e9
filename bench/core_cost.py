"""What a decision costs without gRPC: from the bytes of a body to the Decision, and what else the core does per request.

Times are CPU time of the process (all threads: the log's writer is in it), in batches; the smallest batch says what the
code costs, the median what it costs beside what else the machine does.

    python -m bench.core_cost [--quick]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any, Final

from extproc.app import tune_gc
from extproc.config.schema import Config
from extproc.edge.observability.decisions import RecentDecisions
from extproc.edge.observability.log import Log
from extproc.edge.observability.telemetry import Telemetry
from extproc.edge.scraping.signals import read_metrics
from extproc.edge.services.request_service import RequestService
from extproc.protocol.interfaces import Observers, RouteRequest, StreamEnd
from extproc.request import parse
from extproc.router import Router
from extproc.sim.engine import Engine
from extproc.sim.metrics import MetricsPage, ServerMetrics
from extproc.sim.presets import PRESETS
from extproc.types import Decision, Endpoint, EndpointMetrics, Outcome

__all__ = ["Conversations", "Timing", "aim_of", "chat_body", "lines", "measure", "metrics_page", "reference_loop"]

PATH: Final = "/v1/chat/completions"
MODEL: Final = "llama-3.1-8b"
_BATCH: Final = 50
"""Requests between two looks at the clock; all are under way until the batch is over."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of CPU per call."""

    min_us: float
    median_us: float

    @classmethod
    def of(cls, batches_us: Sequence[float]) -> Timing:
        """Sum up the batches."""
        return cls(min(batches_us), statistics.median(batches_us))


def chat_body(texts: Sequence[str], body_bytes: int, *, stream: bool = True) -> bytes:
    """Write a chat request of about `body_bytes` bytes; `texts` are its messages, the last one is filled up."""
    messages = [{"role": "user" if turn else "system", "content": text} for turn, text in enumerate(texts)]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 100 if stream else 1, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    body["messages"] = messages
    missing = body_bytes - len(json.dumps(body))
    if missing > 0:
        messages[-1]["content"] += "x" * missing
    return json.dumps(body).encode()


class Conversations:
    """Bodies of chat requests, no two alike: a system prompt shared by all, a history shared by some, a new question."""

    def __init__(self, body_bytes: int, *, histories: int, rng: random.Random, stream: bool = True) -> None:
        self._body_bytes = body_bytes
        self._stream = stream
        self._rng = rng
        self._system = self._text(body_bytes // 4)
        self._histories = [self._text(body_bytes // 4) for _ in range(histories)]

    def next(self) -> bytes:
        """Write one more."""
        question = self._text(max(64, self._body_bytes // 2 - 300))
        texts = (self._system, self._rng.choice(self._histories), question)
        return chat_body(texts, self._body_bytes, stream=self._stream)

    def _text(self, n_bytes: int) -> str:
        return self._rng.randbytes(n_bytes // 2).hex()


class _Pool:
    """A Router with endpoints that were scraped a moment ago, and a clock that runs with the requests."""

    def __init__(self, endpoints: int) -> None:
        self.now = 1000.0
        self.router = Router(Config(), rng=random.Random(1))
        self.ids = [f"10.0.{i // 250}.{i % 250 + 1}:8000" for i in range(endpoints)]
        pool = [Endpoint(one.partition(":")[0], 8000) for one in self.ids]
        self.router.set_endpoints(pool, now=self.now)
        for one in self.ids:
            self.router.observe_models(one, {MODEL: None}, now=self.now)

    def scrape(self) -> None:
        """Let every endpoint have been scraped just now."""
        for place, one in enumerate(self.ids):
            metrics = EndpointMetrics(
                waiting=place % 3,
                running=4.0 + place % 5,
                kv_cache_usage=0.3 + place % 7 * 0.05,
                cache_tokens=4_000_000,
            )
            self.router.observe(one, metrics, now=self.now)

    def finish(self, decisions: Sequence[Decision]) -> None:
        """End requests well."""
        for decision in decisions:
            self.router.response_headers(decision, now=self.now)
            self.router.finished(decision, Outcome.OK, now=self.now)

    def warm(self, conversations: Conversations, blocks: int) -> int:
        """Route requests until the index holds so many blocks; return how many it holds."""
        while (held := self.router.index_stats().blocks) < blocks:
            decisions = [self._route(conversations.next()) for _ in range(_BATCH)]
            self.finish(decisions)
            if self.router.index_stats().blocks == held:
                break
        return held

    def _route(self, body: bytes) -> Decision:
        self.now += 0.001
        return self.router.route(parse(PATH, body, content_type="application/json"), now=self.now)


def decision(endpoints: int, body_bytes: int, warm_blocks: int, *, batches: int) -> dict[str, Any]:
    """Measure parse to Decision through `Router`, the end of a request, and the same through `RequestService`."""
    pool = _Pool(endpoints)
    conversations = Conversations(body_bytes, histories=50, rng=random.Random(2))
    pool.scrape()
    held = pool.warm(conversations, warm_blocks)
    before = gc.get_threshold()
    tune_gc()  # as `serve` does
    routing, ending = _router(pool, conversations, batches)
    whole = _core(pool, conversations, batches)
    gc.unfreeze()
    gc.set_threshold(*before)
    return {
        "endpoints": endpoints,
        "body_bytes": body_bytes,
        "index_blocks": held,
        "parse_and_route": routing,
        "finished": ending,
        "with_metrics_and_log": whole,
    }


def _router(pool: _Pool, conversations: Conversations, batches: int) -> tuple[Timing, Timing]:
    routing: list[float] = []
    ending: list[float] = []
    router = pool.router
    for _ in range(batches):
        bodies = [conversations.next() for _ in range(_BATCH)]
        pool.scrape()
        router.snapshots(pool.now)
        decisions = []
        begin = process_time()
        for body in bodies:
            pool.now += 0.001
            decisions.append(router.route(parse(PATH, body, content_type="application/json"), now=pool.now))
        middle = process_time()
        pool.finish(decisions)
        ending.append((process_time() - middle) / _BATCH * 1e6)
        routing.append((middle - begin) / _BATCH * 1e6)
    return Timing.of(routing), Timing.of(ending)


def _core(pool: _Pool, conversations: Conversations, batches: int) -> Timing:
    """Measure `RequestService.decide`: the same, with metrics, the log (written to nowhere) and the last decisions."""
    config = Config()
    telemetry = Telemetry()
    telemetry.set_endpoints(pool.ids)
    telemetry.set_models([MODEL])
    nowhere = os.open(os.devnull, os.O_WRONLY)
    log = Log(config.log, rng=random.Random(3), fd=nowhere)
    observer = Observers(telemetry, RecentDecisions(config.admin.decisions), log)
    core = RequestService(pool.router, observer, log_connected=lambda _peer: True)
    headers = {"content-type": "application/json", "x-request-id": "6c1a2f34-5b6d-4f7e-8a90-0123456789ab"}
    took: list[float] = []
    for _ in range(batches):
        asks = [
            RouteRequest("POST", PATH, headers, conversations.next(), True, None, False, False) for _ in range(_BATCH)
        ]
        pool.scrape()
        pool.router.snapshots(pool.now)
        begin = process_time()
        decided = []
        for ask in asks:
            pool.now += 0.001
            decided.append(core.decide(ask, pool.now))
        took.append((process_time() - begin) / _BATCH * 1e6)
        for one in decided:
            core.response_started(one.id, 200, headers, pool.now, None)
            core.ended(one.id, StreamEnd.COMPLETED, "127.0.0.1:5000", pool.now)
    log.close()
    os.close(nowhere)
    return Timing.of(took)


def reference_loop() -> dict[str, float]:
    """Time 10,000 turns of an empty loop, which tells how fast and how shared the machine is."""
    took = []
    for _ in range(200):
        begin = process_time()
        for _ in range(10_000):
            pass
        took.append((process_time() - begin) * 1e6)
    return {"min_us": min(took), "median_us": statistics.median(took)}


def metrics_page() -> bytes:
    """Return a metrics page as long as that of a real vLLM (69 kB)."""
    engine = Engine(PRESETS["l4-llama-3.1-8b-fp8"])
    metrics = ServerMetrics(engine, loras=(), max_model_len=8192, started_s=1795228943.4)
    return MetricsPage(metrics, MODEL, padded=True).render()


def signals(*, batches: int) -> dict[str, Any]:
    """Measure reading the few signals out of a page."""
    page = metrics_page()
    took = []
    for _ in range(batches):
        begin = process_time()
        for _ in range(_BATCH):
            read_metrics(page, "vllm")
        took.append((process_time() - begin) / _BATCH * 1e6)
    return {"page_bytes": len(page), "read": Timing.of(took)}


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Run every case and return `{"figures": ..., "aims": [...]}`; the aims hold the medians."""
    batches = 8 if quick else 30
    figures = {
        "decision_1kB_10": decision(10, 1000, 50_000, batches=2 * batches),
        "decision_32kB_100": decision(100, 32_000, 100_000 if quick else 1_000_000, batches=batches),
        "signals": signals(batches=batches),
    }
    small, large = figures["decision_1kB_10"], figures["decision_32kB_100"]
    aims = (
        ("parse to Decision, 1 kB, 10 endpoints, us", 60, small["parse_and_route"]),
        ("parse to Decision, 32 kB, 100 endpoints, warm index, us", 300, large["parse_and_route"]),
        ("signals out of a 70 kB vLLM page, us", 150, figures["signals"]["read"]),
    )
    return {
        "figures": {name: {key: _plain(value) for key, value in case.items()} for name, case in figures.items()},
        "aims": [aim_of(name, aim, timing) for name, aim, timing in aims],
    }


def aim_of(name: str, aim: float, timing: Timing) -> dict[str, Any]:
    """Hold a median against its aim."""
    measured = round(timing.median_us, 1)
    return {"name": name, "aim": aim, "measured": measured, "met": measured <= aim, "min": round(timing.min_us, 1)}


def _plain(value: Any) -> Any:
    return {"min_us": value.min_us, "median_us": value.median_us} if isinstance(value, Timing) else value


def lines(figures: dict[str, Any]) -> list[str]:
    """Say the figures in words, one line per case."""
    shown = []
    for name, case in figures.items():
        times = ", ".join(
            f"{key.replace('_', ' ')} {value['median_us']:.1f} us (min {value['min_us']:.1f})"
            for key, value in case.items()
            if isinstance(value, dict)
        )
        sizes = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in case.items() if isinstance(value, int))
        shown.append(f"{name}: {times} [{sizes}]")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer batches, a smaller index")
    measured = measure(quick=parser.parse_args().quick)
    print("\n".join(lines(measured["figures"])))
    for aim in measured["aims"]:
        print(f"{'met ' if aim['met'] else 'MISS'} {aim['name']}: {aim['measured']} (aim {aim['aim']})")


if __name__ == "__main__":
    main()
