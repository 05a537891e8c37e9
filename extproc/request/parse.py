"""Turn the body of a request into an `InferenceRequest`.

Decides what is refused (400) and what is merely not understood and therefore routed by load. Bodies are read only to
route them: a field of an unexpected type counts as absent, a prompt of an unexpected shape as none, and the engine gets
all of it. Refused is what no engine accepts: a body that is not a JSON object, or nested too deeply, or a chat whose
`messages` is not a list of objects. `canonical` writes prompts, `truncated` repairs truncated bodies, `parse_cost` limits
how much of a body is parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from xxhash import xxh3_128_hexdigest

from extproc.errors import InvalidRequestError
from extproc.request import canonical
from extproc.request.api import kind_of_body, kind_of_path
from extproc.request.decode import ANY, TooExpensiveError, decode, decode_field, given, in_utf8, too_deep, wrong_type
from extproc.request.names import LONGEST_NAME, bounded
from extproc.request.parse_cost import PART, RESPELLING, TOKEN_IDS, UNCOUNTED_BYTES, WHOLE, affordable
from extproc.request.truncated import repair_truncated
from extproc.types import InferenceRequest, RequestKind

__all__ = ["parse"]

_MAX_TOKENS = 2**31 - 1
"""No engine has a longer context; larger limits count as none, so that sums of them do not overflow."""

_LONGEST_SETTING = 4096
"""Longest setting, in bytes, that is written canonically beside token ids; of longer ones a digest is."""

_NONE = msgspec.Raw()
"""Value of an absent `Raw` field."""


class _Body(msgspec.Struct, gc=False):
    """Fields every API has. Null is the same as absent, as it is for the engines' own models."""

    model: str | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    user: str | None = None
    truncate_prompt_tokens: msgspec.Raw = _NONE
    """The engine truncates the prompt, usually on its left: its cache does not contain the prompt's prefix."""


class _Completions(_Body, gc=False):
    # Undecoded: bodies with a list of token ids may have more elements than others (`parse_cost.TOKEN_IDS`).
    prompt: msgspec.Raw = _NONE
    prompt_embeds: msgspec.Raw = _NONE
    max_tokens: int | None = None
    add_special_tokens: msgspec.Raw = _NONE
    lora_path: msgspec.Raw = _NONE


class _Chat(_Body, gc=False):
    messages: list[dict[str, Any]] | None = None
    tools: msgspec.Raw = _NONE
    functions: msgspec.Raw = _NONE
    chat_template: msgspec.Raw = _NONE
    documents: msgspec.Raw = _NONE
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    tool_choice: Any = None
    reasoning_effort: Any = None
    chat_template_kwargs: Any = None
    add_special_tokens: Any = None
    mm_processor_kwargs: Any = None
    lora_path: Any = None
    input_ids: Any = None


class _Responses(_Body, gc=False):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | list[Any] | None = None
    tools: msgspec.Raw = _NONE
    previous_response_id: Any = None
    previous_response: Any = None
    previous_input_messages: Any = None
    conversation: Any = None
    prompt: Any = None
    max_output_tokens: int | None = None
    tool_choice: Any = None
    reasoning: Any = None
    chat_template_kwargs: Any = None
    mm_processor_kwargs: Any = None


class _Embeddings(_Body, gc=False):
    # As above; chat has no token ids, and is refused where `messages` has them.
    input: msgspec.Raw = _NONE
    messages: list[dict[str, Any]] | None = None
    chat_template: msgspec.Raw = _NONE
    chat_template_kwargs: msgspec.Raw = _NONE
    add_special_tokens: msgspec.Raw = _NONE
    mm_processor_kwargs: msgspec.Raw = _NONE
    lora_path: msgspec.Raw = _NONE


class _Messages(_Body, gc=False):
    messages: list[dict[str, Any]] | None = None
    system: str | list[Any] | None = None
    tools: msgspec.Raw = _NONE
    metadata: Any = None
    max_tokens: int | None = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    chat_template_kwargs: Any = None


_Prompts = tuple[bytes, ...]
B = TypeVar("B", bound=_Body)

_ONLY_AT_THE_END: Final = frozenset({"add_generation_prompt", "continue_final_message"})
"""Of the arguments of a chat template: they change how the prompt ends, not how it begins."""


def _completions(body: _Completions) -> tuple[_Prompts, int | None]:
    if given(body.prompt_embeds):
        return (), body.max_tokens
    prompts = canonical.prompts_of(body.prompt)
    if body.add_special_tokens is not _NONE or body.lora_path is not _NONE:
        settings = {"add_special_tokens": _unless(_setting(body.add_special_tokens), True)}
        prompts = _headed(prompts, settings, _setting(body.lora_path))
    return prompts, body.max_tokens


