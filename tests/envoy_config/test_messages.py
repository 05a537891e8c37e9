"""The small constructors."""

import datetime as dt

from envoy_data_plane.envoy.config.core import v3 as core

from extproc.envoy_config.messages import extension, load_assignment, seconds, socket_address
from extproc.envoy_config.options import HostPort


def test_seconds() -> None:
    assert seconds(0.05) == dt.timedelta(milliseconds=50)


def test_an_extension_shows_its_type() -> None:
    typed = extension("x", core.TcpKeepalive(keepalive_time=1)).to_dict()["typedConfig"]
    assert typed == {"@type": "type.googleapis.com/envoy.config.core.v3.TcpKeepalive", "keepaliveTime": 1}


def test_addresses() -> None:
    assert socket_address("::1", 1).to_dict() == {"socketAddress": {"address": "::1", "portValue": 1}}
    assignment = load_assignment("c", [HostPort("a", 1), HostPort("b", 2)])
    assert len(assignment.endpoints[0].lb_endpoints) == 2
