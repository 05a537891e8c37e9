"""`extproc model-server`: one simulated vLLM replica behind the HTTP API of the real one (0.32).

Decides which endpoint answers what, acts out faults, and starts and stops the server; the answers are made in `answers`, the
time they take in `engine`. Every response carries `x-model-server: <name>`. A request with `x-model-server-echo: 1`, on any
path, is answered with what arrived. The options are in `model_server_options`, so that `--help` does not import aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import signal
import socket
import struct
import sys
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import HttpVersion11, web

from extproc.loop import run
from extproc.sim import tokens
from extproc.sim.answers import Answer, StreamedAnswer
from extproc.sim.completions import ApiError, Generation, Kind, ServedModels, decode_object, parse, resolve_model
from extproc.sim.engine import Engine, EngineRequest
from extproc.sim.engine_loop import EngineLoop
from extproc.sim.faults import Fault, FaultKind, FaultPlan, parse_fault
from extproc.sim.metrics import CONTENT_TYPE, MetricsPage, ServerMetrics, selected
from extproc.sim.model_server_options import ModelServerOptions, add_arguments, options_from

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

    Handler = Callable[["ModelServer", web.BaseRequest], Awaitable[web.StreamResponse]]

__all__ = ["ModelServer", "ModelServerOptions", "add_arguments", "main", "serve"]

VERSION: Final = "0.32.0"
SHUTDOWN_S: Final = 1.0
"""Time connections get to send what is left when the server stops."""


def unix_now() -> float:
    """Give Unix time in seconds."""
    return datetime.now(UTC).timestamp()


class ModelServer:
    """The endpoints over one engine. Made inside a running event loop; `listen` opens the port."""

    def __init__(self, options: ModelServerOptions, *, unix_clock: Callable[[], float] = unix_now) -> None:
        self.options = options
        self.served = ServedModels(options.model, options.loras, options.max_model_len)
        self.engine = Engine(options.constants)
        self.faults = FaultPlan()
        self.stopping = asyncio.Event()
        self._unix_clock = unix_clock
        self._loop = EngineLoop(self.engine, self._new_metrics(), speed=options.speed, unix_clock=unix_clock)
        self._page = self._new_page()
        self._in_flight = 0
        self._listener: asyncio.Server | None = None
        self._http = web.Server(
            self.handle,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=75.0,
            auto_decompress=False,  # uvicorn leaves a compressed body as it is, too
        )
        self.port = 0

    async def listen(self) -> None:
        """Open the port; the first time whichever `options.port` says (0: any), then the same again. Raises OSError."""
        loop = asyncio.get_running_loop()
        port = self.port or self.options.port
        self._listener = await loop.create_server(self._http, self.options.host, port, reuse_address=True)
        self.port = self._listener.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """`http://host:port`."""
        host = self.options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def stop(self) -> None:
        """Stop listening, end what runs as vLLM does on SIGTERM (an error event in streams), close all connections.

        A second call does nothing.
        """
        if self.stopping.is_set():
            return
        self.stopping.set()
        if self._listener is not None:
            self._listener.close()
        self._loop.restart(self._loop.metrics)
        self._http.pre_shutdown()  # idle connections end now, busy ones after their response
        await self._http.shutdown(SHUTDOWN_S)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        path, method = request.path, request.method
        if request.headers.get("x-model-server-echo"):
            return await self._echo(request)
        if path == "/fault" and method == "POST":
            return await self._fault(request)
        fault = self.faults.meet(path)
        if fault is not None:
            failed = await self._act(fault, request)
            if failed is not None:
                return failed
        handlers = _ROUTES.get(path)
        if handlers is None:
            return self._json(request, b'{"detail":"Not Found"}', 404)
        handler = handlers.get(method)
        if handler is None:
            response = self._json(request, b'{"detail":"Method Not Allowed"}', 405)
            response.headers["allow"] = ", ".join(handlers)
            return response
        self._in_flight += 1
        try:
            if fault is not None and path in _KINDS and fault.kind in _STREAM_FAULTS:
                return await self._generate(request, _KINDS[path], fault)
            return await handler(self, request)
        except ApiError as error:
            return self._json(request, error.body(), error.status)
        finally:
            self._in_flight -= 1

    async def completions(self, request: web.BaseRequest) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._generate(request, Kind.COMPLETION)

    async def chat_completions(self, request: web.BaseRequest) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._generate(request, Kind.CHAT)

    async def models(self, request: web.BaseRequest) -> web.StreamResponse:
        """GET /v1/models: the base model and its adapters."""
        created = int(self._unix_clock())
        base = self.options.model
        cards = [_model_card(base, base, None, self.served.max_model_len, created)]
        cards += [_model_card(name, f"{base}-lora-{name}", base, None, created) for name in self.served.loras]
        return self._json(request, msgspec.json.encode({"object": "list", "data": cards}))

    async def health(self, request: web.BaseRequest) -> web.StreamResponse:
        """GET /health and /ping: 200, empty."""
        return web.Response(headers=self._headers(request))

    async def version(self, request: web.BaseRequest) -> web.StreamResponse:
        """GET /version."""
        return self._json(request, msgspec.json.encode({"version": VERSION}))

    async def load(self, request: web.BaseRequest) -> web.StreamResponse:
        """GET /load: generation requests in flight over HTTP, this one not counted."""
        return self._json(request, msgspec.json.encode({"server_load": self._in_flight - 1}))

    async def metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """GET /metrics: the whole page. Below it, at `/metrics/`, vLLM has another that knows `name[]` (instrumentator/metrics.py)."""
        page, names = self._page.render(), request.query.getall("name[]", [])
        if names and request.path.endswith("/"):
            page = selected(page, names)
        return web.Response(body=page, headers=self._headers(request) | {"content-type": CONTENT_TYPE})

    async def reset_prefix_cache(self, request: web.BaseRequest) -> web.StreamResponse:
        """POST /reset_prefix_cache."""
        self.engine.reset_prefix_cache()
        return self._json(request, b'{"success":true}')

    async def tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        """POST /tokenize for a prompt or messages."""
        fields = decode_object(await request.content.read())
        resolve_model(fields, self.served)
        messages, prompt = fields.get("messages"), fields.get("prompt")
        if isinstance(messages, list):
            sequence = tokens.chat_tokens(messages, fields.get("tools"))
        elif isinstance(prompt, str):
            sequence = tokens.prompt_tokens(prompt)
        else:
            raise ApiError(400, "1 validation error:\n  prompt: Field required", "Bad Request", "prompt")
        answer = {"count": tokens.count(sequence), "max_model_len": self.served.max_model_len}
        return self._json(
            request, msgspec.json.encode(answer | {"tokens": tokens.to_ids(sequence), "token_strs": None})
        )

    async def read_body(self, request: web.BaseRequest) -> bytes:
        """Read the whole body of a generation request."""
        return await request.content.read()

    async def _generate(self, request: web.BaseRequest, kind: Kind, fault: Fault | None = None) -> web.StreamResponse:
        body = await self.read_body(request)
        if request.content_type != "application/json":
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise ApiError(400, message, "Bad Request")
        generation = parse(body, kind, self.served)
        limit = self.options.max_num_queued_requests
        if limit is not None and self.engine.num_waiting >= limit:
            self._loop.metrics.rejected += 1
            message = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
            raise ApiError(503, message, "Service Unavailable")
        headers = self._headers(request)
        prefix = "chatcmpl" if kind is Kind.CHAT else "cmpl"
        answer_id = f"{prefix}-{headers['x-request-id']}"
        created = int(self._unix_clock())
        if generation.stream:
            return await self._stream(request, generation, answer_id, created, headers, fault)
        answer = Answer(generation, answer_id, created)
        await self._run(answer)
        headers |= self._load_header(request)
        return web.Response(body=answer.body(), headers=headers | {"content-type": "application/json"})

    async def _stream(
        self,
        request: web.BaseRequest,
        generation: Generation,
        answer_id: str,
        created: int,
        headers: dict[str, str],
        fault: Fault | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers | {"content-type": "text/event-stream; charset=utf-8"})
        chunked = request.version >= HttpVersion11
        if chunked:
            response.enable_chunked_encoding()
        try:
            await response.prepare(request)
        except ConnectionResetError:
            return response  # the client has just gone
        transport = request.transport
        if transport is None:
            return response

        def write(data: bytes) -> None:
            # The framing of HTTP/1.1 by hand: response.write() would need a task to wake up for every token.
            if not transport.is_closing():
                transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

        cut: Callable[[], None] | None = None
        trickle: _Trickle | None = None
        match fault.kind if fault is not None else None:
            case FaultKind.RESET:
                cut = functools.partial(_reset, transport)
            case FaultKind.CLOSE:
                cut = transport.close
            case FaultKind.TRICKLE:
                assert fault is not None
                trickle = _Trickle(write, fault.seconds)
        answer = StreamedAnswer(
            generation,
            answer_id,
            created,
            write if trickle is None else trickle.write,
            cut=cut,
            cut_after_tokens=None if cut is None or fault is None else fault.after_tokens,
        )
        try:
            await self._run(answer)
            if trickle is not None:
                await trickle.finish()
        finally:
            if trickle is not None:
                trickle.stop()
        with contextlib.suppress(ConnectionResetError):
            await response.write_eof()
        return response

    async def _run(self, answer: Answer) -> None:
        """Put every choice into the engine and wait for all; none is left in the engine when the wait ends."""
        generation = answer.generation
        ids = [f"{answer.answer_id}-{choice.index}-{uuid.uuid4().hex}" for choice in answer.choices]
        try:
            for request_id, choice in zip(ids, answer.choices, strict=True):
                sequence = choice.tokens
                keys = tokens.block_keys(
                    sequence, self.options.constants.block_size, lora=generation.lora, cache_salt=generation.cache_salt
                )
                prompt = tokens.count(generation.prompts[choice.prompt])
                output = generation.output_tokens[choice.prompt]
                engine_request = EngineRequest(request_id, prompt, output, keys, generation.lora)
                self._loop.submit(engine_request, choice, generation.finish_reason)
            await answer.done
        finally:
            for request_id in ids:
                self._loop.abort(request_id)

    async def _act(self, fault: Fault, request: web.BaseRequest) -> web.StreamResponse | None:
        """Carry out a fault before the request is read; None when the request goes on."""
        match fault.kind:
            case FaultKind.SLOW:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), fault.seconds)
                return None
            case FaultKind.ERROR:
                await request.content.read()
                error = ApiError(fault.status, "A fault was ordered for this request.", "InternalServerError")
                return self._json(request, error.body(), fault.status)
            case FaultKind.HANG:
                await request.content.read()
                await self.stopping.wait()
                return self._json(request, b"", 503)
            case FaultKind.RESET | FaultKind.CLOSE:
                if fault.after_tokens and request.path in _KINDS:
                    return None
                if request.transport is not None:
                    if fault.kind is FaultKind.RESET:
                        _reset(request.transport)
                    else:
                        request.transport.close()
                return web.Response()
            case FaultKind.ANSWER:
                await request.content.read()
                return web.Response(text=fault.body, headers=self._headers(request))
            case FaultKind.NONE | FaultKind.RESTART | FaultKind.TRICKLE:
                return None

    async def _fault(self, request: web.BaseRequest) -> web.StreamResponse:
        """POST /fault: put a fault in force. A restart is answered when the server is back."""
        try:
            fault = parse_fault(await request.content.read())
        except ValueError as error:
            return self._json(request, ApiError(400, str(error), "BadRequestError").body(), 400)
        self.faults.order(fault)
        if fault.kind is FaultKind.RESTART:
            await self._restart(request, fault.seconds)
        return self._json(request, msgspec.json.encode({"fault": fault.kind.value}))

    async def _restart(self, request: web.BaseRequest, seconds: float) -> None:
        if self._listener is not None:
            self._listener.close()
        # Connections first: a killed process does not end its streams.
        for connection in self._http.connections:
            if connection is not request.protocol and connection.transport is not None:
                _reset(connection.transport)
        try:
            self._loop.restart(self._new_metrics())
            if seconds:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), seconds)
        finally:
            # Also when the client that ordered the restart is gone.
            self._loop.restart(self._new_metrics())
            self._page = self._new_page()
            if not self.stopping.is_set():
                await self.listen()

    async def _echo(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with what arrived: method, target, headers in order, length and SHA-256 of the body. Bodies are not kept."""
        digest, length = hashlib.sha256(), 0
        async for chunk in request.content.iter_any():
            digest.update(chunk)
            length += len(chunk)
        seen = {
            "server": self.options.name,
            "method": request.method,
            "path": request.path_qs,
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.raw_headers],
            "body_bytes": length,
            "sha256": digest.hexdigest(),
        }
        return self._json(request, msgspec.json.encode(seen))

    def _headers(self, request: web.BaseRequest) -> dict[str, str]:
        request_id = request.headers.get("x-request-id")
        if not request_id or not request_id.isascii():
            request_id = uuid.uuid4().hex
        return {"server": "uvicorn", "vary": "Origin", "x-request-id": request_id, "x-model-server": self.options.name}

    def _load_header(self, request: web.BaseRequest) -> dict[str, str]:
        """Give the ORCA load report that a request asks for with endpoint-load-metrics-format."""
        waiting, usage = float(self._loop.metrics.num_waiting), self._loop.metrics.kv_cache_usage
        match request.headers.get("endpoint-load-metrics-format", "").upper():
            case "TEXT":
                text = f"named_metrics.num_requests_waiting={waiting}, named_metrics.kv_cache_usage_perc={usage}"
            case "JSON":
                text = f'{{"named_metrics": {{"num_requests_waiting": {waiting}, "kv_cache_usage_perc": {usage}}}}}'
            case _:
                return {}
        return {"endpoint-load-metrics": f"{request.headers['endpoint-load-metrics-format'].upper()} {text}"}

    def _json(self, request: web.BaseRequest, body: bytes, status: int = 200) -> web.Response:
        return web.Response(
            body=body, status=status, headers=self._headers(request) | {"content-type": "application/json"}
        )

    def _new_metrics(self) -> ServerMetrics:
        served = self.served
        return ServerMetrics(
            self.engine, loras=served.loras, max_model_len=served.max_model_len, started_s=self._unix_clock()
        )

    def _new_page(self) -> MetricsPage:
        return MetricsPage(self._loop.metrics, self.options.model, padded=self.options.pad_metrics)


