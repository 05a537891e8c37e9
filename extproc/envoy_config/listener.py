"""The listener: connection manager, filters in their order, routes, access logs, and Envoy's own error replies.

Decides what the picker is asked and told about a request. Where requests go is decided in `clusters`.
"""

from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel import v3 as cel
from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_log
from envoy_data_plane.envoy.extensions.access_loggers.stream import v3 as stream_log
from envoy_data_plane.envoy.extensions.content_parsers.json import v3 as json_parser
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata import v3 as json_to_metadata
from envoy_data_plane.envoy.extensions.filters.http.lua import v3 as lua
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata import v3 as sse_to_metadata
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts
from envoy_data_plane.envoy.type import v3 as envoy_type
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google import protobuf

from extproc.envoy_config.clusters import (
    ATTEMPT_HEADER,
    DESTINATION,
    ENGINES,
    PICKER,
    SERVED,
    extension,
    http_filter,
    log_clusters,
    pack,
    seconds,
    socket_address,
)
from extproc.envoy_config.options import MEBIBYTE, BodyMode, EnvoyOptions, Profile, Retries
from extproc.protocol.settings import EXPLAIN_HEADER, PICKER_HEADERS

OWN_NAMESPACE = "extproc"
"""Dynamic metadata namespace of the picker: decision id, explanation, `retry`."""
RETRY_KEY = "retry"
"""`extproc: {retry: true}`: the picker has seen the end of the body and no trailers, so a retry cannot double anything."""
FIRST_ATTEMPT_REFUSED = "503 1"
"""`ATTEMPT_HEADER` of the one answer that is retried: the first engine asked says that it is starting, draining or full."""

FORBIDDEN_HEADERS = (
    DESTINATION,
    SERVED,
    "x-gateway-destination-endpoint-subset",
    "x-extproc-decision",
    "x-prefiller-host-port",
    "x-envoy-retry-on",
    "x-envoy-retry-grpc-on",
    "x-envoy-max-retries",
    "x-envoy-hedge-on-per-try-timeout",
    "x-envoy-upstream-rq-timeout-ms",
    "x-envoy-upstream-rq-per-try-timeout-ms",
    "x-envoy-retriable-status-codes",
    "x-envoy-retriable-header-names",
)
"""Headers that control routing and that no client may send: removed before any filter, route or cluster reads them."""

ENGINE_FLAGS = ("UF", "UH", "UC", "UR", "UO", "URX", "LR")
"""Access log response flags of an engine that could not be reached or gave up before its answer began."""

USAGE_NAMESPACE = "extproc.usage"
"""Not among the namespaces the picker may write, so these values come from the engine."""

USAGE_PATHS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("prompt", ("usage", "prompt_tokens")),
    ("completion", ("usage", "completion_tokens")),
    ("cached", ("usage", "prompt_tokens_details", "cached_tokens")),
)
"""Metadata key, and where OpenAI's completions and chat completions (vLLM, SGLang) have the value."""

MAX_SSE_EVENT_BYTES = 64 * 1024
"""A longer event is passed on but not parsed. The last event of a stream, the one with `usage`, is small; Envoy's default is
8 KiB, which engines that add more to it could exceed."""

JSON_USAGE_SCRIPT = """\
function envoy_on_response(handle)
  local kind = handle:headers():get("content-type") or ""
  if not kind:find("^application/json") then return end
  local tail = ""
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    if length >= 4096 then
      tail = chunk:getBytes(length - 4096, 4096)
    elseif length > 0 then
      tail = (tail .. chunk:getBytes(0, length)):sub(-4096)
    end
  end
  local usage = tail:match('.*[{,%s]"usage"%s*:%s*(%b{})')
  if not usage then return end
  local metadata = handle:streamInfo():dynamicMetadata()
  local function lift(key, pattern)
    local value = tonumber(usage:match(pattern))
    if value then metadata:set("extproc.usage", key, value) end
  end
  lift("prompt", '"prompt_tokens"%s*:%s*(%d+)')
  lift("completion", '"completion_tokens"%s*:%s*(%d+)')
  lift("cached", '"cached_tokens"%s*:%s*(%d+)')
end
"""
"""Reads `usage` out of the last 4 KiB of a JSON answer while the answer streams through.

The stock filter `json_to_metadata` does the same in one typed message, but buffers the whole answer and turns one above the
buffer limit (1 MiB) into a 500 (seen with 1.40 and 3 MB of embeddings); no answer may be lost for a statistic. Inside a
JSON string every quote is escaped, so text written by a model is not mistaken for the key `usage`: its quote follows a
backslash. Lua is for JSON answers only, because for a stream it costs Envoy twice what `sse_to_metadata` does.
"""


