"""The table of refusals, and how configuration problems are worded."""

from __future__ import annotations

import re

import pytest

from extproc import errors
from extproc.errors import ConfigError, ConfigProblem, ExtprocError, InternalError, InvalidRequestError, RequestError


def refusals(base: type[RequestError] = RequestError) -> list[type[RequestError]]:
    """The tree of request errors, its root included."""
    return [base, *(found for child in base.__subclasses__() for found in refusals(child))]


def test_the_table_is_complete() -> None:
    """Each refusal's HTTP answer; whoever adds one decides these here, too."""
    table = {kind.__name__: (kind.status, kind.reason, kind.error_type, kind.retry_after_s) for kind in refusals()}
    assert table == {
        "RequestError": (500, "internal_error", "internal_error", None),
        "InternalError": (500, "internal_error", "internal_error", None),
        "InvalidRequestError": (400, "invalid_request", "invalid_request_error", None),
        "ModelNotFoundError": (404, "model_not_found", "invalid_request_error", None),
        "OverloadedError": (429, "overloaded", "rate_limit_error", 1),
        "NoEndpointError": (503, "no_endpoint", "service_unavailable", 5),
        "NoEligibleEndpointError": (503, "no_eligible_endpoint", "service_unavailable", 5),
        "SubsetEmptyError": (503, "subset_empty", "service_unavailable", 5),
        "DecisionTimeoutError": (503, "decision_timeout", "service_unavailable", 1),
    }


@pytest.mark.parametrize("kind", refusals())
def test_every_refusal_can_go_on_the_wire(kind: type[RequestError]) -> None:
    assert re.fullmatch(r"[a-z_]+", kind.reason), "a metric label and a header value"
    assert (kind.retry_after_s is not None) == (kind.status in {429, 503})
    error = kind("what is wrong", param="messages[0]")
    assert (str(error), error.message, error.param) == ("what is wrong", "what is wrong", "messages[0]")
    assert kind("x").param is None


def test_everything_raised_on_purpose_has_one_base() -> None:
    for name in errors.__all__:
        found = getattr(errors, name)
        if isinstance(found, type) and issubclass(found, BaseException):
            assert issubclass(found, ExtprocError)
    assert not issubclass(InternalError, InvalidRequestError)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (ConfigProblem("", "is empty"), "is empty"),
        (ConfigProblem("a.b", "is wrong"), "a.b: is wrong"),
        (ConfigProblem("a.b", "is wrong", "write 3"), "a.b: is wrong; write 3"),
        (ConfigProblem("a.b", "is wrong", "write 3", line=7), "line 7: a.b: is wrong; write 3"),
    ],
)
def test_a_problem_in_words(problem: ConfigProblem, text: str) -> None:
    assert str(problem) == text
    assert str(ConfigError((problem, problem))) == f"{text}\n{text}"
    error = ConfigError((problem,), source="c.yaml")
    assert str(error) == f"c.yaml: {text}"
    assert (error.problems, error.source) == ((problem,), "c.yaml")
