"""`extproc demo`: one chat workload through a real Envoy, several times: round robin, then the picker.

Decides what is compared and shows it; starts and stops every process itself. Model servers are
simulated (`extproc model-server`), Envoy, the picker, HTTP and the traffic are real.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.demo.drive import RequestRecord, drive
from extproc.demo.processes import Child, ChildError, Children, envoy_binary, free_ports, port_is_free
from extproc.demo.report import RunFigures, draw, figures_of, table
from extproc.demo.workload import ChatSpec, ChatWorkload, make_chat
from extproc.envoy_config import EnvoyOptions, render, render_round_robin
from extproc.errors import ExtprocError

__all__ = ["add_arguments", "main"]

MODEL = "llama-3.1-8b"
GPU = "l4-llama-3.1-8b-fp8"
SERVERS = 4
SPEC = ChatSpec(
    seed=1,
    tenants=50,
    sessions=200,
    turns=3,
    system_tokens=80,
    opening_tokens=700,
    user_tokens=100,
    reply_tokens=8,
    arrival_s=10.0,
    think_s=2.0,
)
"""Chosen so that round robin itself finds 20 to 45 % of the prompt tokens cached: a fair baseline.

Many conversations, each about a text that comes first: whether a turn meets its prefix under round robin is chance, which
averages out in the cached share of a few hundred requests (times to first token vary more, because queues do)."""
ROUND_ROBIN = "round robin"
PICKER = "picker"
ROWS = ((ROUND_ROBIN, ""), (PICKER, "weighted"), ("least-load", "least-load"), ("prefix-hash", "prefix-hash"))
"""(name of the row, strategy of the picker; none: Envoy alone)."""
AIM_CACHED_RATIO = 2.0
"""The picker's cached share against round robin's that the demo promises."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where everything listens, all on loopback."""

    envoy: int = 10000
    envoy_admin: int = 9901
    grpc: int = 9002
    health: int = 9003
    metrics: int = 9090
    admin: int = 9091
    servers: tuple[int, ...] = tuple(range(8001, 8001 + SERVERS))

    @classmethod
    def free(cls) -> Ports:
        """Choose ports that are free."""
        envoy, envoy_admin, grpc, health, metrics, admin, *servers = free_ports(6 + SERVERS)
        return cls(envoy, envoy_admin, grpc, health, metrics, admin, tuple(servers))

    def all(self) -> tuple[int, ...]:
        """Every port."""
        return (self.envoy, self.envoy_admin, self.grpc, self.health, self.metrics, self.admin, *self.servers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `extproc demo` to a (sub)parser."""
    parser.epilog = "example:\n  extproc demo --rows 2 --keep"
    parser.add_argument(
        "--keep",
        action="store_true",
        help="stay up afterwards and print the URLs and a curl line to try (default: stop everything)",
    )
    parser.add_argument(
        "--free-ports",
        action="store_true",
        help="use any free ports (default: 10000, 9901, 9002, 9003, 9090, 9091, 8001-8004)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=len(ROWS),
        choices=range(2, len(ROWS) + 1),
        help="how many rows (default: all, %(default)s)",
    )
    parser.add_argument(
        "--sessions",
        type=int,
        default=SPEC.sessions,
        metavar="N",
        help="conversations in the workload (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=SPEC.seed, metavar="N", help="seed of the workload (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        metavar="DIR",
        help="where demo.json, demo.png and the logs go (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo; 0 when everything worked, 1 when something failed, 2 when it cannot start, 130 after Ctrl-C."""
    status = 2
    try:
        demo = _Demo(args)
        demo.prepare()
        status = 1
        return asyncio.run(_with_signals(demo))
    except ExtprocError as error:
        print(f"extproc demo: {error}", file=sys.stderr)
        return status
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nextproc demo: interrupted; everything it started has been stopped", file=sys.stderr)
        return 130


async def _with_signals(demo: _Demo) -> int:
    """Run the demo so that SIGTERM, like Ctrl-C, ends it in order."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await demo.run()


class _Demo:
    """One call of the demo."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.keep: bool = args.keep
        self.out: Path = args.out.resolve()
        self.rows = ROWS[: args.rows]
        self.ports = Ports.free() if args.free_ports else Ports()
        fields = {name: getattr(SPEC, name) for name in SPEC.__slots__}
        self.workload: ChatWorkload = make_chat(ChatSpec(**{**fields, "sessions": args.sessions, "seed": args.seed}))
        self.envoy = str(envoy_binary())
        self.servers = tuple(f"gpu-{number}" for number in range(1, SERVERS + 1))

    def prepare(self) -> None:
        """Raise ChildError where a port is in use or the folder for the results cannot be made."""
        taken = [port for port in self.ports.all() if not port_is_free(port)]
        if taken:
            listed = ", ".join(map(str, taken))
            raise ChildError(
                f"port {listed} on 127.0.0.1 is in use; stop what listens there, or run `extproc demo --free-ports`"
            )
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ChildError(f"cannot make the folder {self.out}: {error.strerror}") from error

    async def run(self) -> int:
        """Run all rows, print the comparison, keep the last picker up if asked."""
        started = time.monotonic()
        spec = self.workload.spec
        print(
            f"{spec.requests} chat requests in {spec.sessions} conversations of {spec.tenants} tenants, {SERVERS} simulated {GPU} engines, "
            f"a real Envoy. The same requests once per row, each time with fresh caches.\n"
        )
        figures: list[RunFigures] = []
        records: list[list[RequestRecord]] = []
        decisions: list[dict[str, Any]] = []
        for name, strategy in self.rows:
            async with Children(self.out / "demo-logs" / name.replace(" ", "-")) as children:
                await self._start(children, strategy)
                run = await self._drive(name)
                if name == PICKER:
                    decisions = await self._decisions()
                records.append(run)
                figures.append(figures_of(name, run, self.servers))
        picture = self.out / "demo.png"
        title = f"{spec.requests} chat requests, {SERVERS} engines: Envoy's round robin against the picker"
        for suffix in (".png", ".svg"):
            await asyncio.to_thread(draw, figures, records, picture.with_suffix(suffix), title=title)
        failed = self._report(figures, decisions, picture, time.monotonic() - started)
        if self.keep:
            await self._stay()
        return 1 if failed else 0

    async def _start(self, children: Children, strategy: str) -> None:
        """Start engines, the picker (unless `strategy` is empty) and Envoy, and wait until each is ready."""
        python = [sys.executable, "-m", "extproc"]
        starting: list[tuple[Child, str]] = []
        for name, port in zip(self.servers, self.ports.servers, strict=True):
            argv = [*python, "model-server", "--name", name, "--port", str(port), "--model", MODEL, "--gpu", GPU]
            starting.append((await children.start(name, argv), f"http://127.0.0.1:{port}/health"))
        if strategy:
            config = self.out / "demo-picker.yaml"
            config.write_text(self._picker_config(strategy))
            child = await children.start("picker", [*python, "serve", "--config", str(config)])
            starting.append((child, f"http://127.0.0.1:{self.ports.metrics}/readyz"))
        await asyncio.gather(*(child.wait_http(url) for child, url in starting))
        options = EnvoyOptions(
            endpoints=tuple(f"127.0.0.1:{port}" for port in self.ports.servers),
            pickers=(f"127.0.0.1:{self.ports.grpc}",),
            listen_port=self.ports.envoy,
            admin_port=self.ports.envoy_admin,
        )
        path = self.out / "demo-envoy.yaml"
        path.write_text(render("direct", options) if strategy else render_round_robin(options))
        envoy = await children.start(
            "envoy",
            [self.envoy, "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"],
        )
        await envoy.wait_http(f"http://127.0.0.1:{self.ports.envoy_admin}/ready")

    def _picker_config(self, strategy: str) -> str:
        return yaml.safe_dump(
            {
                "apiVersion": "extproc/v1alpha1",
                "kind": "ExtprocConfig",
                "server": {
                    "host": "127.0.0.1",
                    "grpc_port": self.ports.grpc,
                    "health_port": self.ports.health,
                    "metrics_port": self.ports.metrics,
                    "drain_delay": 0,
                    "grace_period": 2,
                },
                "admin": {"port": self.ports.admin, "decisions": 10_000},
                "pool": {"endpoints": [f"127.0.0.1:{port}" for port in self.ports.servers]},
                "routing": {"strategy": strategy, "fallbacks": 1},
                "explain": {"header": True},
            },
            sort_keys=False,
        )

    async def _drive(self, name: str) -> list[RequestRecord]:
        total = self.workload.spec.requests
        width = max(len(row) for row, _ in self.rows)
        live = sys.stdout.isatty()

        def progress(done: int) -> None:
            if live:
                bar = "#" * round(30 * done / total)
                print(f"\r{name:<{width}}  [{bar:<30}] {done}/{total}", end="", flush=True)

        started = time.monotonic()
        url = f"http://127.0.0.1:{self.ports.envoy}"
        records = await drive(self.workload, url, model=MODEL, progress=progress)
        print(
            f"{chr(13) if live else ''}{name:<{width}}  {len(records)}/{total} requests in {time.monotonic() - started:.1f} s"
            + " " * 24
        )
        return records

    async def _decisions(self) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self.ports.admin}/debug/decisions?limit=10000"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            decisions: list[dict[str, Any]] = (await response.json())["decisions"]
            return decisions

    def _report(
        self, figures: Sequence[RunFigures], decisions: Sequence[dict[str, Any]], picture: Path, duration_s: float
    ) -> bool:
        """Print everything and write demo.json; return whether something failed."""
        base, ours = figures[0], figures[1]
        print(f"\n{table(figures)}\n")
        print("Three decisions of the picker, in its own words:")
        for title, decision in _three(decisions):
            print(f"  {title}: {decision['reason']}")
        ratio = ours.cached_share / base.cached_share if base.cached_share else 0.0
        errors = sum(row.errors for row in figures)
        aims = [
            {"name": "errors", "aim": 0, "measured": errors, "met": errors == 0},
            {
                "name": "cached share, picker against round robin",
                "aim": AIM_CACHED_RATIO,
                "measured": round(ratio, 2),
                "met": ratio >= AIM_CACHED_RATIO,
            },
            {
                "name": "round robin's own cached share",
                "aim": [0.2, 0.45],
                "measured": round(base.cached_share, 3),
                "met": 0.2 <= base.cached_share <= 0.45,
            },
            {
                "name": "TTFT mean, picker against round robin, below",
                "aim": 1.0,
                "measured": round(ours.ttft_mean_s / base.ttft_mean_s, 3) if base.ttft_mean_s else None,
                "met": ours.ttft_mean_s < base.ttft_mean_s,
            },
        ]
        report = {"figures": {row.name: row.as_dict() for row in figures}, "aims": aims}
        path = self.out / "demo.json"
        path.write_text(json.dumps(report, indent=2) + "\n")
        print(
            f"\nPicture: {_short(picture)}   figures: {_short(path)}   logs: {_short(self.out / 'demo-logs')}   ({duration_s:.0f} s)"
        )
        missed = [aim for aim in aims if not aim["met"]]
        for aim in missed:
            print(f"extproc demo: missed: {aim['name']}: aim {aim['aim']}, measured {aim['measured']}", file=sys.stderr)
        return bool(missed) or len(decisions) == 0

    async def _stay(self) -> None:
        """Start the picker's row once more and wait for Ctrl-C."""
        async with Children(self.out / "demo-logs" / "keep") as children:
            await self._start(children, "weighted")
            body = json.dumps(
                {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "Hello there"}]}
            )
            envoy = f"http://127.0.0.1:{self.ports.envoy}/v1/chat/completions"
            print(
                f"\nStill up; Ctrl-C ends it.\n"
                f"  Envoy          http://127.0.0.1:{self.ports.envoy}  (its admin: http://127.0.0.1:{self.ports.envoy_admin})\n"
                f"  decisions      http://127.0.0.1:{self.ports.admin}/debug/decisions\n"
                f"  endpoints      http://127.0.0.1:{self.ports.admin}/debug/endpoints\n"
                f"  metrics        http://127.0.0.1:{self.ports.metrics}/metrics\n"
                f"  configuration  {_short(self.out / 'demo-picker.yaml')} (edit it: it is reloaded)\n"
                f"Try:\n"
                f"  curl -si {envoy} -H 'content-type: application/json' -H 'x-extproc-explain: 1' -d {shlex.quote(body)}",
                flush=True,
            )
            with contextlib.suppress(asyncio.CancelledError):
                await _first_end(children.children)
        print("\nstopped")