def http_listener(profile: Profile, options: EnvoyOptions) -> listener.Listener:
    """Build the one listener of a profile."""
    return listener.Listener(
        name="http",
        address=socket_address(options.listen_host, options.listen_port),
        per_connection_buffer_limit_bytes=profile.buffer_limit_bytes,
        filter_chains=[
            listener.FilterChain(
                filters=[
                    listener.Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=pack(_connection_manager(profile, options)),
                    )
                ]
            )
        ],
    )


def _connection_manager(profile: Profile, options: EnvoyOptions) -> hcm.HttpConnectionManager:
    filters = [http_filter("envoy.filters.http.ext_proc", _ext_proc(profile))]
    logs = [_stdout_log()] if options.stdout_access_log else []
    if not profile.full_response:
        filters += usage_filters()
        logs += _picker_logs(profile, options)
    tried = [] if profile.full_response or profile.retries is Retries.NEVER else _attempts_logs(profile, options)
    filters.append(http_filter("envoy.filters.http.router", router.Router(upstream_log=tried)))
    return hcm.HttpConnectionManager(
        stat_prefix="ingress",
        codec_type=hcm.HttpConnectionManagerCodecType.AUTO,
        use_remote_address=True,
        normalize_path=True,
        generate_request_id=True,
        request_headers_timeout=seconds(10),
        request_timeout=seconds(300),
        stream_idle_timeout=seconds(3600),
        common_http_protocol_options=core.HttpProtocolOptions(idle_timeout=seconds(3600)),
        http2_protocol_options=core.Http2ProtocolOptions(
            max_concurrent_streams=1000,
            initial_stream_window_size=MEBIBYTE,
            initial_connection_window_size=16 * MEBIBYTE,
        ),
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                early.HeaderMutation(
                    mutations=[mutation_rules.HeaderMutation(remove=name) for name in FORBIDDEN_HEADERS]
                ),
            )
        ],
        access_log=logs,
        access_log_options=None
        if profile.full_response
        else hcm.HttpConnectionManagerHcmAccessLogOptions(access_log_flush_interval=seconds(10)),
        upgrade_configs=[]
        if profile.request_body is BodyMode.BUFFERED
        else [hcm.HttpConnectionManagerUpgradeConfig(upgrade_type="websocket")],
        local_reply_config=local_replies(),
        route_config=_routes(profile),
        http_filters=filters,
    )


def _ext_proc(profile: Profile) -> ext_proc.ExternalProcessor:
    send, skip = ext_proc.ProcessingModeHeaderSendMode.SEND, ext_proc.ProcessingModeHeaderSendMode.SKIP
    body = ext_proc.ProcessingModeBodySendMode[profile.request_body.value]
    full_duplex = profile.request_body is BodyMode.FULL_DUPLEX_STREAMED
    return ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=PICKER), retry_policy=_stream_retry_policy()
        ),
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=send,
            request_body_mode=body,
            request_trailer_mode=send if full_duplex else skip,
            response_header_mode=send if profile.full_response else skip,
            response_body_mode=body if profile.full_response else ext_proc.ProcessingModeBodySendMode.NONE,
            response_trailer_mode=send if profile.full_response else skip,
        ),
        message_timeout=seconds(5),
        failure_mode_allow=profile.fail_open,
        status_on_error=envoy_type.HttpStatus(code=envoy_type.StatusCode.ServiceUnavailable),
        route_cache_action=ext_proc.ExternalProcessorRouteCacheAction.CLEAR
        if profile.retries is Retries.WHEN_PICKER_ALLOWS
        else ext_proc.ExternalProcessorRouteCacheAction.DEFAULT,
        metadata_options=None if profile.original_dst else _metadata_options(),
    )


