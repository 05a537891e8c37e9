"""The only rooms with I/O: the gRPC server and its codec, TLS, scraping, discovery, the admin pages, telemetry.

An edge reads, calls the core and performs; it decides nothing. What can be said without a socket, a file or a clock
belongs to the core.
"""
