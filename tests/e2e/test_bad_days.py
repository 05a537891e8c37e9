"""Bad days, through a real Envoy: dead endpoints, failing engines, a killed picker, a killed Envoy."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.load import load
from extproc.envoy_config.options import PROFILES
from tests.e2e.day import Streamed, Streams, access_log, assert_clean, events, log_message, stream
from tests.e2e.stack import MODEL, Stack, until

pytestmark = pytest.mark.e2e

ROUND_ROBIN = {"routing": {"strategy": "round-robin", "fallbacks": 1}}
SLOW_TO_HEAL = {"half_life": "10m"}
"""So that a health score can be looked at before it has healed."""


async def health_score(stack: Stack, endpoint_id: str) -> float:
    return float(next(found["health_score"] for found in await stack.endpoints() if found["endpoint"] == endpoint_id))


async def is_demoted(stack: Stack, endpoint_id: str) -> bool:
    return bool(next(found["demoted"] for found in await stack.endpoints() if found["endpoint"] == endpoint_id))


async def requests_total(stack: Stack, **labels: str) -> float:
    return (await stack.metrics()).total("extproc_requests_total", **labels)


# An endpoint that dies


@pytest.mark.parametrize("fallbacks", [0, 1])
async def test_a_dead_endpoint_is_not_the_clients_problem(tmp_path: Path, transport: str, fallbacks: int) -> None:
    """With a second choice of ours, and as shipped: without one Envoy takes turns over the endpoints not yet tried."""
    shipped = load("").routing.fallbacks
    assert shipped == 0
    config = {
        "routing": {"strategy": "round-robin", "fallbacks": fallbacks},
        "pool": {"health": SLOW_TO_HEAL},
    }
    async with Stack("direct", tmp_path, transport=transport, servers=3, config=config) as stack:
        dead = stack.server_ids[2]
        await stack.engines[2].kill()

        for number in range(12):
            answer = await stack.chat(f"question {number}")
            assert answer.status == 200, answer.body
            assert answer.headers["x-model-server"] != "gpu-3"
        await stack.settled()

        # The retry went well, but the first choice could not be reached, and Envoy's access log says so.
        page = await stack.metrics()
        assert page.by("extproc_rerouted_requests_total", "endpoint").keys() == {dead}
        assert page.total("extproc_rerouted_requests_total", endpoint=dead) >= 1
        assert page.by("extproc_requests_total", "endpoint").keys() == set(stack.server_ids[:2])
        assert page.total("extproc_requests_total", outcome="ok") == 12
        rerouted = next(found for found in await stack.decisions() if found["endpoint"] == dead)
        assert rerouted["outcome"] == "ok"
        assert rerouted["served_by"] in stack.server_ids[:2]
        assert await is_demoted(stack, dead)
        # Demoted: nobody is sent there while the others are well.
        before = (await stack.metrics()).total("extproc_decisions_total", endpoint=dead)
        for number in range(6):
            assert (await stack.chat(f"another {number}")).status == 200
        after = (await stack.metrics()).total("extproc_decisions_total", endpoint=dead)
        assert after == before

        # Its health score heals with time, and it is tried again.
        await stack.start_engine(2)
        stack.write_config({"pool": {"health": {"half_life": "2s"}}})

        async def back() -> bool:
            await stack.chat("are you back?")
            return bool(await requests_total(stack, endpoint=dead, outcome="ok"))

        await until(back, "the endpoint is used again")
        await until(lambda: _well(stack, dead), "its health score has healed")
        assert_clean(stack.picker)


async def _well(stack: Stack, endpoint_id: str) -> bool:
    await stack.chat("still there?")
    return await health_score(stack, endpoint_id) > 0.7


RETRIED = {"direct", "tls", "full-duplex", "buffered", "fail-open", "headers-only"}
"""Profiles that try another endpoint where the first cannot be reached (envoy/README.md)."""


@pytest.mark.parametrize("profile", PROFILES)
async def test_several_dead_endpoints_at_once(tmp_path: Path, transport: str, profile: str) -> None:
    """Three of five: one more than a list of fallbacks names, as many as there are retries."""
    config = {"routing": {"strategy": "round-robin"}, "pool": {"health": SLOW_TO_HEAL}}
    async with Stack(profile, tmp_path, transport=transport, dead=3, config=config) as stack:
        for generation, fallbacks in enumerate((0, 1, 2) if profile in RETRIED else (0,), start=2):
            if profile in RETRIED:
                stack.write_config({"routing": {"fallbacks": fallbacks}})
                await until(partial(_generation_is, stack, generation), "the picker has read the changed file")
            answers = [await stack.chat(f"question {number} of {fallbacks}") for number in range(10)]
            decisions = (await stack.settled())[:10]
            met = [found for found in decisions if found["endpoint"] in stack.dead_ids]
            assert met, "what is dead is tried now and then"
            refused = [answer for answer in answers if answer.status != 200]
            if profile in RETRIED:
                assert not refused
                assert all(found["served_by"] in stack.server_ids for found in met)
                assert all(len(found["fallbacks"]) == fallbacks for found in decisions)
            else:
                assert [found["outcome"] for found in met] == ["connect_failure"] * len(refused)
                assert {(answer.status, answer.json()["error"]["type"]) for answer in refused} == {
                    (503, "engine_unavailable")
                }
        # Counted against the endpoint, whether or not a client noticed.
        blamed = {found["endpoint"] for found in await stack.endpoints() if found["health_score"] < 1.0}
        assert blamed
        assert blamed <= set(stack.dead_ids)
        rerouted = (await stack.metrics()).by("extproc_rerouted_requests_total", "endpoint")
        assert rerouted.keys() == (blamed if profile in RETRIED else set())
        assert bool(await requests_total(stack, outcome="connect_failure")) is (profile not in RETRIED)
        assert_clean(stack.picker)


async def _generation_is(stack: Stack, wanted: int) -> bool:
    return (await stack.metrics()).total("extproc_config_generation") >= wanted


@pytest.mark.parametrize("profile", ["direct", "full-duplex"])
async def test_no_endpoint_can_be_reached(tmp_path: Path, transport: str, profile: str) -> None:
    """Envoy's own 503: seen in the access log, or as response headers; counted against the endpoint either way."""
    config = {"pool": {"health": SLOW_TO_HEAL}}
    async with Stack(profile, tmp_path, transport=transport, servers=0, dead=2, config=config, ready=False) as stack:
        answer = await stack.chat("anybody there?")
        assert answer.status == 503
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.json()["error"]["type"] == "engine_unavailable"
        assert answer.headers["retry-after"] == "1"
        decisions = await stack.settled()
        assert [found["outcome"] for found in decisions] == ["connect_failure"]
        assert await health_score(stack, decisions[0]["endpoint"]) < 0.6
        assert await requests_total(stack, outcome="connect_failure") == 1
        assert_clean(stack.picker)


