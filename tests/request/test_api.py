from __future__ import annotations

import json

import pytest

from extproc.errors import InvalidRequestError
from extproc.request.api import kind_of_body, kind_of_path
from extproc.types import RequestKind


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", RequestKind.COMPLETIONS),
        ("/v1/chat/completions", RequestKind.CHAT),
        ("/v1/responses", RequestKind.RESPONSES),
        ("/v1/embeddings", RequestKind.EMBEDDINGS),
        ("/v1/messages", RequestKind.MESSAGES),
        ("/openai/v1/chat/completions", RequestKind.CHAT),
        ("/openai/deployments/gpt/chat/completions?api-version=1/completions", RequestKind.CHAT),
        ("/v1/chat/completions/", RequestKind.CHAT),
        ("/anthropic/v1/messages?beta=true", RequestKind.MESSAGES),
        ("/v1/messages/count_tokens", RequestKind.OTHER),
        ("/v1/threads/t/messages", RequestKind.OTHER),
        ("/v1/responses/r1/cancel", RequestKind.OTHER),
        ("/v1/models", RequestKind.OTHER),
        ("/v1/xcompletions", RequestKind.OTHER),
        ("/?x=/v1/completions", RequestKind.OTHER),
        ("/", RequestKind.OTHER),
        ("", RequestKind.OTHER),
    ],
)
def test_path_tells_the_api(path: str, kind: RequestKind) -> None:
    assert kind_of_path(path) is kind


@pytest.mark.parametrize("name", ["completions", "chat/completions", "responses", "embeddings", "messages"])
def test_the_usual_spelling_is_what_taking_the_path_apart_gives(name: str) -> None:
    assert kind_of_path(f"/v1/{name}") is kind_of_path(f"/v1/{name}?x=1") is not RequestKind.OTHER


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": []}, RequestKind.CHAT),
        ({"messages": [], "system": "s"}, RequestKind.MESSAGES),
        ({"messages": [], "stop_sequences": []}, RequestKind.MESSAGES),
        ({"prompt": "x"}, RequestKind.COMPLETIONS),
        ({"prompt_embeds": "x"}, RequestKind.COMPLETIONS),
        ({"input": "x"}, RequestKind.RESPONSES),
        ({"input": [{"role": "user"}]}, RequestKind.RESPONSES),
        ({"input": "x", "prompt": {"id": "template"}}, RequestKind.RESPONSES),
        ({"input": "x", "dimensions": 3}, RequestKind.EMBEDDINGS),
        ({"input": "x", "encoding_format": "float"}, RequestKind.EMBEDDINGS),
        ({"input": ["x"]}, RequestKind.EMBEDDINGS),
        ({"input": [[1], [2]]}, RequestKind.EMBEDDINGS),
        ({"model": "m"}, RequestKind.OTHER),
    ],
)
def test_fields_tell_the_api_where_the_path_is_missing(body: object, kind: RequestKind) -> None:
    assert kind_of_body(json.dumps(body).encode()) is kind


def test_body_must_be_an_object() -> None:
    with pytest.raises(InvalidRequestError):
        kind_of_body(b"[]")
