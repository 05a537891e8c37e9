"""What Envoy itself answers when the picker or the engines fail: JSON in OpenAI's form instead of empty or plain text.

Only Envoy's own failures are rewritten. The picker's `ImmediateResponse` is a local reply too, and has to pass as it is: so
the mappers select by what went wrong, never by status.
"""

from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel import v3 as cel
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.google import protobuf

from extproc.envoy_config.messages import pack

ENGINE_FLAGS = ("UF", "UH", "UC", "UR", "UO", "URX", "LR")
"""Access log response flags of an engine that could not be reached or gave up before its answer began."""


def local_replies() -> hcm.LocalReplyConfig:
    """Build the mappers; the first that fits is used, and a reply none fits stays as it is."""
    return hcm.LocalReplyConfig(
        mappers=[
            _mapper(
                _details("response.code_details.startsWith('ext_proc_error')"),
                message="the endpoint picker is not available",
                kind="picker_unavailable",
                retry_after_s=1,
            ),
            _mapper(
                accesslog.AccessLogFilter(response_flag_filter=accesslog.ResponseFlagFilter(flags=list(ENGINE_FLAGS))),
                message="%LOCAL_REPLY_BODY%",
                kind="engine_unavailable",
                retry_after_s=1,
            ),
            _mapper(
                _details("response.code_details == 'request_payload_too_large'"),
                message="the request body is larger than the proxy's buffer limit",
                kind="invalid_request_error",
            ),
        ]
    )


def _mapper(
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


def _details(expression: str) -> accesslog.AccessLogFilter:
    """Select by a CEL expression (`response.code_details` says what Envoy itself found wrong)."""
    return accesslog.AccessLogFilter(
        extension_filter=accesslog.ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=pack(cel.ExpressionFilter(expression=expression)),
        )
    )
