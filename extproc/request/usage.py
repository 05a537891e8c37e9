"""Read the token counts that an engine reports from a response, whole or streamed, without keeping the response.

Used where the gateway sends the response body to the picker. Fields: OpenAI completions and chat (`prompt_tokens`,
`completion_tokens`, `prompt_tokens_details.cached_tokens`), Responses (`input_tokens`, `output_tokens`,
`input_tokens_details.cached_tokens`), Anthropic (`input_tokens` without, `cache_read_input_tokens` and
`cache_creation_input_tokens` with the cache; the sum is the prompt). Sources: the two API references; vLLM
vllm/entrypoints/anthropic/serving.py (no cache fields: `input_tokens` is the whole prompt).
"""

from __future__ import annotations

import json
import re
from typing import Any

from extproc.types import Usage

__all__ = ["UsageReader"]

_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
"""Occurs in JSON only as a member: inside a string the quotes would be escaped."""

_MAX_OBJECT_BYTES = 4096
"""A usage object is a few hundred bytes long."""

_MAX_HELD_BYTES = 65_536
"""How much of an unfinished line, or of the end of a JSON response, is kept; `usage` is near the end."""

_DECODER = json.JSONDecoder()


class UsageReader:
    """Collects `usage` from the chunks of one response body, in any division; keeps at most 128 KiB.

    `content_type` is the response's header: `text/event-stream` is read as events, all else as one JSON document.
    """

    __slots__ = ("_first", "_held", "_last", "_streamed")

    def __init__(self, content_type: str) -> None:
        self._streamed = "event-stream" in content_type.lower()
        self._held = bytearray()
        self._first = b""
        self._last = b""

    def feed(self, chunk: bytes) -> None:
        """Process the next bytes of the body. A chunk of complete events without usage costs one search through it."""
        if not self._streamed:
            self._hold(chunk)
            return
        if self._held or not chunk.endswith(b"\n"):
            self._hold(chunk)
            end = self._held.rfind(b"\n") + 1
            if not end:
                return
            chunk = bytes(self._held[:end])
            del self._held[:end]
        if b'"usage"' in chunk:
            self._note(chunk)

    def result(self) -> Usage | None:
        """Return what was reported so far; None if nothing was. May be called again after more chunks."""
        if self._held:
            self._note(bytes(self._held))
        usage = _parsed(self._first) if self._streamed else {}
        # Anthropic reports the input at the start of a stream and the output at its end; others report both each time.
        usage.update({key: value for key, value in _parsed(self._last).items() if value is not None})
        return _usage(usage)

    def _hold(self, chunk: bytes) -> None:
        self._held += chunk
        if len(self._held) > 2 * _MAX_HELD_BYTES:
            del self._held[:-_MAX_HELD_BYTES]

    def _note(self, text: bytes) -> None:
        """Remember the first usage object of the response and the last so far, undecoded."""
        for match in _USAGE.finditer(text):
            found = text[match.end() : match.end() + _MAX_OBJECT_BYTES]
            if not self._first:
                self._first = found
            self._last = found


def _parsed(text: bytes) -> dict[str, Any]:
    """Decode the JSON object at the start of `text`; empty if there is none."""
    try:
        value, _ = _DECODER.raw_decode(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    assert isinstance(value, dict)
    return value


def _usage(raw: dict[str, Any]) -> Usage | None:
    read, created = _count(raw.get("cache_read_input_tokens")), _count(raw.get("cache_creation_input_tokens"))
    prompt = _count(raw.get("prompt_tokens"))
    if prompt is None:
        prompt = _count(raw.get("input_tokens"))
        if prompt is not None:
            prompt += (read or 0) + (created or 0)
    completion = _count(raw.get("completion_tokens"))
    if completion is None:
        completion = _count(raw.get("output_tokens"))
    cached = _cached(raw.get("prompt_tokens_details"))
    if cached is None:
        cached = _cached(raw.get("input_tokens_details"))
    if cached is None:
        cached = read
    if prompt is None and completion is None and cached is None:
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def _cached(details: Any) -> int | None:
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
