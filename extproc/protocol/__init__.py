"""The ext_proc protocol without I/O: events in, replies out, for one gRPC stream that carries one HTTP request.

It applies Envoy's rules (order, body modes, trailers, half-close), buffers the body within limits, and reports exactly
once how a request ended. It does not parse bodies, choose endpoints, read or write protobuf, or read a clock.
"""
