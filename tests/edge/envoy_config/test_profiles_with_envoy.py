"""What the other profiles promise, in a real Envoy."""

from pathlib import Path

import pytest

from extproc.edge.envoy_config import PROFILES
from tests.edge.envoy_config.harness import DESTINATION, running, until

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
