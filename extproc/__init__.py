"""extproc: an endpoint picker for LLM inference behind Envoy.

The public library is `extproc.router.Router`; everything that does I/O lives in `extproc.edge`, `extproc.app`,
`extproc.cli`, `extproc.demo.command` and the HTTP half of `extproc.sim`.
"""

__version__ = "0.1.0"