def _chat(body: _Chat) -> tuple[_Prompts, int | None]:
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.input_ids is not None:
        return (), limit  # SGLang uses them instead of the messages
    out = [canonical.CHAT]
    if body.chat_template is not _NONE:
        canonical.append_head(out, canonical.TEMPLATE, body.chat_template)
    if (
        body.reasoning_effort is not None
        or body.chat_template_kwargs is not None
        or body.add_special_tokens is not None
        or body.mm_processor_kwargs is not None
        or body.lora_path is not None
        or body.tool_choice is not None
    ):
        _append_chat_settings(out, body)
    if body.documents is not _NONE:
        canonical.append_head(out, canonical.DOCUMENTS, body.documents)
    if body.tools is not _NONE:
        canonical.append_tools(out, body.tools)
    if body.functions is not _NONE:
        canonical.append_tools(out, body.functions)
    if body.messages:
        canonical.append_messages(out, body.messages)
    return _joined(out), limit


def _append_chat_settings(out: list[bytes], body: _Chat) -> None:
    settings = {
        "reasoning_effort": body.reasoning_effort,
        "chat_template_kwargs": _template_arguments(body.chat_template_kwargs),
        "add_special_tokens": _unless(body.add_special_tokens, False),
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "lora_path": body.lora_path,
        "tool_choice": _tool_choice(body.tool_choice) if given(body.tools) else None,
    }
    _append_settings(out, settings)


def _responses(body: _Responses) -> tuple[_Prompts, int | None]:
    limit = body.max_output_tokens
    before = (
        body.previous_response_id,
        body.previous_response,
        body.previous_input_messages,
        body.conversation,
        body.prompt,
    )
    if before != (None, None, None, None, None):
        return (), limit  # the engine prepends something that is not in this body
    out = [canonical.CHAT]
    settings = {
        "reasoning_effort": _member(body.reasoning, "effort"),
        "chat_template_kwargs": _template_arguments(body.chat_template_kwargs),
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "tool_choice": _tool_choice(body.tool_choice) if given(body.tools) else None,
    }
    _append_settings(out, settings)
    canonical.append_tools(out, body.tools)
    canonical.append_system(out, body.instructions)
    if isinstance(body.input, str):
        if body.input:
            canonical.append_message(out, "user", body.input)
    elif body.input:
        canonical.append_messages(out, body.input)
    return _joined(out), limit


def _embeddings(body: _Embeddings) -> tuple[_Prompts, int | None]:
    settings = {
        "chat_template_kwargs": _template_arguments(_setting(body.chat_template_kwargs)),
        "add_special_tokens": _unless(_setting(body.add_special_tokens), not body.messages),
        "mm_processor_kwargs": _setting(body.mm_processor_kwargs),
    }
    adapter = _setting(body.lora_path)
    if body.messages:
        out = [canonical.CHAT]
        canonical.append_head(out, canonical.TEMPLATE, body.chat_template)
        _append_settings(out, settings | {"lora_path": adapter})
        canonical.append_messages(out, body.messages)
        return _joined(out), None
    return _headed(canonical.prompts_of(body.input), settings, adapter), None


def _messages(body: _Messages) -> tuple[_Prompts, int | None]:
    if body.user is None and body.metadata is not None:
        body.user = _as_name(_member(body.metadata, "user_id"))
    out = [canonical.CHAT]
    settings = {
        "reasoning_effort": _member(body.output_config, "effort"),
        "thinking": _member(body.thinking, "type"),
        "chat_template_kwargs": _template_arguments(body.chat_template_kwargs),
        "tool_choice": _tool_choice(body.tool_choice) if given(body.tools) else None,
    }
    _append_settings(out, settings)
    canonical.append_tools(out, body.tools)
    canonical.append_system(out, body.system)
    if body.messages:
        canonical.append_messages(out, body.messages)
    return _joined(out), body.max_tokens


def _joined(out: list[bytes]) -> _Prompts:
    return (b"".join(out),) if len(out) > 1 else ()


def _append_settings(out: list[bytes], settings: dict[str, Any]) -> None:
    """Append what changes how the rendered prompt begins, as one head; None is the same as absent."""
    found = {key: value for key, value in settings.items() if value is not None}
    if found:
        out.append(canonical.EXTRA + canonical.encoded(found))


def _headed(prompts: _Prompts, settings: dict[str, Any], adapter: Any) -> _Prompts:
    """Put settings before texts that are no chat. Nothing changes token ids; an adapter of theirs has a cache of its own."""
    if prompts and prompts[0].startswith(canonical.TOKENS):
        return prompts if adapter is None else ()
    out: list[bytes] = []
    _append_settings(out, settings | {"lora_path": adapter})
    return tuple([out[0] + prompt for prompt in prompts]) if out else prompts


