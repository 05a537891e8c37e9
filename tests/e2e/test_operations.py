"""Operating a picker: starting it wrongly, changing its configuration, stopping it, securing it, not reading its log."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from extproc import __version__
from extproc.demo.processes import free_ports
from tests.e2e.day import EXT_PROC, NOT_SERVING, READINESS, SERVING, Streams, assert_clean, events, health
from tests.e2e.stack import EXTPROC, Stack, merged, until

pytestmark = pytest.mark.e2e

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def extproc(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run([*EXTPROC, *argv], capture_output=True, text=True, timeout=300, check=False)


async def readyz(stack: Stack) -> tuple[int, str]:
    async with stack.http.get(f"http://127.0.0.1:{stack.ports.metrics}/readyz") as answer:
        return answer.status, (await answer.text()).strip()


# The command line


def test_version() -> None:
    done = extproc("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"extproc {__version__}")


def test_check_config(tmp_path: Path) -> None:
    file = tmp_path / "extproc.yaml"
    file.write_text("apiVersion: extproc/v1alpha1\nkind: ExtprocConfig\npool: {endpoints: ['10.0.0.1:8000']}\n")
    done = extproc("check-config", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: ok\n", "")

    shown = extproc("check-config", "--show", str(file))
    document = yaml.safe_load(shown.stdout)
    assert shown.returncode == 0
    assert document["pool"]["endpoints"] == ["10.0.0.1:8000"]
    assert document["server"]["grpc_port"] == 9002, "with every default"
    (tmp_path / "shown.yaml").write_text(shown.stdout)
    assert extproc("check-config", str(tmp_path / "shown.yaml")).returncode == 0


BAD = {
    "an unknown key": ("pool: {endpoint: ['10.0.0.1:8000']}", ["pool.endpoint", "endpoints"]),
    "a wrong type": ("server: {grpc_port: many}", ["server.grpc_port", "many"]),
    "out of range": ("server: {grpc_port: 70000}", ["server.grpc_port", "65,535"]),
    "an unknown strategy": ("routing: {strategy: wheighted}", ["routing.strategy", "weighted"]),
    "not an endpoint": ("pool: {endpoints: ['10.0.0.1']}", ["pool.endpoints", "10.0.0.1"]),
    "two sources": ("pool: {endpoints: ['10.0.0.1:1'], dns: {host: x, port: 1}}", ["pool.", "endpoints", "dns"]),
    "not YAML": ("pool: [", ["line"]),
    "not a mapping": ("- 1", ["mapping"]),
    "two problems": ("server: {grpc_port: many}\nadmin: {port: few}", ["server.grpc_port", "admin.port"]),
}


@pytest.mark.parametrize("command", ["check-config", "serve"])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_configuration_is_refused_with_its_path(tmp_path: Path, case: str, command: str) -> None:
    text, named = BAD[case]
    file = tmp_path / "extproc.yaml"
    file.write_text(text + "\n")
    argv = ["check-config", str(file)] if command == "check-config" else ["serve", "--config", str(file)]
    done = extproc(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in [str(file), *named]:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize("argv", [["check-config"], ["serve", "--config"]])
def test_a_missing_file_is_named(tmp_path: Path, argv: list[str]) -> None:
    file = tmp_path / "nowhere.yaml"
    done = extproc(*argv, str(file))
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert "No such file" in done.stderr
    assert "--config" in done.stderr or "check the path" in done.stderr


@pytest.mark.parametrize("key", ["server.grpc_port", "server.health_port", "server.metrics_port", "admin.port"])
def test_a_port_in_use_is_named(key: str) -> None:
    flags = {
        "server.grpc_port": "--grpc-port",
        "server.health_port": "--grpc-health-port",
        "server.metrics_port": "--metrics-port",
        "admin.port": "--admin-port",
    }
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = ["--host", "127.0.0.1", "--endpoint", "127.0.0.1:1"]
        for name, flag in flags.items():
            argv += [flag, str(port if name == key else 0)]
        done = extproc("serve", *argv)
    assert done.returncode == 2
    assert key in done.stderr
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file = tmp_path / "extproc.yaml"
    tls = {"mode": "files", "certificate": str(tmp_path / "tls.crt"), "private_key": str(tmp_path / "tls.key")}
    file.write_text(
        yaml.safe_dump(
            {"server": {"tls": tls, "grpc_port": 0, "health_port": 0, "metrics_port": 0}, "admin": {"port": 0}}
        )
    )
    done = extproc("serve", "--config", str(file))
    assert done.returncode == 2
    assert "server.tls.certificate" in done.stderr
    assert str(tmp_path / "tls.crt") in done.stderr


# Changing the configuration while running


async def test_a_bad_configuration_while_running_changes_nothing(tmp_path: Path, transport: str) -> None:
    async with Stack("direct", tmp_path, transport=transport) as stack:
        assert (await stack.chat("hello")).status == 200
        good = stack.config_file.read_text()
        refused = "the changed configuration was refused; the last good one stays"

        for number, text in enumerate(("pool: [", "routing: {strategy: wheighted}", "- nothing\n", ""), start=1):
            stack.config_file.write_text(text)

            def said(count: int = number) -> bool:
                return len(events(stack.picker, refused)) == count

            await until(said, "the refusal is logged")
            page = await stack.metrics()
            assert page.total("extproc_config_last_reload_successful") == 0
            assert page.total("extproc_config_reloads_total", result="failure") == number
            assert page.total("extproc_config_generation") == 1
            status, reason = await readyz(stack)
            assert status == 200
            assert "refused" in reason
            assert (await stack.chat("hello again")).status == 200
        line = events(stack.picker, refused)[1]
        assert line["file"] == str(stack.config_file)
        assert "routing.strategy" in line["problems"][0]

        # A good one applies without a restart, for the next request on.
        stack.config_file.write_text(good)
        stack.write_config({"routing": {"strategy": "round-robin"}})

        async def applied() -> bool:
            page = await stack.metrics()
            return (
                page.total("extproc_config_last_reload_successful") == 1
                and page.total("extproc_config_generation") == 2
            )

        await until(applied, "the good configuration is in force")
        assert await readyz(stack) == (200, "ready")
        for number in range(4):
            assert (await stack.chat(f"question {number}")).status == 200
        newest = (await stack.settled())[:4]
        assert {found["strategy"] for found in newest} == {"round-robin"}
        assert len({found["endpoint"] for found in newest}) == 2
        assert_clean(stack.picker)


async def test_a_mounted_config_map_is_reloaded(tmp_path: Path, transport: str) -> None:
    """Kubernetes swaps the symbolic link `..data` of the mounted folder; the file's own link never changes."""
    mount = tmp_path / "mount"
    mount.mkdir()

    def swap(generation: int, document: Mapping[str, Any]) -> None:
        folder = mount / f"..2026_11_21_{generation}"
        folder.mkdir()
        (folder / "extproc.yaml").write_text(yaml.safe_dump(document))
        (mount / "..data_tmp").symlink_to(folder.name)
        old = (mount / "..data").resolve() if (mount / "..data").exists() else None
        (mount / "..data_tmp").replace(mount / "..data")
        if old is not None:
            (old / "extproc.yaml").unlink()
            old.rmdir()

    stack = Stack("direct", tmp_path, transport=transport)
    swap(1, stack.picker_config())
    link = mount / "extproc.yaml"
    link.symlink_to("..data/extproc.yaml")
    stack.config_file = link
    stack.write_config = lambda changes=None: None  # type: ignore[method-assign]
    async with stack:
        for generation, strategy in ((2, "least-load"), (3, "random")):
            swap(generation, merged(stack.picker_config(), {"routing": {"strategy": strategy}}))

            async def applied(wanted: int = generation) -> bool:
                return (await stack.metrics()).total("extproc_config_generation") == wanted

            await until(applied, "the new generation is in force")
            assert (await stack.chat("hello")).status == 200
            assert (await stack.decisions())[0]["strategy"] == strategy
        assert_clean(stack.picker)


