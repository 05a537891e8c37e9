"""Endpoints that come, go and hang while a picker runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.demo.processes import Child
from tests.e2e.day import assert_clean, events
from tests.e2e.stack import DEADLINE_S, EXTPROC, Stack, until

pytestmark = pytest.mark.e2e


def write(path: Path, endpoints: Sequence[str]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(yaml.safe_dump({"endpoints": list(endpoints)}))
    fresh.replace(path)


async def known(stack: Stack) -> set[str]:
    return {found["endpoint"] for found in await stack.endpoints()}


async def test_endpoints_of_a_file_come_and_go(tmp_path: Path, transport: str) -> None:
    file = tmp_path / "endpoints.yaml"
    config = {"pool": {"endpoints": [], "file": {"path": str(file)}}, "routing": {"strategy": "round-robin"}}
    stack = Stack("direct", tmp_path, transport=transport, servers=3, config=config, ready=False)
    one, two, three = stack.server_ids
    write(file, [one, two])
    async with stack:

        async def now(*wanted: str) -> None:
            async def so() -> bool:
                return await known(stack) == set(wanted)

            await until(so, f"the endpoints are {wanted}")

        async def served(count: int = 6) -> set[str]:
            answers = [await stack.chat(f"question {number}") for number in range(count)]
            assert {answer.status for answer in answers} == {200}
            return {answer.headers["x-model-server"] for answer in answers}

        await now(one, two)
        assert await served() == {"gpu-1", "gpu-2"}

        write(file, [one, two, three])
        await now(one, two, three)
        assert await served() == {"gpu-1", "gpu-2", "gpu-3"}

        write(file, [two, three])
        await now(two, three)
        assert await served() == {"gpu-2", "gpu-3"}
        await stack.settled()
        page = await stack.metrics()
        assert page.total("extproc_endpoints") == 2
        gone = [(name, labels) for name, labels, _ in page.samples if one in labels.values()]
        assert not gone, "the series of an endpoint that left go with it"

        # What cannot be read changes nothing.
        file.write_text("endpoints: [")
        await until(
            lambda: events(stack.picker, "endpoint look-up failed; the endpoints found last stay"), "it is said"
        )
        assert await known(stack) == {two, three}
        assert await served() == {"gpu-2", "gpu-3"}
        assert (await stack.metrics()).total("extproc_discovery_failures_total", source="file") >= 1
        file.unlink()
        assert await served() == {"gpu-2", "gpu-3"}

        # None at all is an answer too: a clear 503.
        write(file, [])
        await now()
        answer = await stack.chat("anybody?")
        assert answer.status == 503
        assert "retry-after" in answer.headers
        write(file, [three])
        await now(three)
        assert await served(2) == {"gpu-3"}
        assert_clean(stack.picker)


async def test_the_pool_of_the_configuration_changes(tmp_path: Path, transport: str) -> None:
    async with Stack(
        "direct", tmp_path, transport=transport, servers=2, config={"routing": {"strategy": "round-robin"}}
    ) as stack:
        stack.write_config({"pool": {"endpoints": [stack.server_ids[1]]}})

        async def so() -> bool:
            return await known(stack) == {stack.server_ids[1]}

        await until(so, "one endpoint has left")
        for number in range(4):
            assert (await stack.chat(f"question {number}")).headers["x-model-server"] == "gpu-2"
        # From a list to a name.
        dns = {"endpoints": [], "dns": {"host": "localhost", "port": stack.server_ports[0], "type": "A"}}
        stack.write_config({"pool": dns})

        async def by_name() -> bool:
            return await known(stack) == {stack.server_ids[0]}

        await until(by_name, "the name is resolved")
        assert (await stack.chat("by name")).headers["x-model-server"] == "gpu-1"
        assert (await stack.endpoints())[0]["name"] == "localhost"
        assert_clean(stack.picker)


async def test_host_names_in_the_list(tmp_path: Path, transport: str) -> None:
    stack = Stack("direct", tmp_path, transport=transport, servers=2)
    stack.config = {"pool": {"endpoints": [f"localhost:{port}" for port in stack.server_ports]}}
    async with stack:
        assert await known(stack) == set(stack.server_ids), "the picker names addresses, as Envoy compares them"
        assert (await stack.chat("hello")).status == 200
        assert_clean(stack.picker)


class Unready(Stack):
    """A stack whose picker does not become ready, so that Envoy holds it for unhealthy."""

    async def start_picker(self, *, by_log: bool = False) -> Child:
        self.picker = await self._start("picker", [*EXTPROC, "serve", "--config", str(self.config_file)])
        await self.picker.wait_http(f"http://127.0.0.1:{self.ports.metrics}/healthz", timeout_s=DEADLINE_S)
        return self.picker

    async def picker_healthy(self, *, healthy: bool = True) -> None:
        """Do not wait for what will not come."""


async def test_a_name_that_does_not_resolve_is_said_and_refused(tmp_path: Path, transport: str) -> None:
    config = {"pool": {"endpoints": [], "dns": {"host": "nobody.invalid", "port": 8000}}}
    async with Unready("direct", tmp_path, transport=transport, servers=1, config=config, ready=False) as stack:
        [said] = await until(lambda: events(stack.picker, "no endpoints: not ready, and every request gets 503"))
        assert "nobody.invalid" in said["why"]
        async with stack.http.get(f"http://127.0.0.1:{stack.ports.metrics}/readyz") as page:
            assert page.status == 503
            assert "nobody.invalid" in await page.text()
        answer = await stack.chat("anybody?")
        assert answer.status == 503
        assert answer.headers["content-type"].startswith("application/json")
        assert (await stack.metrics()).total("extproc_discovery_failures_total", source="dns") >= 1
        assert_clean(stack.picker)


async def readyz(stack: Stack) -> tuple[int, str]:
    async with stack.http.get(f"http://127.0.0.1:{stack.ports.metrics}/readyz") as answer:
        return answer.status, await answer.text()


async def test_without_endpoints_it_is_not_ready_and_its_own_answer_still_arrives(
    tmp_path: Path, transport: str
) -> None:
    """Envoy asks the only picker all the same, so the client hears why; and it is served as soon as there are endpoints."""
    async with Stack("direct", tmp_path, transport=transport, servers=1) as stack:
        stack.write_config({"pool": {"endpoints": []}})

        async def empty() -> bool:
            return await readyz(stack) == (
                503,
                "no endpoints: pool.endpoints is empty; set it (or --endpoint), pool.file or pool.dns\n",
            )

        await until(empty, "it says that it has no endpoints")
        await stack.picker_healthy(healthy=False)
        answer = await stack.chat("anybody?")
        assert answer.status == 503
        assert answer.json()["error"]["type"] == "service_unavailable", "the picker's own"
        assert (await stack.metrics()).total("extproc_endpoints") == 0

        stack.write_config()

        async def back() -> bool:
            return (await readyz(stack))[0] == 200

        await until(back, "it has endpoints again")
        assert (await stack.chat("and now?")).status == 200, "before any health check has found it"
        assert_clean(stack.picker)


async def test_a_name_that_does_not_resolve_keeps_the_endpoints_of_before(tmp_path: Path, transport: str) -> None:
    async with Stack("direct", tmp_path, transport=transport, servers=1) as stack:
        stack.write_config({"pool": {"endpoints": [], "dns": {"host": "nobody.invalid", "port": 8000}}})

        async def failed() -> bool:
            return (await stack.metrics()).total("extproc_discovery_failures_total", source="dns") >= 1

        await until(failed, "the name is looked up")
        status, said = await readyz(stack)
        assert status == 200
        assert "ready, with the endpoints found last; a look-up fails: nobody.invalid: " in said
        assert (await stack.metrics()).total("extproc_discovery_failing") == 1
        assert (await stack.chat("still there?")).status == 200
        assert_clean(stack.picker)


# Scrapes

SCRAPE = {"busy_interval": "100ms", "idle_interval": "100ms", "cost_factor": 0, "timeout": "2s"}


async def of(stack: Stack, endpoint_id: str) -> dict[str, Any]:
    return next(found for found in await stack.endpoints() if found["endpoint"] == endpoint_id)


async def test_a_hung_metrics_page_delays_nobody_elses(tmp_path: Path, transport: str) -> None:
    async with Stack("direct", tmp_path, transport=transport, servers=4, config={"pool": {"scrape": SCRAPE}}) as stack:
        hung = stack.server_ids[0]
        await stack.fault(0, kind="hang", path="/metrics")
        before = (await stack.metrics()).total("extproc_scrape_duration_seconds_count")

        async def failing() -> bool:
            return bool((await of(stack, hung))["scrape_failures"] >= 2)

        await until(failing, "the hung page has timed out several times")
        scraped = (await stack.metrics()).total("extproc_scrape_duration_seconds_count") - before
        # Three others, while two timeouts of twenty intervals each passed: one by one behind it they would have had two each.
        assert scraped >= 3 * 5
        ages = {found["endpoint"]: found["signal_age_s"] for found in await stack.endpoints()}
        assert ages[hung] > max(age for name, age in ages.items() if name != hung)
        assert [(await of(stack, name))["scrape_failures"] for name in stack.server_ids[1:]] == [0, 0, 0]
        assert (await stack.metrics()).total("extproc_scrape_errors_total", endpoint=hung, reason="timeout") >= 2
        for number in range(8):
            assert (await stack.chat(f"question {number}")).status == 200
        assert not (await of(stack, hung))["demoted"], "failed scrapes alone demote nobody"

        await stack.fault(0, kind="none")

        async def heard() -> bool:
            return bool((await of(stack, hung))["scrape_failures"] == 0)

        await until(heard, "it is heard again")
        assert_clean(stack.picker)


async def test_all_metrics_pages_fail_and_load_is_still_balanced(tmp_path: Path, transport: str) -> None:
    async with Stack(
        "direct", tmp_path, transport=transport, servers=3, config={"pool": {"scrape": SCRAPE}}, speed=100.0
    ) as stack:
        for index in range(3):
            await stack.fault(index, kind="error", status=500, path="/metrics")

        async def failing() -> bool:
            return all(found["scrape_failures"] >= 3 for found in await stack.endpoints())

        await until(failing, "no page can be read")
        answers = [await stack.chat(f"{number} is a question of its own") for number in range(90)]
        assert {answer.status for answer in answers} == {200}
        await stack.settled()
        served = [answer.headers["x-model-server"] for answer in answers]
        assert min(served.count(f"gpu-{number}") for number in (1, 2, 3)) >= 9, "30 each, +- 4.5"
        assert_clean(stack.picker)
