from __future__ import annotations

from typing import Any

import msgspec
import pytest

from extproc.config.schema import Bytes, Config, ExplainConfig, RoutingConfig, Seconds, ServerConfig
from extproc.protocol.events import BodyMode
from extproc.protocol.settings import SessionSettings


def test_the_defaults_are_the_configurations_defaults() -> None:
    assert SessionSettings.from_config(Config()) == SessionSettings()


def test_what_concerns_the_wire_is_taken_over() -> None:
    server = ServerConfig(
        max_inspect_bytes=Bytes(7), default_body_mode="buffered", decision_deadline=Seconds(0.5), response_phase="keep"
    )
    config = msgspec.structs.replace(
        Config(), server=server, explain=ExplainConfig(header=True), routing=RoutingConfig(subset_namespace="mine")
    )
    settings = SessionSettings.from_config(config)
    assert settings.max_inspect_bytes == 7
    assert settings.default_body_mode is BodyMode.BUFFERED
    assert settings.deadline_s == 0.5
    assert settings.allow_explain
    assert settings.subset_namespace == "mine"


@pytest.mark.parametrize(("header", "allowed"), [(False, False), (True, True), ("brief", True), ("full", True)])
def test_when_explanations_are_given(header: Any, allowed: bool) -> None:
    assert SessionSettings.from_config(Config(explain=ExplainConfig(header=header))).allow_explain is allowed
