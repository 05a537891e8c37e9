"""Turn the body of a request into an `InferenceRequest`.

Decides what is refused (400) and what is merely not understood and therefore routed by load: refused is a body of a
known API that is no JSON object or has a wrong type in a field we read; everything else is for the engine to judge.
How a prompt is spelled is `canonical`'s concern, bodies that were cut `cut`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from extproc.errors import InvalidRequestError
from extproc.request import canonical
from extproc.request.api import kind_of_body, kind_of_path
from extproc.request.cut import salvage
from extproc.request.decode import decode, given, respell, too_deep
from extproc.vocabulary import InferenceRequest, RequestKind

__all__ = ["parse"]

_MAX_TOKENS = 2**31 - 1
"""No engine has a longer context; larger bounds mean none, and must not overflow anybody's arithmetic."""

_NONE = msgspec.Raw()
"""Value of an absent `Raw` field."""


class _Body(msgspec.Struct, gc=False):
    """Fields every API has. Null is the same as absent, as it is for the engines' own models."""

    model: str | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    user: str | None = None


class _Completions(_Body, gc=False):
    prompt: str | list[Any] | None = None
    prompt_embeds: msgspec.Raw = _NONE
    max_tokens: int | None = None


class _Chat(_Body, gc=False):
    messages: list[dict[str, Any]] | None = None
    tools: msgspec.Raw = _NONE
    functions: msgspec.Raw = _NONE
    chat_template: str | None = None
    documents: list[Any] | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None


class _Responses(_Body, gc=False):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | list[Any] | None = None
    tools: msgspec.Raw = _NONE
    previous_response_id: msgspec.Raw = _NONE
    conversation: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    max_output_tokens: int | None = None


class _Embeddings(_Body, gc=False):
    input: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None


class _Metadata(msgspec.Struct, gc=False):
    user_id: str | None = None


class _Messages(_Body, gc=False):
    messages: list[dict[str, Any]] | None = None
    system: str | list[Any] | None = None
    tools: msgspec.Raw = _NONE
    metadata: _Metadata | None = None
    max_tokens: int | None = None


_Prompts = tuple[bytes, ...]
B = TypeVar("B", bound=_Body)


def _completions(body: _Completions) -> tuple[_Prompts, int | None]:
    if given(body.prompt_embeds):
        return (), body.max_tokens
    return canonical.prompts_of(body.prompt, "prompt"), body.max_tokens


def _chat(body: _Chat) -> tuple[_Prompts, int | None]:
    out = [canonical.CHAT]
    if body.chat_template:
        out.append(canonical.json_head(canonical.TEMPLATE, body.chat_template))
    if body.documents:
        out.append(canonical.json_head(canonical.DOCUMENTS, body.documents))
    canonical.append_tools(out, body.tools, "tools")
    canonical.append_tools(out, body.functions, "functions")
    canonical.append_messages(out, body.messages or (), "messages")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _joined(out), limit


def _responses(body: _Responses) -> tuple[_Prompts, int | None]:
    limit = body.max_output_tokens
    if given(body.previous_response_id) or given(body.conversation) or given(body.prompt):
        return (), limit  # the engine puts something before it that we have never seen
    out = [canonical.CHAT]
    canonical.append_tools(out, body.tools, "tools")
    canonical.append_system(out, body.instructions, "instructions")
    if isinstance(body.input, str):
        if body.input:
            canonical.append_message(out, "user", body.input, "input")
    else:
        canonical.append_messages(out, body.input or (), "input")
    return _joined(out), limit


def _embeddings(body: _Embeddings) -> tuple[_Prompts, int | None]:
    if body.messages:
        out = [canonical.CHAT]
        canonical.append_messages(out, body.messages, "messages")
        return _joined(out), None
    return canonical.prompts_of(body.input, "input"), None


