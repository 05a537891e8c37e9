"""The server side of HTTP/2 (RFC 9113) and of gRPC framing, sans-IO: bytes in, events out; commands in, bytes out.

Read in this order: `frames`, `blocks`, `headers`, `limits`, `streams`, `events`, `outbound`, `connection`, `grpc`;
the RFC section stands at each rule.
Sockets, timers, TLS and what the messages mean belong to `edge`; HPACK's coding belongs to the `hpack` library.
"""
