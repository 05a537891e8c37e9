"""A `Dialogue` whose every word crosses a real gRPC connection on loopback: events out as protobuf, replies back.

The test's own expectations judge what came over the wire; besides, each reply is held equal to what the session gave to
the edge. The clock is the dialogue's, and the loop's time can be skipped, so that no test waits for a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.struct_pb2 import Struct

from extproc.edge.envoy_wire.message_parts import plain_value
from extproc.edge.grpcio import stream as grpcio_stream
from extproc.edge.native import calls as native_calls
from extproc.errors import ProtocolError, RequestError
from extproc.protocol.events import (
    DeadlinePassed,
    Direction,
    Event,
    HalfClosed,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamLost,
    Unknown,
)
from extproc.protocol.replies import (
    BodyReply,
    DecisionReply,
    Finish,
    FinishWith,
    HeadersReply,
    ImmediateReply,
    Reply,
    TrailersReply,
)
from extproc.protocol.session import Session
from extproc.protocol.shared import SessionShared
from extproc.types import Decision
from tests.edge.grpcio.harness import PROCESS, server_config, until
from tests.protocol.dialogue import DESTINATION, Counters, Dialogue, PlainMetadata

_SKIPPED_S = 5.0
"""Beyond every decision's deadline, short of everything else a server waits for."""


class HurriedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time can be skipped."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


@dataclass(frozen=True)
class Step:
    """What one step of a session gave to the edge, and the bytes held then."""

    replies: list[Reply]
    held_bytes: int
    error: ProtocolError | None = None


class RecordedSession(Session):
    """The server's session; keeps its steps."""

    made: list[RecordedSession]
    """Set by a subclass of the test's."""

    def __init__(self, shared: SessionShared, _peer: str = "", _gateway: object = None) -> None:
        super().__init__(shared, "peer")  # as a dialogue's own session: whoever the client of the test is
        self.shared = shared
        self.steps: list[Step] = []
        self.made.append(self)

    def receive(self, event: Event, now: float) -> list[Reply]:
        return self._record(lambda: super(RecordedSession, self).receive(event, now))

    def resume(self, result: Decision | RequestError, now: float) -> list[Reply]:
        return self._record(lambda: super(RecordedSession, self).resume(result, now))

    def pass_on(self, data: bytes) -> bool:
        if not super().pass_on(data):
            return False
        self.steps.append(Step([BodyReply(Direction.RESPONSE, data, False)], self.shared.budget.used_bytes))
        return True

    def _record(self, step: Callable[[], list[Reply]]) -> list[Reply]:
        try:
            replies = step()
        except ProtocolError as error:
            self.steps.append(Step([], 0, error))
            raise
        self.steps.append(Step(list(replies), self.shared.budget.used_bytes))
        return replies


class _Sessions:
    """What a test sees as `d.session`: the server's, but answers to held decisions go through the edge."""

    def __init__(self, dialogue: WireDialogue) -> None:
        self._dialogue = dialogue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialogue.served, name)

    def resume(self, result: Decision | RequestError, now: float) -> list[Reply]:
        return self._dialogue.answer(result, now)


class _Quiet(Counters):
    """Counts what a session counts; what an edge counts of its streams is no part of a dialogue."""

    def stream_opened(self) -> None:
        pass

    def stream_ended(self, how: str) -> None:
        pass


@dataclass
class Wires:
    """The loop, the transport, and what dialogues of one test have opened there."""

    transport: Callable[..., Any]
    runner: asyncio.Runner
    open: list[WireDialogue] = field(default_factory=list)
    sessions: list[RecordedSession] = field(default_factory=list)

    def close(self) -> None:
        for dialogue in self.open:
            self.runner.run(dialogue.close())


