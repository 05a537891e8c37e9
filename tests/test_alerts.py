"""docs/alerts.yaml fires when it should, on pages that a real picker has given: what promtool says of it.

Each case drives a picker and keeps pages of its metrics; they become the input series, a page every minute.
"""

# ruff: noqa: F811 - fixtures are imported
from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extproc.types import Endpoint, InferenceRequest, Outcome, RequestKind
from tests.edge.grpcio.harness import Gateway
from tests.test_app import Running, Source, _as_before, sources  # noqa: F401 - fixtures

DOCS: Final = Path(__file__).parents[1] / "docs"
RULES: Final = DOCS / "alerts.yaml"
MINUTES: Final = 20
"""Pages of the time after what happened: longer than the longest `for`."""
A: Final = Endpoint("127.0.0.1", 1)
B: Final = Endpoint("127.0.0.1", 2)

Page = dict[str, float]


def rules() -> dict[str, dict[str, Any]]:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


def promtool() -> str:
    found = shutil.which("promtool", path=f"{os.environ.get('PATH', '')}:{DOCS.parent / '.tools'}")
    if found is None:
        pytest.skip("no promtool; Debian has it in the package prometheus")
    return found


async def page(running: Running) -> Page:
    _, text = await running.get("/metrics")
    return {
        sample.name + "{" + ",".join(f'{name}="{value}"' for name, value in sample.labels.items()) + "}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("extproc_")
    }


def served(running: Running, outcome: Outcome) -> None:
    """Let one request be decided and end."""
    picker = running.picker
    decision = picker.router.route(InferenceRequest(RequestKind.CHAT), now=picker._clock())
    picker.observer.decided(decision, 0.001, {})
    finished = picker.router.finished(decision, outcome, now=picker._clock())
    assert finished is not None
    picker.observer.ended(finished)


async def refused(running: Running) -> None:
    """Ask for a decision as a gateway does, and get a 503."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.picker.server.grpc_port}") as channel:
        gateway = Gateway(channel)
        await gateway.headers()
        await gateway.body(b'{"model": "m", "prompt": "p"}', end=True)
        reply = await gateway.hear()
        assert reply.immediate_response.status.code == 503


def fired(pages: Sequence[Page], folder: Path) -> set[str]:
    """Return the alerts that fire at some time, with the last page repeated for some minutes.

    promtool is told that none ever does, and says which do.
    """
    pages = [*pages, *[pages[-1]] * MINUTES]
    names = sorted({name for found in pages for name in found})
    series = [{"series": n, "values": " ".join(str(found.get(n, "_")) for found in pages)} for n in names]
    expected = [
        {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []}
        for minute in range(len(pages))
        for name in rules()
    ]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": expected}
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    found = set(re.findall(r"alertname: ?(\w+)", said))
    assert done.returncode == 0 or found, said[-3000:]
    return found


def test_the_rules_are_valid_and_documented() -> None:
    done = subprocess.run([promtool(), "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(Extproc\w+)`", text, re.MULTILINE)) == set(rules())


async def test_a_picker_that_does_its_work_alarms_nobody(sources: list[Source], tmp_path: Path) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        sources[0].find(A, B)
        await running.until(lambda: running.picker.server.health.ready)
        pages = [await page(running)]
        for _ in range(5):
            served(running, Outcome.OK)
            pages.append(await page(running))
    assert fired(pages, tmp_path) == set()


async def test_a_picker_without_endpoints_from_the_start(tmp_path: Path) -> None:
    """Nothing has ever been decided, and the first requests are refused between two looks of Prometheus."""
    async with Running("") as running:
        await running.until(lambda: running.picker._discovered)
        pages = [await page(running)] * 2
        for _ in range(3):
            await refused(running)
        pages.append(await page(running))
    assert fired(pages, tmp_path) == {"ExtprocNoEndpoints", "ExtprocRefusesRequests"}


async def test_endpoints_that_go_by_a_reload(sources: list[Source], tmp_path: Path) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        sources[0].find(A, B)
        await running.until(lambda: running.picker.server.health.ready)
        served(running, Outcome.OK)
        pages = [await page(running)]
        sources[0].find()
        pages.append(await page(running))
        await refused(running)
        pages.append(await page(running))
    assert fired(pages, tmp_path) == {"ExtprocNoEndpoints", "ExtprocRefusesRequests"}


@pytest.mark.parametrize("outcome", [Outcome.SERVER_ERROR, Outcome.CONNECT_FAILURE, Outcome.RESET, Outcome.TIMEOUT])
async def test_an_endpoint_that_fails_from_its_first_request_on(
    sources: list[Source], tmp_path: Path, outcome: Outcome
) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        sources[0].find(A, B)
        await running.until(lambda: running.picker.server.health.ready)
        pages = [await page(running)]
        for _ in range(6):
            served(running, outcome)
            pages.append(await page(running))
    assert fired(pages[:2], tmp_path) == set(), "one failure wakes nobody"
    assert fired(pages, tmp_path) == {"ExtprocRequestsFail"}


async def test_look_ups_that_fail(tmp_path: Path) -> None:
    async with Running("pool: {file: {path: nowhere.yaml}}") as running:
        await running.until(lambda: running.picker._discovered)
        running.picker._on_endpoints([A])
        pages = [await page(running)]
    assert fired(pages, tmp_path) == {"ExtprocLookUpFails"}


async def test_a_configuration_that_is_refused(sources: list[Source], tmp_path: Path) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        sources[0].find(A)
        pages = [await page(running)]
        running.change("nonsense")
        pages.append(await page(running))
    assert fired(pages, tmp_path) == {"ExtprocConfigRejected"}


@pytest.mark.parametrize("place", ["decide", "event loop"])
async def test_the_first_defect(sources: list[Source], tmp_path: Path, place: str) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        sources[0].find(A)
        pages = [await page(running)]
        running.picker.telemetry.internal_error(place)
        pages.append(await page(running))
    assert fired(pages, tmp_path) == {"ExtprocDefect"}


async def test_connections_that_are_refused(sources: list[Source], tmp_path: Path) -> None:
    async with Running("") as running:
        await running.until(lambda: sources)
        sources[0].find(A)
        pages = [await page(running)]
        running.picker.telemetry.connection_dropped("metrics", "crowded")
        pages.append(await page(running))
        assert fired(pages, tmp_path) == set(), "a silent peer that makes place is no matter"
        running.picker.telemetry.accept_failed("grpc")
        pages.append(await page(running))
    assert fired(pages, tmp_path) == {"ExtprocConnectionsRefused"}