# Engine faults


async def test_a_broken_engine_with_an_empty_queue_attracts_no_traffic(tmp_path: Path, transport: str) -> None:
    """It answers 500 at once, so it always looks idle: the trap of least load."""
    config = {"routing": {"strategy": "least-load", "fallbacks": 1}, "pool": {"health": SLOW_TO_HEAL}}
    async with Stack("direct", tmp_path, transport=transport, servers=3, config=config) as stack:
        broken = stack.server_ids[0]
        await stack.fault(0, kind="error", status=500)
        statuses = []
        for number in range(30):
            statuses.append((await stack.chat(f"question {number}")).status)
            await stack.settled()
        assert set(statuses) <= {200, 500}
        assert 2 <= statuses.count(500) <= 4, "an engine's 500 is the client's; two in a row demote"
        assert await requests_total(stack, endpoint=broken, outcome="server_error") == statuses.count(500)
        assert await is_demoted(stack, broken)
        assert not await requests_total(stack, endpoint=stack.server_ids[1], outcome="server_error")
        assert events(stack.picker, "a request failed at its endpoint")


def with_ids_of_the_client(text: str) -> str:
    """Keep the client's request id, as an Envoy behind a gateway of one's own does."""
    document = yaml.safe_load(text)
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["preserve_external_request_id"] = True
    return yaml.safe_dump(document)


async def test_one_request_that_is_repeated_demotes_nobody(tmp_path: Path, transport: str) -> None:
    """The request itself may be what breaks engines; health must not become a weapon."""
    config = {**ROUND_ROBIN, "pool": {"health": SLOW_TO_HEAL}}
    stack = Stack("direct", tmp_path, transport=transport, config=config, edit=with_ids_of_the_client)
    async with stack:
        for index in range(2):
            await stack.fault(index, kind="error", status=500)
        same = {"x-request-id": "7b6c1a52-9d0e-4f53-8a2b-3c1d5e7f9a0b"}
        for _ in range(8):
            assert (await stack.chat("poison", same)).status == 500
        await stack.settled()
        assert await requests_total(stack, outcome="server_error") == 8
        assert not [found for found in await stack.endpoints() if found["demoted"]], "it counts once in all"
        for _ in range(8):
            await stack.chat("poison")
        await stack.settled()
        assert len([found for found in await stack.endpoints() if found["demoted"]]) == 1, "and never all are demoted"
        for index in range(2):
            await stack.fault(index, kind="error", status=400)
        for _ in range(4):
            assert (await stack.chat("bad request")).status == 400
        await stack.settled()
        assert await requests_total(stack, outcome="client_error") == 4


