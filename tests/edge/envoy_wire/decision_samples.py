"""A decision and its parts, for the tests of pages, log and metrics."""

from __future__ import annotations

from typing import Any

from extproc.types import Candidate, Decision, Endpoint, EndpointSnapshot, RequestKind

A = Endpoint("10.0.0.1", 8000, "gpu-1")
B = Endpoint("10.0.0.2", 8000, "gpu-2")
FIRST = Candidate(A.id, 4.5, (0.5, 1.0), 200, 3, 1.0, 0.25, 0.5)
SECOND = Candidate(B.id, 2.0, (0.0, 1.0), 0, 0, None, None, None)


def decision(**changes: Any) -> Decision:
    """Make a decision for A, with B as the other candidate."""
    fields: dict[str, Any] = {
        "id": "0123456789abcdef",
        "endpoint": A,
        "fallbacks": (B,),
        "strategy": "weighted",
        "scorers": (("prefix", 3.0), ("queue", 2.0)),
        "candidates": (FIRST, SECOND),
        "chosen": EndpointSnapshot(A, 9.5, waiting=1.0, kv_cache_usage=0.25, in_flight=3),
        "filtered": (("10.0.0.3:8000", "health"),),
        "note": "longest prefix",
        "kind": RequestKind.CHAT,
        "model": "llama",
        "prompt_bytes": 400,
        "matched_bytes": 200,
        "prompt_tokens": 100,
        "predicted_cached_tokens": 50,
        "decided_at": 10.0,
        "request_id": "req-1",
    }
    return Decision(**{**fields, **changes})
