"""How addresses become clusters."""

import pytest
from envoy_data_plane.envoy.config.cluster.v3 import ClusterDiscoveryType, ClusterDnsLookupFamily

from extproc.edge.envoy_config import PROFILES, EnvoyConfigError, EnvoyOptions
from extproc.edge.envoy_config.clusters import engines_cluster, picker_cluster

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
    assert picker_cluster(DIRECT, EnvoyOptions(picker="picker:9002")).type is ClusterDiscoveryType.STRICT_DNS


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
    cluster = picker_cluster(PROFILES[profile], EnvoyOptions())
    assert (cluster.transport_socket is not None) == (profile == "tls")
