"""Answers to completion and chat requests in vLLM 0.32's JSON: whole ones, and streams of server-sent events.

Takes tokens from the engine loop and turns them into bytes. A streamed token goes from the engine's timer straight to the connection's
transport, without waking a task: with the pieces of the JSON built once per request this is most of what makes a token cheap.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.sim import tokens
from extproc.sim.completions import ApiError, Generation, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.sim.engine import TokenEvent

FINGERPRINT: Final = "vllm-0.32.0-73596e2c"
ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_DONE: Final = b"data: [DONE]\n\n"
_ENGINE_DEAD_LINE: Final = (
    b"data: "
    + json.dumps(
        {"error": {"message": ENGINE_DEAD, "type": "InternalServerError", "param": None, "code": 500}}
    ).encode()
    + b"\n\n"
)


class Answer:
    """All choices of one request: how far each is, and a future that is done when all are, or when the engine lost one.

    The future fails with ApiError 500 when the engine was lost. `answer_id` is the `id` of the body, `created` Unix seconds.
    """

    def __init__(self, generation: Generation, answer_id: str, created: int) -> None:
        self.generation = generation
        self.answer_id = answer_id
        self.created = created
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.choices = [
            Choice(self, index, prompt, number)
            for index, (prompt, number) in enumerate(
                (prompt, number) for prompt in range(len(generation.prompts)) for number in range(generation.choices)
            )
        ]
        self._open = len(self.choices)

    def token(self, choice: Choice, event: TokenEvent) -> None:
        """Take a token of a choice; nothing to do before the last one."""
        if event.finished:
            self.choice_finished(choice)

    def dropped(self) -> None:
        """Fail: the engine has lost a choice."""
        if not self.done.done():
            self.done.set_exception(ApiError(500, ENGINE_DEAD, "InternalServerError"))
            self.done.exception()  # else asyncio complains when the client has gone too and nobody waits any more

    def choice_finished(self, _choice: Choice) -> None:
        """Count a finished choice; the last one completes the answer."""
        self._open -= 1
        if not self._open and not self.done.done():
            self.all_finished()
            self.done.set_result(None)

    def all_finished(self) -> None:
        """Do what has to be done before `done`."""

    def usage(self, *, stream: bool) -> dict[str, Any]:
        """Give `usage` as vLLM does with --enable-prompt-tokens-details; a stream's has fewer fields."""
        generation = self.generation
        prompt = sum(tokens.count(prompt) for prompt in generation.prompts)
        completion = sum(choice.generated for choice in self.choices)
        # Several answers to one prompt count its tokens once, and so its hits.
        cached = sum(choice.cached_tokens for choice in self.choices if choice.number == 0)
        details: dict[str, Any] = {"cached_tokens": cached}
        chat = generation.kind is Kind.CHAT
        if not stream or chat:
            # Blocks are created for what was not found; completions report null (recorded).
            details["created_cache_tokens"] = 0 if chat else None
        if not stream:
            details["multimodal_tokens"] = None
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        return usage | {"prompt_tokens_details": details} | ({} if stream else {"completion_tokens_details": None})

    def body(self) -> bytes:
        """Give the JSON of a whole answer, fields in vLLM's order."""
        generation = self.generation
        head = {"id": self.answer_id, "object": "", "created": self.created, "model": generation.model}
        tail: dict[str, Any] = {
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": self.usage(stream=False),
        }
        end: dict[str, Any] = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        if generation.kind is Kind.CHAT:
            ids = tokens.to_ids(generation.prompts[0]) if generation.return_token_ids else None
            choices = [choice.chat_json() for choice in self.choices]
            tail |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
            return msgspec.json.encode(head | {"object": "chat.completion", "choices": choices} | tail | end)
        choices = [choice.completion_json() for choice in self.choices]
        return msgspec.json.encode(head | {"object": "text_completion", "choices": choices} | tail | end)


class Choice:
    """One sequence of an answer; the engine loop's sink for it."""

    __slots__ = ("answer", "cached_tokens", "generated", "index", "number", "output", "prompt")

    def __init__(self, answer: Answer, index: int, prompt: int, number: int) -> None:
        generation = answer.generation
        self.answer = answer
        self.index = index
        self.prompt = prompt
        """Which of the request's prompts."""
        self.number = number
        """Which of the `n` answers to that prompt."""
        self.output = tokens.output_tokens(generation.prompts[prompt], generation.output_tokens[prompt], number)
        self.generated = 0
        self.cached_tokens = 0

    @property
    def tokens(self) -> bytes:
        """Prompt and the whole output, whether generated yet or not."""
        return self.answer.generation.prompts[self.prompt] + self.output

    def on_token(self, event: TokenEvent) -> None:
        """Take a token from the engine loop."""
        self.generated = event.output_tokens
        self.cached_tokens = event.cached_tokens
        self.answer.token(self, event)

    def on_dropped(self) -> None:
        """Learn that the engine lost this sequence."""
        self.answer.dropped()

    def completion_json(self) -> dict[str, Any]:
        """Give the choice of a whole completion."""
        generation = self.answer.generation
        ids = generation.return_token_ids
        return {
            "index": self.index,
            "text": self.output.decode(),
            "logprobs": None,
            "finish_reason": generation.finish_reason,
            "stop_reason": None,
            "token_ids": tokens.to_ids(self.output) if ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": tokens.to_ids(generation.prompts[self.prompt]) if ids else None,
            "routed_experts": None,
        }

    def chat_json(self) -> dict[str, Any]:
        """Give the choice of a whole chat answer."""
        generation = self.answer.generation
        empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        return {
            "index": self.index,
            "message": {"role": "assistant", "content": self.output.decode()} | empty,
            "logprobs": None,
            "finish_reason": generation.finish_reason,
            "stop_reason": None,
            "token_ids": tokens.to_ids(self.output) if generation.return_token_ids else None,
            "routed_experts": None,
        }


