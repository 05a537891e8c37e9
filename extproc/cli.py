"""The command line: what each subcommand is called, its arguments, and its exit status.

0 done, 1 failed while running, 2 cannot start as asked (wrong arguments or configuration, a port in use), 130 interrupted.
Heavy imports happen in the subcommand that needs them, so that `extproc --version` and errors come at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
        # Whoever read our output has enough; the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser(command: str) -> argparse.ArgumentParser:
    """Build the parser; `command` is the one that is asked for, and of those that cost imports only it gets arguments."""
    parser = argparse.ArgumentParser(
        prog="extproc",
        description="An LLM endpoint picker for Envoy: sends each request to the GPU that holds its prefix and has room.",
    )
    parser.add_argument("--version", action="version", version=f"extproc {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    serve = commands.add_parser("serve", help="run the picker", description="Run the picker until SIGTERM.")
    _add_source(serve)
    _add_flags(serve)
    serve.set_defaults(run=_serve)

    check = commands.add_parser(
        "check-config",
        help="say what is wrong in a configuration file",
        description="Read a configuration as `serve` would, and say every problem in it.",
    )
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--show", action="store_true", help="print the configuration with all defaults filled in")
    check.set_defaults(run=_check_config)

    explain = commands.add_parser(
        "explain",
        help="say where one request body would go, and why",
        description="Ask the endpoints for their metrics, then decide for one request body and print the decision. "
        "The prefix index starts empty, so only what `--after` bodies leave there is found.",
    )
    explain.add_argument("body", type=Path, metavar="BODY.json", help="the request body; - reads standard input")
    _add_source(explain)
    explain.add_argument(
        "--path", default="/v1/chat/completions", help="the request's path (default: by the body's fields)"
    )
    explain.add_argument(
        "--after", type=Path, action="append", default=[], metavar="BODY.json", help="a body to route before; repeat"
    )
    explain.add_argument("--json", action="store_true", help="print the whole decision record")
    explain.set_defaults(run=_explain)

    for name, text, add in (
        ("envoy-config", "print a ready Envoy configuration", _add_envoy_config),
        ("model-server", "run a simulated vLLM", _add_model_server),
        ("demo", "see it work: real Envoy, the picker, four simulated model servers", _add_demo),
    ):
        subparser = commands.add_parser(name, help=text)
        if name == command:
            add(subparser)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the configuration file (`serve` reloads it when it changes)"
    )
    parser.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a model server; repeat (instead of the file's pool)",
    )


_FLAGS = (
    ("--host", "server.host", str, "address to listen on"),
    ("--grpc-port", "server.grpc_port", int, "ext_proc, access log and gRPC health"),
    ("--grpc-health-port", "server.health_port", int, "gRPC health, plaintext"),
    ("--metrics-port", "server.metrics_port", int, "/metrics, /healthz, /readyz"),
    ("--admin-port", "admin.port", int, "/debug pages"),
    ("--transport", "server.transport", str, "gRPC implementation: grpcio or native"),
    ("--strategy", "routing.strategy", str, "how an endpoint is chosen"),
    (
        "--fallbacks",
        "routing.fallbacks",
        int,
        "further endpoints to name, where the gateway takes a list: Envoy's override_host",
    ),
    ("--log-level", "log.level", str, "debug, info, warning or error"),
    ("--log-format", "log.format", str, "json or text"),
)
"""(flag, key of the configuration, type, help): flags beat the file."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    for flag, key, kind, text in _FLAGS:
        parser.add_argument(
            flag, dest=key, type=kind, metavar=key.rpartition(".")[2].upper(), help=f"{text} (key {key})"
        )


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
            f"{path}: pool.endpoints is empty; Envoy's cluster needs the endpoints (with pool.dns or pool.file, name them by --endpoint)"
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
    # Until the picker takes it: whoever asks for a re-read while we start must not end us, and gets what is read now.
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
