"""What every profile has in common and what differs; local replies and usage filters are consistent in themselves.

That Envoy obeys, `test_direct_with_envoy` shows.
"""

from typing import Any

import pytest
import yaml

from extproc.envoy_config import PROFILES, EnvoyOptions, render
from extproc.envoy_config.listener import (
    FORBIDDEN_HEADERS,
    JSON_USAGE_SCRIPT,
    USAGE_NAMESPACE,
    USAGE_PATHS,
    local_replies,
    usage_filters,
)
from extproc.protocol.settings import CONTROL_HEADERS, PICKER_HEADERS


def manager(profile: str) -> Any:
    listener = yaml.safe_load(render(profile, EnvoyOptions()))["static_resources"]["listeners"][0]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


@pytest.mark.parametrize("profile", PROFILES)
def test_common_to_all(profile: str) -> None:
    hcm = manager(profile)
    mutations = hcm["early_header_mutation_extensions"][0]["typed_config"]["mutations"]
    assert [m["remove"] for m in mutations] == list(FORBIDDEN_HEADERS)
    assert "x-extproc-explain" not in FORBIDDEN_HEADERS
    assert hcm["http_filters"][0]["typed_config"]["message_timeout"] == "5s"
    for route in hcm["route_config"]["virtual_hosts"][0]["routes"]:
        assert route["route"]["timeout"] == "0s"


@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_meant_for_a_picker_is_taken_away(profile: str) -> None:
    """Before anything can obey it, or behind the picker: together everything that the picker itself removes."""
    [host] = manager(profile)["route_config"]["virtual_hosts"]
    assert host["request_headers_to_remove"] == list(PICKER_HEADERS)
    assert {*FORBIDDEN_HEADERS, *PICKER_HEADERS} >= CONTROL_HEADERS
    assert not {*FORBIDDEN_HEADERS} & {*PICKER_HEADERS}


@pytest.mark.parametrize("profile", PROFILES)
def test_no_retry_policy_where_the_body_could_be_doubled(profile: str) -> None:
    hcm = manager(profile)
    ext_proc = hcm["http_filters"][0]["typed_config"]
    if ext_proc["processing_mode"]["request_body_mode"] not in {"FULL_DUPLEX_STREAMED", "STREAMED"}:
        return
    for route in hcm["route_config"]["virtual_hosts"][0]["routes"]:
        if "retry_policy" in route["route"]:
            assert route["match"]["dynamic_metadata"][0]["filter"] == "extproc"
            assert ext_proc["route_cache_action"] == "CLEAR"


@pytest.mark.parametrize("profile", PROFILES)
def test_websockets_where_nothing_waits_for_the_end_of_a_body(profile: str) -> None:
    hcm = manager(profile)
    buffered = hcm["http_filters"][0]["typed_config"]["processing_mode"]["request_body_mode"] == "BUFFERED"
    assert hcm.get("upgrade_configs", []) == ([] if buffered else [{"upgrade_type": "websocket"}])


MODES = {
    "direct": ("FULL_DUPLEX_STREAMED", "SEND", "SKIP", "NONE", "SKIP"),
    "full-duplex": ("FULL_DUPLEX_STREAMED", "SEND", "SEND", "FULL_DUPLEX_STREAMED", "SEND"),
    "buffered": ("BUFFERED", "SKIP", "SKIP", "NONE", "SKIP"),
    "streamed": ("STREAMED", "SKIP", "SKIP", "NONE", "SKIP"),
    "headers-only": ("NONE", "SKIP", "SKIP", "NONE", "SKIP"),
    "original-dst": ("FULL_DUPLEX_STREAMED", "SEND", "SEND", "FULL_DUPLEX_STREAMED", "SEND"),
    "fail-open": ("BUFFERED", "SKIP", "SKIP", "NONE", "SKIP"),
    "tls": ("FULL_DUPLEX_STREAMED", "SEND", "SKIP", "NONE", "SKIP"),
}


@pytest.mark.parametrize("profile", PROFILES)
def test_processing_mode(profile: str) -> None:
    ext_proc = manager(profile)["http_filters"][0]["typed_config"]
    parts = ("request_body", "request_trailer", "response_header", "response_body", "response_trailer")
    mode = ext_proc["processing_mode"]
    assert mode["request_header_mode"] == "SEND"
    assert tuple(mode[f"{part}_mode"] for part in parts) == MODES[profile]
    assert ext_proc["failure_mode_allow"] is (profile == "fail-open")


def test_every_mapper_selects_by_cause_and_answers_json() -> None:
    kinds = []
    for mapper in local_replies().to_dict()["mappers"]:
        assert mapper["filter"].keys() <= {"extensionFilter", "responseFlagFilter"}
        error = mapper["bodyFormatOverride"]["jsonFormat"]["error"]
        assert error["code"] == "%RESPONSE_CODE%"
        kinds.append(error["type"])
    assert kinds == ["picker_unavailable", "engine_unavailable", "invalid_request_error"]


def test_script_and_rules_write_the_same_keys() -> None:
    for key, path in USAGE_PATHS:
        assert f'lift("{key}", \'"{path[-1]}"' in JSON_USAGE_SCRIPT
    assert f'metadata:set("{USAGE_NAMESPACE}", key, value)' in JSON_USAGE_SCRIPT


def test_streams_first_then_json() -> None:
    assert [f.name for f in usage_filters()] == ["envoy.filters.http.sse_to_metadata", "envoy.filters.http.lua"]
