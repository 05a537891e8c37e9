"""The profiles by name."""

import pytest

from extproc.envoy_config import EnvoyConfigError
from extproc.envoy_config.profiles import PROFILES, profile_named


def test_names() -> None:
    expected = "direct full-duplex buffered streamed headers-only original-dst fail-open tls"
    assert list(PROFILES) == expected.split()
    assert all(profile_named(name).name == name for name in PROFILES)


def test_unknown() -> None:
    with pytest.raises(EnvoyConfigError, match="profile: '' is not one of direct, full-duplex"):
        profile_named("")
