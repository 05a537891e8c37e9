"""Acts the schedule out on engines, pickers, files and Envoy, and tells the judge what clients may feel of it.

What hostile clients do stands in `hostile`.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from bench.hard_days.hostile import Hostile
from bench.hard_days.judge import Invariant, Judge, Span
from bench.hard_days.schedule import Fault, Group
from bench.hard_days.stage import Picker, Stage
from extproc.errors import ExtprocError

__all__ = ["BAD_CONFIGS", "BAD_ENDPOINTS", "GOOD_CONFIGS", "NONSENSE", "Acts", "engine_order"]

_FOUND_S: Final = 2.5
"""Envoy finds a picker that is ready again after 0.5 s (the profile's `unhealthy_interval`); the rest is for a busy machine."""
_KILLED_BESIDE_S: Final = 6.0
"""So long may Envoy take to pass by one of two pickers that was killed: two failed checks, 2 s apart, and a busy machine."""
_FILE_S: Final = 2.5
"""The picker looks at its files once a second; the rest is for a busy machine."""
_ON_TIME_S: Final = 0.3
"""A sleep that lasts so much longer tells of a machine that was busy with something else: nobody has been on time."""
_DRAIN_DELAY_S: Final = 5.0
"""The shipped `server.drain_delay`: so long a picker that is told to end takes requests."""
_STATUSES: Final = {"error-500": 500, "error-503": 503, "error-404": 404, "error-401": 401, "error-429": 429}

GOOD_CONFIGS: Final[tuple[dict[str, Any], ...]] = (
    {"routing": {"strategy": "least-load"}},
    {"routing": {"strategy": "prefix-cache"}},
    {"routing": {"strategy": "prefix-hash"}},
    {"routing": {"near_tie": 0.1, "weights": {"prefix": 1, "queue": 4, "in-flight": 4, "running": 1}}},
    {"routing": {"fallbacks": 2}, "explain": {"header": True}},
    {"prefix": {"block_bytes": 512}, "log": {"level": "warning", "decisions": {"sample": 1}}},
)
"""Changes that are valid: every strategy that looks at load, and what has to be built anew."""
BAD_CONFIGS: Final[tuple[str | bytes, ...]] = (
    "routing: {strategy: [",
    "routing: {strategie: weighted}\n",
    "routing: {weights: {prefix: -1}}\npool: {endpoints: ['no port']}\n",
    "",
    bytes(range(256)),
    "server: {grpc_port: 99999999999999999999}\nrouting: .nan\n",
)
BAD_ENDPOINTS: Final[tuple[str | bytes, ...]] = (
    "- 127.0.0.1:",
    "",
    bytes(range(256)),
    "endpoints: {a: b}\n",
    "- 127.0.0.1:99999\n- ''\n- null\n",
)

_VLLM: Final = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "process_start_time_seconds",
)


def _page(*values: str) -> str:
    return "".join(f'{name}{{model_name="m"}} {value}\n' for name in _VLLM for value in values)


NONSENSE: Final = (
    "<html><body>502 Bad Gateway</body></html>",
    _page("NaN"),
    _page("+Inf", "-Inf"),
    _page("-1e9"),
    _page("1e308", "9" * 400),
    _page("0"),
    "vllm:num_requests_waiting{" * 20_000 + "\n" + "x" * 1_000_000,
    "",
)
"""What a metrics page may say instead of metrics."""


def engine_order(fault: Fault) -> dict[str, Any]:
    """Return what an engine is told for a fault, without its path; the strength decides how late or how slowly."""
    name, strength = fault.kind.name, fault.strength
    if name in _STATUSES:
        return {"kind": "error", "status": _STATUSES[name]}
    match name:
        case "hang" | "metrics-hang":
            return {"kind": "hang"}
        case "slow-start":
            return {"kind": "slow", "seconds": 0.3 + 2.7 * strength}
        case "slow-stream":
            return {"kind": "trickle", "seconds": 0.05 + 0.25 * strength}
        case "break-off-reset":
            return {"kind": "reset", "after_tokens": 1 + int(8 * strength)}
        case "break-off-close":
            return {"kind": "close", "after_tokens": 1 + int(8 * strength)}
        case "reset":
            return {"kind": "reset"}
        case "metrics-lost":
            return ({"kind": "error", "status": 404}, {"kind": "error", "status": 503}, {"kind": "reset"})[
                fault.variant
            ]
        case "metrics-nonsense":
            return {"kind": "answer", "body": NONSENSE[fault.variant]}
    raise ValueError(f"{name} is no fault of an engine")


