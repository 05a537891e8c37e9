"""The comments in the rendered YAML: why each choice was made, what it costs, what to change.

Only prose, keyed by place (see `commented_yaml`). Figures were measured with Envoy 1.40; each has a test in
`test_direct_with_envoy.py` or is in `envoy/README.md`.
"""

from extproc.envoy_config.options import BodyMode, EnvoyOptions, Profile, Retries

_ALWAYS = {
    "admin": "Admin interface: whoever reaches it can read everything and stop Envoy. Keep it on loopback.",
    "overload_manager": "Envoy refuses connections above this instead of running out of file descriptors (`ulimit -n`).",
    "listeners/http/address": "Loopback, so that a first try is not open to the network. To serve others: `--listen-host 0.0.0.0`, "
    "with TLS and authentication in front or added here; Envoy checks no API key.",
    "early_header_mutation_extensions": "Headers that steer, taken away from clients before anything can obey them: where a "
    "request goes (with a picker that is away or declines, Envoy would follow a client to any address it names), and the "
    "retries and timeouts of the router. `request_headers_to_remove` on the route would be too late. `x-extproc-explain` is not "
    "among them: clients may ask for an explanation.",
    "request_headers_to_remove": "What clients say to a picker is not the engine's business. Our picker removes these headers itself; this "
    "is for requests that go on without it.",
    "message_timeout": "How long the picker may take over one message; Envoy's default of 200 ms turns a busy picker into 504s. "
    "In full duplex no such timer runs: there the picker's own deadline is the only one.",
    "status_on_error": "Without the picker: 503 with Retry-After (see local_reply_config), where Envoy's default is an empty 500.",
    "stream_idle_timeout": "Silence allowed on a running request. An engine is silent while a request waits in its queue and is "
    "prefilled; Envoy's default of 5 minutes would cut that with a 504. What this long timeout costs is memory for clients that "
    "vanished without closing, and those are bounded by the connection limit below.",
    "request_timeout": "For the request to arrive as a whole: bounds what a slow upload can hold. The answer may take as long as it likes.",
    "request_headers_timeout": "The same for the headers alone.",
    "use_remote_address": "Envoy is the edge here: it sets x-forwarded-for and replaces a client's x-request-id. "
    "Behind another proxy: false.",
    "local_reply_config": "What Envoy answers itself becomes an error in OpenAI's form. By cause, not by status: the picker's own 503 "
    "and 429 are local replies too and pass as they are.",
    "clusters/picker/circuit_breakers": "Envoy's defaults of 1,024 are soon reached by streams that last minutes, and shedding "
    "load is the picker's task.",
    "clusters/picker/health_checks": "The picker says itself when it is ready; it turns unready before it stops. Found away after two failed "
    "checks (2.5 s measured, hence its `server.drain_delay` of 5 s), found again after 0.5 s. A timeout of 1 s took a picker for dead that was only flooded "
    "(2,000 streams at once). no_traffic_interval: Envoy's default would wait 60 s where there was no traffic yet.",
    "update_merge_window": "Tell the workers at once. By default a change of health reaches them a second late (seen: 503 from a "
    "picker that was back).",
    "clusters/picker/upstream_connection_options": "A host that vanished is noticed after 25 s. By TCP, not by HTTP/2 pings: "
    "gRPC servers take pings without traffic as abuse and close the connection (GOAWAY too_many_pings).",
    "clusters/picker/load_assignment": "The picker (`--picker`; repeat it for several, and requests take turns among those that are ready): serves "
    "ext_proc, the access log and gRPC health on one port.",
    "typed_config/grpc_service/retry_policy": "A picker that refuses the connection, or dies before it has answered, is not "
    "the client's problem: the stream is opened again, at another picker if there is one, else after a pause in which a new process may "
    "have begun to listen. All that was said on it is said again, so nothing is lost or doubled. Price: with no picker at all the 503 "
    "comes after these pauses, 1.2 s at most, instead of at once.",
    "clusters/engines/connect_timeout": "How long an address that does not answer can delay a request, each.",
    "clusters/engines/upstream_connection_options": "A host that vanished while it was silent (queueing, prefilling) is noticed after 25 s.",
    "clusters/picker/typed_extension_protocol_options/envoy.extensions.upstreams.http.v3.HttpProtocolOptions/explicit_http_config/http2_protocol_options": "One stream per request; the picker's own SETTINGS decide. The windows let a "
    "prompt of 1 MiB pass without waiting for a round trip. Control frames: a thousand clients that leave at once are a thousand "
    "resets, at which Envoy would by default give the picker's connection up, and every other request on it.",
    "explicit_http_config/http_protocol_options": "HTTP/1.1, which is what vLLM and SGLang speak.",
}