def _metadata_options() -> ext_proc.MetadataOptions:
    forwarded = ["envoy.lb", "envoy.lb.subset_hint"]
    return ext_proc.MetadataOptions(
        receiving_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=["envoy.lb", OWN_NAMESPACE]),
        forwarding_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=forwarded),
    )


def _routes(profile: Profile) -> route.RouteConfiguration:
    once = route.RouteAction(cluster=ENGINES, timeout=seconds(0))
    again = route.RouteAction(cluster=ENGINES, timeout=seconds(0), retry_policy=_retry_policy())
    everything = route.RouteMatch(prefix="/")
    allowed = route.RouteMatch(
        prefix="/",
        dynamic_metadata=[
            matcher.MetadataMatcher(
                filter=OWN_NAMESPACE,
                path=[matcher.MetadataMatcherPathSegment(key=RETRY_KEY)],
                value=matcher.ValueMatcher(bool_match=True),
            )
        ],
    )
    match profile.retries:
        case Retries.ALWAYS:
            routes = [route.Route(name="engines", match=everything, route=again)]
        case Retries.WHEN_PICKER_ALLOWS:
            routes = [
                route.Route(name="engines-retriable", match=allowed, route=again),
                route.Route(name="engines-once", match=everything, route=once),
            ]
        case Retries.NEVER:
            routes = [route.Route(name="engines", match=everything, route=once)]
    return route.RouteConfiguration(
        name="engines",
        virtual_hosts=[
            route.VirtualHost(
                name="engines",
                domains=["*"],
                routes=routes,
                request_headers_to_remove=list(PICKER_HEADERS),
                request_body_buffer_limit=None
                if profile.request_body is BodyMode.BUFFERED or profile.retries is Retries.NEVER
                else 4 * MEBIBYTE,
                response_headers_to_remove=[] if profile.retries is Retries.NEVER else [ATTEMPT_HEADER],
                response_headers_to_add=[] if profile.full_response else [_explain_header()],
            )
        ],
    )


def _retry_policy() -> route.RetryPolicy:
    return route.RetryPolicy(
        retry_on="connect-failure,refused-stream,reset-before-request,retriable-headers",
        retriable_headers=[
            route.HeaderMatcher(name=ATTEMPT_HEADER, string_match=matcher.StringMatcher(exact=FIRST_ATTEMPT_REFUSED))
        ],
        num_retries=3,
        host_selection_retry_max_attempts=5,
        retry_host_predicate=[
            route.RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=pack(previous_hosts.PreviousHostsPredicate()),
            )
        ],
    )


def _stream_retry_policy() -> core.RetryPolicy:
    """Open a stream to the pickers again that none has answered yet; after pauses of up to 0.1, 0.2, 0.4 and 0.5 s."""
    return core.RetryPolicy(
        retry_on="connect-failure,refused-stream,reset",
        num_retries=4,
        retry_back_off=core.BackoffStrategy(base_interval=seconds(0.1), max_interval=seconds(0.5)),
        host_selection_retry_max_attempts=3,
        retry_host_predicate=[
            core.RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=pack(previous_hosts.PreviousHostsPredicate()),
            )
        ],
    )


def _explain_header() -> core.HeaderValueOption:
    return core.HeaderValueOption(
        header=core.HeaderValue(key=EXPLAIN_HEADER, value=f"%DYNAMIC_METADATA({OWN_NAMESPACE}:explain)%"),
        append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _attempts_logs(profile: Profile, options: EnvoyOptions) -> list[accesslog.AccessLog]:
    """Tell the pickers of each attempt that an engine refused, for the request's own entry names the last one alone."""
    refused = accesslog.StatusCodeFilter(
        comparison=accesslog.ComparisonFilter(
            op=accesslog.ComparisonFilterOp.EQ,
            value=core.RuntimeUInt32(default_value=503, runtime_key="extproc.attempts_log.status"),
        )
    )
    unreachable = accesslog.ResponseFlagFilter(flags=["UF"])
    either = accesslog.AccessLogFilter(
        or_filter=accesslog.OrFilter(
            filters=[
                accesslog.AccessLogFilter(status_code_filter=refused),
                accesslog.AccessLogFilter(response_flag_filter=unreachable),
            ]
        )
    )
    logs = _picker_logs(profile, options)
    for log in logs:
        log.filter = either
    return logs


def _picker_logs(profile: Profile, options: EnvoyOptions) -> list[accesslog.AccessLog]:
    names = log_clusters(profile, options)
    return [_picker_log(f".{number}" if len(names) > 1 else "", name) for number, name in enumerate(names, start=1)]


def _picker_log(suffix: str, cluster_name: str) -> accesslog.AccessLog:
    return accesslog.AccessLog(
        name=f"envoy.access_loggers.http_grpc{suffix}",
        typed_config=pack(
            grpc_log.HttpGrpcAccessLogConfig(
                common_config=grpc_log.CommonGrpcAccessLogConfig(
                    log_name="extproc",
                    transport_api_version=core.ApiVersion.V3,
                    grpc_service=core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=cluster_name)),
                    buffer_flush_interval=seconds(0.05),
                    buffer_size_bytes=4 * MEBIBYTE,
                )
            )
        ),
    )