def _setting(raw: msgspec.Raw) -> Any:
    """Return the value of a setting, None where it is not given; of a large one its digest."""
    if not given(raw):
        return None
    return decode_field(raw, ANY) if len(raw) <= _LONGEST_SETTING else xxh3_128_hexdigest(bytes(raw))


def _template_arguments(value: Any) -> Any:
    """Return the arguments of a chat template that can change how a prompt begins; None for none."""
    if type(value) is dict and any(key in value for key in _ONLY_AT_THE_END):
        value = {key: item for key, item in value.items() if key not in _ONLY_AT_THE_END}
    return value or None


def _tool_choice(value: Any) -> Any:
    """Return a tool choice that changes which tools the prompt lists: `none`, or one by name; None for others.

    SGLang renders the chosen tool only, and none of them for `none`; vLLM leaves them out with
    `--exclude-tools-when-tool-choice-none`.
    """
    if type(value) is dict:
        # A tuple, not a set: the value may be unhashable.
        return None if value.get("type") in ("auto", "any") else value
    return value if value == "none" else None


def _unless(value: Any, usual: bool) -> Any:
    """Return a flag, or None where it has its default."""
    return None if value is usual else value


def _member(value: Any, key: str) -> Any:
    return value.get(key) if type(value) is dict else None


def _as_name(value: Any) -> str | None:
    """Return a user's name or number as text; None for everything else."""
    if type(value) is int:
        return str(value) if value.bit_length() < _MOST_BITS else None
    return value if type(value) is str else None


def _opaque(content_type: str, content_encoding: str) -> bool:
    """Return whether the body is not read: compressed or multipart."""
    if content_encoding and content_encoding.strip().lower() not in {"", "identity"}:
        return True
    return content_type[:10].lower() == "multipart/"


_Read = tuple[_Body, _Prompts, int | None]

_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
"""What pydantic, in which the engines' models are written, reads as true; everything else counts as false."""
_MOST_BITS: Final = 1024
_NO_PART_OF_THE_PROMPT: Final = frozenset(
    {"stream", "user", "metadata", "max_tokens", "max_completion_tokens", "max_output_tokens"}
)


class _Reader:
    """Reads the bodies of one API."""

    __slots__ = ("_decoder", "_fields", "_kind", "_prompts", "_raw", "_strict")

    def __init__(self, kind: type[B], prompts: Callable[[B], tuple[_Prompts, int | None]], *strict: str) -> None:
        """`strict` are the fields whose type every engine checks."""
        # Not strict: like the engines' own models, read "5" and 5.0 as 5 and "true" as true. Numbers as in `decode.ANY`.
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind, strict=False, float_hook=msgspec.Raw)
        self._prompts: Callable[[Any], tuple[_Prompts, int | None]] = prompts
        self._kind: type[_Body] = kind
        self._strict = strict
        fields = msgspec.structs.fields(kind)
        self._fields = [
            (field.name, msgspec.json.Decoder(field.type, strict=False, float_hook=msgspec.Raw)) for field in fields
        ]
        raw = msgspec.defstruct(
            f"{kind.__name__}Raw", [(name, msgspec.Raw, _NONE) for name, _ in self._fields], gc=False
        )
        self._raw: msgspec.json.Decoder[Any] = msgspec.json.Decoder(raw)

    def read(self, body: bytes) -> _Read:
        """Decode `body`; return its fields, its prompts and its limit of tokens."""
        try:
            fields = decode_field(body, self._decoder)
        except msgspec.ValidationError:
            fields, understood = self._read_one_by_one(body)
            if not understood:
                return fields, (), self._prompts(fields)[1]
        prompts, limit = self._prompts(fields)
        return fields, () if given(fields.truncate_prompt_tokens) else prompts, limit

    def _read_one_by_one(self, body: bytes) -> tuple[Any, bool]:
        """Decode the fields of an expected type; False where one that affects the prompt has another."""
        found = self._kind()
        understood = True
        raw = decode(body, self._raw)
        for name, decoder in self._fields:
            value = getattr(raw, name)
            if not given(value):
                continue
            try:
                setattr(found, name, decode_field(value, decoder))
            except msgspec.ValidationError as error:
                if name in self._strict:
                    raise wrong_type(error, name) from error
                if name not in _NO_PART_OF_THE_PROMPT:
                    understood = False
                elif name == "stream":
                    found.stream = bytes(value)[:8].strip(b'"').lower().decode("utf-8", "replace") in _TRUE
                elif name == "user":
                    found.user = _as_name(decode_field(value, ANY))
        return found, understood