class WireDialogue(Dialogue):
    """See above. `wires` is set by a subclass of the test's."""

    wires: Wires

    def __post_init__(self) -> None:
        self.counters = _Quiet()
        super().__post_init__()
        self.now = 0.0
        self._half_closed = self._over = False
        self.session: Any = _Sessions(self)
        self.wires.open.append(self)
        self.wires.runner.run(self._open())

    async def _open(self) -> None:
        self._server = self.wires.transport(server_config(), self.shared, lambda _entry: None, clock=lambda: self.now)
        await self._server.start()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(f"localhost:{self._server.grpc_port}", options=options)
        self._call = self._channel.stream_stream(PROCESS)()
        await until(lambda: any(session.shared is self.shared for session in self.wires.sessions))
        [self.served] = [session for session in self.wires.sessions if session.shared is self.shared]

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()
        await self._server.stop(0, 0)

    # What a test does

    def say(self, *events: Event, now: float = 0.0) -> list[Reply]:
        self.now = now
        return [reply for event in events for reply in self.wires.runner.run(self._say(event))]

    def answer(self, result: Decision | RequestError, now: float) -> list[Reply]:
        self.now = now
        if self.served.closed:
            return self.served.resume(result, now)  # as the edge does for an answer that comes too late
        return self.wires.runner.run(self._answer(result))

    async def _answer(self, result: Decision | RequestError) -> list[Reply]:
        held, seen = self.served.pending, len(self.served.steps)
        assert held is not None
        await until(lambda: held._listener is not None)
        held.answer(result)
        return await self._hear(seen)

    async def _say(self, event: Event) -> list[Reply]:
        seen = len(self.served.steps)
        if self._over:
            return []
        match event:
            case DeadlinePassed():
                deadline = self.served.deadline
                if deadline is None or self.now < deadline:
                    return []
                loop = asyncio.get_running_loop()
                assert isinstance(loop, HurriedLoop)
                loop.ahead_s += _SKIPPED_S
                loop.call_soon(lambda: None)  # awake, it looks at its timers
            case StreamLost():
                self._over = True
                self._call.cancel()
                await until(lambda: self.served.closed)
                return []
            case HalfClosed():
                if self._half_closed:
                    return []
                self._half_closed = True
                await self._call.done_writing()
            case _:
                await self._call.write(encode_event(event))
        return await self._hear(seen)

    async def _hear(self, seen: int) -> list[Reply]:
        """Wait for the session's next step, and read what it said."""
        await until(lambda: len(self.served.steps) > seen)
        step = self.served.steps[seen]
        if step.error is not None:
            self._over = True
            assert await self._call.code() is grpc.StatusCode.INVALID_ARGUMENT
            raise ProtocolError(await self._call.details()) from step.error
        heard: list[Reply] = []
        for expected in step.replies:
            data = await self._call.read()
            if isinstance(expected, Finish):
                assert data is grpc.aio.EOF
                assert await self._call.code() is grpc.StatusCode.OK
                self._over = True
                heard.append(Finish())
            elif isinstance(expected, FinishWith):
                last = decode_reply(data)
                assert isinstance(last, BodyReply)
                assert await self._call.read() is grpc.aio.EOF
                heard.append(FinishWith(last))
            elif isinstance(expected, DecisionReply):
                assert decode_decision(data) == words_of(expected)
                heard.append(expected)
            else:
                heard.append(decode_reply(data))
        assert heard == step.replies, "what the session said is what the peer hears"
        # What a reply holds until it is written counts too; it goes when the edge has written it.
        await until(lambda: self.budget.used_bytes <= step.held_bytes)
        return heard


# The gateway's side of the codec


def encode_event(event: Event) -> bytes:
    """Write an event as Envoy would."""
    message = pb.ProcessingRequest()
    match event:
        case RequestHeaders() | ResponseHeaders():
            part = message.request_headers if isinstance(event, RequestHeaders) else message.response_headers
            part.end_of_stream = event.end_of_stream
            for name, value in event.headers.items():
                part.headers.headers.append(base_pb2.HeaderValue(key=name, raw_value=value.encode("latin-1")))
        case RequestBody() | ResponseBody():
            part = message.request_body if isinstance(event, RequestBody) else message.response_body
            part.body, part.end_of_stream = event.data, event.end_of_stream
        case RequestTrailers():
            message.request_trailers.SetInParent()
        case ResponseTrailers():
            message.response_trailers.SetInParent()
        case Unknown():
            pass
        case _:
            raise AssertionError(f"{event} is no message")
    protocol = getattr(event, "protocol_config", None)
    if protocol is not None:
        message.protocol_config.request_body_mode = protocol.request_body_mode.value
        message.protocol_config.response_body_mode = protocol.response_body_mode.value
    metadata = getattr(event, "metadata", None)
    if metadata is not None:
        assert isinstance(metadata, PlainMetadata)
        message.metadata_context.SetInParent()
        for namespace, values in metadata.namespaces.items():
            message.metadata_context.filter_metadata[namespace].update(values)
    data: bytes = message.SerializeToString()
    return data


