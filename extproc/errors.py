"""The exception tree, and which HTTP answer each request error stands for.

Decides the status, the OpenAI error type, the drop reason (a bounded set: it becomes a metric label and a response
header) and `Retry-After` of every refusal. How an answer is put on the wire is `protocol`'s concern.
Sources: gateway-api-inference-extension docs/proposals/004 (503 for no endpoint, 429 for shedding); the OpenAI API's
error object for the JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "ConfigError",
    "ConfigProblem",
    "DecisionTimeoutError",
    "ExtprocError",
    "InternalError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "NoEligibleEndpointError",
    "NoEndpointError",
    "OverloadedError",
    "ProtocolError",
    "RequestError",
    "SubsetEmptyError",
]


class ExtprocError(Exception):
    """Base of everything this package raises on purpose."""


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing wrong in a configuration: where it is, what is wrong, what would be right."""

    path: str
    """Place in the document, for example `routing.weights.prefix`; empty for the document itself."""
    message: str
    """What was found there and why it cannot be used."""
    remedy: str = ""
    """What to write instead."""
    line: int = 0
    """Line of the document, from 1; 0 where there is none (a command-line flag)."""

    def __str__(self) -> str:
        """Render as `line N: path: message; remedy`."""
        text = f"{self.path}: {self.message}" if self.path else self.message
        text = f"line {self.line}: {text}" if self.line else text
        return f"{text}; {self.remedy}" if self.remedy else text


class ConfigError(ExtprocError):
    """A configuration that cannot be used; carries every problem found, in document order."""

    def __init__(self, problems: tuple[ConfigProblem, ...], *, source: str = "") -> None:
        self.problems = problems
        self.source = source
        prefix = f"{source}: " if source else ""
        super().__init__("\n".join(f"{prefix}{problem}" for problem in problems))


class ProtocolError(ExtprocError):
    """The ext_proc peer sent what its own protocol forbids (Envoy's mistake, not ours, not the client's)."""


class RequestError(ExtprocError):
    """A request that gets an answer from us instead of an endpoint.

    `message` is shown to the client; `param` names the offending field of the body, if there is one.
    """

    status: ClassVar[int] = 500
    reason: ClassVar[str] = "internal_error"
    """Drop reason: metric label and value of the drop-reason response header."""
    error_type: ClassVar[str] = "internal_error"
    """`error.type` of the OpenAI error object."""
    retry_after_s: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    """The body is not a JSON object, or a field we read has a wrong type."""

    status = 400
    reason = "invalid_request"
    error_type = "invalid_request_error"


class ModelNotFoundError(RequestError):
    """Every endpoint's models are known, and none has this one (only with `routing.unknown_model: reject`)."""

    status = 404
    reason = "model_not_found"
    error_type = "invalid_request_error"


class OverloadedError(RequestError):
    """Every otherwise eligible endpoint is beyond the configured limits."""

    status = 429
    reason = "overloaded"
    error_type = "rate_limit_error"
    retry_after_s = 1


class NoEndpointError(RequestError):
    """The pool has no endpoint at all."""

    status = 503
    reason = "no_endpoint"
    error_type = "service_unavailable"
    retry_after_s = 5


class NoEligibleEndpointError(RequestError):
    """The pool has endpoints, but the filters left none."""

    status = 503
    reason = "no_eligible_endpoint"
    error_type = "service_unavailable"
    retry_after_s = 5


class SubsetEmptyError(NoEligibleEndpointError):
    """The gateway's subset hint is empty or names no endpoint of this pool."""

    reason = "subset_empty"


class DecisionTimeoutError(RequestError):
    """The decision was not made before our own deadline."""

    status = 503
    reason = "decision_timeout"
    error_type = "service_unavailable"
    retry_after_s = 1


class InternalError(RequestError):
    """A defect of ours; the log has the traceback."""