_READERS: dict[str, _Reader] = {
    RequestKind.COMPLETIONS.value: _Reader(_Completions, _completions),
    RequestKind.CHAT.value: _Reader(_Chat, _chat, "messages"),
    RequestKind.RESPONSES.value: _Reader(_Responses, _responses),
    RequestKind.EMBEDDINGS.value: _Reader(_Embeddings, _embeddings),
    RequestKind.MESSAGES.value: _Reader(_Messages, _messages, "messages"),
}
"""By value: before Python 3.12 hashing an enum member is a Python call."""

_OTHER = RequestKind.OTHER
"""A module-level name: before Python 3.12 an enum member is slow to look up."""
_OF_TOKEN_IDS: Final = frozenset({RequestKind.COMPLETIONS.value, RequestKind.EMBEDDINGS.value})


def _whole(kind: RequestKind, body: bytes) -> tuple[RequestKind, _Read | None, bool]:
    """Read a complete body, or the affordable part of it (False); kind OTHER: recognise the API first."""
    if kind is _OTHER:
        try:
            kind = kind_of_body(body)
        except InvalidRequestError:
            return kind, None, True  # it may not be an inference request
        if kind is _OTHER:
            return kind, None, True
    name = kind._value_
    if len(body) > UNCOUNTED_BYTES:
        prices = TOKEN_IDS if name in _OF_TOKEN_IDS else WHOLE
        seen = affordable(body, prices, PART)
        if seen < len(body):
            return *_part(kind, body[:seen]), False
    return kind, _READERS[name].read(body), True


def _part(kind: RequestKind, body: bytes) -> tuple[RequestKind, _Read | None]:
    """Read a truncated body."""
    try:
        seen = repair_truncated(body)
    except InvalidRequestError:
        if kind is _OTHER:
            return kind, None
        raise
    try:
        if kind is _OTHER:
            kind = kind_of_body(seen)
        return kind, _READERS[kind._value_].read(seen) if kind is not _OTHER else None
    except (InvalidRequestError, TooExpensiveError):
        return kind, None  # of wrong types as far as it was read: the engine gets all of it and decides


def _seen(kind: RequestKind, body: bytes, complete: bool) -> tuple[RequestKind, _Read | None, bool]:
    """Read a body, or the affordable part of it; the last value says whether all of it was read."""
    try:
        try:
            if complete and len(body) <= UNCOUNTED_BYTES:
                return _whole(kind, body)
            try:
                body = in_utf8(body, complete=complete)  # prices are those of UTF-8
            except InvalidRequestError:
                if kind is _OTHER:
                    return kind, None, complete  # it may not be an inference request
                raise
            if complete:
                return _whole(kind, body)
            return *_part(kind, body[: affordable(body, PART)]), False
        except TooExpensiveError:
            body = in_utf8(body, complete=False)
            return *_part(kind, body[: affordable(body, RESPELLING)]), False
    except RecursionError as error:
        raise too_deep(body) from error


def parse(
    path: str,
    body: bytes,
    *,
    content_type: str = "",
    content_encoding: str = "",
    complete: bool = True,
    session_key: str = "",
    subset: frozenset[str] | None = None,
    request_id: str = "",
    explain: bool = False,
) -> InferenceRequest:
    """Read what the router needs from the body of a POST to `path` (empty: unknown, the body's fields tell the API).

    `complete` is False for a body that was truncated at some byte: the prompts are then those of the part, which is
    refused only where no continuation could make it JSON. A body with too many elements to be parsed at once
    (`parse_cost`) is read like a truncated one. Without a `path` only `messages` of a wrong type are refused.
    `session_key` falls back to the body's user; `subset`, `request_id` and `explain` are passed on. Compressed and
    multipart bodies are not read. Names are shortened (`names.bounded`).
    Raises InvalidRequestError, whose message and `param` name the field. Costs O(body).
    """
    if len(session_key) + len(request_id) > LONGEST_NAME:
        session_key, request_id = bounded(session_key), bounded(request_id)
    kind = kind_of_path(path)
    read: _Read | None = None
    plain = content_type == "application/json" and not content_encoding
    if (kind is not _OTHER or not path) and (plain or not _opaque(content_type, content_encoding)):
        kind, read, complete = _seen(kind, body, complete)
    if read is None:
        return InferenceRequest(
            kind=kind,
            session_key=session_key,
            subset=subset,
            request_id=request_id,
            body_bytes=len(body),
            complete=complete,
            explain=explain,
        )
    fields, prompts, limit = read
    model, user, salt = fields.model or "", fields.user or "", fields.cache_salt or ""
    if len(model) + len(user) + len(salt) > LONGEST_NAME:
        model, user, salt = bounded(model), bounded(user), bounded(salt)
    return InferenceRequest(
        kind,
        model,
        prompts if complete or model else (),
        salt,
        bool(fields.stream),
        limit if limit is None or 0 <= limit <= _MAX_TOKENS else None,
        user,
        session_key or user,
        subset,
        request_id,
        len(body),
        complete,
        explain,
    )
