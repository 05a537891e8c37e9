"""The picker as `bench.soak` runs it: its garbage collections are timed, and on SIGUSR1 it counts its objects.

python -m bench.soak_picker calm|python|A,B,C FOLDER CONFIG
"""

from __future__ import annotations

import functools
import gc
import json
import signal
import sys
import time
from array import array
from pathlib import Path
from typing import Any, Final

from extproc import app, cli
from extproc.pool import ledger, pool

__all__ = ["main"]

_REMEMBERED_IDS: Final = 1000


def main(collector: str, folder: Path, config: str) -> int:
    """Run the picker, time its garbage collections, and count its objects on SIGUSR1."""
    # Full early, as the prefix index: what may be remembered is no leak.
    patched: Any = pool
    patched.Ledger = functools.partial(ledger.Ledger, remembered_ids=_REMEMBERED_IDS)
    times: dict[int, array[float]] = {generation: array("d") for generation in range(3)}
    began = 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()  # CPU time: how long it would take on a machine of its own
        else:
            times[info["generation"]].append(time.thread_time() - began)

    def count(*_: object) -> None:
        gc.collect()
        fresh = folder / "objects.new"
        fresh.write_text(str(sys.getallocatedblocks()))
        fresh.replace(folder / "objects.json")

    if collector == "python":
        app.tune_gc = lambda: None
    elif collector != "calm":
        calm, thresholds = app.tune_gc, [int(word) for word in collector.split(",")]

        def otherwise() -> None:
            calm()
            gc.set_threshold(*thresholds)

        app.tune_gc = otherwise
    gc.callbacks.append(watch)
    signal.signal(signal.SIGUSR1, count)
    status = cli.main(["serve", "--config", config])
    gc.callbacks.remove(watch)
    found = {
        str(generation): {"count": len(each), "total_ms": sum(each) * 1e3, "max_ms": max(each, default=0.0) * 1e3}
        for generation, each in times.items()
    }
    (folder / "pauses.json").write_text(json.dumps(found))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
