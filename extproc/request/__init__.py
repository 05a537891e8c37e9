"""From the bytes of a request body to an `InferenceRequest`, and from a response to the engine's `Usage`.

Here lives everything that knows the OpenAI and Anthropic dialects: which path is which API, which fields matter and how
a prompt is spelled canonically. What becomes of the prompt (blocks, matching, scores) lives in `prefix` and `routing`;
headers and body chunks belong to `protocol`.
"""

from extproc.request.names import bounded
from extproc.request.parse import parse
from extproc.request.usage import UsageReader

__all__ = ["UsageReader", "bounded", "parse"]
