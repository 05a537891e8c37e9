"""`make bench`: every figure of what the picker costs, with its aim; ends with 0 also where an aim is missed.

    python -m bench [--quick] [--transport native] [--out DIR]

Core (parse to Decision, index, signals) first, then the picker against a bare server behind a real Envoy. Figures go to
`DIR/bench.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import core_cost, prefix_index, proxy_cost
from bench.load import require_h2load
from extproc.errors import ExtprocError
from extproc.sim.processes import envoy_binary


def machine() -> dict[str, Any]:
    """Say on what the figures were taken."""
    words = subprocess.run(
        [str(envoy_binary()), "--version"], check=True, capture_output=True, text=True
    ).stdout.split()
    versions = [word for word in words[-1].split("/") if word[:1].isdigit() and "." in word]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(Path("/proc/cpuinfo").read_text()),
        "python": platform.python_version(),
        "envoy": versions[0] if versions else words[-1],
        "load_average": os.getloadavg()[0],
        "loop_us": core_cost.reference_loop(),
    }


def _cpu_model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _machine_line(found: dict[str, Any]) -> str:
    loop = found["loop_us"]
    return (
        f"machine: {found['cores']} cores, {found['cpu']}, Python {found['python']}, Envoy {found['envoy']}; "
        f"load average {found['load_average']:.2f} at the start; 10,000 turns of a loop: "
        f"{loop['median_us']:.0f} us (min {loop['min_us']:.0f}; far apart: the machine is shared, read the ratios)"
    )


def run(folder: Path, *, quick: bool, transport: str) -> dict[str, Any]:
    """Measure everything and print it; return `{"figures": ..., "aims": [...]}`. Raises ExtprocError."""
    started = time.monotonic()
    found = machine()
    print(_machine_line(found), flush=True)
    core = core_cost.measure(quick=quick)
    print("\n" + "\n".join(core_cost.lines(core["figures"])), flush=True)
    index = prefix_index.measure(prefix_index.SHORT)
    grown = index["figures"]["memory_100k_prefixes"]["growth_mib"]
    print(f"prefix index with 100,000 prefixes: {grown:.0f} MiB\n", flush=True)
    proxy = proxy_cost.measure(folder, quick=quick, transport=transport)
    print("\n".join(proxy_cost.table(proxy["figures"])), flush=True)
    figures = {
        "machine": found,
        "core": core["figures"],
        "index": index["figures"],
        "proxy": proxy["figures"],
        "duration_s": round(time.monotonic() - started, 1),
    }
    return {"figures": figures, "aims": core["aims"] + index["aims"] + proxy["aims"]}


def aim_lines(aims: list[dict[str, Any]]) -> list[str]:
    """Lay out aims and what was measured, one line each."""
    width = max(len(aim["name"]) for aim in aims)
    return [
        f"{'met   ' if aim['met'] else 'MISSED'} {aim['name']:<{width}}  aim {aim['aim']:>6g}  measured {aim['measured']:>8.2f}"
        for aim in aims
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two short rounds and a smaller index: about 40 s")
    parser.add_argument(
        "--transport", default="grpcio", choices=("grpcio", "native"), help="of the picker (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: %(default)s")
    args = parser.parse_args()
    folder: Path = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        require_h2load()
        measured = run(folder, quick=args.quick, transport=args.transport)
    except (ExtprocError, subprocess.CalledProcessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    path = folder / "bench.json"
    path.write_text(json.dumps(measured, indent=2) + "\n")
    missed = sum(not aim["met"] for aim in measured["aims"])
    print("\n" + "\n".join(aim_lines(measured["aims"])))
    print(
        f"\n{missed} of {len(measured['aims'])} aims missed; figures: {path} ({measured['figures']['duration_s']:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
