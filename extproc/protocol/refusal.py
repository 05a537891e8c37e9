"""Turn a request error into the HTTP answer that stands for it.

The JSON is the OpenAI API's error object, which every client library of that API shows its user.
"""

from __future__ import annotations

import json
from typing import Final

from extproc.errors import RequestError
from extproc.protocol.replies import ImmediateReply

__all__ = ["DROP_REASON_HEADER", "refusal"]

DROP_REASON_HEADER: Final = "x-extproc-drop-reason"


def refusal(error: RequestError) -> ImmediateReply:
    """Return the answer: status, JSON body, content type, drop reason and, on 429 and 503, `retry-after`."""
    body = {"message": error.message, "type": error.error_type, "param": error.param, "code": error.reason}
    headers = [("content-type", "application/json"), (DROP_REASON_HEADER, error.reason)]
    if error.retry_after_s is not None:
        headers.append(("retry-after", str(error.retry_after_s)))
    return ImmediateReply(
        status=error.status,
        headers=tuple(headers),
        body=json.dumps({"error": body}).encode(),
        details=f"extproc_{error.reason}",
    )
