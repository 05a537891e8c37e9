"""The command line: the commands, their arguments, and the exit status.

0 done, 1 failed while running, 2 cannot start as asked (wrong arguments or configuration, a port in use), 130 interrupted.
Slow imports happen in the command that needs them, so that `extproc --version` and errors appear at once.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from extproc import __version__
from extproc.errors import ConfigError, ExtprocError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name); return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser(next((word for word in argv if not word.startswith("-")), ""))
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] | None = getattr(args, "run", None)
    if run is None:
        parser.print_help()
        return 2
    try:
        status = run(args)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"extproc {args.command}: the configuration cannot be used:", file=sys.stderr)
        for line in str(error).splitlines():
            print(f"  {line}", file=sys.stderr)
        return 2
    except ExtprocError as error:
        print(f"extproc {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has closed the pipe; the interpreter's flush at exit must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser(command: str) -> argparse.ArgumentParser:
    """Build the parser; only `command`, the one that is asked for, gets arguments, because some need slow imports."""
    groups = "\n\n".join(
        f"{group}:\n" + "\n".join(f"  {name:<14}{text}" for name, text, _ in members) for group, members in _COMMANDS
    )
    parser = argparse.ArgumentParser(
        prog="extproc",
        usage="extproc [-h] [--version] COMMAND ...",
        description=f"{_DESCRIPTION}\n\n{groups}",
        epilog="example:\n  extproc serve --endpoint 10.0.0.7:8000 --endpoint 10.0.0.8:8000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"extproc {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help=argparse.SUPPRESS, prog="extproc")
    for _, members in _COMMANDS:
        for name, text, add in members:
            subparser = commands.add_parser(
                name, description=f"{text[0].upper()}{text[1:]}.", formatter_class=argparse.RawDescriptionHelpFormatter
            )
            if name == command:
                add(subparser)
    return parser


_DESCRIPTION = """\
An LLM endpoint picker for Envoy: sends each request to the GPU that holds the
prompt's prefix in its cache and has room. COMMAND --help describes a command."""


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from extproc.config.schema import Config

    parser.description = (
        "Run the picker until SIGTERM or Ctrl-C. SIGHUP makes it read all files again.\nFlags override the file."
    )
    parser.epilog = "example:\n  extproc serve --config extproc.yaml --log-format text"
    _add_source(parser)
    for flag, key, kind, text in _FLAGS:
        default = functools.reduce(getattr, key.split("."), Config())
        name = key.rpartition(".")[2].upper()
        parser.add_argument(flag, dest=key, type=kind, metavar=name, help=f"{text} (key {key}, default: {default})")
    parser.set_defaults(run=_serve)


def _add_check_config(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read a configuration as `serve` does and report every problem in it.\nExit status 2 if there is one."
    )
    parser.epilog = "example:\n  extproc check-config --show extproc.yaml"
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--show", action="store_true", help="print the configuration with all defaults (default: print only `ok`)"
    )
    parser.set_defaults(run=_check_config)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Read the metrics of all endpoints once, choose an endpoint for one request body, and
