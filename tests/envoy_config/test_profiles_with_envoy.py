"""What the other profiles promise, in a real Envoy."""

import asyncio
from pathlib import Path

import pytest

from extproc.envoy_config import PROFILES
from extproc.envoy_config.clusters import RETRY_BUDGET_AT_LEAST
from tests.envoy_config.harness import DESTINATION, running, until

pytestmark = pytest.mark.e2e
BODY = bytes(range(256)) * 800
DUPLEX = {"direct", "full-duplex", "original-dst", "tls"}


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "tls"])
async def test_bodies_arrive_once_where_the_picker_says(profile: str) -> None:
    async with running(profile) as stage:
        stage.picker.destination = stage.engines[1].address
        for answer in (
            await stage.post(body=BODY, headers={DESTINATION: stage.engines[0].address}),
            await stage.post_h2(BODY, trailers=False),
            await stage.post_h2(BODY, trailers=True),
        ):
            assert (answer.status, answer.body) == (200, f"{stage.engines[1].address} {len(BODY)}".encode())
        assert [seen.body for seen in stage.engines[1].seen] == [BODY] * 3


async def test_streamed_is_not_retried_for_it_would_be_doubled() -> None:
    async with running("streamed") as stage:
        stage.picker.destination = f"{stage.dead},{stage.engines[1].address}"
        assert (await stage.post(body=BODY)).status == 503
        assert stage.bodies() == []


@pytest.mark.parametrize("profile", ["full-duplex", "buffered", "headers-only", "fail-open"])
async def test_a_dead_endpoint_is_not_the_clients_problem(profile: str) -> None:
    async with running(profile) as stage:
        stage.picker.destination = f"{stage.dead},{stage.engines[1].address}"
        assert (await stage.post(body=BODY)).status == 200
        if profile not in DUPLEX:
            assert (await stage.post_h2(BODY, trailers=True)).status == 200
        assert {seen.body for seen in stage.engines[1].seen} == {BODY}


RETRYING = ["direct", "full-duplex", "buffered", "headers-only", "fail-open"]


@pytest.mark.parametrize("profile", RETRYING)
@pytest.mark.parametrize("named", [True, False], ids=["a second choice", "none"])
async def test_a_503_of_the_first_engine_is_retried_once_and_bodies_arrive_whole(profile: str, named: bool) -> None:
    async with running(profile, engines=3) as stage:
        first, second, _ = stage.engines
        first.refuses_with = 503
        stage.picker.destination = f"{first.address},{second.address}" if named else first.address
        for client in ("HTTP/1.1", "HTTP/2", "HTTP/2 with trailers"):
            for path in ("/echo", "/sse"):
                for body in (b'{"prompt": "hello"}', BODY):
                    if client == "HTTP/1.1":
                        answer = await stage.post(path, body)
                    else:
                        answer = await stage.post_h2(body, trailers="trailers" in client, path=path)
                    if profile in DUPLEX and "trailers" in client:
                        # ADR 4: a retry policy would double this body; the first engine's answer is the client's.
                        assert (answer.status, answer.body) == (503, b'{"error": "not now"}')
                        assert stage.bodies() == [body]
                    else:
                        assert answer.status == 200
                        assert answer.body.endswith(b"[DONE]\n\n" if path == "/sse" else str(len(body)).encode())
                        assert [seen.body for seen in first.seen] == [body]
                        assert stage.bodies() == [body] * 2
                        assert not named or [seen.body for seen in second.seen] == [body]
                    assert "x-extproc-attempt" not in answer.headers
                    for engine in stage.engines:
                        engine.seen.clear()


@pytest.mark.parametrize("status", [429, 500, 502, 504])
async def test_other_errors_of_an_engine_are_the_clients(status: int) -> None:
    """It may have begun (5xx), or wants to be heard (429)."""
    async with running("direct") as stage:
        stage.engines[0].refuses_with = status
        stage.picker.destination = ",".join(engine.address for engine in stage.engines)
        assert (await stage.post(body=BODY)).status == status
        assert stage.bodies() == [BODY]


@pytest.mark.parametrize("profile", RETRYING)
async def test_a_503_of_every_engine_costs_one_attempt_more(profile: str) -> None:
    async with running(profile, engines=4) as stage:
        for engine in stage.engines:
            engine.refuses_with = 503
        stage.picker.destination = ",".join(engine.address for engine in stage.engines)
        for number in range(1, 6):
            answer = await stage.post(body=BODY)
            assert (answer.status, answer.body) == (503, b'{"error": "not now"}')
            assert len(stage.bodies()) == 2 * number
        assert "x-extproc-attempt" not in answer.headers


