from prometheus_client.parser import text_string_to_metric_families

from extproc.sim.metrics_padding import PYTHON_FAMILIES, http_families


def test_padding_is_valid_and_holds_nothing_a_picker_reads() -> None:
    families = list(text_string_to_metric_families(PYTHON_FAMILIES + http_families("1.0")))
    assert len(families) > 5
    assert not [family.name for family in families if family.name.startswith("vllm:")]