class StreamedAnswer(Answer):
    """An answer that writes each token through `write` as it comes: `write(data)` puts bytes on the connection, framed.

    After `cut_after_tokens` tokens, when set, `cut()` is called instead of writing more (a fault, see `faults`).
    """

    def __init__(
        self,
        generation: Generation,
        answer_id: str,
        created: int,
        write: Callable[[bytes], None],
        *,
        cut: Callable[[], None] | None = None,
        cut_after_tokens: int | None = None,
    ) -> None:
        super().__init__(generation, answer_id, created)
        self._write = write
        self._cut = cut
        self._cut_after_tokens = cut_after_tokens
        chat = generation.kind is Kind.CHAT
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._head = (
            f'data: {{"id":{json.dumps(answer_id)},"object":"{kind}","created":{created},"model":{json.dumps(generation.model)},"choices":['
        ).encode()
        field = '"delta":{"content":"' if chat else '"text":"'
        self._heads = [self._head + f'{{"index":{choice.index},{field}'.encode() for choice in self.choices]
        self._tail = _tail(chat=chat, finish_reason=None)
        self._last_tail = _tail(chat=chat, finish_reason=generation.finish_reason)

    def token(self, choice: Choice, event: TokenEvent) -> None:
        """Write the token; the request's last one is followed by the usage and the end of the stream."""
        generation = self.generation
        position = event.output_tokens
        if self._cut is not None and position > (self._cut_after_tokens or 0):
            self._cut()
            return
        end = position * tokens.TOKEN_BYTES
        piece = choice.output[end - tokens.TOKEN_BYTES : end]
        data = self._heads[choice.index] + piece + (self._last_tail if event.finished else self._tail)
        if position == 1 and generation.kind is Kind.CHAT:
            data = self._role_chunk(choice) + data
        close = b"}\n\n"
        if generation.continuous_usage:
            close = b',"usage":' + msgspec.json.encode(self._running_usage(choice)) + close
        if event.finished:
            if not generation.include_usage:
                close = f',"system_fingerprint":"{FINGERPRINT}"'.encode() + close
            self._write(data + close)
            self.choice_finished(choice)
        else:
            self._write(data + close)

    def all_finished(self) -> None:
        """Write the usage, when asked for, and the end of the stream."""
        usage = b""
        if self.generation.include_usage:
            text = msgspec.json.encode(self.usage(stream=True))
            usage = self._head + b'],"usage":' + text + f',"system_fingerprint":"{FINGERPRINT}"}}\n\n'.encode()
        self._write(usage + _DONE)

    def dropped(self) -> None:
        """End the stream as vLLM does when its engine dies: an error event, then the end (recorded)."""
        if not self.done.done():
            self._write(_ENGINE_DEAD_LINE + _DONE)
            self.done.set_result(None)

    def _role_chunk(self, choice: Choice) -> bytes:
        ids = json.dumps(tokens.to_ids(self.generation.prompts[0])) if self.generation.return_token_ids else "null"
        return (
            self._head
            + (
                f'{{"index":{choice.index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],'
                f'"prompt_token_ids":{ids},"prompt_text":null}}\n\n'
            ).encode()
        )

    def _running_usage(self, choice: Choice) -> dict[str, int]:
        prompt = tokens.count(self.generation.prompts[choice.prompt])
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + choice.generated,
            "completion_tokens": choice.generated,
        }


def _tail(*, chat: bool, finish_reason: str | None) -> bytes:
    """Everything after the piece of text up to the end of `choices`; the chunk stays open for usage and fingerprint."""
    reason = "null" if finish_reason is None else f'"{finish_reason}"'
    if chat:
        stop = "" if finish_reason is None else '"stop_reason":null,'
        return f'"}},"logprobs":null,"finish_reason":{reason},{stop}"token_ids":null}}]'.encode()
    return f'","logprobs":null,"finish_reason":{reason},"stop_reason":null,"prompt_token_ids":null,"token_ids":null}}]'.encode()