async def test_keys_that_need_a_restart_are_said(tmp_path: Path, transport: str) -> None:
    async with Stack("direct", tmp_path, transport=transport, servers=1) as stack:
        stack.write_config({"server": {"metrics_port": free_ports(1)[0]}, "routing": {"strategy": "random"}})
        named = "some changed keys take effect only after a restart"
        line = (await until(lambda: events(stack.picker, named), named))[0]
        assert line["keys"] == ["server.metrics_port"]
        assert (await stack.chat("hello")).status == 200
        assert (await stack.decisions())[0]["strategy"] == "random", "the rest applies"


# Stopping it


async def test_sigterm_lets_open_streams_finish(tmp_path: Path, transport: str) -> None:
    """Unready first, then the drain delay, then the port closes; what is open runs to its end; exit status 0."""
    config = {"server": {"drain_delay": "5s", "grace_period": "60s"}}
    async with Stack("full-duplex", tmp_path, transport=transport, config=config, speed=2.0) as stack:
        for port in (stack.ports.health, stack.ports.grpc):
            for service in (*READINESS, "liveness"):
                assert await health(port, service) == SERVING, service
            assert await health(port, "no such service") == "NOT_FOUND"
        running = Streams(stack, 8, max_tokens=500)  # twice the drain delay
        await running.begun()

        stack.picker.send(signal.SIGTERM)
        # Every line below must happen within the drain delay; were it cut short, the port would be closed.
        await until(lambda: events(stack.picker, "draining"), "it drains")
        for port in (stack.ports.health, stack.ports.grpc):
            for service in READINESS:
                assert await health(port, service) == NOT_SERVING, service
            assert await health(port, "liveness") == SERVING
        assert await readyz(stack) == (503, "draining")
        assert running.running == 8

        # Open streams go on after the port has closed; GOAWAY and a closed port cut none of them.
        closing = (await until(lambda: events(stack.picker, "closing the gRPC port"), "the port closes"))[0]
        assert closing["open_streams"] == 8
        began = events(stack.picker, "draining")[0]
        waited = datetime.fromisoformat(closing["time"]) - datetime.fromisoformat(began["time"])
        assert waited >= timedelta(seconds=4.99)
        for answer in await running.done():
            assert answer.whole, (answer.error, answer.data[-200:])
            assert answer.tokens == 500
        assert await stack.picker.process.wait() == 0
        assert events(stack.picker)[-1]["event"] == "stopped"
        assert events(stack.picker)[-1]["in_flight"] == 0
        assert_clean(stack.picker)


