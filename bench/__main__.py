"""`make bench`: every figure of what the picker costs, with its aim; ends with 0 also where an aim is missed.

    python -m bench [PART ...] [--quick] [--rounds N] [--transport both] [--unscraped] [--out DIR]
                    [--peer NAME=COMMAND [--peer-profile NAME=PROFILE] [--peer-port NAME=PORT]]

Parts: core (parse to Decision, index, signals, pools of 1,000; no processes), proxy (behind a real Envoy), streams (100-token answers),
closed (gRPC straight to the server), scrape, memory. All of them where none is named. Figures go to `DIR/bench.json`.

A peer is any ext_proc server. COMMAND is run without a shell; {port} in it becomes the port to serve on, {endpoints} the
model servers (ip:port, joined by commas), {health_port} and {metrics_port} two more free ports:

    python -m bench proxy streams --peer 'mine=./my-picker --grpc-port {port} --backends {endpoints}' --peer-profile mine=full-duplex
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Final

from bench import closed_cost, core_cost, heavy_cost, memory_cost, prefix_index, proxy_cost, scale_cost, stream_cost
from bench.load import require_h2load
from bench.machine import OtherWork, machine, machine_line, other_work_line
from bench.peers import Peer, parse_peers
from bench.stage import raise_stage
from extproc.envoy_config import EnvoyConfigError
from extproc.errors import ExtprocError

__all__ = ["PARTS", "aim_lines", "main"]

PARTS: Final = ("core", "proxy", "streams", "closed", "scrape", "memory")
_STAGED: Final = ("proxy", "streams", "closed")
_STREAMS_LAST: Final = 6
"""So many times as long as other loads: few come in a second, each lasts half of one, and the ends of a sample are not its rate."""
_BY_H2LOAD: Final = frozenset({"proxy", "streams"})
_CTRL_C: Final = 130


def _say(*texts: str) -> None:
    print("\n".join(texts), flush=True)


class _Bench:
    """One run: what is asked for, and what has been measured so far."""

    def __init__(self, args: argparse.Namespace, peers: Sequence[Peer]) -> None:
        self.parts: tuple[str, ...] = tuple(part for part in PARTS if part in (args.parts or PARTS))
        self.folder: Path = args.out.resolve()
        self.peers = peers
        self.transports = ("grpcio", "native") if args.transport == "both" else (args.transport,)
        self.unscraped: bool = args.unscraped
        self.quick: bool = args.quick
        self.rounds: int = args.rounds or (2 if args.quick else 3)
        self.seconds = 0.7 if args.quick else 1.2
        self.figures: dict[str, Any] = {}
        self.aims: list[dict[str, Any]] = []

    def run(self) -> None:
        """Measure every part and print it. Raises ExtprocError."""
        self.figures["machine"] = machine()
        _say(machine_line(self.figures["machine"]))
        if "core" in self.parts:
            self._core()
        staged = [part for part in self.parts if part in _STAGED]
        if staged:
            asyncio.run(self._staged(staged))
        if "scrape" in self.parts:
            self._scrape()
        if "memory" in self.parts:
            blocks = 50_000 if self.quick else 1_000_000
            self._take("memory", asyncio.run(memory_cost.measure(self.folder, blocks=blocks)), memory_cost)

    def write(self, others: OtherWork, failed: str | None = None) -> None:
        """Write all figures so far to the file, and print the aims."""
        found = self.figures.setdefault("machine", {})
        found["other_work_cores"] = others.cores()
        self.figures["duration_s"] = round(others.seconds, 1)
        self.figures["failed"] = failed
        path = self.folder / "bench.json"
        text = json.dumps({"figures": self.figures, "aims": self.aims}, indent=2, default=_plain)
        path.write_text(text + "\n")
        missed = sum(not aim["met"] for aim in self.aims)
        _say("", "== aims ==", *aim_lines(self.aims))
        if "cores" in found:
            _say("", other_work_line(found["other_work_cores"], found["cores"]))
        _say(f"{missed} of {len(self.aims)} aims missed; figures: {path} ({self.figures['duration_s']:.0f} s)")

    def _take(self, part: str, measured: dict[str, Any], room: Any) -> None:
        self.figures[part] = measured["figures"]
        self.aims += measured["aims"]
        _say("", f"== {part} ==", *room.lines(measured["figures"]))

    def _core(self) -> None:
        self._take("core", core_cost.measure(quick=self.quick), core_cost)
        self._take("scale", scale_cost.measure(quick=self.quick), scale_cost)
        self._take("heavy", heavy_cost.measure(quick=self.quick), heavy_cost)
        index = prefix_index.measure(prefix_index.SHORT)
        self.figures["index"] = index["figures"]
        self.aims += index["aims"]
        grown = index["figures"]["memory_100k_prefixes"]["growth_mb"]
        _say(f"prefix index with 100,000 prefixes: {grown:.0f} MB")

    async def _staged(self, parts: Sequence[str]) -> None:
        rooms = {"proxy": proxy_cost, "streams": stream_cost, "closed": closed_cost}
        async with raise_stage(
            self.folder,
            transports=self.transports,
            peers=self.peers,
            streams="streams" in parts,
            unscraped=self.unscraped,
        ) as stage:
            for part in parts:
                seconds = self.seconds * (_STREAMS_LAST if part == "streams" else 1)
                measured = await rooms[part].measure(stage, self.folder, rounds=self.rounds, seconds=seconds)
                self._take(part, measured, rooms[part])

    def _scrape(self) -> None:
        if importlib.util.find_spec("bench.scrape_cost") is None:
            _say("", "== scrape ==", "not measured: there is no bench/scrape_cost.py")
            return
        room = importlib.import_module("bench.scrape_cost")
        self._take("scrape", room.measure(quick=self.quick), room)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} is not for a JSON file")


def aim_lines(aims: Sequence[dict[str, Any]]) -> list[str]:
    """Lay out aims and what was measured, one line each."""
    width = max((len(aim["name"]) for aim in aims), default=0)
    return [
        f"{'met   ' if aim['met'] else 'MISSED'} {aim['name']:<{width}}  aim {aim['aim']:>6g}  measured {aim['measured']:>8g}"
        for aim in aims
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="two short rounds and a smaller index: to see that it works"
    )
    parser.add_argument("--rounds", type=int, help="how often each server takes its turn (default: 3)")
    parser.add_argument(
        "--transport", default="both", choices=("grpcio", "native", "both"), help="of our picker (default: %(default)s)"
    )
    parser.add_argument(
        "--unscraped", action="store_true", help="one more row: native, response phase closed, without scraping"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="compare this server, too")
    parser.add_argument(
        "--peer-profile",
        action="append",
        default=[],
        metavar="NAME=PROFILE",
        help="how Envoy drives it: a profile of `extproc envoy-config` (default: direct)",
    )
    parser.add_argument(
        "--peer-port", action="append", default=[], metavar="NAME=PORT", help="where it serves, if it cannot be told"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 0, 1 where something failed, 2 for wrong arguments, 130 after Ctrl-C."""
    parser = _parser()
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"{part}: not one of {', '.join(PARTS)}")
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds: at least 1")
    # Whatever ends us ends our processes: both signals unwind everything that is open.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    others = OtherWork()
    try:
        peers = parse_peers(args.peer, args.peer_profile, args.peer_port)
        bench = _Bench(args, peers)
        if _BY_H2LOAD & set(bench.parts):
            require_h2load()
        bench.folder.mkdir(parents=True, exist_ok=True)
    except ExtprocError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    try:
        bench.run()
    except (ExtprocError, EnvoyConfigError, subprocess.CalledProcessError) as error:
        bench.write(others, failed=str(error))
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted; all processes have ended", file=sys.stderr)
        return _CTRL_C
    bench.write(others)
    shutil.rmtree(bench.folder / "bench-logs", ignore_errors=True)  # a line per decision: of use after a failure only
    return 0


if __name__ == "__main__":
    sys.exit(main())
