import asyncio
import json

import aiohttp
import pytest

from bench.core_cost import chat_body, metrics_page
from bench.engine import TOKENS, EngineConnection, PrefixCache, StandIn, read_request, selected_page, sized_page
from extproc.demo.processes import free_ports
from extproc.edge.scraping.signals import read_metrics


@pytest.mark.parametrize(
    ("request_bytes", "body"),
    [
        (b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n", b""),
        (b"POST /x HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-end: 1\r\n\r\n", b"abc"),
    ],
)
def test_a_request_is_read_however_it_is_cut(request_bytes: bytes, body: bytes) -> None:
    for cut in range(len(request_bytes)):
        assert read_request(bytearray(request_bytes[:cut])) is None
    found = read_request(bytearray(request_bytes + b"GET / HTTP/1.1"))
    assert found == (request_bytes.split()[1], body, len(request_bytes))


def test_what_was_seen_from_the_beginning_is_cached() -> None:
    cache = PrefixCache()
    assert cache.cached_bytes(b"a" * 300) == 0
    assert cache.cached_bytes(b"a" * 300) == 256
    assert cache.cached_bytes(b"a" * 128 + b"b" * 256) == 128
    assert cache.cached_bytes(b"b" + b"a" * 300) == 0


def test_an_engine_claims_the_cache_it_is_told() -> None:
    page = metrics_page()
    assert sized_page(page, None) is page
    assert read_metrics(sized_page(page, 7_000_000), "vllm").cache_tokens == 7_000_000


def test_the_page_is_whole_but_below_its_exact_path() -> None:
    page = metrics_page()
    query = b"name%5B%5D=vllm:num_requests_running&name%5B%5D=vllm:num_requests_waiting"
    for path in (b"/metrics", b"/metrics/", b"/metrics?" + query):
        assert selected_page(page, path) is page
    short = selected_page(page, b"/metrics/?" + query)
    assert len(short) < 1000
    assert read_metrics(short, "vllm").running == read_metrics(page, "vllm").running == 0.0
    engine = StandIn(page, 0.001)
    assert engine.metrics(b"/metrics/?" + query).endswith(short)
    assert engine.metrics(b"/metrics").endswith(page)


async def _served(engine: StandIn, bodies: list[bytes]) -> list[str]:
    (port,) = free_ports(1)
    server = await asyncio.get_running_loop().create_server(lambda: EngineConnection(engine), "127.0.0.1", port)
    texts = []
    async with server, aiohttp.ClientSession() as http:
        for body in bodies:
            async with http.post(f"http://127.0.0.1:{port}/v1/chat/completions", data=body) as response:
                assert response.status == 200
                texts.append(await response.text())
    return texts


async def test_a_short_answer_says_what_was_cached() -> None:
    body = chat_body(["a", "b"], 1000, stream=False)
    answers = [json.loads(text) for text in await _served(StandIn(b"", 0.001), [body, body])]
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers] == [0, 896 // 4]
    assert answers[0]["usage"]["prompt_tokens"] == 250


async def test_a_stream_has_a_hundred_tokens_and_ends_with_usage() -> None:
    (text,) = await _served(StandIn(b"", 0.0), [chat_body(["a", "b"], 1000)])
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert len(events) == TOKENS + 2
    assert json.loads(events[0])["choices"][0]["delta"]["content"] == " token"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == TOKENS
    assert events[-1] == "[DONE]"
