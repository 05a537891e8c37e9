"""Puts a profile's messages together and writes them as YAML with comments."""

import warnings
from typing import Any

from extproc.envoy_config.commented_yaml import dump
from extproc.envoy_config.comments import comments_for, head_for
from extproc.envoy_config.options import EnvoyConfigError, EnvoyOptions
from extproc.envoy_config.profiles import Profile, profile_named


def render(profile: str, options: EnvoyOptions) -> str:
    """Render a profile as an Envoy bootstrap file (YAML, snake_case proto names) whose comments say why.

    The same arguments always give the same text. Raises EnvoyConfigError: unknown profile, no endpoints, or
    `envoy-data-plane` (extra `demo`) is not installed.
    """
    chosen = profile_named(profile)
    return dump(bootstrap(chosen, options), comments_for(chosen, options), head=head_for(chosen))


def bootstrap(profile: Profile, options: EnvoyOptions) -> dict[str, Any]:
    """Build the typed `envoy.config.bootstrap.v3.Bootstrap` and give its proto JSON form with snake_case names."""
    try:
        with warnings.catch_warnings():
            # pydantic dislikes the validators that envoy-data-plane 2.2 was generated with: not ours, and harmless.
            warnings.simplefilter("ignore", DeprecationWarning)
            import betterproto2
            from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
            from envoy_data_plane.envoy.config.overload import v3 as overload
            from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections import v3 as connections

            from extproc.envoy_config.clusters import engines_cluster, picker_clusters
            from extproc.envoy_config.listener import http_listener
            from extproc.envoy_config.messages import pack, socket_address
    except ImportError as error:
        raise EnvoyConfigError("envoy-data-plane is not installed: pip install 'extproc-picker[demo]'") from error

    message = bootstrap_v3.Bootstrap(
        admin=bootstrap_v3.Admin(address=socket_address(options.admin_host, options.admin_port)),
        overload_manager=overload.OverloadManager(
            resource_monitors=[
                overload.ResourceMonitor(
                    name="envoy.resource_monitors.global_downstream_max_connections",
                    typed_config=pack(
                        connections.DownstreamConnectionsConfig(max_active_downstream_connections=50_000)
                    ),
                )
            ]
        ),
        static_resources=bootstrap_v3.BootstrapStaticResources(
            listeners=[http_listener(profile, options)],
            clusters=[*picker_clusters(profile, options), engines_cluster(profile, options)],
        ),
    )
    document = message.to_dict(casing=betterproto2.Casing.SNAKE)
    _spell_out_defaults(document)
    return document


def _spell_out_defaults(document: dict[str, Any]) -> None:
    """Write out what equals the proto's default, is therefore not serialised, and yet is what a reader looks for."""
    resources = document["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    mode = manager["http_filters"][0]["typed_config"]["processing_mode"]
    for key in ("request_body_mode", "response_body_mode"):
        mode.setdefault(key, "NONE")
    manager["http_filters"][0]["typed_config"].setdefault("failure_mode_allow", False)
    for log in manager["http_filters"][-1]["typed_config"].get("upstream_log", ()):
        log["filter"]["or_filter"]["filters"][0]["status_code_filter"]["comparison"].setdefault("op", "EQ")
    resources["clusters"][0]["common_lb_config"]["healthy_panic_threshold"].setdefault("value", 0)
