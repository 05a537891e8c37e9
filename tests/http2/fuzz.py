"""The coverage-guided fuzzer: `python -m tests.http2.fuzz --seconds 60`.

Inputs are bytes as a client sends them, behind one byte of options (`differential.Options`). They begin with the corpus
and are changed frame by frame. What fails is printed as a line for `corpus/`, where `test_differential` replays it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, Final

NO_FUZZER: Final = 77
"""Exit status where there is no fuzzer, as automake's tests say it."""
FOUND: Final = 1
"""Exit status where something was found."""
MISSING: Final = "atheris is not installed (requirements/dev.txt: there is no wheel for this Python or this machine)"


def main(argv: list[str]) -> int:
    """Fuzz in a process of its own; return its exit status: 0 where nothing was found."""
    arguments = _arguments(argv)
    try:
        import atheris
    except ImportError:
        print(f"fuzz: skipped: {MISSING}", file=sys.stderr)
        return NO_FUZZER
    if arguments.folder is not None:
        _fuzz(atheris, arguments)
    with tempfile.TemporaryDirectory() as folder:
        # The fuzzer ends its process by itself; and it wants its corpus in files.
        here = [sys.executable, "-m", "tests.http2.fuzz", *argv, "--folder"]
        status = subprocess.run([*here, folder], check=False).returncode
        if arguments.keep is not None:
            _keep(Path(folder) / "inputs", arguments.keep)
    return status


def _arguments(argv: list[str]) -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.http2.fuzz", description="Fuzz extproc/http2.")
    parser.add_argument("--seconds", type=int, default=60, help="how long at most (default 60)")
    parser.add_argument(
        "--runs", type=int, default=-1, help="how many inputs at most; with a seed, the same ones each time"
    )
    parser.add_argument("--seed", type=int, default=0, help="0 (default): another one each time")
    parser.add_argument("--keep", type=Path, help="write what reaches something to this file, as lines of a corpus")
    parser.add_argument(
        "--find", action="store_true", help="take the first input for a failure, to see that one is told"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _keep(inputs: Path, file: Path) -> None:
    """Write the shortest inputs that together reach all that was reached in `extproc/http2`."""
    from tests.http2.differential import line_of

    found = sorted({path.read_bytes() for path in inputs.iterdir()}, key=lambda data: (len(data), data))
    reached: set[tuple[str, int, int]] = set()
    with file.open("w", encoding="utf-8") as out:
        for data in found:
            new = _steps(data) - reached
            if new:
                reached |= new
                print(line_of(data), file=out)


def _steps(data: bytes) -> set[tuple[str, int, int]]:
    """Return the steps from line to line that one input takes in `extproc/http2`."""
    from tests.http2.differential import check

    steps: set[tuple[str, int, int]] = set()

    def on_call(frame: FrameType, _event: str, _arg: Any) -> Any:
        name = frame.f_code.co_filename
        if Path(name).parent.name != "http2" or "extproc" not in name:
            return None
        last = 0

        def on_line(frame: FrameType, _event: str, _arg: Any) -> Any:
            nonlocal last
            steps.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return on_line

        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        check(data)
    finally:
        sys.settrace(before)
    return steps


def _fuzz(atheris: Any, arguments: Any) -> None:
    """Fuzz; does not return."""
    with atheris.instrument_imports(include=["extproc.http2", "h2", "hpack"]):
        from tests.http2 import differential
    from tests.http2.mutation import MOST_BYTES, Mutator, minimised

    seeds = list(differential.corpus().values())
    inputs = arguments.folder / "inputs"
    inputs.mkdir()
    for number, seed in enumerate(seeds):
        (inputs / f"seed-{number}").write_bytes(seed)

    def fails(data: bytes) -> bool:
        try:
            differential.check(data)
        except Exception:  # noqa: BLE001 - whatever it is, it is found
            return True
        return False

    def one(data: bytes) -> None:
        try:
            differential.check(data)
            assert not arguments.find, "as asked"
        except Exception:
            print(f"\nfuzz: found\n{differential.line_of(minimised(data, fails))}\n", file=sys.stderr, flush=True)
            raise

    options = [
        f"-max_total_time={arguments.seconds}",
        f"-runs={arguments.runs}",
        f"-seed={arguments.seed}",
        f"-max_len={MOST_BYTES}",
        "-rss_limit_mb=2000",
        # The fuzzer's own choice would be 77.
        f"-error_exitcode={FOUND}",
        "-timeout=20",
        f"-artifact_prefix={arguments.folder}/",
        "-print_final_stats=1",
        str(inputs),
    ]
    # Looked up when it is called: `Fuzz` puts another one there.
    mutator = Mutator(seeds, lambda data, most: atheris.Mutate(data, most))  # noqa: PLW0108
    atheris.Setup(["fuzz", *options], one, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
