"""OpenAI completion and chat requests: bytes of a request body to what is to be generated, or to vLLM's error for it.

Reads only what decides prompt, length and form of the answer; sampling parameters are accepted and mean nothing here. The error texts
are vLLM 0.32's (recorded), so that a client library reacts as it would to the real one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.sim import tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_OUTPUT_TOKENS: Final = 128
"""Length of an answer when the request sets no limit: the model then stops by itself."""


class Kind(Enum):
    """Which of the two APIs a request came by."""

    COMPLETION = auto()
    CHAT = auto()


class ApiError(Exception):
    """An answer in vLLM's error form; `status` is the HTTP status."""

    def __init__(self, status: int, message: str, error_type: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.param = param

    def body(self) -> bytes:
        """Give the JSON body."""
        error = {"message": str(self), "type": self.error_type, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What a server answers for: the base model and LoRA adapters over it."""

    base: str
    loras: tuple[str, ...]
    max_model_len: int
    """Most tokens of prompt and output together."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What a request asks for; `prompts` are token sequences (`tokens`), at least one, none empty."""

    kind: Kind
    model: str
    lora: str | None
    prompts: tuple[bytes, ...]
    choices: int
    """Answers per prompt (`n`), >= 1."""
    output_tokens: tuple[int, ...]
    """Length of the answer to each prompt."""
    finish_reason: str
    """`length` when the request set the limit, else `stop`."""
    cache_salt: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


def parse(body: bytes, kind: Kind, served: ServedModels) -> Generation:
    """Read a request body. Raises ApiError, in vLLM's order: JSON, model, prompt, parameters, length."""
    fields = decode_object(body)
    model, lora = resolve_model(fields, served)
    prompts = _chat_prompt(fields) if kind is Kind.CHAT else _completion_prompts(fields)
    temperature = fields.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        raise _invalid(
            "temperature", f"temperature must be non-negative, got {float(temperature)}.", float(temperature)
        )
    choices = _positive(fields, "n") or 1
    limit = _positive(fields, "max_tokens")
    if kind is Kind.CHAT:
        limit = _positive(fields, "max_completion_tokens") or limit
    stream_options = fields.get("stream_options")
    if not isinstance(stream_options, dict):
        stream_options = {}
    salt = fields.get("cache_salt")
    return Generation(
        kind=kind,
        model=model,
        lora=lora,
        prompts=prompts,
        choices=choices,
        output_tokens=tuple(_output_tokens(prompt, limit, served.max_model_len) for prompt in prompts),
        finish_reason="stop" if limit is None else "length",
        cache_salt=salt if isinstance(salt, str) and salt else None,
        stream=fields.get("stream") is True,
        include_usage=stream_options.get("include_usage") is True,
        continuous_usage=stream_options.get("continuous_usage_stats") is True,
        return_token_ids=fields.get("return_token_ids") is True,
    )


def decode_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises ApiError 400 for anything else."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        position, reason = _json_error(body)
        raise ApiError(
            400,
            f"1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body.{position}', 'msg': 'JSON decode error', "
            f"'input': '<dict of 0 items>', 'ctx': {{'error': '{reason}'}}}}",
            "Bad Request",
            f"body.{position}",
        ) from None
    if not isinstance(value, dict):
        raise ApiError(400, "1 validation error:\n  Input should be a valid dictionary", "Bad Request", "body")
    return value


def resolve_model(fields: dict[str, Any], served: ServedModels) -> tuple[str, str | None]:
    """Return the base model's name and the adapter named, if any. No name means the base model; an unknown one is 404."""
    name = fields.get("model")
    if name is None or name == served.base:
        return served.base, None
    if name in served.loras:
        return name, name
    valid = ", ".join((served.base, *served.loras))
    raise ApiError(404, f"The model `{name}` does not exist. Valid aliases: {valid}.", "NotFoundError", "model")


def _json_error(body: bytes) -> tuple[int, str]:
    """Position and reason as in Python's json errors, which is what vLLM reports."""
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        return error.pos, error.msg
    except (UnicodeDecodeError, RecursionError):
        pass
    return 0, "Expecting value"


def _invalid(param: str, message: str, value: object = None) -> ApiError:
    suffix = f"(parameter={param})" if value is None else f"(parameter={param}, value={value})"
    return ApiError(400, f"{message} {suffix}", "BadRequestError", param)


def _positive(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiError(400, f"1 validation error:\n  {name}: Input should be a valid integer", "Bad Request", name)
    if value < 1:
        raise _invalid(name, f"{name} must be at least 1, got {value}.", value)
    return value


def _chat_prompt(fields: dict[str, Any]) -> tuple[bytes, ...]:
    messages, tools = fields.get("messages"), fields.get("tools")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ApiError(400, "1 validation error:\n  messages: Field required", "Bad Request", "messages")
    if not messages:
        raise _invalid("messages", "messages must not be empty.")
    return (tokens.chat_tokens(messages, tools if isinstance(tools, list) else None),)


def _completion_prompts(fields: dict[str, Any]) -> tuple[bytes, ...]:
    prompt = fields.get("prompt")
    prompts: Sequence[Any] = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not prompts or not all(prompts):
        raise _invalid("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
    try:
        if all(isinstance(item, str) or _is_ids(item) for item in prompts):
            return tuple(tokens.prompt_tokens(item) for item in prompts)
    except ValueError as error:
        raise _invalid("prompt", f"{error}.") from None
    raise ApiError(400, "1 validation error:\n  prompt: Input should be a valid string", "Bad Request", "prompt")


def _is_ids(value: Any) -> bool:
    # The first element decides, the packing checks the rest: a list of 100,000 ids is not walked twice.
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def _output_tokens(prompt: bytes, limit: int | None, max_model_len: int) -> int:
    length = tokens.count(prompt)
    room = max_model_len - length
    if room < 0 or (room == 0 and limit is None):
        raise _invalid(
            "input_tokens",
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            max_model_len + 1,
        )
    if limit is not None and limit > room:
        raise _invalid(
            "input_tokens",
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {limit} output tokens and your "
            f"prompt contains at least {length} input tokens, for a total of at least {length + limit} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            length,
        )
    return min(room, DEFAULT_OUTPUT_TOKENS) if limit is None else limit