_PANIC = (
    "Where none is ready, requests go to all of them all the same. A picker that drains is not ready and yet serves, and a new one does so "
    "before a health check has found it: without this (0) the restart of the only picker costs seconds of 503. From the first ready one "
    "on, only those that are ready are asked: of a hundred pickers one is 1 %."
)

_NO_PANIC = (
    "No panic mode: while no picker is ready (away, draining, without endpoints) requests pass it by at once, round robin. The other "
    "profiles say 1: they would rather ask a picker that drains than answer 503."
)

_UPGRADES = (
    "WebSockets (vLLM's /v1/realtime) go to an endpoint chosen by load. Without this Envoy answers 403, as it does where bodies are "
    "buffered: an upgraded connection has no end to wait for. In full duplex every frame passes through the picker."
)

_ENGINES_IDLE = (
    "Shorter than the engines' own: vLLM closes a connection after 5 s of idling (VLLM_HTTP_TIMEOUT_KEEP_ALIVE), and a request "
    "that meets the close is lost (503 UC), for it cannot be repeated safely."
)

_LOGGER = "access_log/envoy.access_loggers.http_grpc"

_ACCESS_LOG = {
    _LOGGER: "Tells the picker how each request ended: code, flags, times, endpoint, and all dynamic "
    "metadata (common_properties.metadata): its own under `extproc`, the endpoint that served under `envoy.lb`, the engine's usage "
    "under `extproc.usage`. Correlate by a decision id in the metadata; x-request-id comes along (request.request_id) but can be "
    "forged where Envoy is not the edge. Entries are lost while the picker is away: it needs a lease.",
    f"{_LOGGER}/typed_config/common_config/buffer_size_bytes": "What waits while the picker is busy, about 1 kB an entry; beyond it Envoy drops entries "
    "(access_logs.grpc_access_log.logs_dropped), and the picker holds their slots until the lease runs out. The default of 16 KiB "
    "loses some when a hundred answers end at once.",
    "access_log_options": "An entry also while a request still runs (access_log_type DownstreamPeriodic): renews the picker's lease.",
    "envoy.filters.http.sse_to_metadata": "The engine's usage (prompt, completion and cached tokens) of a stream, if the client asked for "
    "`stream_options.include_usage` or the engine forces it. Costs up to 1 ms of Envoy's CPU per 100 events (with the next filter) and holds nothing back. "
    "Leave it out to save that, at the price of what the picker learns.",
    "envoy.filters.http.lua": "The same for JSON answers, from their last 4 KiB, while they stream through. Not json_to_metadata: that holds "
    "the whole answer back and turns one above 1 MiB (embeddings, log probabilities) into a 500 (measured).",
    "max_event_size": "A longer event is passed on but not looked into.",
    "response_headers_to_add": "Only there when the picker has set `extproc: {explain: ...}`: without it Envoy adds no header.",
}

_EVERY_LOG = (
    " One for each picker, over a cluster of its own: over the pickers' common one a worker's log goes to one of them, whoever decided, "
    "and the others hold their requests for open. What another one decided is counted (`foreign`) and dropped."
)

_OVERRIDE_HOST = {
    "override_host_sources": "The picker's destination: `ip:port`, or several, in the order of preference. Only as metadata, which no client can "
    "write: Envoy appends the list of every further source, so with the header beside it each address would be tried twice.",
    "selected_host_key": "Who served in the end, for the picker: with a fallback it need not be the first choice.",
    "fallback_policy": "For a request without destination, or when none of its addresses is among the endpoints (silently).",
    "clusters/engines/load_assignment": "The model servers (`--endpoint` or `--config`). The picker can only choose among these.",
}

