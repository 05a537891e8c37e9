"""The two clusters of every profile: the picker and the engines.

Decides timeouts, limits, health checks and load balancing towards both. The addresses are the options'; the comments in
the YAML are `comments`.
"""

import datetime as dt
from collections.abc import Sequence

import betterproto2
from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.extensions.filters.http.header_mutation import v3 as header_mutation
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec import v3 as upstream_codec
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin import v3 as round_robin
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstreams
from envoy_data_plane.envoy.type import v3 as envoy_type
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.google.protobuf import Any as ProtoAny

from extproc.envoy_config.options import MEBIBYTE, EnvoyConfigError, EnvoyOptions, HostPort, Profile, Retries

PICKER = "picker"
ENGINES = "engines"
DESTINATION = "x-gateway-destination-endpoint"
"""Endpoint picker protocol: header and metadata key that name the destination."""
SERVED = "x-gateway-destination-endpoint-served"
"""Endpoint picker protocol: metadata key that names the endpoint that answered."""
HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
"""gRPC health service name of a ready picker (endpoint picker protocol)."""
ONLY_WHERE_NONE_IS_READY = 1
"""Panic threshold, percent of a cluster: below it there is no ready picker at all, of up to a hundred."""
ATTEMPT_HEADER = "x-extproc-attempt"
"""On answers of engines, inside of Envoy alone: the status, a space, and which attempt of the request it was, from 1."""
RETRY_BUDGET_PERCENT = 20
RETRY_BUDGET_AT_LEAST = 50
"""Retries under way at a time: a share of the requests under way, but not below this number."""
NO_LIMIT = 100_000
"""Envoy's default of 1,024 is soon reached by streams that last minutes; shedding load is the picker's task."""


def picker_clusters(profile: Profile, options: EnvoyOptions) -> list[cluster.Cluster]:
    """Build the pickers' cluster, health-checked, and, where there are several, one more for the access log of each."""
    addresses = [HostPort.parse(text, what="picker") for text in options.pickers]
    pickers = _picker_cluster(PICKER, profile, options, addresses)
    pickers.common_lb_config = cluster.ClusterCommonLbConfig(
        healthy_panic_threshold=envoy_type.Percent(value=0 if profile.fail_open else ONLY_WHERE_NONE_IS_READY),
        update_merge_window=seconds(0),
    )
    pickers.health_checks = [
        core.HealthCheck(
            timeout=seconds(3),
            interval=seconds(2),
            no_traffic_interval=seconds(2),
            unhealthy_interval=seconds(0.5),
            unhealthy_threshold=2,
            healthy_threshold=1,
            grpc_health_check=core.HealthCheckGrpcHealthCheck(service_name=EXT_PROC_SERVICE),
        )
    ]
    logs = zip(log_clusters(profile, options), addresses, strict=False)
    return [
        pickers,
        *(_picker_cluster(name, profile, options, [address]) for name, address in logs if name != PICKER),
    ]


def log_clusters(profile: Profile, options: EnvoyOptions) -> tuple[str, ...]:
    """Name the cluster of each access log: over one cluster a worker's log would reach one picker, not the one that decided."""
    if profile.full_response:
        return ()
    if len(options.pickers) == 1:
        return (PICKER,)
    return tuple(f"{PICKER}-log-{number}" for number in range(1, len(options.pickers) + 1))


def _picker_cluster(name: str, profile: Profile, options: EnvoyOptions, addresses: list[HostPort]) -> cluster.Cluster:
    """Build what all clusters of pickers have in common: HTTP/2, no limits, maybe TLS."""
    return cluster.Cluster(
        name=name,
        type=_discovery(addresses),
        dns_lookup_family=_lookup_family(addresses),
        connect_timeout=seconds(1),
        per_connection_buffer_limit_bytes=MEBIBYTE,
        typed_extension_protocol_options={
            HTTP_OPTIONS: pack(
                upstreams.HttpProtocolOptions(
                    explicit_http_config=upstreams.HttpProtocolOptionsExplicitHttpConfig(
                        http2_protocol_options=core.Http2ProtocolOptions(
                            max_concurrent_streams=NO_LIMIT,
                            initial_stream_window_size=MEBIBYTE,
                            initial_connection_window_size=16 * MEBIBYTE,
                            max_outbound_control_frames=NO_LIMIT,
                        )
                    )
                )
            )
        },
        circuit_breakers=_circuit_breakers(),
        upstream_connection_options=_tcp_keepalive(),
        transport_socket=_picker_tls(options, addresses) if profile.picker_tls else None,
        load_assignment=load_assignment(name, addresses),
    )


