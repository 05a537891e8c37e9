"""The HTTP/2 client of the end-to-end tests: the one that the tests of the Envoy configurations use."""

from tests.envoy_config.h2_client import Answer, h2_request

__all__ = ["Answer", "h2_request"]