_RETRY = (
    "Failures before the engine can have seen the request, and once a 503 that the first engine gives before any body (starting, draining, "
    "full): nothing runs twice. Each try takes the next address of the picker's list, then round robin over the endpoints not yet "
    "tried: a dead or restarting endpoint is not the client's problem. Not 429: that is for the client to hear. Not 500, 502 or 504 "
    "either: the engine may have begun."
)

_ATTEMPTS = {
    "http_filters/envoy.filters.http.header_mutation": "Says on each answer, for the retry policy alone, its status and which attempt it was: a policy has one number of retries for all "
    "kinds of failure, and a 503 is worth one. Removed before the client sees it.",
    "clusters/engines/circuit_breakers": "Envoy's defaults of 1,024 are soon reached by streams that last minutes, and shedding load is the picker's task. "
    "Retries have a budget: when all engines answer 503, another attempt helps nobody. Beyond it the engine's 503 goes to the client.",
}

_ATTEMPTS_LOG = (
    "An entry for each attempt that an engine answered with 503 or that could not connect: the request's own entry names the endpoint of "
    "the last attempt alone, and an engine that is starting, draining or full is none that cannot be reached. It brings no metadata; the "
    "picker knows the request by x-request-id."
)

_MARKED = (
    "Retries only where the picker says so, by dynamic metadata `extproc: {retry: true}` in a headers reply that also changes a header "
    "(only then is the route chosen again). Why: with a retry policy on the route, a body streamed through ext_proc and request "
    "trailers, Envoy 1.40 sends the body to the engine twice (envoyproxy/envoy#45470; full duplex: always, streamed: 2 of 180). "
    "A picker that has seen the end of the body knows that there are no trailers."
)

_BUFFER_LIMIT = (
    "A retry sends the body again, so Envoy keeps it until the answer begins; a longer one is not retried. Memory: the bodies of "
    "the requests that wait."
)


def comments_for(profile: Profile, options: EnvoyOptions) -> dict[str, str]:
    """Choose the comments of a profile: place -> text."""
    chosen = _ALWAYS | {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions/common_http_protocol_options/idle_timeout": _ENGINES_IDLE,
        "request_header_mode": _processing(profile),
        "listeners/http/per_connection_buffer_limit_bytes": _listener_buffer(profile),
        "failure_mode_allow": _failure_mode(profile),
        "healthy_panic_threshold": _NO_PANIC if profile.fail_open else _PANIC,
    }
    if profile.request_body is not BodyMode.BUFFERED:
        chosen["upgrade_configs"] = _UPGRADES
    if not profile.full_response:
        chosen |= _ACCESS_LOG
        if len(options.pickers) > 1:
            first = f"{_LOGGER}.1"
            chosen |= {place.replace(_LOGGER, first): chosen.pop(place) for place in _ACCESS_LOG if _LOGGER in place}
            chosen[first] += _EVERY_LOG
    if not profile.original_dst:
        chosen |= _OVERRIDE_HOST | {
            "metadata_options": "What the picker may write (destination; its own namespace), and what it is shown (a subset to choose from).",
        }
        if profile.request_body is not BodyMode.BUFFERED:
            chosen["request_body_buffer_limit"] = _BUFFER_LIMIT
    else:
        chosen["original_dst_lb_config"] = (
            "Envoy dials what the header says, any address at all: hence a client's own header must never get here. Exactly one "
            "`ip:port`; a list is answered with 503."
        )
    chosen |= _routes(profile)
    if profile.retries is not Retries.NEVER:
        chosen |= _ATTEMPTS
        if not profile.full_response:
            chosen["upstream_log"] = _ATTEMPTS_LOG
    if profile.picker_tls:
        chosen["clusters/picker/transport_socket"] = _tls(options)
    return chosen


def head_for(profile: Profile) -> str:
    """Write the head of the file."""
    return (
        f"Envoy for extproc, profile {profile.name}. Rendered by `extproc envoy-config --profile {profile.name}`: "
        f"change the options there, or this copy. Envoy 1.40 or newer.\n\n{profile.summary}\n\n"
        f"  envoy -c {profile.name}.yaml\n"
    )