async def test_sigterm_serves_what_comes_during_the_drain_delay(tmp_path: Path, transport: str) -> None:
    config = {"server": {"drain_delay": "3s"}}
    async with Stack("direct", tmp_path, transport=transport, config=config) as stack:
        stack.picker.send(signal.SIGTERM)
        await until(lambda: events(stack.picker, "draining"), "it drains")
        assert (await stack.chat("just in time")).status == 200
        assert await stack.picker.process.wait() == 0
        assert (await stack.chat("too late")).status == 503
        assert_clean(stack.picker)


async def test_sigterm_has_a_limit(tmp_path: Path, transport: str) -> None:
    """A stream that does not end within the grace period does not keep the process."""
    config = {"server": {"drain_delay": 0, "grace_period": "500ms"}}
    async with Stack("full-duplex", tmp_path, transport=transport, servers=1, config=config) as stack:
        await stack.fault(0, kind="hang")
        waiting = asyncio.ensure_future(stack.chat("hello?"))

        async def sent() -> bool:
            return await stack.in_flight() == 1

        await until(sent, "the request is at the engine")
        stack.picker.send(signal.SIGTERM)
        assert await stack.picker.process.wait() == 0
        assert_clean(stack.picker)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_second_signal_does_not_wait(tmp_path: Path, transport: str) -> None:
    config = {"server": {"drain_delay": "5m"}}
    async with Stack("direct", tmp_path, transport=transport, servers=1, config=config) as stack:
        stack.picker.send(signal.SIGTERM)
        await until(lambda: events(stack.picker, "draining"), "it drains")
        stack.picker.send(signal.SIGTERM)
        assert await stack.picker.process.wait() == -signal.SIGTERM
        assert events(stack.picker)[-1]["event"].startswith("a second signal to stop")


