"""Any other ext_proc server, named on the command line: `--peer NAME=COMMAND`, `--peer-profile NAME=PROFILE`.

COMMAND is split as a shell would, and run without one. `{port}` in it becomes the port its ext_proc service must listen
on (127.0.0.1, plaintext), `{health_port}` and `{metrics_port}` two more free ones, `{endpoints}` the model servers
(`ip:port`, joined by commas).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.envoy_stage import PLAIN
from extproc.envoy_config import PROFILES
from extproc.errors import ExtprocError

__all__ = ["OWN_NAMES", "Peer", "PeerError", "parse_peers"]

OWN_NAMES: Final = frozenset({"bare", "grpcio", "native", "native-close", "unscraped", PLAIN})
_PLACEHOLDERS: Final = ("port", "health_port", "metrics_port", "endpoints")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,19}")
_PLACEHOLDER: Final = re.compile(r"\{(\w*)\}")


class PeerError(ExtprocError):
    """A `--peer` or `--peer-profile` that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One server of somebody else."""

    name: str
    command: tuple[str, ...]
    """Words, with placeholders."""
    profile: str = "direct"
    """Of `extproc envoy-config`: how Envoy drives it."""
    port: int | None = None
    """Where it listens, if its command cannot be told; None: on the one that replaces `{port}`."""

    def argv(self, *, port: int, health_port: int, metrics_port: int, endpoints: Sequence[str]) -> list[str]:
        """Return the command with everything filled in."""
        values = dict(zip(_PLACEHOLDERS, (port, health_port, metrics_port, ",".join(endpoints)), strict=True))
        return [_PLACEHOLDER.sub(lambda found: str(values[found[1]]), word) for word in self.command]


def parse_peers(peers: Sequence[str], profiles: Sequence[str], ports: Sequence[str] = ()) -> tuple[Peer, ...]:
    """Read the options `--peer`, `--peer-profile` and `--peer-port`. Raises PeerError."""
    commands = _by_name("--peer", "NAME=COMMAND", peers)
    profile_of = _by_name("--peer-profile", "NAME=PROFILE", profiles)
    port_of = {name: _port(name, text) for name, text in _by_name("--peer-port", "NAME=PORT", ports).items()}
    for option, named in (("--peer-profile", profile_of.keys()), ("--peer-port", port_of.keys())):
        for name in named - commands.keys():
            raise PeerError(f"{option} {name}=...: there is no --peer {name}=COMMAND")
    for name, profile in profile_of.items():
        if profile not in PROFILES:
            raise PeerError(f"--peer-profile {name}={profile}: not one of {', '.join(PROFILES)}")
    return tuple(
        Peer(name, _words(name, text), profile_of.get(name, "direct"), port_of.get(name))
        for name, text in commands.items()
    )


def _by_name(option: str, form: str, texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value.strip() or _NAME.fullmatch(name) is None:
            raise PeerError(f"{option} {text!r}: write {form}, NAME of at most 20 letters, digits and hyphens")
        if name in OWN_NAMES:
            raise PeerError(f"{option} {text!r}: the name {name} is one of our own; take another")
        if name in found:
            raise PeerError(f"{option} {text!r}: {name} is given twice")
        found[name] = value
    return found


def _words(name: str, text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PeerError(f"--peer {name}: the command cannot be split into words: {error}") from error
    for word in words:
        for placeholder in _PLACEHOLDER.findall(word):
            if placeholder not in _PLACEHOLDERS:
                known = ", ".join(f"{{{one}}}" for one in _PLACEHOLDERS)
                raise PeerError(f"--peer {name}: {{{placeholder}}} is not a placeholder; there are {known}")
    return tuple(words)


def _port(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise PeerError(f"--peer-port {name}={text}: not a port from 1 to 65535")
    return int(text)