@pytest.mark.parametrize("profile", ["direct", "full-duplex"])
async def test_an_engine_that_resets_in_mid_stream(tmp_path: Path, transport: str, profile: str) -> None:
    config = {"pool": {"health": SLOW_TO_HEAL}}
    # 0.2 s for each token: on a busy machine the headers take their way through the picker before the reset comes.
    async with Stack(profile, tmp_path, transport=transport, servers=1, config=config, speed=0.2) as stack:
        await stack.fault(0, kind="reset", after_tokens=3, count=1)
        answer = await stream(stack, Streamed(), "a story", max_tokens=20)
        assert answer.status == 200
        assert not answer.whole
        assert answer.tokens < 20
        if profile == "direct":  # else what the picker has not yet given back goes with the reset
            assert answer.tokens >= 3
        decisions = await stack.settled()
        assert decisions[0]["outcome"] in {"reset", "aborted"}
        if profile == "direct":  # a response phase does not tell an engine's reset from a client's
            assert decisions[0]["outcome"] == "reset"
            assert await health_score(stack, stack.server_ids[0]) < 0.6
        assert (await stream(stack, Streamed(), "a story", max_tokens=20)).whole
        assert_clean(stack.picker)


@pytest.mark.parametrize("profile", ["direct", "full-duplex"])
async def test_a_client_that_gives_up_on_a_hung_engine(tmp_path: Path, transport: str, profile: str) -> None:
    async with Stack(profile, tmp_path, transport=transport, servers=1) as stack:
        await stack.fault(0, kind="hang")
        waiting = asyncio.ensure_future(stack.chat("hello?"))

        async def sent() -> bool:
            return await stack.in_flight() == 1

        await until(sent, "the request is at the engine")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        decisions = await stack.settled()
        assert decisions[0]["outcome"] == ("client_gone" if profile == "direct" else "aborted")
        assert await health_score(stack, stack.server_ids[0]) == 1.0, "a client's patience says nothing of the engine"
        await stack.fault(0, kind="none")
        assert (await stack.chat("hello again")).status == 200
        assert_clean(stack.picker)


async def test_a_restarted_engine_has_lost_its_prefixes(tmp_path: Path, transport: str) -> None:
    config = {"pool": {"scrape": {"busy_interval": "200ms", "idle_interval": "200ms", "cost_factor": 0}}}
    async with Stack("direct", tmp_path, transport=transport, servers=2, config=config) as stack:
        prompt = "a long system prompt that is worth keeping " * 100

        async def ask() -> dict[str, Any]:
            assert (await stack.chat(prompt)).status == 200
            return (await stack.settled())[0]

        first = await ask()
        again = await ask()
        assert again["endpoint"] == first["endpoint"]
        assert again["predicted_cached_tokens"] > 500
        assert again["usage"]["cached_tokens"] > 500
        held = (await stack.metrics()).total("extproc_prefix_index_held_blocks")
        assert held > 0

        index = stack.server_ids.index(first["endpoint"])
        await stack.scraped(index)  # else a restart in the second of the first start shows in nothing
        await stack.fault(index, kind="restart")
        noticed = "an engine has restarted; its prefixes are forgotten"
        line = (await until(lambda: events(stack.picker, noticed), noticed))[0]
        assert line["endpoint"] == first["endpoint"]
        page = await stack.metrics()
        assert page.total("extproc_prefix_evicted_blocks_total", cause="restart") == held
        assert page.total("extproc_prefix_index_held_blocks") == 0
        cold = await ask()
        assert cold["predicted_cached_tokens"] == 0
        assert cold["usage"]["cached_tokens"] == 0
        assert_clean(stack.picker)


# The picker is killed

CUT = {"full-duplex", "original-dst", "buffered", "streamed"}
"""Profiles in which the death of the picker cuts running answers: it sees them, or Envoy keeps the stream of a request whose
body it has shown in these modes until the answer has ended (envoy/README.md)."""