class Acts:
    """Performs faults, each in a task of its own; `run` returns when the last has ended."""

    def __init__(self, stage: Stage, judge: Judge, hostile: Hostile, seed: int, say: Callable[[str], None]) -> None:
        self._stage = stage
        self._judge = judge
        self._hostile = hostile
        self._rng = random.Random(seed)
        self._say = say
        self._engines = [asyncio.Lock() for _ in stage.engine_ports]
        self._orders: list[dict[str, list[Fault]]] = [{"/v1/": [], "/metrics": []} for _ in stage.engine_ports]
        self._places = [asyncio.Lock() for _ in stage.pickers]
        self.not_started: set[str] = set()
        """Logs of processes that could not start, which is a violation already."""
        self._configs = asyncio.Lock()
        """Held while a picker starts: a bad configuration would end it, as it should."""
        self._bad_config = False
        self._bad_pool = False
        self._waiting_for_pool: list[Span] = []
        self._starting = 0

    async def run(self, faults: list[Fault], start_s: float) -> None:
        """Perform each fault at its time. What an act itself cannot do is a violation, not an end."""
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, start_s + fault.at_s - time.monotonic()))
                group.create_task(self._perform(fault))

    async def watch(self) -> None:
        """Start a picker again that has ended by itself, and note that it has."""
        while True:
            await asyncio.sleep(0.2)
            for picker in self._stage.pickers:
                child = picker.child
                if child is None or child.running or child.process.pid in picker.leaving:
                    continue
                picker.leaving.add(child.process.pid)
                now = time.monotonic()
                status = child.process.returncode
                self._judge.broken(
                    Invariant.ALIVE, now, f"{child.name} ended by itself with status {status}: {child.tail(5)[-600:]}"
                )
                try:
                    async with self._places[picker.number]:
                        await self._start_again(picker, self._gap(picker, now))
                except ExtprocError as error:
                    self._judge.broken(Invariant.ALIVE, time.monotonic(), f"it does not start again: {error}")

    async def _perform(self, fault: Fault) -> None:
        self._say(fault.line())
        try:
            match fault.kind.group:
                case Group.ENGINE | Group.METRICS:
                    await asyncio.gather(*(self._engine(fault, engine) for engine in fault.engines))
                case Group.PICKER:
                    picker = self._stage.pickers[int(fault.strength * len(self._stage.pickers))]
                    async with self._places[picker.number]:
                        await self._picker(fault, picker)
                case Group.CONFIG:
                    await self._config(fault)
                case Group.POOL:
                    await self._pool(fault)
                case Group.PROXY:
                    await self._proxy(fault)
                case Group.CLIENT:
                    await self._hostile.perform(fault)
        except (ExtprocError, aiohttp.ClientError, OSError, TimeoutError) as error:
            self._judge.broken(
                Invariant.ALIVE, time.monotonic(), f"{fault.kind.name} could not be acted out: {error!r}"
            )

    # Engines

    async def _engine(self, fault: Fault, engine: int) -> None:
        if fault.kind.name in {"restart", "away"}:
            async with self._engines[engine]:
                await self._stage.order(engine, kind="restart", seconds=fault.seconds)
                # A new process knows nothing of what was ordered before.
                for path in self._orders[engine]:
                    await self._order(engine, path)
            return
        path = "/metrics" if fault.kind.group is Group.METRICS else "/v1/"
        stacked = self._orders[engine][path]
        stacked.append(fault)
        async with self._engines[engine]:
            await self._order(engine, path)
        await asyncio.sleep(fault.seconds)
        stacked.remove(fault)
        async with self._engines[engine]:
            await self._order(engine, path)

    async def _order(self, engine: int, path: str) -> None:
        """Put the newest fault of a path in force, or none."""
        stacked = self._orders[engine][path]
        order = engine_order(stacked[-1]) if stacked else {"kind": "none"}
        await self._stage.order(engine, path=path, **order)

    # Pickers

    def _gap(self, picker: Picker, now: float) -> Span | None:
        """Note that there is no picker from now on; where another is left, only for as long as Envoy takes to see it."""
        alone = not any(one.running for one in self._stage.pickers if one is not picker)
        span = Span(now) if alone else Span(now, now + _KILLED_BESIDE_S)
        self._judge.acts.gaps.append(span)
        return span if alone else None

    async def _start_again(self, picker: Picker, gap: Span | None) -> None:
        await self._start(picker)
        if gap is not None:
            gap.end_s = time.monotonic() + _FOUND_S

    def _without_endpoints(self) -> None:
        """Note that a picker that starts now cannot know any endpoint, until the file is good again; one that runs keeps them."""
        span = Span(time.monotonic())
        self._judge.acts.empty.append(span)
        self._waiting_for_pool.append(span)

    async def _start(self, picker: Picker) -> None:
        """Start a process in a picker's place, with a good configuration, and wait until it is ready. Raises ChildError."""
        async with self._configs:
            if self._bad_config:
                self._stage.write_config(picker)
            if self._bad_pool:
                self._without_endpoints()
            self._starting += 1
            try:
                await self._stage.start_picker(picker)
                await self._stage.until_ready(picker)
            finally:
                self._starting -= 1

    async def _picker(self, fault: Fault, picker: Picker) -> None:
        match fault.kind.name:
            case "picker-kill":
                now = time.monotonic()
                await self._stage.kill(picker)
                gap = self._gap(picker, now)
                await asyncio.sleep(fault.seconds)
                await self._start_again(picker, gap)
            case "picker-restart":
                await self._restart(picker)
            case "picker-beside":
                await self._beside(picker)
            case "picker-hup":
                if picker.child is not None:
                    picker.child.send(signal.SIGHUP)
                await asyncio.sleep(fault.seconds)

    async def _restart(self, picker: Picker) -> None:
        """In place, as a service manager does: ask it to end, wait, start it at once."""
        old = self._stage.terminate(picker)
        await self._stage.until_silent(picker, old)
        alone = not any(one.running for one in self._stage.pickers if one is not picker)
        gap = None
        if alone:
            gap = Span(time.monotonic())
            self._judge.acts.gaps.append(gap)
        await old.process.wait()
        self._ended(old.name, old.process.returncode)
        await self._start_again(picker, gap)

    async def _beside(self, picker: Picker) -> None:
        """Start a new process on the same ports while the old one drains: no request may be lost."""
        told_s = time.monotonic()
        old = self._stage.terminate(picker)
        try:
            await self._start(picker)
        except ExtprocError:
            fresh = picker.child
            assert fresh is not None
            picker.leaving.add(fresh.process.pid)
            self.not_started.add(fresh.name)
            await fresh.stop()
            self._judge.broken(
                Invariant.ALIVE,
                time.monotonic(),
                f"a new picker cannot start beside the draining one: {fresh.tail(3)[-300:]}",
            )
            gap = self._gap(picker, time.monotonic())
            await old.process.wait()
            await self._start_again(picker, gap)
            return
        ready_s = time.monotonic()
        if ready_s > told_s + _DRAIN_DELAY_S:
            # So slow is the machine that the old one had closed its port before the new one could open it.
            self._judge.acts.gaps.append(Span(told_s + _DRAIN_DELAY_S, ready_s + _FOUND_S))
        await old.process.wait()
        self._ended(old.name, old.process.returncode)

    def _ended(self, name: str, status: int | None) -> None:
        if status != 0:
            self._judge.broken(Invariant.ALIVE, time.monotonic(), f"{name}, told to end, ended with status {status}")

    # Files

    async def _config(self, fault: Fault) -> None:
        if fault.kind.name == "config-good":
            self._stage.changes = GOOD_CONFIGS[fault.variant]
            for picker in self._stage.pickers:
                self._stage.write_config(picker)
            await asyncio.sleep(fault.seconds)
        else:
            async with self._configs:
                self._bad_config = True
                self._stage.refused_configs += 1
                for picker in self._stage.pickers:
                    self._stage.write_config(picker, BAD_CONFIGS[fault.variant])
            await asyncio.sleep(fault.seconds)
            self._bad_config = False
        self._stage.changes = {}
        for picker in self._stage.pickers:
            self._stage.write_config(picker)

    async def _pool(self, fault: Fault) -> None:
        stage, ids = self._stage, self._stage.endpoint_ids
        match fault.kind.name:
            case "endpoints-leave":
                stage.write_endpoints([one for number, one in enumerate(ids) if number not in fault.engines])
            case "endpoints-garbage":
                self._bad_pool = True
                stage.write_endpoints(BAD_ENDPOINTS[fault.variant])
            case "endpoints-missing":
                self._bad_pool = True
                stage.write_endpoints(None)
            case "endpoints-none":
                self._bad_pool = True
                self._without_endpoints()
                stage.write_endpoints([])
            case "endpoints-renamed":
                shuffled = self._rng.sample(ids, len(ids))
                names = [one.rpartition(":") for one in shuffled]
                stage.write_endpoints(
                    [{"address": host, "port": int(port), "name": f"gpu-{port}"} for host, _, port in names]
                )
        if self._bad_pool and self._starting:
            self._without_endpoints()
        began = time.monotonic()
        await asyncio.sleep(fault.seconds)
        if fault.kind.name == "endpoints-none" and time.monotonic() - began < fault.seconds + _ON_TIME_S:
            for picker in stage.pickers:
                # Only a process that has seen the list, which takes it up to a second.
                seen = picker.running and not self._places[picker.number].locked()
                if seen and await stage.readiness(picker) == 200:
                    said = f"picker {picker.number + 1} says it is ready without an endpoint"
                    self._judge.broken(Invariant.ALIVE, time.monotonic(), said)
        stage.write_endpoints(ids)
        self._bad_pool = False
        for span in self._waiting_for_pool:
            span.end_s = time.monotonic() + _FILE_S + _FOUND_S
        self._waiting_for_pool.clear()

    # Envoy

    async def _proxy(self, fault: Fault) -> None:
        span = Span(time.monotonic())
        self._judge.acts.proxy.append(span)
        try:
            await self._stage.replace_envoy(max(0.0, fault.seconds - 5))
        finally:
            span.end_s = time.monotonic() + 1.0