def engines_cluster(profile: Profile, options: EnvoyOptions) -> cluster.Cluster:
    """Build the model servers' cluster; raises EnvoyConfigError if the profile needs endpoints and there are none."""
    engines = cluster.Cluster(
        name=ENGINES,
        connect_timeout=seconds(2),
        per_connection_buffer_limit_bytes=MEBIBYTE,
        typed_extension_protocol_options={
            HTTP_OPTIONS: pack(
                upstreams.HttpProtocolOptions(
                    common_http_protocol_options=core.HttpProtocolOptions(idle_timeout=seconds(4)),
                    explicit_http_config=upstreams.HttpProtocolOptionsExplicitHttpConfig(
                        http_protocol_options=core.Http1ProtocolOptions()
                    ),
                    http_filters=[] if profile.retries is Retries.NEVER else _attempt_filters(),
                )
            )
        },
        circuit_breakers=_circuit_breakers(retry_budget=profile.retries is not Retries.NEVER),
        upstream_connection_options=_tcp_keepalive(),
    )
    if profile.original_dst:
        engines.type = cluster.ClusterDiscoveryType.ORIGINAL_DST
        engines.lb_policy = cluster.ClusterLbPolicy.CLUSTER_PROVIDED
        engines.original_dst_lb_config = cluster.ClusterOriginalDstLbConfig(
            use_http_header=True, http_header_name=DESTINATION
        )
        return engines
    if not options.endpoints:
        raise EnvoyConfigError(f"endpoints: profile {profile.name} needs at least one (only original-dst needs none)")
    addresses = [HostPort.parse(text, what="endpoint") for text in options.endpoints]
    engines.type = _discovery(addresses)
    engines.dns_lookup_family = _lookup_family(addresses)
    engines.load_balancing_policy = _override_host()
    engines.load_assignment = load_assignment(ENGINES, addresses)
    return engines


def _override_host() -> cluster.LoadBalancingPolicy:
    """Obey the picker's destination if it is among the endpoints, else round robin."""

    def policy(typed: core.TypedExtensionConfig) -> cluster.LoadBalancingPolicy:
        return cluster.LoadBalancingPolicy(policies=[cluster.LoadBalancingPolicyPolicy(typed_extension_config=typed)])

    return policy(
        extension(
            "envoy.load_balancing_policies.override_host",
            override_host.OverrideHost(
                override_host_sources=[override_host.OverrideHostOverrideHostSource(metadata=_envoy_lb(DESTINATION))],
                selected_host_key=_envoy_lb(SERVED),
                fallback_policy=policy(
                    extension("envoy.load_balancing_policies.round_robin", round_robin.RoundRobin())
                ),
            ),
        )
    )


def _envoy_lb(key: str) -> metadata.MetadataKey:
    return metadata.MetadataKey(key="envoy.lb", path=[metadata.MetadataKeyPathSegment(key=key)])


def _discovery(addresses: Sequence[HostPort]) -> cluster.ClusterDiscoveryType:
    """Choose STATIC for addresses alone; STRICT_DNS takes names too, and makes an endpoint of every address of a name."""
    if all(address.is_ip for address in addresses):
        return cluster.ClusterDiscoveryType.STATIC
    return cluster.ClusterDiscoveryType.STRICT_DNS


def _lookup_family(addresses: Sequence[HostPort]) -> cluster.ClusterDnsLookupFamily:
    """IPv4 first where DNS is asked: Envoy's AUTO would take the IPv6 address alone where a name has both."""
    if all(address.is_ip for address in addresses):
        return cluster.ClusterDnsLookupFamily.AUTO
    return cluster.ClusterDnsLookupFamily.V4_PREFERRED