def decode_reply(data: bytes) -> Reply:
    """Read a reply as Envoy would."""
    message = pb.ProcessingResponse.FromString(data)
    kind = message.WhichOneof("response")
    if kind == "immediate_response":
        part = message.immediate_response
        return ImmediateReply(part.status.code, _set(part.headers), part.body, part.details)
    direction = Direction.REQUEST if kind.startswith("request") else Direction.RESPONSE
    assert not message.HasField("dynamic_metadata")
    if kind.endswith("trailers"):
        return TrailersReply(direction)
    common = getattr(message, kind).response
    if kind.endswith("headers"):
        return HeadersReply(direction, _set(common.header_mutation), tuple(common.header_mutation.remove_headers))
    assert not common.HasField("header_mutation")
    if not common.HasField("body_mutation"):
        return BodyReply(direction)
    streamed = common.body_mutation.streamed_response
    return BodyReply(direction, streamed.body, streamed.end_of_stream)


@dataclass
class DecisionWords:
    """What a decision says on the wire."""

    answers: str
    edits: tuple[tuple[str, str], ...] = ()
    removed: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    data: bytes | None = None


def words_of(reply: DecisionReply) -> DecisionWords:
    """Say what a decision must say on the wire, for decisions without edits of their own."""
    words = DecisionWords(_ANSWERED[reply.answers], data=reply.data)
    decision = reply.decision
    if reply.answers is not RequestTrailers:
        words.removed = reply.remove_headers
    if decision is not None:
        if reply.answers is not RequestTrailers:
            length = () if reply.data is None else (("content-length", str(len(reply.data))),)
            words.edits = ((DESTINATION, decision.endpoint.id), *length)
        own: dict[str, Any] = {"decision": decision.id}
        if reply.retriable:
            own["retry"] = True
        if reply.explanation:
            own["explain"] = reply.explanation
        destination = {DESTINATION: decision.endpoint.id, "x-extproc-decision": decision.id}
        words.metadata = {"envoy.lb": destination, "extproc": own}
    return words


_ANSWERED: dict[type[Event], str] = {
    RequestHeaders: "request_headers",
    RequestBody: "request_body",
    RequestTrailers: "request_trailers",
}


def decode_decision(data: bytes) -> DecisionWords:
    """Read the reply that carries a decision as Envoy would."""
    message = pb.ProcessingResponse.FromString(data)
    words = DecisionWords(message.WhichOneof("response"), metadata=_struct(message.dynamic_metadata))
    if words.answers != "request_trailers":
        common = getattr(message, words.answers).response
        words.edits = _set(common.header_mutation)
        words.removed = tuple(common.header_mutation.remove_headers)
        words.data = common.body_mutation.body if common.HasField("body_mutation") else None
    return words


def _set(mutation: Any) -> tuple[tuple[str, str], ...]:
    overwrite = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    assert all(option.append_action == overwrite for option in mutation.set_headers)
    return tuple((option.header.key, option.header.raw_value.decode()) for option in mutation.set_headers)


def _struct(struct: Struct) -> dict[str, Any]:
    return {namespace: plain_value(value) for namespace, value in struct.fields.items()}


def over(transport: Callable[..., Any], runner: asyncio.Runner, patch: pytest.MonkeyPatch, *modules: Any) -> Wires:
    """Let the tests of `modules` hold their dialogues over `transport`, on a `HurriedLoop`."""
    wires = Wires(transport, runner)
    for edge in (native_calls, grpcio_stream):
        patch.setattr(edge, "Session", type("KeptSession", (RecordedSession,), {"made": wires.sessions}))
    bound = type("BoundDialogue", (WireDialogue,), {"wires": wires})
    for module in modules:
        patch.setattr(module, "Dialogue", bound)
    return wires