def _processing(profile: Profile) -> str:
    match profile.request_body:
        case BodyMode.FULL_DUPLEX_STREAMED:
            request = (
                "Full duplex: the body streams to the picker and comes back from it; no size limit, and nothing waits in Envoy. "
                "Trailers must be SEND with it. content-length is dropped: engines see chunked bodies."
            )
        case BodyMode.BUFFERED:
            request = "Buffered: one message with the whole body, and it keeps its content-length."
        case BodyMode.STREAMED:
            request = "Streamed: a message per chunk, each to be answered; the headers are answered before the first."
        case BodyMode.NONE:
            request = "Headers alone: one message per request."
    if profile.full_response:
        return (
            f"{request} The response goes the same way: a message per token, and the picker's death cuts it, even after the 200. A picker "
            "that closes its stream right after the last request-body reply avoids both."
        )
    return f"{request} Of the response the picker sees nothing (SKIP, NONE, SKIP), so a picker that dies cuts no running answer."


def _listener_buffer(profile: Profile) -> str:
    if profile.request_body is BodyMode.BUFFERED:
        return (
            "The largest body, and what one connection may hold in memory: a larger one is refused with 413. Envoy's default of 1 MiB "
            "is about 250,000 tokens, too small for prompts with images. The picker must accept messages of this size "
            "(grpc.max_receive_message_length)."
        )
    return "What one connection may hold back before Envoy stops reading from it; no limit on a body's size."


def _failure_mode(profile: Profile) -> str:
    if profile.fail_open:
        return (
            "Without the picker requests go on, by round robin. Buffered, because in full duplex Envoy answers every request whose body "
            "has begun with an error, whatever is said here, until a health check has found the picker away. Price of failing open: caches are hit by "
            "chance, and nothing sheds load."
        )
    return "Without the picker: 503. Profile fail-open shows the other choice."


def _routes(profile: Profile) -> dict[str, str]:
    timeout = "No limit on how long an answer may take: a stream lasts as long as it generates."
    match profile.retries:
        case Retries.ALWAYS:
            return {"routes/engines/route/retry_policy": _RETRY, "routes/engines/route/timeout": timeout}
        case Retries.NEVER:
            return {
                "routes/engines/route/timeout": f"{timeout} No retries either: they would dial the same address again."
            }
        case Retries.WHEN_PICKER_ALLOWS:
            return {
                "routes/engines-retriable": _MARKED
                + (
                    " What remains here: the headers are answered before the body ends, so only a request without a body can be marked; "
                    "the others get a 503 from a dead endpoint."
                    if profile.request_body is BodyMode.STREAMED
                    else " What remains: a request with trailers (HTTP/2 only; no LLM client known sends them) that meets a dead "
                    "or busy endpoint gets its 503."
                ),
                "routes/engines-retriable/route/retry_policy": _RETRY,
                "routes/engines-retriable/route/timeout": timeout,
                "route_cache_action": "Choose the route again when the picker has answered: its metadata decides which (above); only if it changed a header as well.",
            }


def _tls(options: EnvoyOptions) -> str:
    lines = ["TLS to the picker."]
    if options.picker_ca is None:
        lines += [
            (
                "The certificate is NOT verified, as the gateways do: nobody can listen, but somebody in between could pose as the picker. "
                "To verify it, `--picker-ca FILE [--picker-server-name NAME]`, which writes into common_tls_context:"
            ),
            "  validation_context:",
            "    trusted_ca: {filename: /etc/extproc/ca.pem}",
            "    match_typed_subject_alt_names: [{san_type: DNS, matcher: {exact: picker.example.com}}]",
        ]
    if options.picker_certificate is None:
        lines += [
            "To present a client certificate, `--picker-certificate FILE --picker-key FILE`, which writes there:",
            "  tls_certificates:",
            "  - certificate_chain: {filename: /etc/extproc/client.pem}",
            "    private_key: {filename: /etc/extproc/client-key.pem}",
        ]
    return "\n".join(lines)
