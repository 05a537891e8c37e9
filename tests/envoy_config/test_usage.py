"""The filters that lift usage agree with each other. That they work, `test_direct_with_envoy` shows."""

from extproc.envoy_config.usage import JSON_USAGE_SCRIPT, USAGE_NAMESPACE, USAGE_PATHS, usage_filters


def test_script_and_rules_write_the_same_keys() -> None:
    for key, path in USAGE_PATHS:
        assert f'lift("{key}", \'"{path[-1]}"' in JSON_USAGE_SCRIPT
    assert f'metadata:set("{USAGE_NAMESPACE}", key, value)' in JSON_USAGE_SCRIPT


def test_streams_first_then_json() -> None:
    assert [f.name for f in usage_filters()] == ["envoy.filters.http.sse_to_metadata", "envoy.filters.http.lua"]
