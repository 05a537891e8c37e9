"""The profile `direct` in a real Envoy: nothing lost, nothing doubled, nothing obeyed that a client made up."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.envoy_config.harness import DESTINATION, Stage, running, until

pytestmark = pytest.mark.e2e

SMALL = b'{"prompt": "hello"}'
LARGE = bytes(range(256)) * 800
"""205 kB: many HTTP/2 frames, several ext_proc messages; every byte value, so that a shift would show."""


async def test_forged_control_headers_are_not_obeyed() -> None:
    forged = {
        "x-gateway-destination-endpoint-served": "1.2.3.4:5",
        "x-gateway-destination-endpoint-subset": "1.2.3.4:5",
        "x-extproc-decision": "forged",
        "x-prefiller-host-port": "1.2.3.4:5",
        "x-envoy-max-retries": "9",
        "x-envoy-upstream-rq-timeout-ms": "1",
    }
    async with running("direct") as stage:
        forged[DESTINATION] = stage.engines[1].address
        # The picker names no destination, so Envoy would have only the client's.
        for _ in range(6):
            answer = await stage.post(headers={**forged, "x-extproc-explain": "1"})
            assert answer.status == 200
        assert all(engine.seen for engine in stage.engines), "round robin, not the client's wish"
        at_picker = stage.picker.request_headers()
        assert not forged.keys() & at_picker.keys()
        assert at_picker["x-extproc-explain"] == "1"
        for engine in stage.engines:
            assert not forged.keys() & engine.seen[0].headers.keys()


@pytest.mark.parametrize("how", ["metadata", "header"])
async def test_the_destination_counts_as_metadata_only(how: str) -> None:
    """As in Istio. A second source would be appended to the first: every address twice, and no try left for the others."""
    async with running("direct", engines=3) as stage:
        stage.picker.send_metadata, stage.picker.send_header = how == "metadata", how == "header"
        stage.picker.destination = stage.engines[1].address
        for _ in range(6):
            assert (await stage.post()).status == 200
        served = [bool(engine.seen) for engine in stage.engines]
        assert served == ([False, True, False] if how == "metadata" else [True, True, True])


@pytest.mark.parametrize("first", ["live", "dead, then live", "dead"])
@pytest.mark.parametrize("client", ["HTTP/1.1", "HTTP/2", "HTTP/2 with trailers"])
async def test_bodies_arrive_once(client: str, first: str) -> None:
    async with running("direct") as stage:
        live = stage.engines[1].address
        stage.picker.destination = {"live": live, "dead, then live": f"{stage.dead},{live}", "dead": stage.dead}[first]
        for body in (SMALL, LARGE):
            if client == "HTTP/1.1":
                answer = await stage.post(body=body)
            else:
                answer = await stage.post_h2(body, trailers="trailers" in client)
            arrived = [seen.body for engine in stage.engines for seen in engine.seen]
            if "trailers" in client and first != "live":
                # What remains: no retry for a request that ended in trailers. A clear answer, nothing doubled.
                assert answer.status == 503
                assert b"engine_unavailable" in answer.body
                assert arrived == []
            else:
                assert answer.status == 200
                assert arrived == [body]
            for engine in stage.engines:
                engine.seen.clear()


async def test_why_the_picker_has_to_allow_retries() -> None:
    """Envoy 1.40 doubles a body that ends in trailers if there is a retry policy. If this fails, Envoy was cured."""
    async with running("direct") as stage:
        stage.picker.always_allow_retry = True
        stage.picker.destination = stage.engines[0].address
        assert (await stage.post_h2(LARGE, trailers=True)).status == 200
        assert stage.bodies() == [LARGE + LARGE]


async def test_an_endpoint_that_swallows_connections_is_left_for_the_next() -> None:
    async with running("direct") as stage:
        stage.picker.destination = f"{stage.dead},{stage.engines[0].address}"
        body = LARGE * 15
        with _black_hole(int(stage.dead.rpartition(":")[2])):
            answer = await stage.post(body=body)
        assert answer.status == 200
        assert stage.bodies() == [body], "3 MB, kept for the second try (request_body_buffer_limit)"


@contextlib.contextmanager
def _black_hole(port: int) -> Iterator[None]:
    """Listen with a full backlog: the kernel drops every further SYN, as a host that vanished would."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield


async def test_explain_header_only_with_metadata() -> None:
    async with running("direct") as stage:
        stage.picker.destination = stage.engines[0].address
        for headers in (None, {"x-extproc-explain": "1"}):
            assert "x-extproc-explain" not in (await stage.post(headers=headers)).headers
        stage.picker.explain = '{"endpoint": "10.0.0.1:8000", "scores": [0.5, 1]}'
        assert (await stage.post()).headers["x-extproc-explain"] == stage.picker.explain
        assert "x-extproc-explain" in (await stage.post("/sse")).headers


