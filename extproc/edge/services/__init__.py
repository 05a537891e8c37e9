"""What the gRPC port offers: ext_proc requests, Envoy's access log, health; written without a transport.

A transport (`edge.native`, `edge.grpcio`) reads the bytes, calls these, and writes what they return.
"""
