"""Which API a request speaks: by its path, or by its fields where the gateway sends no path.

Reading the body is left to `parse` and `canonical`.
Sources: the OpenAI and Anthropic API references; vLLM vllm/entrypoints/openai/api_server.py for the paths an engine
serves; NGINX Gateway Fabric sends no pseudo-headers, hence no path.
"""

from __future__ import annotations

import re

import msgspec

from extproc.request.decode import decode, given
from extproc.types import RequestKind

__all__ = ["kind_of_body", "kind_of_path"]

_LAST_SEGMENT = {
    "completions": RequestKind.COMPLETIONS,
    "responses": RequestKind.RESPONSES,
    "embeddings": RequestKind.EMBEDDINGS,
    "messages": RequestKind.MESSAGES,
}
_USUAL = {f"/v1/{last}": kind for last, kind in _LAST_SEGMENT.items()} | {"/v1/chat/completions": RequestKind.CHAT}
"""The paths of nearly all requests, which need not be split."""


def kind_of_path(path: str) -> RequestKind:
    """Return the API behind `path`; OTHER for every path that is not known.

    The query is ignored, and so are a trailing slash and everything before the API's own segments (`/openai/v1/`,
    Azure's `/openai/deployments/NAME/`). `/messages` counts only below `/v1`, because OpenAI's threads end in it, too.
    """
    usual = _USUAL.get(path)
    if usual is not None:
        return usual
    path = path.partition("?")[0].rstrip("/")
    parent, _, last = path.rpartition("/")
    kind = _LAST_SEGMENT.get(last, RequestKind.OTHER)
    if kind is RequestKind.COMPLETIONS and parent.endswith("/chat"):
        return RequestKind.CHAT
    if kind is RequestKind.MESSAGES and not parent.endswith("/v1"):
        return RequestKind.OTHER
    return kind


class _Fields(msgspec.Struct, gc=False):
    """The fields by which an API is recognised, undecoded; an absent field is the empty Raw."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    stop_sequences: msgspec.Raw = msgspec.Raw()
    encoding_format: msgspec.Raw = msgspec.Raw()
    dimensions: msgspec.Raw = msgspec.Raw()


_PLAIN_LIST = re.compile(rb"\[\s*[^\s{\]]")
"""A list whose first element is text, a token id or a list: the Responses API has objects."""

_FIELDS: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)


def kind_of_body(body: bytes) -> RequestKind:
    """Guess the API from the fields of `body`, which must be a JSON object; OTHER if none fits.

    Chat and Anthropic messages, and responses and embeddings, can look alike; then the more frequent one is returned,
    which is harmless: the same body always gives the same answer, hence the same prompt.
    Raises InvalidRequestError if the body is not a JSON object. Costs one pass over the body.
    """
    fields = decode(body, _FIELDS)
    if given(fields.messages):
        if given(fields.system) or given(fields.stop_sequences):
            return RequestKind.MESSAGES
        return RequestKind.CHAT
    if given(fields.input):
        if _PLAIN_LIST.match(fields.input) or given(fields.encoding_format) or given(fields.dimensions):
            return RequestKind.EMBEDDINGS
        return RequestKind.RESPONSES
    if given(fields.prompt) or given(fields.prompt_embeds):
        return RequestKind.COMPLETIONS
    return RequestKind.OTHER
