"""From the bytes of a request body to an `InferenceRequest`, and from a response to the engine's `Usage`.

Everything that knows the OpenAI and Anthropic APIs is here: which path belongs to which API, which fields are read, and
the canonical form of a prompt. What is done with the prompt (blocks, matching, scores) is in `prefix` and `routing`;
headers and body chunks are in `protocol`.
"""

from extproc.request.names import bounded
from extproc.request.parse import parse
from extproc.request.usage import UsageReader

__all__ = ["UsageReader", "bounded", "parse"]
