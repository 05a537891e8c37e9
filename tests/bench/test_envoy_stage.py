import json

import pytest

from bench.envoy_stage import PLAIN, Listen, envoy_config
from extproc.envoy_config import PROFILES, EnvoyConfigError

_ENDPOINTS = ["127.0.0.1:8001", "127.0.0.1:8002"]


def test_each_has_a_listener_and_clusters_of_its_own() -> None:
    listens = [Listen(PLAIN, 1), Listen("a-direct", 2, "direct", 12), Listen("b-full-duplex", 3, "full-duplex", 13)]
    resources = envoy_config(listens, _ENDPOINTS, 9)["static_resources"]
    assert [one["name"] for one in resources["listeners"]] == [PLAIN, "a-direct", "b-full-duplex"]
    assert [one["address"]["socket_address"]["port_value"] for one in resources["listeners"]] == [1, 2, 3]
    clusters = [one["name"] for one in resources["clusters"]]
    assert clusters == [
        "engines-no-filter",
        "picker-a-direct",
        "engines-a-direct",
        "picker-b-full-duplex",
        "engines-b-full-duplex",
    ]
    told = json.dumps(resources["listeners"][1])
    assert '"picker-a-direct"' in told
    assert '"engines-a-direct"' in told
    assert '"picker"' not in told
    manager = resources["listeners"][1]["filter_chains"][0]["filters"][0]["typed_config"]
    assert manager["stat_prefix"] == "a-direct"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_can_take_part(profile: str) -> None:
    resources = envoy_config([Listen("a", 2, profile, 12, health_checked=False)], _ENDPOINTS, 9)["static_resources"]
    assert all("health_checks" not in one for one in resources["clusters"])


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(EnvoyConfigError):
        envoy_config([Listen("a", 2, "fast", 12)], _ENDPOINTS, 9)
