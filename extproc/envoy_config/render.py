"""Puts the messages of a profile together and writes them as YAML with comments."""

import warnings
from typing import Any

import yaml

from extproc.envoy_config.commented_yaml import dump
from extproc.envoy_config.comments import comments_for, head_for
from extproc.envoy_config.options import EnvoyConfigError, EnvoyOptions, Profile, profile_named

_ROUND_ROBIN = "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
_ROUTER = "envoy.filters.http.router"


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

            from extproc.envoy_config.clusters import engines_cluster, pack, picker_clusters, socket_address
            from extproc.envoy_config.listener import http_listener
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


def render_round_robin(options: EnvoyOptions) -> str:
    """Render `direct` without ext_proc, access log and usage filters, with Envoy's own round robin over the endpoints.

    Demo and benchmarks compare with it: listener, limits and cluster are those of `direct`.
    """
    document: dict[str, Any] = bootstrap(profile_named("direct"), options)
    resources = document["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    [router] = [one for one in manager["http_filters"] if one["name"] == _ROUTER]
    router["typed_config"].pop("upstream_log")
    manager["http_filters"] = [router]
    manager.pop("access_log", None)
    host = manager["route_config"]["virtual_hosts"][0]
    host["routes"] = [one for one in host["routes"] if "dynamic_metadata" not in one["match"]]
    host.pop("response_headers_to_add", None)
    host.pop("request_headers_to_remove")
    host.pop("response_headers_to_remove")
    resources["clusters"] = [one for one in resources["clusters"] if one["name"] == "engines"]
    [protocol] = resources["clusters"][0]["typed_extension_protocol_options"].values()
    protocol.pop("http_filters")
    policy = {"name": "envoy.load_balancing_policies.round_robin", "typed_config": {"@type": _ROUND_ROBIN}}
    resources["clusters"][0]["load_balancing_policy"] = {"policies": [{"typed_extension_config": policy}]}
    text: str = yaml.safe_dump(document, sort_keys=False)
    return text