class _Trickle:
    """Passes pieces of an answer on, one every `seconds` at most."""

    def __init__(self, write: Callable[[bytes], None], seconds: float) -> None:
        self._write = write
        self._seconds = seconds
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._pump = asyncio.ensure_future(self._run())

    def write(self, data: bytes) -> None:
        """Queue a piece."""
        self._pieces.put_nowait(data)

    async def finish(self) -> None:
        """Return when the last piece has been written; cancellation ends the remaining pieces, too."""
        self._pieces.put_nowait(None)
        await self._pump

    def stop(self) -> None:
        """Drop what is left."""
        self._pump.cancel()

    async def _run(self) -> None:
        while (piece := await self._pieces.get()) is not None:
            self._write(piece)
            await asyncio.sleep(self._seconds)


def _reset(transport: asyncio.Transport) -> None:
    """Close a connection with RST: no linger, and nothing of what is buffered goes out."""
    raw = transport.get_extra_info("socket")
    if raw is not None and not transport.is_closing():
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _model_card(name: str, root: str, parent: str | None, max_model_len: int | None, created: int) -> dict[str, object]:
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


_STREAM_FAULTS: Final = frozenset({FaultKind.RESET, FaultKind.CLOSE, FaultKind.TRICKLE})
_KINDS: Final = {"/v1/completions": Kind.COMPLETION, "/v1/chat/completions": Kind.CHAT}
_ROUTES: Final[dict[str, dict[str, Handler]]] = {
    "/v1/completions": {"POST": ModelServer.completions},
    "/v1/chat/completions": {"POST": ModelServer.chat_completions},
    "/v1/models": {"GET": ModelServer.models},
    "/health": {"GET": ModelServer.health},
    "/ping": {"GET": ModelServer.health, "POST": ModelServer.health},
    "/version": {"GET": ModelServer.version},
    "/load": {"GET": ModelServer.load},
    "/metrics": {"GET": ModelServer.metrics},
    "/metrics/": {"GET": ModelServer.metrics},
    "/reset_prefix_cache": {"POST": ModelServer.reset_prefix_cache},
    "/tokenize": {"POST": ModelServer.tokenize},
}


async def serve(options: ModelServerOptions) -> ModelServer:
    """Start a model server in the current event loop. Raises OSError when the port cannot be had."""
    server = ModelServer(options)
    await server.listen()
    return server


def main(args: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT, with the arguments of `add_arguments`. Returns the exit status: 0, or 2 for a bad start."""
    try:
        options = options_from(args)
    except ValueError as error:
        sys.stderr.write(f"extproc model-server: {error}\n")
        return 2
    return run(_run(options))


async def _run(options: ModelServerOptions) -> int:
    try:
        server = await serve(options)
    except OSError as error:
        reason = error.strerror or str(error)
        sys.stderr.write(f"extproc model-server: cannot listen on {options.host}:{options.port}: {reason}\n")
        return 2
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    sys.stdout.write(f"model server {options.name}: {options.model} on {server.url}\n")
    sys.stdout.flush()
    await stopped.wait()
    await server.stop()
    return 0
