"""The load of `bench.soak`: ext_proc streams in a closed loop, over connections whose frames `bench.h2_client` writes.

Each stream is a whole request, both phases in full duplex; of a hundred, four are cut off in mid-body and four are no JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hpack import Decoder, Encoder

from bench.h2_client import H2Client, LoadError
from extproc.http2.grpc import message_frame

__all__ = ["MODEL", "OWN_BYTES", "Load", "Words"]

MODEL: Final = "llama-3.1-8b"
OWN_BYTES: Final = 700
"""Of each prompt, beside its tenant's."""
_TENANTS: Final = 50
_SYSTEM_BYTES: Final = 1500
_FULL_DUPLEX: Final = 4


def _message(**parts: Any) -> bytes:
    data: bytes = pb.ProcessingRequest(**parts).SerializeToString()
    return message_frame(data)


def _headers(fields: Mapping[str, str]) -> Any:
    found = pb.HttpHeaders()
    for name, value in fields.items():
        found.headers.headers.append(base_pb2.HeaderValue(key=name, raw_value=value.encode()))
    return found


def _body(data: bytes, *, end: bool = True) -> bytes:
    return _message(request_body=pb.HttpBody(body=data, end_of_stream=end))


class Words:
    """What is said on each stream, as gRPC messages; prompts of `_TENANTS` tenants, each with a part of its own."""

    def __init__(self, own_bytes: int = OWN_BYTES) -> None:
        rng = random.Random(1)
        self._own_bytes = own_bytes
        self._noise = rng.randbytes(1 << 20).hex()
        systems = [rng.randbytes(_SYSTEM_BYTES // 2).hex() for _ in range(_TENANTS)]
        config = pb.ProtocolConfiguration(request_body_mode=_FULL_DUPLEX, response_body_mode=_FULL_DUPLEX)
        request = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
        usage = {"prompt_tokens": 550, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 300}}
        answer = json.dumps({"choices": [{"text": "x"}], "usage": usage}).encode()
        self._begin = _message(request_headers=_headers(request), protocol_config=config)
        self._answer = _message(
            response_headers=_headers({":status": "200", "content-type": "application/json"})
        ) + _message(response_body=pb.HttpBody(body=answer, end_of_stream=True))
        # One body of each tenant, cut where its own part stands: building a message for each request costs too much.
        own = "~" * own_bytes
        bodies = [_body(json.dumps({"model": MODEL, "prompt": system + own}).encode()) for system in systems]
        self._tenants = [tuple(body.split(own.encode())) for body in bodies]
        self._no_json = self._begin + _body(b"this is no JSON")
        self._half = self._begin + _body(b'{"model": "' + b"x" * 500, end=False)

    def whole(self, number: int) -> bytes:
        """Say a request, and its answer."""
        start = number * 37 % (len(self._noise) - self._own_bytes)
        own = f"{number:12d}" + self._noise[start : start + self._own_bytes - 12]
        before, after = self._tenants[number % _TENANTS]
        return b"".join((self._begin, before, own.encode(), after, self._answer))

    def of(self, number: int) -> tuple[bytes, bool]:
        """Return what stream `number` says, and whether it is cut off then."""
        match number % 25:
            case 7:
                return self._no_json, False
            case 13:
                return self._half, True
            case _:
                return self.whole(number), False


class Load:
    """The streams of one connection: keeps `streams` of them under way until `next_number` gives None."""

    def __init__(self, words: Words, streams: int, next_number: Callable[[], int | None]) -> None:
        self._words = words
        self._width = streams
        self._next = next_number
        self._began: dict[int, float] = {}
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
            (":authority", "picker"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        encoder = Encoder()
        self._first, self._block = encoder.encode(fields), encoder.encode(fields)
        """The first one fills the peer's table, all others refer to it."""
        self._decoder = Decoder()
        self._status: dict[int, str] = {}
        self._over = asyncio.Event()
        self._client: H2Client
        self.latencies_s = array("d")
        self.failed: list[str] = []
        self.reset = 0

    async def run(self, port: int) -> None:
        """Connect, and go on until all has been said and answered; what goes wrong stands in `failed`."""
        loop = asyncio.get_running_loop()
        _, self._client = await loop.create_connection(lambda: H2Client(self), "127.0.0.1", port)
        over = loop.create_task(self._over.wait())
        try:
            await self._client.settled
            self._fill()
            done, _ = await asyncio.wait((over, self._client.lost), return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        except LoadError as error:
            self.failed.append(f"the connection broke with {len(self._began)} streams open: {error}")
        finally:
            over.cancel()
            self._client.close()

    def _fill(self) -> None:
        while len(self._began) < self._width and (number := self._next()) is not None:
            said, cut = self._words.of(number)
            stream_id = self._client.request(self._first or self._block, (said,), end=not cut)
            self._first = b""
            if cut:
                self._client.reset(stream_id)
                self.reset += 1
            else:
                self._began[stream_id] = time.perf_counter()
        if not self._began:
            self._over.set()

    def headers(self, stream_id: int, block: bytes) -> None:
        """Take headers or trailers: all must be decoded, the last ones count."""
        fields: dict[Any, Any] = dict(self._decoder.decode(block, raw=False))
        self._status[stream_id] = fields.get("grpc-status", "none")

    def data(self, stream_id: int, payload: bytes) -> None:
        """Look at nothing: what the picker says is looked at elsewhere."""

    def ended(self, stream_id: int, *, reset: bool) -> None:
        """Every stream that ends makes room for the next."""
        status = self._status.pop(stream_id, "none")
        began = self._began.pop(stream_id, None)
        if began is None:
            return  # we had reset it
        if reset or status != "0":
            self.failed.append(f"stream {stream_id} {'was reset' if reset else f'ended with grpc-status {status}'}")
        else:
            self.latencies_s.append(time.perf_counter() - began)
        self._fill()
