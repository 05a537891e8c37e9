"""The yardstick of demo and benchmark: the same Envoy without a picker, balancing by itself.

Only for comparison, hence no profile: listener, limits and cluster are those of `direct`, and nothing else differs.
"""

from typing import Any

import yaml

from extproc.envoy_config.options import EnvoyOptions
from extproc.envoy_config.profiles import profile_named
from extproc.envoy_config.render import bootstrap

_ROUND_ROBIN = "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
_ROUTER = "envoy.filters.http.router"


def render_round_robin(options: EnvoyOptions) -> str:
    """Render `direct` without ext_proc, access log and usage filters, with Envoy's own round robin over the endpoints."""
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