@pytest.mark.parametrize("path", ["/json", "/sse", "/big"])
async def test_usage_arrives_in_the_access_log(path: str) -> None:
    """JSON, a stream with include_usage, and 3 MB of JSON (json_to_metadata would answer 500)."""
    async with running("direct") as stage:
        stage.picker.destination = stage.engines[0].address
        answer = await stage.post(path)
        assert answer.status == 200
        assert len(answer.body) > (3_000_000 if path == "/big" else 100)
        entry = await stage.picker.entry()
        metadata = entry["commonProperties"]["metadata"]["filterMetadata"]
        assert metadata["extproc.usage"] == {"prompt": 11, "completion": 3, "cached": 8}
        assert metadata["extproc"]["decision"] == "d-1"
        assert metadata["envoy.lb"]["x-gateway-destination-endpoint-served"] == stage.engines[0].address
        assert entry["request"]["requestId"] == stage.engines[0].seen[0].headers["x-request-id"]
        assert entry["response"]["responseCode"] == 200
        upstream = entry["commonProperties"]["upstreamRemoteAddress"]["socketAddress"]
        assert f"{upstream['address']}:{upstream['portValue']}" == stage.engines[0].address


async def test_no_usage_where_the_engine_gave_none() -> None:
    async with running("direct") as stage:
        stage.picker.destination = stage.engines[0].address
        assert (await stage.post("/sse-without-usage")).status == 200
        assert "extproc.usage" not in (await stage.picker.entry())["commonProperties"]["metadata"]["filterMetadata"]


async def test_text_a_model_wrote_is_not_usage() -> None:
    async with running("direct") as stage:
        stage.picker.destination = stage.engines[0].address
        assert (await stage.post("/quoted-usage")).status == 200
        entry = await stage.picker.entry()
        assert "extproc.usage" not in entry["commonProperties"]["metadata"]["filterMetadata"]


async def test_the_picker_sees_nothing_of_the_response() -> None:
    async with running("direct") as stage:
        stage.picker.destination = stage.engines[0].address
        assert (await stage.post("/sse")).status == 200
        await stage.picker.entry()
        assert {kind.partition("_")[0] for kind in stage.picker.kinds()} == {"request"}


async def test_entries_come_while_a_request_runs() -> None:
    def every_second(text: str) -> str:
        assert "access_log_flush_interval: 10s" in text
        return text.replace("access_log_flush_interval: 10s", "access_log_flush_interval: 1s")

    async with running("direct", edit=every_second) as stage:
        stage.picker.destination = stage.engines[0].address
        running_request = asyncio.ensure_future(stage.post("/wait"))
        entry = await stage.picker.entry()
        assert entry["commonProperties"]["accessLogType"] == "DownstreamPeriodic"
        assert entry["commonProperties"]["intermediateLogEntry"] is True
        assert entry["commonProperties"]["metadata"]["filterMetadata"]["extproc"]["decision"] == "d-1"
        stage.engines[0].go_on.set()
        assert (await running_request).status == 200


async def test_a_running_answer_survives_the_picker() -> None:
    async with running("direct") as stage:
        stage.picker.destination = stage.engines[0].address
        running_request = asyncio.ensure_future(stage.post("/wait"))
        await until(lambda: stage.engines[0].seen, "the engine has the request")
        await stage.server.stop(0)
        stage.engines[0].go_on.set()
        answer = await running_request
        assert (answer.status, answer.body) == (200, b"first last")


async def test_without_the_picker_a_clear_503_and_back_at_once() -> None:
    async with running("direct") as stage:
        stage.picker.destination = stage.engines[0].address
        await stage.server.stop(0)
        await _unavailable(stage)
        await until(lambda: _healthy(stage, 0), "the picker is known to be away")
        await _unavailable(stage)
        await stage.restart_picker()
        await until(lambda: _healthy(stage, 1), "the picker is known to be back")
        assert (await stage.post()).status == 200


async def _unavailable(stage: Stage) -> None:
    answer = await stage.post(body=LARGE)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.headers["content-type"] == "application/json"
    assert b'"type":"picker_unavailable"' in answer.body


async def _healthy(stage: Stage, count: int) -> bool:
    return await stage.stat("cluster.picker.membership_healthy") == count


async def test_an_immediate_response_passes_as_it_is() -> None:
    async with running("direct") as stage:
        stage.picker.immediate = (429, b'{"error": {"message": "busy"}}')
        answer = await stage.post(body=LARGE)
        assert (answer.status, answer.body) == (429, b'{"error": {"message": "busy"}}')
        assert answer.headers["content-type"] == "application/json"
        assert "retry-after" not in answer.headers
        stage.picker.immediate = (503, b"{}")
        assert (await stage.post()).body == b"{}"
