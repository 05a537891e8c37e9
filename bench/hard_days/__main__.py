"""`make hard-days`: seeded faults on top of one another, and what must be true all the while.

    python -m bench.hard_days [--minutes 3] [--seed 1] [--pickers 1|2] [--rate 12] [--only KIND ...] [--without KIND ...] [--dry-run] [--out DIR]

Real Envoy (profile direct), the picker, eight simulated engines. The seed decides which fault comes when; the same seed gives the same list again.
Ends with 1 where an invariant was broken, and says which, when, and how to run it again. Figures go to `DIR/hard-days.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.hard_days.run import Run
from bench.hard_days.schedule import KINDS, draw, times_of
from bench.machine import machine, machine_line
from extproc.errors import ExtprocError

__all__ = ["main"]

_CTRL_C: Final = 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hard_days", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="length of the run (default: %(default)g)")
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--pickers", type=int, choices=(1, 2), help="default: the seed decides (odd: 1, even: 2)")
    parser.add_argument(
        "--rate", type=float, default=12.0, help="turns per second, each a request every way (default: %(default)g)"
    )
    parser.add_argument(
        "--transport", choices=("native", "grpcio"), default="", help="the picker's (default: what is shipped)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="KIND", help=f"only these faults, of {', '.join(KINDS)}"
    )
    parser.add_argument("--without", nargs="+", default=[], metavar="KIND", help="all but these faults")
    parser.add_argument("--dry-run", action="store_true", help="print the schedule and do nothing")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: %(default)s")
    return parser


def _command(args: argparse.Namespace) -> str:
    """Return the command that gives the same run again."""
    words = [f"python -m bench.hard_days --minutes {args.minutes:g} --seed {args.seed} --pickers {args.pickers}"]
    if args.rate != _parser().get_default("rate"):
        words.append(f"--rate {args.rate:g}")
    if args.transport:
        words.append(f"--transport {args.transport}")
    if args.only:
        words.append("--only " + " ".join(args.only))
    if args.without:
        words.append("--without " + " ".join(args.without))
    return " ".join(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return 0, 1 where an invariant was broken, 2 for wrong arguments or where nothing could start, 130 after Ctrl-C."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not 0.2 <= args.minutes <= 600:
        parser.error("--minutes: 0.2 to 600")
    if not 0 < args.rate <= 200:
        parser.error("--rate: above 0, at most 200")
    for name in (*args.only, *args.without):
        if name not in KINDS:
            parser.error(f"{name}: not one of {', '.join(KINDS)}")
    if not (kinds := [name for name in args.only or KINDS if name not in args.without]):
        parser.error("--only, --without: no fault is left")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(10_000)
    if args.pickers is None:
        args.pickers = 1 if args.seed % 2 else 2
    times = times_of(args.minutes)
    faults = draw(args.seed, times, pickers=args.pickers, only=kinds)
    if args.dry_run:
        print("\n".join(fault.line() for fault in faults))
        return 0
    # Whatever ends us ends our processes: both signals unwind everything that is open.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder = args.out.resolve() / "hard-days"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = _command(args)
    try:
        found = machine()
        print(
            machine_line(found),
            f"{len(faults)} faults in {args.minutes:g} minutes, seed {args.seed}: {command}",
            "",
            sep="\n",
            flush=True,
        )
        run = Run(
            folder,
            seed=args.seed,
            times=times,
            faults=faults,
            pickers=args.pickers,
            rate=args.rate,
            transport=args.transport,
        )
        began = time.monotonic()
        figures, aims = asyncio.run(run.run())
    except ExtprocError as error:
        print(f"hard-days: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hard-days: interrupted; all processes have ended; again: {command}", file=sys.stderr)
        return _CTRL_C
    settings = {"seed": args.seed, "minutes": args.minutes, "pickers": args.pickers, "command": command}
    figures = {**settings, "machine": found, "duration_s": round(time.monotonic() - began, 1), **figures}
    return _finish(figures, aims, args.out.resolve(), folder, command)


def _finish(figures: dict[str, Any], aims: list[dict[str, Any]], out: Path, folder: Path, command: str) -> int:
    from bench.hard_days.report import lines

    path = out / "hard-days.json"
    path.write_text(json.dumps({"figures": figures, "aims": aims}, indent=2) + "\n")
    print("\n".join(lines(figures, aims)), flush=True)
    print(f"figures: {path}")
    if all(aim["met"] for aim in aims):
        shutil.rmtree(folder, ignore_errors=True)
        print(f"clean, seed {figures['seed']}")
        return 0
    print(f"BROKEN with seed {figures['seed']}; what each process wrote: {folder / 'logs'}; again: {command}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
