"""The command `extproc envoy-config`: its arguments, and printing what `render` gives."""

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from extproc.envoy_config.options import DEFAULT_ENDPOINTS, PROFILES, EnvoyConfigError, EnvoyOptions
from extproc.envoy_config.render import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `extproc envoy-config` to a (sub)parser."""
    default = EnvoyOptions()
    profiles = "\n".join(
        textwrap.fill(f"{profile.name:<13} {profile.summary}", 98, initial_indent="  ", subsequent_indent=" " * 16)
        for profile in PROFILES.values()
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        f"profiles:\n{profiles}\n\n"
        "example:\n  extproc envoy-config --endpoint 10.0.0.7:8000 --picker 10.0.0.5:9002 --output envoy.yaml"
    )
    parser.add_argument(
        "--profile", default="direct", metavar="NAME", help=f"one of {', '.join(PROFILES)} (default: direct)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="take the endpoints from this configuration of the picker (default: --endpoint)",
    )
    where.add_argument(
        "--endpoint",
        action="append",
        metavar="HOST:PORT",
        help=f"a model server; repeat (default: {' '.join(DEFAULT_ENDPOINTS)})",
    )
    parser.add_argument(
        "--picker",
        action="append",
        metavar="HOST:PORT",
        help=f"a picker; repeat, and requests go to those that are ready (default: {' '.join(default.pickers)})",
    )
    parser.add_argument("--listen-host", default=default.listen_host, metavar="IP", help="default: %(default)s")
    parser.add_argument(
        "--listen-port", type=int, default=default.listen_port, metavar="PORT", help="default: %(default)s"
    )
    parser.add_argument("--admin-host", default=default.admin_host, metavar="IP", help="default: %(default)s")
    parser.add_argument(
        "--admin-port", type=int, default=default.admin_port, metavar="PORT", help="default: %(default)s"
    )
    parser.add_argument(
        "--stdout-access-log",
        action="store_true",
        help="Envoy also writes a line per request to its output (default: no)",
    )
    tls = parser.add_argument_group("profile tls")
    tls.add_argument(
        "--picker-ca", metavar="FILE", help="verify the picker's certificate with this CA (default: not verified)"
    )
    tls.add_argument(
        "--picker-certificate",
        metavar="FILE",
        help="present this client certificate; with --picker-key (default: none)",
    )
    tls.add_argument("--picker-key", metavar="FILE", help="key of --picker-certificate (default: none)")
    tls.add_argument(
        "--picker-server-name", metavar="NAME", help="name to ask for and to verify (default: the picker's host name)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to this file (default: standard output)")


def options_from(args: argparse.Namespace, endpoints_of: Callable[[Path], Sequence[str]]) -> EnvoyOptions:
    """Make options of parsed arguments; `endpoints_of` reads the endpoints (`host:port`) out of a picker's configuration file."""
    endpoints: Sequence[str] = args.endpoint or DEFAULT_ENDPOINTS
    if args.config is not None:
        endpoints = endpoints_of(args.config)
    return EnvoyOptions(
        endpoints=tuple(endpoints),
        pickers=tuple(args.picker or EnvoyOptions().pickers),
        listen_host=args.listen_host,
        listen_port=args.listen_port,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        stdout_access_log=args.stdout_access_log,
        picker_ca=args.picker_ca,
        picker_certificate=args.picker_certificate,
        picker_key=args.picker_key,
        picker_server_name=args.picker_server_name,
    )


def main(args: argparse.Namespace, endpoints_of: Callable[[Path], Sequence[str]]) -> int:
    """Print the configuration (or write it to `--output`); 0, or 2 with a message on standard error.

    Errors that `endpoints_of` raises are its caller's: they pass through.
    """
    try:
        text = render(args.profile, options_from(args, endpoints_of))
    except EnvoyConfigError as error:
        sys.stderr.write(f"extproc envoy-config: {error}\n")
        return 2
    if args.output is None:
        sys.stdout.write(text)
    else:
        try:
            args.output.write_text(text, encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"extproc envoy-config: cannot write {args.output}: {error.strerror}\n")
            return 2
    return 0