@pytest.mark.parametrize("profile", PROFILES)
async def test_the_picker_is_killed_while_answers_stream(tmp_path: Path, transport: str, profile: str) -> None:
    """Running answers as the profile promises, new requests by its failure mode, then all well without a restart of Envoy."""
    config = {"server": {"response_phase": "keep"}}
    # Answers must outlast the picker's absence, some seconds and more on a busy machine: their engines stand still meanwhile,
    # but for those that are asked without a picker.
    tokens = 1500 if profile == "fail-open" else 150
    still = profile not in CUT and profile != "fail-open"
    async with Stack(profile, tmp_path, transport=transport, speed=2.0, config=config) as stack:
        running = Streams(stack, 12, max_tokens=tokens)
        await running.begun()
        assert await stack.in_flight() == 12
        for engine in stack.engines if still else ():
            engine.send(signal.SIGSTOP)
        await stack.picker.kill()

        if profile in CUT:
            answers = await running.done()
            assert not any(answer.whole for answer in answers)
        else:
            assert running.running == 12
        # At once, whether or not Envoy knows already.
        await meanwhile(stack)
        if profile in {"direct", "fail-open"}:
            await stack.picker_healthy(healthy=False)
            await meanwhile(stack)

        await stack.start_picker()
        await stack.picker_healthy()
        for engine in stack.engines if still else ():
            engine.send(signal.SIGCONT)

        async def decided() -> bool:
            assert (await stack.chat("back again")).status == 200
            return await stack.decided() > 0

        await until(decided, "the picker decides again")
        if profile not in CUT:
            for streamed in await running.done():
                assert streamed.whole, (streamed.error, streamed.data[-200:])
                assert streamed.tokens == tokens

            # Envoy reports their ends to a picker that has never heard of them: counted, and nothing else. Who failed
            # open was never decided by anybody.
            async def foreign() -> bool:
                return (await stack.metrics()).total("extproc_access_log_entries_total", kind="foreign") == 12

            await until(foreign, "the entries of the dead picker's decisions")
        await stack.settled()
        page = await stack.metrics()
        assert page.total("extproc_requests_total") == page.total("extproc_decisions_total")
        assert_clean(stack.picker)


async def meanwhile(stack: Stack) -> None:
    """New requests while there is no picker."""
    if stack.profile == "fail-open":
        answers = [await stack.chat(f"question {number}") for number in range(6)]
        assert [answer.status for answer in answers] == [200] * 6
        by_server = [answer.headers["x-model-server"] for answer in answers]
        assert sorted(by_server) == ["gpu-1"] * 3 + ["gpu-2"] * 3, "round robin"
        return
    # Together: each is tried for a while before it is given up.
    for answer in await asyncio.gather(*(stack.chat("is anybody there?") for _ in range(3))):
        assert answer.status == 503
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "picker_unavailable"


async def test_a_killed_picker_cuts_nobody_where_it_has_closed_its_streams(tmp_path: Path) -> None:
    """Full duplex both ways with `response_phase: close`; only the native transport can."""
    config = {"server": {"response_phase": "close", "response_sample": 0.0}}
    async with Stack("full-duplex", tmp_path, transport="native", speed=2.0, config=config) as stack:
        running = Streams(stack, 12, max_tokens=100)
        await running.begun()
        assert (await stack.metrics()).total("extproc_streams_open") == 0
        await stack.picker.kill()
        await meanwhile(stack)
        await stack.start_picker()
        await stack.picker_healthy()
        assert (await stack.chat("back again")).status == 200
        assert all(answer.whole and answer.tokens == 100 for answer in await running.done())


async def test_the_picker_is_stopped_and_started_under_load(tmp_path: Path, transport: str) -> None:
    """Requests in the gap are refused clearly; none hangs, none is cut, and Envoy needs no restart."""
    async with Stack("direct", tmp_path, transport=transport) as stack:
        statuses: list[int] = []
        stop = asyncio.Event()

        async def client(name: int) -> None:
            while not stop.is_set():
                answer = await stack.chat(f"client {name} says hello")
                statuses.append(answer.status)
                if answer.status != 200:
                    assert answer.json()["error"]["type"] == "picker_unavailable"
                    await asyncio.sleep(0.05)

        async def more(status: int, count: int) -> None:
            wanted = statuses.count(status) + count
            await until(lambda: statuses.count(status) >= wanted, f"{count} more answers of status {status}")

        clients = [asyncio.ensure_future(client(name)) for name in range(8)]
        await more(200, 40)
        for _ in range(2):
            await stack.picker.kill()
            await more(503, 1)
            await stack.start_picker()
            await more(200, 40)
        stop.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200, 503}
        await stack.settled()
        assert_clean(stack.picker)


