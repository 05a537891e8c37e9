"""TLS of the native transport: an `ssl` context with ALPN h2 that follows its files, and a listener for it.

A connection keeps its certificate. The files are checked for changes every second, and read in a thread, so that neither
a slow file system nor a long chain of certificates stops the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from extproc.config.schema import TlsConfig
from extproc.edge.process.listen import ConnectionBounds, Listener
from extproc.edge.process.tls import CertificateFiles, KeyPair, host_names, read_client_ca, self_signed
from extproc.errors import ConfigError, ConfigProblem

__all__ = ["ServerTls", "TlsListener"]

_log = logging.getLogger(__name__)

_CHECK_S: Final = 1.0
"""Time between two checks of the certificate files."""


class ServerTls:
    """How the gRPC port is secured; changed certificate files that have been read are used from the next handshake on."""

    def __init__(self, config: TlsConfig, now: datetime | None = None) -> None:
        """Raise ConfigError naming the key and the file that cannot be used. `now` dates a self-signed certificate."""
        self._mode = config.mode
        self._files: CertificateFiles | None = None
        self._newest: ssl.SSLContext | None = None
        self._reading = threading.Lock()
        if config.mode == "self-signed":
            self._newest = _context(self_signed(host_names(), now or datetime.now(UTC)), read_client_ca(config))
        elif config.mode == "files":
            self._files = CertificateFiles(config)
            self._newest = _context(*self._files.read())
            # Called on every ClientHello, with a server name or without.
            self._newest.sni_callback = self._on_hello
        self.context = self._newest
        """The context to listen with; None: plaintext."""

    def read_again(self) -> str:
        """Read the files again, changed or not; return the result for the log. For a thread."""
        if self._files is None:
            return f"none ({self._mode})"
        try:
            with self._reading:
                self._newest = _context(*self._files.read())
        except ConfigError as error:
            return f"refused, the last good ones stay: {error}"
        return "read"

    def read_if_changed(self) -> None:
        """Read the files if they have changed; files that cannot be used are logged, and change nothing. For a thread."""
        try:
            with self._reading:
                if self._files is None or not self._files.changed:
                    return
                self._newest = _context(*self._files.read())
            _log.info("TLS files re-read")
        except ConfigError as error:
            _log.warning("TLS files changed and cannot be used; the last good ones stay", extra={"problem": str(error)})

    async def follow_files(self) -> None:
        """Read changed files, for as long as it runs; returns at once where there are none."""
        while self._files is not None:
            await asyncio.sleep(_CHECK_S)
            await asyncio.to_thread(self.read_if_changed)

    def _on_hello(self, connection: ssl.SSLObject, _name: str | None, _default: ssl.SSLContext) -> None:
        if self._newest is not self.context and self._newest is not None:
            connection.context = self._newest


def _context(pair: KeyPair, client_ca: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # RFC 9113 9.2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION  # RFC 9113 9.2.1
    # A ticket would outlive the change of a certificate, and connections are few and long.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    # RFC 9113 3.3. A client that offers no protocol is assumed to speak HTTP/2.
    context.set_alpn_protocols(["h2"])
    try:
        _load_pair(context, pair)
        if client_ca is not None:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
            # As with grpc.aio: a certificate in the file is trusted without its issuer.
            context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    except (ssl.SSLError, UnicodeDecodeError) as error:
        problem = ConfigProblem("server.tls", f"OpenSSL refuses the certificate: {error}", "check the PEM files")
        raise ConfigError((problem,)) from error
    except OSError as error:
        problem = ConfigProblem(
            "server.tls", f"the certificate cannot be passed to OpenSSL: {error}", "make its TMPDIR writable"
        )
        raise ConfigError((problem,)) from error
    return context


def _load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Load certificate and key into a context. Raises ssl.SSLError, and OSError where no file can be made for them."""
    # `ssl` reads a chain from files only: from copies, so that what was checked is what is used. In memory, where the
    # system offers that: then the key is on no disk, and no disk need be writable.
    try:
        with _in_memory(pair.certificate) as certificate, _in_memory(pair.private_key) as key:
            context.load_cert_chain(certificate, key)
            return
    except ssl.SSLError:
        raise
    except OSError as error:
        _log.debug("no files in memory here; using temporary ones", extra={"problem": str(error)})
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "tls.crt", Path(folder) / "tls.key"
        for name, data in zip(names, (pair.certificate, pair.private_key), strict=True):
            name.touch(mode=0o600)
            name.write_bytes(data)
        context.load_cert_chain(*names)


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield the name of a file in memory that holds `data`. Raises OSError."""
    make: Callable[[str], int] | None = getattr(os, "memfd_create", None)
    if make is None:
        raise OSError("not Linux")
    with os.fdopen(make("tls"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


class TlsListener(Listener):
    """Serves TLS on a bound socket, and tells of the handshakes that fail.

    asyncio's own servers, and uvloop's, let such a peer go without a word to anybody.
    """

    def __init__(
        self,
        bound: socket.socket,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.Protocol],
        handshake_s: float,
        failed: Callable[[str, Any, str], None],
        bounds: ConnectionBounds,
        admits: Callable[[Any, int, Callable[[], bool]], bool] = lambda *_: True,
    ) -> None:
        """Listen on the running loop.

        `failed` takes `timeout` or `failed`, the peer's address and what happened; `admits` is asked before a handshake,
        with the peer's address, how many handshakes are under way, and what ends the oldest of them.
        """
        self._context = context
        self._make = make
        self._handshake_s = handshake_s
        self._admits = admits
        self._failed = failed
        self._handshakes: dict[asyncio.Task[None], None] = {}
        super().__init__(bound, bounds, self._on_connection)

    def close(self) -> None:
        """Accept nothing more, and give up the handshakes that are under way. Harmless when repeated."""
        super().close()
        for handshake in self._handshakes:
            handshake.cancel()

    @property
    def opening(self) -> Collection[asyncio.Task[None]]:
        """The handshakes that are under way."""
        return tuple(self._handshakes)

    def _on_connection(self, connection: socket.socket, address: Any) -> None:
        if not self._admits(address, len(self._handshakes), self._drop_oldest):
            connection.close()
            return
        handshake = self._loop.create_task(self._shake_hands(connection, address))
        self._handshakes[handshake] = None
        handshake.add_done_callback(lambda task: self._handshakes.pop(task, None))

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._handshakes), None)
        if oldest is None:
            return False
        del self._handshakes[oldest]
        oldest.cancel()
        return True

    async def _shake_hands(self, connection: socket.socket, address: Any) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except ConnectionAbortedError:
            self._failed("timeout", address, "no TLS handshake in time")
        except ssl.SSLError as error:
            self._failed("failed", address, str(error))
        except OSError as error:
            # Closed during the handshake, as probes of a port do.
            _log.debug("a peer closed its connection during the TLS handshake", extra={"problem": str(error)})
