"""The ext_proc conversation without I/O: events in, replies out, for one gRPC stream that carries one HTTP request.

It knows Envoy's rules (order, body modes, trailers, half-close), holds the body within bounds, and tells the core exactly
once how a request ended. It does not parse bodies, choose endpoints, know protobuf or read a clock.
"""