# Envoy is killed


@pytest.mark.parametrize("profile", ["direct", "full-duplex"])
async def test_envoy_is_killed_under_load(tmp_path: Path, transport: str, profile: str) -> None:
    # Only the lease tells of their end in `direct`; on a busy machine it must not be over before all have begun.
    config = {"in_flight": {"lease": "5s"}} if profile == "direct" else {}
    prompt = "what everybody asks, at some length " * 60
    async with Stack(profile, tmp_path, transport=transport, config=config, speed=2.0) as stack:
        assert (await stack.chat(prompt)).status == 200
        await stack.settled()
        running = Streams(stack, 16, max_tokens=2000)
        await running.begun()
        assert await stack.in_flight() == 16
        await stack.proxy.kill()
        answers = await running.done()
        assert not any(answer.whole for answer in answers)

        decisions = await stack.settled()
        outcome = "lease_expired" if profile == "direct" else "aborted"
        assert [found["outcome"] for found in decisions[:16]] == [outcome] * 16
        page = await stack.metrics()
        assert page.total("extproc_streams_open") == 0
        assert page.total("extproc_leases_expired_total") == (16 if profile == "direct" else 0)
        assert all(found["health_score"] == 1.0 for found in await stack.endpoints())

        await stack.start_envoy()
        assert (await stack.chat(prompt)).status == 200
        found = (await stack.settled())[0]
        assert found["predicted_cached_tokens"] > 400, "the index has kept what it knew"
        if profile == "direct":
            assert found["usage"]["cached_tokens"] >= found["predicted_cached_tokens"] * 0.75
        assert (await stack.metrics()).total("extproc_internal_errors_total") == 0
        assert_clean(stack.picker)


# Access log entries that are not what they should be


async def test_access_log_entries_of_others(tmp_path: Path, transport: str) -> None:
    async with Stack("direct", tmp_path, transport=transport, servers=1) as stack:
        assert (await stack.chat("one real request")).status == 200
        mine = (await stack.settled())[0]["id"]

        async def entries() -> dict[str, float]:
            return (await stack.metrics()).by("extproc_access_log_entries_total", "kind")

        before = await entries()
        assert before["final"] == 1
        async with access_log(stack.ports.grpc) as call:
            await call.write(log_message("f" * 16).SerializeToString())  # another picker's
            await call.write(log_message(mine, status=500).SerializeToString())  # a second end of ours
            await call.write(log_message(None).SerializeToString())  # no decision of anybody's
            await call.write(b"\xff\xff\xff")

            async def counted() -> bool:
                now = await entries()
                return {
                    kind: now.get(kind) for kind in ("foreign", "late", "uncorrelated", "malformed")
                } == dict.fromkeys(("foreign", "late", "uncorrelated", "malformed"), 1)

            await until(counted, "each is counted as what it is")
        page = await stack.metrics()
        assert page.by("extproc_requests_total", "outcome") == {"ok": 1}
        assert await health_score(stack, stack.server_ids[0]) == 1.0
        assert (await stack.chat("and another")).status == 200
        await stack.settled()


# Nothing grows


async def test_nothing_is_left_after_many_requests(tmp_path: Path, transport: str) -> None:
    async with Stack(
        "direct", tmp_path, transport=transport, servers=3, speed=500.0, config={"log": {"decisions": {"sample": 0.01}}}
    ) as stack:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "max_tokens": 1}
        failed: list[int] = []

        async def client(count: int) -> None:
            for _ in range(count):
                answer = await stack.post("/v1/chat/completions", body)
                if answer.status != 200:
                    failed.append(answer.status)

        await asyncio.gather(*(client(25) for _ in range(40)))
        await stack.settled()
        after_1000 = stack.picker.rss_bytes()
        await asyncio.gather(*(client(50) for _ in range(40)))
        await stack.settled()
        assert not failed
        page = await stack.metrics()
        assert page.total("extproc_requests_total", outcome="ok") == 3000
        assert page.total("extproc_decisions_total") == 3000
        assert page.total("extproc_streams_open") == 0
        assert page.total("extproc_endpoint_in_flight_requests") == 0
        assert page.total("extproc_endpoint_in_flight_tokens") == 0
        assert page.total("extproc_internal_errors_total") == 0
        assert page.total("extproc_protocol_errors_total") == 0
        assert stack.picker.rss_bytes() - after_1000 < 20 * 2**20
        stack.picker.send(signal.SIGTERM)
        assert await stack.picker.process.wait() == 0
        assert_clean(stack.picker)