async def test_retries_stay_within_their_budget() -> None:
    """The first engine refuses everybody at once, and the second has not answered yet: so many retries are under way."""
    async with running("direct") as stage:
        first, second = stage.engines
        first.refuses_with = 503
        stage.picker.destination = f"{first.address},{second.address}"
        requests = [asyncio.ensure_future(stage.post("/late")) for _ in range(RETRY_BUDGET_AT_LEAST + 20)]

        def refused() -> bool:
            return sum(request.done() for request in requests) == 20

        await until(refused, "those beyond the budget have the first engine's answer")
        await until(lambda: len(second.seen) == RETRY_BUDGET_AT_LEAST, "the others are at the second")
        second.go_on.set()
        answers = await asyncio.gather(*requests)
        assert sorted(answer.status for answer in answers) == [200] * RETRY_BUDGET_AT_LEAST + [503] * 20
        assert await stage.stat("cluster.engines.upstream_rq_retry_overflow") == 20


async def test_each_refused_attempt_is_in_the_access_log() -> None:
    async with running("direct") as stage:
        first, second = stage.engines
        first.refuses_with = 503
        stage.picker.destination = f"{stage.dead},{first.address},{second.address}"
        assert (await stage.post()).status == 503, "not the first attempt: a 503 is retried once in all"
        stage.picker.destination = f"{first.address},{stage.dead},{second.address}"
        assert (await stage.post()).status == 200

        def ended() -> bool:
            kinds = [entry["commonProperties"]["accessLogType"] for entry in stage.picker.entries]
            return kinds == [*["UpstreamEnd"] * 2, "DownstreamEnd"] * 2

        await until(ended, "the attempts' entries, each before its request's")
        told = []
        for entry in stage.picker.entries:
            upstream = entry["commonProperties"]["upstreamRemoteAddress"]["socketAddress"]
            told.append((f"{upstream['address']}:{upstream['portValue']}", entry["response"].get("responseCode")))
        dead, busy = (stage.dead, None), (first.address, 503)
        assert told == [dead, busy, busy, busy, dead, (second.address, 200)]
        sent = first.seen[0].headers["x-request-id"], second.seen[0].headers["x-request-id"]
        assert [entry["request"]["requestId"] for entry in stage.picker.entries] == [sent[0]] * 3 + [sent[1]] * 3


async def test_original_dst_never_obeys_a_client() -> None:
    async with running("original-dst") as stage:
        answer = await stage.post(headers={DESTINATION: stage.engines[0].address})
        assert answer.status == 503
        assert stage.bodies() == []


async def test_buffered_refuses_more_than_its_limit() -> None:
    def smaller(text: str) -> str:
        assert "per_connection_buffer_limit_bytes: 67108864" in text
        return text.replace("per_connection_buffer_limit_bytes: 67108864", "per_connection_buffer_limit_bytes: 100000")

    async with running("buffered", edit=smaller) as stage:
        stage.picker.destination = stage.engines[0].address
        answer = await stage.post(body=BODY)
        assert answer.status == 413
        assert b'"type":"invalid_request_error"' in answer.body
        assert (await stage.post(body=BODY[:50_000])).status == 200


async def test_fail_open_goes_on_without_the_picker() -> None:
    async with running("fail-open") as stage:
        await stage.server.stop(0)
        asked = {DESTINATION: stage.engines[0].address, "x-gateway-inference-objective": "urgent"}
        for _ in range(4):
            answer = await stage.post(body=BODY, headers=asked)
            assert answer.status == 200
        assert all(engine.seen for engine in stage.engines), "round robin"
        assert set(stage.bodies()) == {BODY}
        assert not [seen for engine in stage.engines for seen in engine.seen if asked.keys() & seen.headers.keys()]

        async def away() -> bool:
            return await stage.stat("cluster.picker.membership_healthy") == 0

        await until(away, "the picker is known to be away")
        assert (await stage.post(body=BODY)).status == 200


@pytest.mark.parametrize("verified", [False, True])
async def test_tls_to_the_picker(verified: bool, certificate: tuple[Path, Path]) -> None:
    ca = str(certificate[0]) if verified else None
    async with running("tls", certificate=certificate, picker_ca=ca) as stage:
        stage.picker.destination = stage.engines[1].address
        assert (await stage.post(body=BODY)).status == 200
        assert [seen.body for seen in stage.engines[1].seen] == [BODY]
        assert await stage.stat("cluster.picker.ssl.handshake") > 0
        await stage.picker.entry()


async def test_tls_that_is_not_the_pickers_is_refused(certificate: tuple[Path, Path]) -> None:
    async with running(
        "tls",
        certificate=certificate,
        wait_for_picker=False,
        picker_ca=str(certificate[0]),
        picker_server_name="somebody.else",
    ) as stage:
        assert (await stage.post(body=BODY)).status == 503
        assert stage.bodies() == []
