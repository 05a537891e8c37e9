"""Defines the Prometheus metrics, and counts events in them.

Every family is defined here, or in `collectors` where it is read on each scrape; `docs/metrics.md` is generated from the
definitions, and a test compares them. Label sets are bounded: endpoints of the pool (the series of one that leaves are
removed, later events count as `gone`), models that an endpoint is known to serve (others count as `other`), and enums. Of
a request only the model becomes a label. `instruments` keeps the values, `pages` serves them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from extproc.config.schema import ENDPOINT_SOURCES
from extproc.edge.observability.collectors import Collectors, CollectorSources
from extproc.edge.observability.instruments import Instruments
from extproc.edge.process.listen import DROP_REASONS, LISTENERS, PortObserver
from extproc.errors import RequestError
from extproc.protocol.interfaces import Observer, StreamEnd
from extproc.types import Decision, Finished, Outcome

__all__ = ["GONE", "OTHER", "CollectorSources", "Telemetry"]

GONE: Final = "gone"
"""Label of an endpoint that has left the pool."""
OTHER: Final = "other"
"""Label of a model that no endpoint is known to serve."""

_DURATION_BOUNDS: Final = (
    *(float(f"{base}e{exponent}") for exponent in range(-5, 0) for base in (1, 2.5, 5)),
    1.0,
)
"""In seconds."""
_SCRAPE_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SHARE_BOUNDS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_ERROR_BOUNDS: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


_EXPOSED_OUTCOMES: Final = ("ok", "server_error", "connect_failure", "reset", "timeout")
"""Series of each endpoint that exist from the start, because alerts compare them; others begin with their first request."""
_PLACES: Final = (
    *(
        "decide",
        "explanation",
        "splice",
        "access_log_connected",
        "withdraw",
        "response_started",
        "response_body",
        "ended",
    ),
    *("stream", "access_log", "timer", "event loop"),
)
"""Label values of extproc_internal_errors_total."""


def _refusals(error: type[RequestError]) -> set[type[RequestError]]:
    """Return an error class and all its subclasses."""
    return {error}.union(*map(_refusals, error.__subclasses__()))


class Telemetry(Observer, PortObserver):
    """All metrics of one picker, in a registry of its own.

    Methods are called on the event loop's thread, once per event.
    """

    def __init__(
        self, sources: CollectorSources | None = None, *, wall_clock: Callable[[], float] | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self.instruments = Instruments(self.registry)
        self._wall_clock = wall_clock or (lambda: time.time_ns() / 1e9)
        self._endpoints: frozenset[str] = frozenset()
        self._strategy = ""
        self._models: frozenset[str] = frozenset()
        self._define_decisions()
        self._define_wire()
        self._define_maintenance()
        self._expose_from_the_start()
        self._collectors = Collectors(self.instruments, sources or CollectorSources(), lambda: len(self._endpoints))
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def connect(self, sources: CollectorSources) -> None:
        """Name the sources of the values that are read when somebody scrapes (the router exists only after us)."""
        self._collectors.sources = sources

    # Allowed label values

    def set_endpoints(self, endpoint_ids: Iterable[str], strategy: str = "") -> None:
        """Set the endpoints of the pool and the strategy that chooses them; series of others are removed.

        Decisions and failed requests of each are exposed from now on, starting with 0.
        """
        known = self._endpoints if strategy == self._strategy else frozenset()
        self._endpoints, self._strategy = frozenset(endpoint_ids), strategy
        allowed = self._endpoints | {GONE}
        for counter in self._by_endpoint:
            counter.keep(0, allowed)
        if strategy:
            for endpoint_id in self._endpoints - known:
                self._decisions.begin(endpoint_id, strategy)
                for outcome in _EXPOSED_OUTCOMES:
                    self._requests.begin(endpoint_id, strategy, outcome)

    def set_models(self, models: Iterable[str]) -> None:
        """Set the models and adapters that endpoints are known to serve; series of others are removed."""
        self._models = frozenset(models)
        self._model_decisions.keep(0, self._models | {OTHER})

    # Requests

    def decided(self, decision: Decision, duration_s: float, headers: Mapping[str, str]) -> None:  # noqa: ARG002 - the observer's signature
        """Count one decision, its duration and the share of the prompt that is predicted as cached."""
        endpoint, model = decision.endpoint.id, decision.model
        if endpoint not in self._endpoints:
            endpoint = GONE
        if model not in self._models:
            model = OTHER
        self._decisions.values[endpoint, decision.strategy] += 1
        self._model_decisions.values[model, decision.kind._value_] += 1  # `value` is a Python call
        self._decision_duration.observe(duration_s)
        if decision.prompt_tokens > 0:
            self._predicted_share.observe(decision.predicted_cached_tokens / decision.prompt_tokens)

    def refused(self, error: RequestError, headers: Mapping[str, str]) -> None:  # noqa: ARG002 - as above
        """Count an answer of our own."""
        self._immediate.add((str(error.status), error.reason))

    def ended(self, finished: Finished) -> None:
        """Count the end of one request, and compare what the engine reports with what we predicted.

        Outcome and tokens are counted for the endpoint that answered, where it is not the chosen one.
        """
        decision, outcome, usage, served_by = finished.decision, finished.outcome, finished.usage, finished.served_by
        if outcome is Outcome.LEASE_EXPIRED:
            self._leases.add(())
        endpoint = decision.endpoint.id
        if endpoint not in self._endpoints:
            endpoint = GONE
        if served_by:
            self._rerouted.add((endpoint,))
            endpoint = self._known(served_by)
        self._requests.values[endpoint, decision.strategy, outcome._value_] += 1
        if usage is None:
            return
        if usage.completion_tokens is not None:
            self._completion_tokens.add((endpoint,), usage.completion_tokens)
        if usage.prompt_tokens is None:
            return
        self._prompt_tokens.add((endpoint,), usage.prompt_tokens)
        if served_by or usage.cached_tokens is None or usage.prompt_tokens <= 0:
            return
        predicted = min(decision.predicted_cached_tokens, usage.prompt_tokens)
        self._compared_tokens.add((endpoint,), usage.prompt_tokens)
        self._cached_tokens.add((endpoint,), usage.cached_tokens)
        self._predicted_tokens.add((endpoint,), predicted)
        self._prediction_error.observe(abs(predicted - usage.cached_tokens) / usage.prompt_tokens)

    # The wire

    def stream_opened(self) -> None:
        """Count an ext_proc stream that began."""
        self._streams_open.value += 1

    def stream_ended(self, how: str) -> None:
        """Count a stream that ended."""
        self._streams_open.value -= 1
        self._streams_ended.add((how,))

    def protocol_error(self, kind: str) -> None:
        """Count an illegal message of the gateway."""
        self._protocol_errors.add((kind,))

    def deadline_passed(self) -> None:
        """Count a decision that was not made in time."""
        self._deadlines.add(())

    def late_response(self, kind: str) -> None:
        """Count a response message on a stream that had ended early."""
        self._late_responses.add((kind,))

    def body_cut(self, why: str) -> None:
        """Count a decision on a part of the body."""
        self._bodies_cut.add((why,))

    def internal_error(self, where: str) -> None:
        """Count a defect of ours that was caught."""
        self._internal_errors.add((where,))

    # Ports: PortObserver.

    def accept_failed(self, listener: str) -> None:
        """Count a connection that could not be accepted."""
        self._accept_failures.add((listener,))

    def connection_dropped(self, listener: str, reason: str) -> None:
        """Count a connection that was closed to keep a port within its bounds."""
        self._dropped.add((listener, reason))

    def access_log_streams(self, count: int) -> None:
        """Set the number of connected access log streams."""
        self._log_streams.value = count

    def access_log_entry(self, kind: str) -> None:
        """Count an access log entry."""
        self._log_entries.add((kind,))

    # Scrapes, discovery, configuration

    def scraped(self, duration_s: float) -> None:
        """Count a successful scrape."""
        self._scrape_duration.observe(duration_s)

    def scrape_failed(self, endpoint_id: str, reason: str) -> None:
        """Count a failed scrape."""
        self._scrape_errors.add((self._known(endpoint_id), reason))

    def discovery_failed(self, source: str) -> None:
        """Count a failed look-up of endpoints; `source` is its key of `pool`: `endpoints`, `file` or `dns`."""
        self._discovery_failures.add((source,))

    def config_loaded(self, generation: int) -> None:
        """Record a configuration that has taken effect; the first is generation 1."""
        self._reloads.add(("success",))
        self._generation.value = generation
        self._reload_ok.value = 1
        self._reload_at.value = self._wall_clock()

    def config_rejected(self) -> None:
        """Record a configuration that was refused; the one before stays in force."""
        self._reloads.add(("failure",))
        self._reload_ok.value = 0

    def _known(self, endpoint_id: str) -> str:
        return endpoint_id if endpoint_id in self._endpoints else GONE

    def _define_decisions(self) -> None:
        make = self.instruments
        self._decisions = make.counter(
            "extproc_decisions_total", "Decisions, by chosen endpoint and strategy.", "endpoint", "strategy"
        )
        self._model_decisions = make.counter(
            "extproc_model_decisions_total",
            "Decisions, by model and API. A model that no endpoint is known to serve counts as `other`.",
            "model",
            "kind",
        )
        self._decision_duration = make.histogram(
            "extproc_decision_duration_seconds",
            "Time from the end of the request body to the decision.",
            _DURATION_BOUNDS,
        )
        self._predicted_share = make.histogram(
            "extproc_predicted_cached_ratio",
            "Share of a request's prompt tokens that were predicted to be in the chosen endpoint's cache.",
            _SHARE_BOUNDS,
        )
        self._requests = make.counter(
            "extproc_requests_total",
            "Requests that ended, by the endpoint that answered (else the chosen one), strategy and outcome.",
            "endpoint",
            "strategy",
            "outcome",
        )
        self._rerouted = make.counter(
            "extproc_rerouted_requests_total",
            "Requests that another endpoint answered because the chosen one could not be reached or answered 503; `endpoint` is the chosen one.",
            "endpoint",
        )
        self._prompt_tokens = make.counter(
            "extproc_prompt_tokens_total", "Prompt tokens of finished requests, as engines report them.", "endpoint"
        )
        self._completion_tokens = make.counter(
            "extproc_completion_tokens_total",
            "Generated tokens of finished requests, as engines report them.",
            "endpoint",
        )
        self._cached_tokens = make.counter(
            "extproc_reported_cached_tokens_total",
            "Prompt tokens that engines report as found in their cache.",
            "endpoint",
        )
        self._predicted_tokens = make.counter(
            "extproc_predicted_cached_tokens_total",
            "Prompt tokens predicted as cached, of the same requests as extproc_reported_cached_tokens_total.",
            "endpoint",
        )
        self._compared_tokens = make.counter(
            "extproc_compared_prompt_tokens_total",
            "Prompt tokens of the requests for which an engine reported cached tokens.",
            "endpoint",
        )
        self._prediction_error = make.histogram(
            "extproc_cached_prediction_error_ratio",
            "Distance between predicted and reported cached tokens, as a share of the prompt.",
            _ERROR_BOUNDS,
        )
        self._leases = make.counter(
            "extproc_leases_expired_total", "Requests released by lease or estimate because nobody reported their end."
        )

    def _expose_from_the_start(self) -> None:
        """Expose every series whose labels are known, with 0, so that an alert sees the first event of each."""
        for error in _refusals(RequestError):
            self._immediate.begin(str(error.status), error.reason)
        for how in (*(end.value for end in StreamEnd), "refused", "undecided"):
            self._streams_ended.begin(how)
        for why in ("inspect_limit", "budget", "elements"):
            self._bodies_cut.begin(why)
        for place in _PLACES:
            self._internal_errors.begin(place)
        for kind in ("final", "interim", "attempt", "late", "foreign", "uncorrelated", "malformed"):
            self._log_entries.begin(kind)
        for source in ENDPOINT_SOURCES:
            self._discovery_failures.begin(source)
        for result in ("success", "failure"):
            self._reloads.begin(result)
        for listener in LISTENERS:
            self._accept_failures.begin(listener)
            for reason in DROP_REASONS:
                self._dropped.begin(listener, reason)

    def _define_wire(self) -> None:
        make = self.instruments
        self._streams_open = make.gauge("extproc_streams_open", "ext_proc streams that are open.")
        self._streams_ended = make.counter("extproc_streams_ended_total", "ext_proc streams that ended, by how.", "how")
        self._immediate = make.counter(
            "extproc_immediate_responses_total",
            "Requests answered by the picker instead of an endpoint.",
            "status",
            "reason",
        )
        self._protocol_errors = make.counter(
            "extproc_protocol_errors_total",
            "What a peer sent against ext_proc, gRPC, HTTP/2 or TLS, or beyond a bound; `kind` says which.",
            "kind",
        )
        self._deadlines = make.counter(
            "extproc_decision_deadlines_passed_total", "Decisions that were not made within `server.decision_deadline`."
        )
        self._late_responses = make.counter(
            "extproc_late_responses_total",
            "Streams that were ended with their request (`server.response_phase`) and on which a response message arrived later: that response may be damaged, and no further stream of this gateway is ended early.",
            "kind",
        )
        self._bodies_cut = make.counter(
            "extproc_bodies_cut_total",
            "Decisions on a part of the body: longer than `server.max_inspect_bytes` (inspect_limit), beyond `server.max_buffered_bytes` (budget), or of more elements than are read in one go (elements).",
            "why",
        )
        self._internal_errors = make.counter(
            "extproc_internal_errors_total",
            "Defects of the picker that were caught; the log has the traceback.",
            "where",
        )
        self._accept_failures = make.counter(
            "extproc_accept_failures_total",
            "Connections that could not be accepted because file descriptors or memory ran out, by port; transport `grpcio` does not tell of its own.",
            "listener",
        )
        self._dropped = make.counter(
            "extproc_connections_dropped_total",
            "Connections closed to keep a port within its bounds: the newest where all places are taken (full), one that says nothing, for a new one (crowded), or because it said nothing for too long (silent). Transport `grpcio` does not tell of its own.",
            "listener",
            "reason",
        )
        self._log_streams = make.gauge("extproc_access_log_streams", "Envoy access log streams that are connected.")
        self._log_entries = make.counter(
            "extproc_access_log_entries_total",
            "Entries received from Envoy's access log, by kind: each counts once as `final`, `interim`, `attempt`, `uncorrelated` or `malformed`, and a final one whose request is not open once more as `late` or `foreign`.",
            "kind",
        )

    def _define_maintenance(self) -> None:
        make = self.instruments
        self._scrape_duration = make.histogram(
            "extproc_scrape_duration_seconds", "Time one successful scrape of an endpoint took.", _SCRAPE_BOUNDS
        )
        self._scrape_errors = make.counter(
            "extproc_scrape_errors_total", "Scrapes that failed, by endpoint and reason.", "endpoint", "reason"
        )
        self._discovery_failures = make.counter(
            "extproc_discovery_failures_total", "Look-ups of endpoints that failed; the last endpoints stay.", "source"
        )
        self._generation = make.gauge(
            "extproc_config_generation", "Number of the configuration in force; grows with each reload."
        )
        self._reload_ok = make.gauge(
            "extproc_config_last_reload_successful",
            "1: the last configuration that was read is in force; 0: it was refused.",
            1,
        )
        self._reload_at = make.gauge(
            "extproc_config_last_reload_success_timestamp_seconds",
            "Unix time at which a configuration last took effect.",
        )
        self._reloads = make.counter("extproc_config_reloads_total", "Configurations read, by result.", "result")
        self._by_endpoint = (
            self._decisions,
            self._requests,
            self._rerouted,
            self._prompt_tokens,
            self._completion_tokens,
            self._cached_tokens,
            self._predicted_tokens,
            self._compared_tokens,
            self._scrape_errors,
        )