def _messages(body: _Messages) -> tuple[_Prompts, int | None]:
    if body.user is None and body.metadata is not None:
        body.user = body.metadata.user_id
    out = [canonical.CHAT]
    canonical.append_tools(out, body.tools, "tools")
    canonical.append_system(out, body.system, "system")
    canonical.append_messages(out, body.messages or (), "messages")
    return _joined(out), body.max_tokens


def _joined(out: list[bytes]) -> _Prompts:
    return (b"".join(out),) if len(out) > 1 else ()


def _opaque(content_type: str, content_encoding: str) -> bool:
    """Tell whether the body is in a form we do not look into: compressed or multipart."""
    if content_type == "application/json" and not content_encoding:
        return False
    if content_encoding and content_encoding.strip().lower() not in {"", "identity"}:
        return True
    return content_type[:10].lower() == "multipart/"


_Read = tuple[_Body, _Prompts, int | None]


def _read(kind: type[B], prompts: Callable[[B], tuple[_Prompts, int | None]]) -> Callable[[bytes], _Read]:
    # Not strict: like the engines' own models, take "5" and 5.0 for 5 and "true" for true.
    return partial(_read_as, msgspec.json.Decoder(kind, strict=False), prompts)


def _read_as(
    decoder: msgspec.json.Decoder[B], prompts: Callable[[B], tuple[_Prompts, int | None]], body: bytes
) -> _Read:
    """Decode `body` and take what the request needs from it.

    Raw fields are skimmed at first, so that what is wrong in them comes to light only when they are looked into.
    """
    fields = decode(body, decoder)
    try:
        return fields, *prompts(fields)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = decode(respell(body), decoder)
        return fields, *prompts(fields)


_READERS: dict[str, Callable[[bytes], _Read]] = {
    RequestKind.COMPLETIONS.value: _read(_Completions, _completions),
    RequestKind.CHAT.value: _read(_Chat, _chat),
    RequestKind.RESPONSES.value: _read(_Responses, _responses),
    RequestKind.EMBEDDINGS.value: _read(_Embeddings, _embeddings),
    RequestKind.MESSAGES.value: _read(_Messages, _messages),
}
"""By value: hashing a member of an enumeration, and `value` itself, are Python calls before 3.12."""

_OTHER = RequestKind.OTHER
"""By a name of the module: before Python 3.12 looking up a member takes five times as long as any other attribute."""


def _whole(kind: RequestKind, body: bytes) -> tuple[RequestKind, _Read | None]:
    """Read a complete body; OTHER: find out the kind first."""
    if kind is _OTHER:
        try:
            kind = kind_of_body(body)
        except InvalidRequestError:
            return kind, None  # it may be no inference at all
    return kind, _READERS[kind._value_](body) if kind is not _OTHER else None


def _part(kind: RequestKind, body: bytes) -> tuple[RequestKind, _Read | None]:
    """Read what was seen of a body that was cut."""
    try:
        seen = salvage(body)
    except InvalidRequestError:
        if kind is RequestKind.OTHER:
            return kind, None
        raise
    try:
        return _whole(kind, seen)
    except InvalidRequestError:
        return kind, None  # of wrong types as far as it was seen: the engine sees all of it and judges


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

    `complete` is False for a body that was cut at some byte: the prompts are then those of the part that was seen, and
    nothing of it is refused but what no continuation could make JSON. Without a `path` only wrong types are refused,
    in a body whose fields name a known API. `session_key` falls back to the body's user;
    `subset`, `request_id` and `explain` are passed on. Compressed and multipart bodies are not looked into.
    Raises InvalidRequestError: message and `param` name the field. About 6 us for 1 kB, 1 us more per kB.
    """
    kind = kind_of_path(path)
    read: _Read | None = None
    if (kind is not _OTHER or not path) and not _opaque(content_type, content_encoding):
        try:
            kind, read = _whole(kind, body) if complete else _part(kind, body)
        except RecursionError as error:
            raise too_deep(body) from error
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
    user = fields.user or ""
    return InferenceRequest(
        kind,
        fields.model or "",
        prompts if complete or fields.model else (),
        fields.cache_salt or "",
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
