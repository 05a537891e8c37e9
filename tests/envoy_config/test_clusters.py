"""How addresses become clusters."""

import datetime as dt

import pytest
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType, ClusterDnsLookupFamily
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import UpstreamTlsContext

from extproc.envoy_config import PROFILES, EnvoyConfigError, EnvoyOptions
from extproc.envoy_config.clusters import (
    engines_cluster,
    extension,
    load_assignment,
    picker_clusters,
    seconds,
    socket_address,
)
from extproc.envoy_config.options import HostPort

DIRECT = PROFILES["direct"]


def test_addresses_need_no_dns() -> None:
    engines = engines_cluster(DIRECT, EnvoyOptions(endpoints=("[2600::1]:80", "10.0.0.1:8000")))
    assert engines.type is ClusterDiscoveryType.STATIC
    assert engines.load_assignment is not None
    found = [
        (lb.endpoint.address.socket_address.address, lb.endpoint.address.socket_address.port_value)
        for lb in engines.load_assignment.endpoints[0].lb_endpoints
        if lb.endpoint and lb.endpoint.address and lb.endpoint.address.socket_address
    ]
    assert found == [("2600::1", 80), ("10.0.0.1", 8000)]


def test_one_name_makes_the_cluster_resolve() -> None:
    engines = engines_cluster(DIRECT, EnvoyOptions(endpoints=("vllm:8000", "10.0.0.1:8000")))
    assert engines.type is ClusterDiscoveryType.STRICT_DNS
    assert engines.dns_lookup_family is ClusterDnsLookupFamily.V4_PREFERRED
    assert picker_clusters(DIRECT, EnvoyOptions(pickers=("picker:9002",)))[0].type is ClusterDiscoveryType.STRICT_DNS


TWO = EnvoyOptions(pickers=("10.0.0.1:9002", "10.0.0.2:9002"))


@pytest.mark.parametrize("profile", PROFILES)
def test_several_pickers_are_one_cluster_and_each_has_its_log(profile: str) -> None:
    pickers, *logs = picker_clusters(PROFILES[profile], TWO)
    assert _addresses(pickers) == ["10.0.0.1", "10.0.0.2"]
    assert pickers.health_checks
    assert [_addresses(log) for log in logs] == (
        [] if PROFILES[profile].full_response else [["10.0.0.1"], ["10.0.0.2"]]
    )
    assert not any(log.health_checks for log in logs), "one check of a picker is enough"
    assert len(picker_clusters(PROFILES[profile], EnvoyOptions())) == 1


def test_the_certificate_of_several_pickers_may_be_that_of_any() -> None:
    names = EnvoyOptions(pickers=("one.example:1", "two.example:1", "10.0.0.1:1"), picker_ca="ca.pem")
    cluster, *logs = picker_clusters(PROFILES["tls"], names)
    assert cluster.transport_socket is not None
    assert _verified(cluster) == ["one.example", "two.example", "10.0.0.1"]
    assert [_verified(log) for log in logs] == [["one.example"], ["two.example"], ["10.0.0.1"]]
    named = EnvoyOptions(pickers=names.pickers, picker_ca="ca.pem", picker_server_name="picker.example")
    assert _verified(picker_clusters(PROFILES["tls"], named)[0]) == ["picker.example"]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_picker_that_is_not_ready_is_asked_only_where_none_is_unless_failing_open(profile: str) -> None:
    (cluster,) = picker_clusters(PROFILES[profile], EnvoyOptions())
    assert cluster.common_lb_config is not None
    threshold = cluster.common_lb_config.healthy_panic_threshold
    assert threshold is not None
    assert threshold.value == (0 if profile == "fail-open" else 1)


def _addresses(found: Cluster) -> list[str]:
    assert found.load_assignment is not None
    return [
        lb.endpoint.address.socket_address.address
        for lb in found.load_assignment.endpoints[0].lb_endpoints
        if lb.endpoint and lb.endpoint.address and lb.endpoint.address.socket_address
    ]


def _verified(found: Cluster) -> list[str]:
    assert found.transport_socket is not None
    assert found.transport_socket.typed_config is not None
    context = found.transport_socket.typed_config.unpack()
    assert isinstance(context, UpstreamTlsContext)
    assert context.common_tls_context is not None
    assert context.common_tls_context.validation_context is not None
    names = context.common_tls_context.validation_context.match_typed_subject_alt_names
    return [name.matcher.exact for name in names if name.matcher and name.matcher.exact]


@pytest.mark.parametrize("profile", PROFILES)
def test_only_original_dst_needs_no_endpoints(profile: str) -> None:
    options = EnvoyOptions(endpoints=())
    if profile == "original-dst":
        engines = engines_cluster(PROFILES[profile], options)
        assert engines.load_assignment is None
        assert engines.original_dst_lb_config is not None
        assert engines.original_dst_lb_config.http_header_name == "x-gateway-destination-endpoint"
    else:
        with pytest.raises(EnvoyConfigError, match=f"profile {profile} needs at least one"):
            engines_cluster(PROFILES[profile], options)


@pytest.mark.parametrize("profile", PROFILES)
def test_only_tls_has_tls(profile: str) -> None:
    (cluster,) = picker_clusters(PROFILES[profile], EnvoyOptions())
    assert (cluster.transport_socket is not None) == (profile == "tls")


def test_seconds() -> None:
    assert seconds(0.05) == dt.timedelta(milliseconds=50)


def test_an_extension_shows_its_type() -> None:
    typed = extension("x", core.TcpKeepalive(keepalive_time=1)).to_dict()["typedConfig"]
    assert typed == {"@type": "type.googleapis.com/envoy.config.core.v3.TcpKeepalive", "keepaliveTime": 1}


def test_addresses() -> None:
    assert socket_address("::1", 1).to_dict() == {"socketAddress": {"address": "::1", "portValue": 1}}
    assignment = load_assignment("c", [HostPort("a", 1), HostPort("b", 2)])
    assert len(assignment.endpoints[0].lb_endpoints) == 2
