"""Ready Envoy configurations, built as typed messages (`envoy-data-plane`) and rendered to YAML with their reasons as comments.

Here lives what `extproc envoy-config` prints and what `envoy/*.yaml` contains. The endpoints arrive as plain `host:port`
strings: this package imports neither the configuration nor the picker. Only `render` needs `envoy-data-plane` (the extra
`demo`); importing this package does not.
"""

from extproc.envoy_config.command import add_arguments, main
from extproc.envoy_config.options import PROFILES, EnvoyConfigError, EnvoyOptions, Profile
from extproc.envoy_config.render import render, render_round_robin

__all__ = [
    "PROFILES",
    "EnvoyConfigError",
    "EnvoyOptions",
    "Profile",
    "add_arguments",
    "main",
    "render",
    "render_round_robin",
]