def _attempt_filters() -> list[hcm.HttpFilter]:
    """Say on every answer of an engine which attempt it was: a retry policy counts all kinds of failure alike."""
    said = core.HeaderValueOption(
        header=core.HeaderValue(key=ATTEMPT_HEADER, value="%RESP(:status)% %UPSTREAM_REQUEST_ATTEMPT_COUNT%"),
        append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    mutations = header_mutation.Mutations(response_mutations=[mutation_rules.HeaderMutation(append=said)])
    return [
        http_filter("envoy.filters.http.header_mutation", header_mutation.HeaderMutation(mutations=mutations)),
        http_filter("envoy.filters.http.upstream_codec", upstream_codec.UpstreamCodec()),
    ]


def _circuit_breakers(*, retry_budget: bool = False) -> cluster.CircuitBreakers:
    limits = cluster.CircuitBreakersThresholds(
        max_connections=NO_LIMIT, max_pending_requests=NO_LIMIT, max_requests=NO_LIMIT
    )
    if retry_budget:
        limits.retry_budget = cluster.CircuitBreakersThresholdsRetryBudget(
            budget_percent=envoy_type.Percent(value=RETRY_BUDGET_PERCENT), min_retry_concurrency=RETRY_BUDGET_AT_LEAST
        )
    else:
        limits.max_retries = 1000
    return cluster.CircuitBreakers(thresholds=[limits])


def _tcp_keepalive() -> cluster.UpstreamConnectionOptions:
    """10 s of silence, then three probes 5 s apart: a host that vanished is noticed after 25 s."""
    return cluster.UpstreamConnectionOptions(
        tcp_keepalive=core.TcpKeepalive(keepalive_time=10, keepalive_interval=5, keepalive_probes=3)
    )


def _picker_tls(options: EnvoyOptions, addresses: Sequence[HostPort]) -> core.TransportSocket:
    """TLS to the pickers; the certificate is verified if there is a CA to verify it with."""
    hosts = list(dict.fromkeys(address.host for address in addresses))
    # One socket for all of a cluster: of several names none can be asked for, and any is good enough.
    server_name = options.picker_server_name or ("" if addresses[0].is_ip or len(hosts) > 1 else hosts[0])
    names = [options.picker_server_name] if options.picker_server_name else hosts
    validation = tls.CertificateValidationContext()
    if options.picker_ca is not None:
        validation.trusted_ca = core.DataSource(filename=options.picker_ca)
        ips = {address.host for address in addresses if address.is_ip}
        validation.match_typed_subject_alt_names = [
            tls.SubjectAltNameMatcher(
                san_type=tls.SubjectAltNameMatcherSanType.IP_ADDRESS
                if name in ips
                else tls.SubjectAltNameMatcherSanType.DNS,
                matcher=matcher.StringMatcher(exact=name),
            )
            for name in names
        ]
    certificates = []
    if options.picker_certificate is not None and options.picker_key is not None:
        certificates.append(
            tls.TlsCertificate(
                certificate_chain=core.DataSource(filename=options.picker_certificate),
                private_key=core.DataSource(filename=options.picker_key),
            )
        )
    context = tls.UpstreamTlsContext(
        sni=server_name,
        common_tls_context=tls.CommonTlsContext(
            tls_certificates=certificates, validation_context=validation, alpn_protocols=["h2"]
        ),
    )
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=pack(context))


# Constructors for what every part of a configuration repeats


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


def load_assignment(name: str, addresses: list[HostPort]) -> endpoint.ClusterLoadAssignment:
    """Make the endpoints of a STATIC or STRICT_DNS cluster, in the given order."""
    return endpoint.ClusterLoadAssignment(
        cluster_name=name,
        endpoints=[
            endpoint.LocalityLbEndpoints(
                lb_endpoints=[
                    endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=socket_address(a.host, a.port)))
                    for a in addresses
                ]
            )
        ],
    )