# Securing it


class Authority:
    """A certificate authority of one test."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.crt"
        self.file.write_bytes(self._certify(self._name, self._key.public_key(), ca=True, names=()))

    def issue(self, name: str, *names: str) -> tuple[Path, Path]:
        """Write a certificate for DNS names, and its key; replaces those of the same name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        contents = (
            self._certify(subject, key.public_key(), ca=False, names=names),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
        for path, content in zip(paths, contents, strict=True):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(content)
            fresh.replace(path)
        return paths

    def _certify(self, subject: x509.Name, key: Any, *, ca: bool, names: tuple[str, ...]) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
            )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def serial(port: int) -> int:
    """Return the serial number of the certificate that a port shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as plain, context.wrap_socket(plain) as secure:
        shown = secure.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


def serial_of(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


async def test_a_self_signed_certificate(tmp_path: Path, transport: str) -> None:
    async with Stack("tls", tmp_path, transport=transport) as stack:
        assert (await stack.chat("hello")).status == 200
        assert len(await stack.settled()) == 1, "the access log comes by TLS too"
        assert serial(stack.ports.grpc)
        assert await health(stack.ports.health, EXT_PROC) == SERVING, "the health port stays plaintext"
        assert await health(stack.ports.grpc, EXT_PROC) == "UNAVAILABLE"


async def test_certificate_files_are_re_read(tmp_path: Path, transport: str) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("picker", "picker.example")
    tls = {"mode": "files", "certificate": str(certificate), "private_key": str(key)}
    envoy = {"picker_ca": str(authority.file), "picker_server_name": "picker.example"}
    async with Stack("tls", tmp_path, transport=transport, config={"server": {"tls": tls}}, envoy=envoy) as stack:
        assert (await stack.chat("hello")).status == 200
        first = serial_of(certificate)
        assert serial(stack.ports.grpc) == first

        authority.issue("picker", "picker.example")
        second = serial_of(certificate)
        assert second != first
        await until(lambda: serial(stack.ports.grpc) == second, "the new certificate is shown")
        assert (await stack.chat("on the old connection")).status == 200

        certificate.write_text("half a certi")
        assert serial(stack.ports.grpc) == second, "files that cannot be used change nothing"
        await until(lambda: events(stack.picker, "TLS files changed and cannot be used; the last good ones stay"))
        await stack.proxy.kill()
        await stack.start_envoy()
        assert (await stack.chat("on a new connection")).status == 200
        assert_clean(stack.picker)


async def test_mutual_tls(tmp_path: Path, transport: str) -> None:
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    certificate, key = authority.issue("picker", "picker.example")
    client, client_key = authority.issue("envoy")
    tls = {
        "mode": "files",
        "certificate": str(certificate),
        "private_key": str(key),
        "client_ca": str(authority.file),
    }
    envoy = {
        "picker_ca": str(authority.file),
        "picker_server_name": "picker.example",
        "picker_certificate": str(client),
        "picker_key": str(client_key),
    }
    async with Stack("tls", tmp_path, transport=transport, config={"server": {"tls": tls}}, envoy=envoy) as stack:
        assert (await stack.chat("hello")).status == 200
        await stack.settled()
        forged, forged_key = stranger.issue("forged")
        for wrong in (
            {"picker_certificate": str(forged), "picker_key": str(forged_key)},
            {"picker_certificate": None, "picker_key": None},
            {"picker_ca": str(stranger.file)},
        ):
            await stack.proxy.kill()
            stack.envoy = {**envoy, **wrong}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stack, "picker_healthy", _at_once)
                await stack.start_envoy()
            answer = await stack.chat("let me in")
            assert answer.status == 503
            assert answer.json()["error"]["type"] == "picker_unavailable"
        assert (await stack.metrics()).total("extproc_decisions_total") == 1
        assert "Traceback" not in stack.picker.log.read_text()


async def _at_once() -> None:
    """Do not wait for health that will not come."""


# Watching it


async def test_a_log_that_nobody_reads_stalls_nothing(tmp_path: Path, transport: str) -> None:
    async with Stack("direct", tmp_path, transport=transport, speed=200.0, config={"log": {"queue": 100}}) as stack:
        assert await stack.picker.stop() == 0
        read_end, write_end = os.pipe()
        picker = await asyncio.create_subprocess_exec(
            *EXTPROC, "serve", "--config", str(stack.config_file), stdout=write_end, stderr=asyncio.subprocess.DEVNULL
        )
        os.close(write_end)
        try:

            async def ready() -> bool:
                return (await readyz(stack))[0] == 200

            await until(lambda: _quietly(ready()), "the picker is back")
            await stack.picker_healthy()

            async def dropped() -> float:
                for number in range(50):
                    assert (await stack.chat(f"question {number}", max_tokens=1)).status == 200
                return (await stack.metrics()).total("extproc_log_lines_dropped_total")

            await until(dropped, "lines are dropped and counted")
            await stack.settled()
            picker.send_signal(signal.SIGTERM)
            assert await picker.wait() == 0, "a blocked log does not keep it from ending either"
        finally:
            if picker.returncode is None:
                picker.kill()
                await picker.wait()
            os.close(read_end)


async def _quietly(ask: Any) -> bool:
    try:
        return bool(await ask)
    except OSError:
        return False


async def test_every_metric_on_the_live_page_is_documented(tmp_path: Path, transport: str) -> None:
    async with Stack("full-duplex", tmp_path, transport=transport, dead=1) as stack:
        for number in range(4):
            assert (await stack.chat(f"question {number}")).status == 200
        assert (await stack.post("/v1/chat/completions", b"no JSON")).status == 400
        await stack.settled()
        documented = set(re.findall(r"^\| `(extproc_\w+)` \|", DOCUMENTED.read_text(), re.MULTILINE))
        for accept in ("text/plain", "application/openmetrics-text"):
            url = f"http://127.0.0.1:{stack.ports.metrics}/metrics"
            async with stack.http.get(url, headers={"accept": accept}) as answer:
                assert answer.content_type == accept
                page = await answer.text()
            families = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
            ours = {name for name in families if name.startswith("extproc_")}
            assert len(ours) > 30
            assert ours <= documented | {name.removesuffix("_total") for name in documented}
            assert all(name.startswith(("extproc_", "process_", "python_gc_")) for name in families)


async def test_no_prompt_text_reaches_log_metrics_or_pages(tmp_path: Path, transport: str) -> None:
    secret = "zanzibar-4711"
    async with Stack("direct", tmp_path, transport=transport, config={"log": {"level": "debug"}}) as stack:
        assert (await stack.chat(f"my secret is {secret}", headers={"x-extproc-explain": "1"})).status == 200
        broken = b'{"model": "m", "messages": "' + secret.encode() + b'"'
        assert (await stack.post("/v1/chat/completions", broken)).status == 400
        wrong = b'{"model": "m", "messages": "' + secret.encode() + b'"}'
        assert (await stack.post("/v1/chat/completions", wrong)).status == 400
        await stack.settled()
        for port, path in ((stack.ports.metrics, "metrics"), (stack.ports.admin, "debug/decisions")):
            async with stack.http.get(f"http://127.0.0.1:{port}/{path}") as answer:
                assert secret not in await answer.text()
        assert await stack.picker.stop() == 0
        assert secret not in stack.picker.log.read_text()
