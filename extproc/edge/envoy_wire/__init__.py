"""Envoy's messages (ext_proc, access log, gRPC health): protobuf bytes to values of `extproc.protocol`, replies to bytes.

Translates and decides nothing. Transports and services do not live here.
"""