async def _first_end(children: Sequence[Child]) -> None:
    """Wait until one ends. Raises ChildError then: what is left would not work as printed."""
    waits = {asyncio.ensure_future(child.process.wait()): child for child in children}
    try:
        over, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiting in waits:
            waiting.cancel()
    child = waits[over.pop()]
    raise ChildError(f"{child.name} ended with status {child.process.returncode}:\n{child.tail()}")


def _short(path: Path) -> str:
    """Return the path relative to the working folder, where it lies below it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _three(decisions: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Choose a cold prompt, the longest match, and, if there was one, a match given up for load."""
    if not decisions:
        return []

    def given_up(decision: dict[str, Any]) -> int:
        best = max((candidate["matched_bytes"] for candidate in decision["candidates"]), default=0)
        return int(best - decision["matched_bytes"])

    cold = min(decisions, key=lambda decision: (decision["matched_bytes"], decision["decided_at"]))
    warm = max(decisions, key=lambda decision: decision["matched_bytes"])
    rest = [decision for decision in decisions if decision is not cold and decision is not warm]
    chosen = [("a new conversation", cold), ("a long one", warm)]
    if rest:
        third = max(rest, key=lambda decision: (given_up(decision), decision["matched_bytes"]))
        chosen.append(("load before prefix" if given_up(third) > 0 else "another", third))
    return chosen
