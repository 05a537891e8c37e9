"""Every profile is commented where it differs."""

import pytest

from extproc.envoy_config import PROFILES, EnvoyOptions
from extproc.envoy_config.comments import comments_for, head_for


@pytest.mark.parametrize("profile", PROFILES)
def test_head_says_which_profile_and_how_it_was_made(profile: str) -> None:
    assert f"extproc envoy-config --profile {profile}" in head_for(PROFILES[profile])


def test_tls_tells_how_to_verify_until_it_is_done() -> None:
    place = "clusters/picker/transport_socket"
    assert "--picker-ca" in comments_for(PROFILES["tls"], EnvoyOptions())[place]
    done = EnvoyOptions(picker_ca="ca.pem", picker_certificate="c.pem", picker_key="k.pem")
    assert comments_for(PROFILES["tls"], done)[place] == "TLS to the picker."


@pytest.mark.parametrize("profile", PROFILES)
def test_no_comment_is_empty(profile: str) -> None:
    assert all(comments_for(PROFILES[profile], EnvoyOptions()).values())