def _stdout_log() -> accesslog.AccessLog:
    return accesslog.AccessLog(name="envoy.access_loggers.stdout", typed_config=pack(stream_log.StdoutAccessLog()))


def usage_filters() -> list[hcm.HttpFilter]:
    """Build `sse_to_metadata` for streams and the script for JSON answers, in the order of the chain."""
    return [
        http_filter(
            "envoy.filters.http.sse_to_metadata",
            sse_to_metadata.SseToMetadata(
                response_rules=sse_to_metadata.SseToMetadataProcessingRules(
                    content_parser=extension(
                        "envoy.content_parsers.json",
                        json_parser.JsonContentParser(
                            rules=[json_parser.JsonContentParserRuleConfig(rule=rule) for rule in _usage_rules()]
                        ),
                    ),
                    max_event_size=MAX_SSE_EVENT_BYTES,
                )
            ),
        ),
        http_filter(
            "envoy.filters.http.lua", lua.Lua(default_source_code=core.DataSource(inline_string=JSON_USAGE_SCRIPT))
        ),
    ]


def _usage_rules() -> list[json_to_metadata.JsonToMetadataRule]:
    return [
        json_to_metadata.JsonToMetadataRule(
            selectors=[json_to_metadata.JsonToMetadataSelector(key=step) for step in path],
            on_present=json_to_metadata.JsonToMetadataKeyValuePair(
                metadata_namespace=USAGE_NAMESPACE, key=key, type=json_to_metadata.JsonToMetadataValueType.NUMBER
            ),
        )
        for key, path in USAGE_PATHS
    ]


def local_replies() -> hcm.LocalReplyConfig:
    """Build the mappers; the first that fits is used, and a reply none fits stays as it is."""
    return hcm.LocalReplyConfig(
        mappers=[
            _local_reply(
                _code_details("response.code_details.startsWith('ext_proc_error')"),
                message="the endpoint picker is not available",
                kind="picker_unavailable",
                retry_after_s=1,
            ),
            _local_reply(
                accesslog.AccessLogFilter(response_flag_filter=accesslog.ResponseFlagFilter(flags=list(ENGINE_FLAGS))),
                message="%LOCAL_REPLY_BODY%",
                kind="engine_unavailable",
                retry_after_s=1,
            ),
            _local_reply(
                _code_details("response.code_details == 'request_payload_too_large'"),
                message="the request body is larger than the proxy's buffer limit",
                kind="invalid_request_error",
            ),
        ]
    )


def _local_reply(
    when: accesslog.AccessLogFilter, *, message: str, kind: str, retry_after_s: int | None = None
) -> hcm.ResponseMapper:
    error = {"message": message, "type": kind, "code": "%RESPONSE_CODE%"}
    headers = []
    if retry_after_s is not None:
        headers.append(
            core.HeaderValueOption(
                header=core.HeaderValue(key="retry-after", value=str(retry_after_s)),
                append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
            )
        )
    return hcm.ResponseMapper(
        filter=when,
        headers_to_add=headers,
        body_format_override=core.SubstitutionFormatString(json_format=protobuf.Struct.from_dict({"error": error})),
    )


def _code_details(expression: str) -> accesslog.AccessLogFilter:
    """Select by a CEL expression (`response.code_details` says what Envoy itself found wrong)."""
    return accesslog.AccessLogFilter(
        extension_filter=accesslog.ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=pack(cel.ExpressionFilter(expression=expression)),
        )
    )
