"""On what the figures were taken: processor, cores, Python, Envoy, and how fast and how shared the machine was."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bench.core_cost import reference_loop
from extproc.demo.processes import envoy_binary

__all__ = ["OtherWork", "busy_s", "cpu_model", "machine", "machine_line", "other_work_line"]

_NOTICED_CORES: Final = 0.2
"""Work of others, in cores, from which on latencies are not the servers' alone."""


def machine() -> dict[str, Any]:
    """Describe the machine. Raises ChildError where there is no Envoy."""
    words = subprocess.run(
        [str(envoy_binary()), "--version"], check=True, capture_output=True, text=True
    ).stdout.split()
    versions = [word for word in words[-1].split("/") if word[:1].isdigit() and "." in word]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "python": platform.python_version(),
        "uvloop": _uvloop(),
        "envoy": versions[0] if versions else words[-1],
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "loop_us": reference_loop(),
    }


def _uvloop() -> str | None:
    try:
        return version("uvloop")
    except PackageNotFoundError:
        return None


def cpu_model(cpuinfo: str) -> str:
    """Return the processor's name out of the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def machine_line(found: dict[str, Any]) -> str:
    """Say it in one line."""
    loop = found["loop_us"]
    return (
        f"machine: {found['cores']} cores, {found['cpu']}, Python {found['python']}, "
        f"{'uvloop ' + found['uvloop'] if found['uvloop'] else 'no uvloop'}, Envoy {found['envoy']}; "
        f"load average {found['load_average']:.2f} at the start; 10,000 turns of a loop: "
        f"{loop['median_us']:.0f} us (min {loop['min_us']:.0f}; far apart: the machine is shared, read the ratios)"
    )


def busy_s(stat: str) -> float:
    """Return the CPU time all cores have spent on anything, in seconds, out of the text of /proc/stat."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(text) for text in stat.split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class OtherWork:
    """How much of the machine others have used since the start: everything but us and the children we have waited for."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._before = self._others_s()

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._begin

    def cores(self) -> float:
        """Return it in cores; true once all our children have ended."""
        return max(0.0, (self._others_s() - self._before) / self.seconds)

    def _others_s(self) -> float:
        own = sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        return busy_s(Path("/proc/stat").read_text()) - own


def other_work_line(cores: float, of: int) -> str:
    """Say what it means for the figures."""
    if cores < _NOTICED_CORES:
        return f"other work took {cores:.2f} of the machine's {of} cores meanwhile: the latencies are the servers' own"
    return (
        f"other work took {cores:.2f} of the machine's {of} cores meanwhile: "
        "ratios of CPU hold where all servers carried the rate; latencies tell of the machine"
    )
