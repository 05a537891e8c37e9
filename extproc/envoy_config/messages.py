"""Small constructors for what every part of an Envoy configuration repeats: Any, addresses, extensions, durations."""

import datetime as dt

import betterproto2
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.google.protobuf import Any as ProtoAny

from extproc.envoy_config.options import HostPort


def pack(message: betterproto2.Message) -> ProtoAny:
    """Wrap a message in `google.protobuf.Any`; in YAML it appears with its `@type`."""
    return ProtoAny.pack(message)


def seconds(value: float) -> dt.timedelta:
    """Make a `google.protobuf.Duration` of seconds."""
    return dt.timedelta(seconds=value)


def extension(name: str, message: betterproto2.Message) -> core.TypedExtensionConfig:
    """Make a `TypedExtensionConfig`."""
    return core.TypedExtensionConfig(name=name, typed_config=pack(message))


def http_filter(name: str, message: betterproto2.Message) -> hcm.HttpFilter:
    """Make an entry of `HttpConnectionManager.http_filters`."""
    return hcm.HttpFilter(name=name, typed_config=pack(message))


def socket_address(host: str, port: int) -> core.Address:
    """Make an `Address`; `host` without brackets."""
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port))


def load_assignment(cluster: str, addresses: list[HostPort]) -> endpoint.ClusterLoadAssignment:
    """Make the endpoints of a STATIC or STRICT_DNS cluster, in the given order."""
    return endpoint.ClusterLoadAssignment(
        cluster_name=cluster,
        endpoints=[
            endpoint.LocalityLbEndpoints(
                lb_endpoints=[
                    endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=socket_address(a.host, a.port)))
                    for a in addresses
                ]
            )
        ],
    )
