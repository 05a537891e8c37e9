"""extproc: an endpoint picker for LLM inference behind Envoy.

The names below are the library: a `Router` that does no I/O, and what goes in and comes out of it. They are imported
when they are first used, so that `import extproc` costs the command line nothing. The servers, scraping and discovery
live in `extproc.edge`; `extproc.app` puts them together.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extproc.config.load import load as load_config
    from extproc.config.schema import Config
    from extproc.errors import ConfigError, ExtprocError, RequestError
    from extproc.request.parse import parse as parse_request
    from extproc.router import Finished, Router
    from extproc.routing.explain import sentence as describe
    from extproc.types import (
        Decision,
        Endpoint,
        EndpointMetrics,
        EndpointSnapshot,
        InferenceRequest,
        Outcome,
        RequestKind,
        Usage,
    )

__all__ = [
    "Config",
    "ConfigError",
    "Decision",
    "Endpoint",
    "EndpointMetrics",
    "EndpointSnapshot",
    "ExtprocError",
    "Finished",
    "InferenceRequest",
    "Outcome",
    "RequestError",
    "RequestKind",
    "Router",
    "Usage",
    "describe",
    "load_config",
    "parse_request",
]

__version__ = "0.1.0"

if not TYPE_CHECKING:  # a type checker would take any name to be here
    _HOMES = {
        "Config": "config.schema",
        "ConfigError": "errors",
        "ExtprocError": "errors",
        "Finished": "router",
        "RequestError": "errors",
        "Router": "router",
        "describe": "routing.explain:sentence",
        "load_config": "config.load:load",
        "parse_request": "request.parse:parse",
    }

    def __getattr__(name: str) -> Any:
        """Import one of the names in `__all__`."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module, _, attribute = _HOMES.get(name, "types").partition(":")
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), attribute or name)
        return value

    def __dir__() -> list[str]:
        """List the names that have not been imported yet, too."""
        return sorted({*globals(), *__all__})