print the decision. No request is sent. The prefix index starts empty: it holds only
the prompts given with --after."""
    parser.epilog = "example:\n  extproc explain body.json --config extproc.yaml --after earlier.json"
    parser.add_argument("body", type=Path, metavar="BODY.json", help="the request body; - reads standard input")
    _add_source(parser)
    parser.add_argument("--path", default="/v1/chat/completions", help="the request's path (default: %(default)s)")
    parser.add_argument(
        "--after",
        type=Path,
        action="append",
        default=[],
        metavar="BODY.json",
        help="a body that was routed before; repeat (default: none)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole decision as JSON (default: a sentence and a table)"
    )
    parser.set_defaults(run=_explain)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the configuration file, which `serve` reloads when it changes (default: all keys have their defaults)",
    )
    parser.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a model server; repeat (default: the endpoints of the file)",
    )


_FLAGS = (
    ("--host", "server.host", str, "address to listen on"),
    ("--grpc-port", "server.grpc_port", int, "ext_proc, access log and gRPC health"),
    ("--grpc-health-port", "server.health_port", int, "gRPC health, plaintext"),
    ("--metrics-port", "server.metrics_port", int, "/metrics, /healthz, /readyz"),
    ("--admin-port", "admin.port", int, "/debug pages"),
    ("--transport", "server.transport", str, "gRPC implementation: grpcio or native"),
    ("--strategy", "routing.strategy", str, "how an endpoint is chosen"),
    ("--fallbacks", "routing.fallbacks", int, "endpoints named after the destination, for Envoy's override_host"),
    ("--log-level", "log.level", str, "debug, info, warning or error"),
    ("--log-format", "log.format", str, "json or text"),
)
"""(flag, key of the configuration, type, help): flags override the file."""


def overrides(args: argparse.Namespace) -> dict[str, object]:
    """Return the configuration keys that the command line sets."""
    found: dict[str, object] = {
        key: getattr(args, key) for _, key, _, _ in _FLAGS if getattr(args, key, None) is not None
    }
    if args.endpoint:
        found["pool.endpoints"] = args.endpoint
    return found


def _missing(command: str, *modules: str) -> bool:
    """Tell whether packages of the extra `demo` are missing, and say so."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f"extproc {command}: needs packages that `extproc serve` does not ({', '.join(missing)}): "
            "pip install 'extproc-picker[demo]'",
            file=sys.stderr,
        )
    return bool(missing)


def _add_envoy_config(parser: argparse.ArgumentParser) -> None:
    from extproc.envoy_config import command

    def run(args: argparse.Namespace) -> int:
        return 2 if _missing(args.command, "envoy_data_plane") else command.main(args, _endpoints_of)

    command.add_arguments(parser)
    parser.set_defaults(run=run)


def _endpoints_of(path: Path) -> Sequence[str]:
    from extproc.app import read_config

    config = read_config(path, {})
    if not config.pool.endpoints:
        raise ExtprocError(
            f"{path}: pool.endpoints is empty, but Envoy's cluster needs the endpoints; "
            "with another source than pool.endpoints, name them by --endpoint"
        )
    return config.pool.endpoints


def _add_model_server(parser: argparse.ArgumentParser) -> None:
    from extproc.sim import model_server_options

    def run(args: argparse.Namespace) -> int:
        from extproc.sim import model_server

        return model_server.main(args)

    model_server_options.add_arguments(parser)
    parser.set_defaults(run=run)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from extproc.demo import command as demo

    def run(args: argparse.Namespace) -> int:
        return 2 if _missing(args.command, "envoy_data_plane", "matplotlib") else demo.main(args)

    demo.add_arguments(parser)
    parser.set_defaults(run=run)


def _serve(args: argparse.Namespace) -> int:
    # Until the picker handles it: a SIGHUP during the start must not end the process; the files are read anyway.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from extproc.app import serve

    return serve(args.config, overrides(args))


def _check_config(args: argparse.Namespace) -> int:
    from extproc.app import read_config
    from extproc.config.load import dump

    config = read_config(args.file, {})
    if args.show:
        sys.stdout.write(dump(config))
    else:
        print(f"{args.file}: ok")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from extproc.explain import explain

    return explain(
        args.config, overrides(args), body=args.body, after=args.after, request_path=args.path, as_json=args.json
    )


_COMMANDS: Final[tuple[tuple[str, tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...]], ...]] = (
    ("run", (("serve", "run the picker", _add_serve),)),
    (
        "try",
        (
            ("demo", "compare with round robin: real Envoy, simulated engines", _add_demo),
            ("model-server", "run a simulated vLLM engine", _add_model_server),
        ),
    ),
    (
        "check and set up",
        (
            ("check-config", "report every problem in a configuration file", _add_check_config),
            ("explain", "show where a request body would go, and why", _add_explain),
            ("envoy-config", "print a ready Envoy configuration", _add_envoy_config),
        ),
    ),
)
"""The commands in their groups: name, help, and what adds its arguments."""
