"""Each of Envoy's own failures has a message of its own. That they arrive, `test_direct_with_envoy` shows."""

from extproc.envoy_config.local_replies import local_replies


def test_every_mapper_selects_by_cause_and_answers_json() -> None:
    kinds = []
    for mapper in local_replies().to_dict()["mappers"]:
        assert mapper["filter"].keys() <= {"extensionFilter", "responseFlagFilter"}
        error = mapper["bodyFormatOverride"]["jsonFormat"]["error"]
        assert error["code"] == "%RESPONSE_CODE%"
        kinds.append(error["type"])
    assert kinds == ["picker_unavailable", "engine_unavailable", "invalid_request_error"]
